"""The tasks of the OpusLM generation: which files an example is made of, and in which order.

Facts of ESPnet's ``SPEECHLM_TASKS`` (branch ``inference``); the ids of tasks and modalities come from the checkpoint's own
``token_list``, because branches differ.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..errors import ConfigError, DataError

# Modalities whose content is text, and whose content is rows of codes; the others cannot be decoded here.
TEXT_MODALITIES = ("text_bpe",)
AUDIO_MODALITIES = ("codec_ssl", "spk")


@dataclass(frozen=True)
class Entry:
    """One file of an example.

    Attributes:
        name: the file's name, which is also the entry's.
        modality: in the checkpoint's own words.
        kind: how the file is read: ``text``, ``kaldi_ark`` or ``dialogue_json``. data.json may say another kind (a speaker
            prompt is a speaker's name as ``text``, or codes as ``kaldi_ark``).
    """

    name: str
    modality: str
    kind: str


@dataclass(frozen=True)
class Task:
    """Conditions are given, targets are generated.

    Attributes:
        fixed_length_key: name of the condition that has as many frames as the answer where ``fixed_length`` is on; empty if the
            task has none.
    """

    name: str
    conditions: tuple[Entry, ...]
    targets: tuple[Entry, ...]
    fixed_length_key: str = ""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """In the order of the sequence, whatever the order in data.json."""
        return self.conditions + self.targets

    @property
    def chat(self) -> bool:
        """Whether the one entry is a dialogue, with roles."""
        return self.targets[0].modality == "dialogue"

    @property
    def continues(self) -> bool:
        """Whether there is no condition: the target itself, or its beginning, is the prompt."""
        return not self.conditions and not self.chat


_TEXT = Entry("text", "text_bpe", "text")
_SOURCE_TEXT = Entry("src_text", "text_bpe", "text")
_PHONES = Entry("text", "g2p", "text")
_SPEAKER = Entry("utt2spk", "spk", "text")
_DIALOGUE = Entry("dialogue", "dialogue", "dialogue_json")
_IMAGE = Entry("image.scp", "image", "kaldi_ark")


def _codes(modality: str, name: str = "wav.scp") -> Entry:
    return Entry(name, modality, "kaldi_ark")


_TASKS = {
    # name: (conditions, targets)
    "textlm": ((), (_TEXT,)),
    "audiolm": ((), (_codes("codec"),)),
    "ssl_audiolm": ((), (_codes("ssl"),)),
    "tts": ((_PHONES, _SPEAKER), (_codes("codec"),)),
    "ssl_tts": ((_TEXT,), (_codes("ssl"),)),
    "bpe_tts": ((_TEXT, _SPEAKER), (_codes("codec"),)),
    "asr": ((_codes("codec"),), (_TEXT,)),
    "ssl_asr": ((_codes("ssl"),), (_TEXT,)),
    "mt": ((_SOURCE_TEXT,), (_TEXT,)),
    "text2audio": ((Entry("text", "text_emb", "kaldi_ark"),), (_codes("codec"),)),
    "visual_tts": ((_PHONES, _SPEAKER, _codes("video_ssl", "video.scp")), (_codes("codec"),)),
    "vc": ((_codes("codec", "src_wav.scp"), _SPEAKER), (_codes("codec"),)),
    "ssl2codec": ((_codes("ssl", "ssl_wav.scp"), _SPEAKER), (_codes("codec"),)),
    "svs": ((Entry("label", "svs_lb", "text"),), (_codes("codec"),)),
    "st": ((_codes("ssl"),), (_SOURCE_TEXT, _TEXT)),
    "se": ((_codes("codec"),), (_codes("codec", "spk1.scp"),)),
    "codec_ssl_asr": ((_codes("codec_ssl"),), (_TEXT,)),
    "codec_ssl_tts": ((_TEXT, _SPEAKER), (_codes("codec_ssl"),)),
    "codec_ssl_plain_tts": ((_TEXT,), (_codes("codec_ssl"),)),
    "codec_ssl_audiolm": ((), (_codes("codec_ssl"),)),
    "codec_ssl_se": ((_codes("codec_ssl", "mix.scp"),), (_codes("codec_ssl"),)),
    "codec_ssl_tse": ((_codes("codec_ssl", "mix.scp"), _SPEAKER), (_codes("codec_ssl"),)),
    "codec_ssl_denoise": ((_codes("codec_ssl"),), (_codes("codec_ssl", "spk1.scp"),)),
    "aac_codecssl": ((_codes("codec_ssl"),), (_TEXT,)),
    "ag_codecssl": ((_TEXT,), (_codes("codec_ssl"),)),
    "text_dialogue": ((), (_DIALOGUE,)),
    "audio_dialogue": ((), (_DIALOGUE,)),
    "vision_dialogue": ((), (_DIALOGUE,)),
    "image_to_text": ((_IMAGE,), (_TEXT,)),
    "text_to_image": ((_TEXT,), (_IMAGE,)),
}

_FIXED_LENGTH = {"codec_ssl_se": "mix.scp", "codec_ssl_tse": "mix.scp"}

TASKS = {name: Task(name, *entries, _FIXED_LENGTH.get(name, "")) for name, entries in _TASKS.items()}


def check_fixed_length(task: Task, source: str) -> None:
    """Raise ConfigError if nothing says how long an answer of ``task`` has to be; ``source`` sets ``fixed_length``."""
    if not task.fixed_length_key:
        raise ConfigError(
            f"{source}: fixed_length: task {task.name} has no fixed_length_key, so nothing says how long an answer has to be; "
            f"set it for {' and '.join(_FIXED_LENGTH)} only"
        )


def find_task(name: str, source: str) -> Task:
    """The task called ``name``.

    Args:
        source: who names it, for the message.

    Raises:
        DataError: if there is no such task, or one of its modalities is not text or codec_ssl audio.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"{source}: unknown task {name!r}{hint}; known are {', '.join(TASKS)}")
    task = TASKS[name]
    for entry in task.entries:
        if entry.modality not in (*TEXT_MODALITIES, *AUDIO_MODALITIES, "dialogue"):
            raise DataError(
                f"{source}: task {name} has an entry {entry.name} of modality {entry.modality}, which cannot be decoded; "
                f"supported are {', '.join((*TEXT_MODALITIES, *AUDIO_MODALITIES))}"
            )
    return task
