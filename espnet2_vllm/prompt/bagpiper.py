"""Bagpiper: from the messages of a conversation to the rows of its prompt.

Source: ESPnet ``SpeechLMPreprocessor`` and ``DiscreteAudioIO`` (espnet2/speechlm/model/speechlm).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..codes import audio_rows
from ..errors import CheckpointError, DataError
from ..layout import Layout
from ..plan import Continuous, Given, Utterance, Wanted

if TYPE_CHECKING:
    from ..audio.listening import Listening
    from ..audio.reading import Reading
    from ..checkpoint import Checkpoint
    from ..codec import Codec

ROLES = ("system", "user", "assistant")
DISCRETE, CONTINUOUS = "discrete_audio", "continuous_audio"

# (waveform [n] or [channels, n] float, sampling rate in Hz)
Clip = tuple[np.ndarray, int]
# [role, modality, content]; content is a text, or for audio a Clip or what names a recording (a path, ark:offset, command |).
Message = Sequence[Any]
# All audio of one prompt to [rows, S] ids each; together, because ESPnet encodes them as one batch.
EncodeAudio = Callable[[Sequence[Clip]], Sequence[np.ndarray]]


class Tokenizer(Protocol):
    """What is needed of ``text.TextTokenizer``."""

    def encode_bagpiper(self, text: str) -> list[int]: ...


def codec_encoder(layout: Layout, codec: Codec, notes: Counter[str] | None = None) -> EncodeAudio:
    """Encodes prompts with ``codec``, as ESPnet does: first channel, resampled, all clips in one zero-padded batch.

    ``notes`` counts the recordings of several channels and of other rates.

    A clip shorter than the longest of its prompt takes the codes of its padding into its last S - 1 rows. The encoder raises
    DataError for a clip that has not one whole frame.
    """

    def encode(clips: Sequence[Clip]) -> list[np.ndarray]:
        from ..audio import mono_at

        wavs = []
        for wav, rate in clips:
            wavs.append(mono_at(wav, rate, codec.sample_rate, notes))
            if len(wavs[-1]) < codec.hop:
                raise DataError(
                    f"the audio has {len(wavs[-1])} samples at {codec.sample_rate} Hz, but the codec needs {codec.hop} for "
                    "one frame"
                )
        codes = codec.encode_batch(wavs)
        return [audio_rows(layout, c, len(wav) // codec.hop) for c, wav in zip(codes, wavs, strict=True)]

    return encode


def bagpiper_prompt(
    layout: Layout,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    encode_audio: EncodeAudio | None = None,
    listening: Listening | Deaf | None = None,
    upto_assistant: bool = True,
    base_dir: Path | None = None,
    reading: Reading | None = None,
) -> Given:
    """A conversation as rows, without the ``<|assistant|>`` that asks for an answer.

    ``<|bos|>``, then per message ``<|role|> <|modality|>``, content, and ``<|eot|>`` if the next message has the same role,
    else ``<|eos|>``. Continuous rows are pads that stand for what the audio encoder will make of the sound.

    Args:
        encode_audio: for prompts with audio as codes (``codec_encoder``); None if the checkpoint has no codec.
        listening: how the checkpoint hears audio that is not the assistant's; None if it takes that as codes too
            (``preprocessor.audio_input`` of train.yaml, see ``listening_of``).
        upto_assistant: leave out the first message of the assistant and all behind it, as ESPnet does when it decodes.
        base_dir: where recordings are looked up that are not found from the working directory.
        reading: how those are read that messages name; None is ``Reading()``, without commands.

    Returns:
        [T, S] int32 rows, and which of them are continuous.

    Raises:
        DataError: for a message that is malformed, cannot be read, or has a role or modality that cannot be prompted.
    """
    if not messages:
        raise DataError("the conversation has no messages")
    checked = _checked(messages, upto_assistant)
    audio = iter(_audio(layout, checked, encode_audio, listening, base_dir, reading))
    rows, continuous = [_special(layout, "bos")], []
    for i, (role, modality, content) in enumerate(checked):
        goes_on = i + 1 < len(checked) and checked[i + 1][0] == role
        body = _text_rows(layout, tokenizer, content) if modality == "text" else next(audio)
        if isinstance(body, Continuous):
            continuous.append(replace(body, start=sum(map(len, rows)) + 2))
            body = np.full((body.count, layout.num_streams), layout.pad, dtype=np.int32)
        end = _special(layout, "eot" if goes_on else "eos")
        rows += [_special(layout, role), _special(layout, modality), body, end]
    return Given(np.concatenate(rows), continuous=tuple(continuous))


def bagpiper_utterance(
    layout: Layout,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    key: str,
    info: Mapping[str, Any] | None = None,
    **options: Any,
) -> Utterance:
    """The conversation as given, the assistant's answer as wanted. ``options``: those of ``bagpiper_prompt``."""
    prompt = bagpiper_prompt(layout, tokenizer, messages, **options)
    parts = (prompt, Wanted(_special(layout, "assistant"), role="assistant"))
    return Utterance(key, parts, info or {})


def _special(layout: Layout, name: str) -> np.ndarray:
    row = np.full((1, layout.num_streams), layout.pad, dtype=np.int32)
    row[0, 0] = layout.specials[name]
    return row


def _text_rows(layout: Layout, tokenizer: Tokenizer, text: str) -> np.ndarray:
    ids = np.asarray(tokenizer.encode_bagpiper(text), dtype=np.int32)
    rows = np.full((len(ids), layout.num_streams), layout.pad, dtype=np.int32)
    # The preprocessor takes a 0 for padding, also where it is the tokenizer's own token 0 (Qwen: "!").
    rows[:, 0] = np.where(ids == 0, layout.pad, ids + layout.text.start)
    return rows


def _checked(messages: Sequence[Message], upto_assistant: bool) -> list[tuple[str, str, Any]]:
    """The messages that make the prompt; what stands behind them is not looked at."""
    found = []
    for i, message in enumerate(messages):
        if not isinstance(message, Sequence) or isinstance(message, str) or len(message) != 3:
            raise DataError(f"message {i} is {message!r}, expected [role, modality, content]")
        role, modality, content = message
        if role not in ROLES:
            raise DataError(f"message {i}: role {role!r} is unknown; expected one of {', '.join(ROLES)}")
        if upto_assistant and role == "assistant":
            break
        _check_content(modality, content, f"message {i}")
        found.append((role, modality, content))
    return found


def _check_content(modality: str, content: Any, where: str) -> None:
    if modality not in ("text", "audio"):
        raise DataError(f"{where}: modality {modality!r} cannot be prompted; expected text or audio")
    if modality == "text" and not isinstance(content, str):
        raise DataError(f"{where}: a text must be a string, got {type(content).__name__}")
    if modality == "audio" and not (isinstance(content, str) or _is_clip(content)):
        raise DataError(f"{where}: audio must be a path or (samples, rate), got {type(content).__name__}")


def _is_clip(content: Any) -> bool:
    return isinstance(content, Sequence) and len(content) == 2 and isinstance(content[0], np.ndarray)


def _audio(
    layout: Layout,
    messages: Sequence[tuple[str, str, Any]],
    encode_audio: EncodeAudio | None,
    listening: Listening | Deaf | None,
    base_dir: Path | None,
    reading: Reading | None,
) -> list[np.ndarray | Continuous]:
    """Of each audio message, in order, its rows of ids, or its continuous rows without their place."""
    from ..audio.reading import FIRST, Reading

    reading = replace(reading or Reading(), channel=FIRST).of_conversations()
    found: list[Any] = []
    discrete: list[int] = []
    for i, (role, modality, content) in enumerate(messages):
        if modality != "audio":
            continue
        if encode_audio is None and (listening is None or role == "assistant"):
            raise DataError(f"message {i} is audio, but the checkpoint has no codec to encode it with")
        try:
            heard = listening is not None and role != "assistant"
            how = replace(reading, enough=listening.enough) if heard else reading
            clip = read_recording(content, base_dir, how) if isinstance(content, str) else content
            if heard:
                wav = listening.prepare(*clip)
                found.append(Continuous(0, listening.rows(len(wav)), wav))
                continue
        except DataError as error:
            raise DataError(f"message {i}: {error}") from error
        discrete.append(len(found))
        found.append(clip)
    rows = encode_audio([found[place] for place in discrete]) if discrete else []
    assert len(rows) == len(discrete), f"{len(rows)} encodings of {len(discrete)} clips"
    for place, clip in zip(discrete, rows, strict=True):
        assert clip.ndim == 2 and clip.shape[1] == layout.num_streams, f"encoding of shape {clip.shape}"
        found[place] = clip
    return found


class Deaf:
    """In place of ``Listening`` where audio cannot be heard, so that prompts without audio go on."""

    def __init__(self, error: CheckpointError) -> None:
        self.error = error
        self.enough: int | None = 1
        self.notes: Counter[str] = Counter()

    def prepare(self, wav: np.ndarray, rate: int) -> np.ndarray:
        raise DataError(str(self.error)) from self.error


def listening_of(checkpoint: Checkpoint, long_audio: str = "whole") -> Listening | Deaf | None:
    """How ``checkpoint`` hears audio that is not the assistant's; None if it takes that as codes."""
    from ..audio.listening import Listening

    if (checkpoint.preprocessor.get("audio_input") or DISCRETE) != CONTINUOUS:
        return None
    try:
        return Listening.of(checkpoint, long_audio)
    except CheckpointError as error:
        return Deaf(error)


def read_recording(spec: str, base_dir: Path | None, reading: Reading | None = None) -> Clip:
    """A recording as ESPnet finds it: from the working directory, or else from ``base_dir``.

    DataError as ``read_audio``.
    """
    from ..audio.reading import read_audio, split_place

    path, _ = split_place(spec.strip())
    here = base_dir is None or spec.strip().endswith("|") or os.path.exists(path) or os.path.exists(spec.strip())
    return read_audio(spec, base_dir=None if here else base_dir, reading=reading)
