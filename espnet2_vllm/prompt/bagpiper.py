"""Bagpiper: from the messages of a conversation to the rows of its prompt.

Source: ESPnet ``SpeechLMPreprocessor`` and ``DiscreteAudioIO`` (espnet2/speechlm/model/speechlm).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..codes import audio_rows
from ..errors import DataError
from ..layout import Layout
from ..plan import Given, Utterance, Wanted

if TYPE_CHECKING:
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


def codec_encoder(layout: Layout, codec: Codec) -> EncodeAudio:
    """Encodes prompts with ``codec``, as ESPnet does: first channel, resampled, all clips in one zero-padded batch.

    A clip shorter than the longest of its prompt takes the codes of its padding into its last S - 1 rows. The encoder raises
    DataError for a clip that has not one whole frame.
    """

    def encode(clips: Sequence[Clip]) -> list[np.ndarray]:
        from ..audio import first_channel, resample

        wavs = []
        for wav, rate in clips:
            mono = first_channel(wav) if wav.ndim == 2 else wav
            wavs.append(resample(mono.astype(np.float32, copy=False), rate, codec.sample_rate))
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
    audio_input: str = DISCRETE,
    upto_assistant: bool = True,
    base_dir: Path | None = None,
) -> np.ndarray:
    """Rows of a conversation, without the ``<|assistant|>`` that asks for an answer.

    ``<|bos|>``, then per message ``<|role|> <|modality|>``, content, and ``<|eot|>`` if the next message has the same role,
    else ``<|eos|>``.

    Args:
        encode_audio: for prompts with audio (``codec_encoder``); None if the checkpoint has no codec.
        audio_input: how the checkpoint takes audio that is not the assistant's (``preprocessor.audio_input`` of train.yaml).
        upto_assistant: leave out the first message of the assistant and all behind it, as ESPnet does when it decodes.
        base_dir: where recordings are looked up that are not found from the working directory.

    Returns:
        [T, S] int32.

    Raises:
        DataError: for a message that is malformed, cannot be read, or has a role or modality that cannot be prompted.
    """
    if not messages:
        raise DataError("the conversation has no messages")
    checked = _checked(messages, upto_assistant)
    audio = iter(_encoded(layout, checked, encode_audio, audio_input, base_dir))
    rows = [_special(layout, "bos")]
    for i, (role, modality, content) in enumerate(checked):
        goes_on = i + 1 < len(checked) and checked[i + 1][0] == role
        rows += [
            _special(layout, role),
            _special(layout, modality),
            _text_rows(layout, tokenizer, content) if modality == "text" else next(audio),
            _special(layout, "eot" if goes_on else "eos"),
        ]
    return np.concatenate(rows)


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
    parts = (Given(prompt), Wanted(_special(layout, "assistant"), role="assistant"))
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


def _encoded(
    layout: Layout,
    messages: Sequence[tuple[str, str, Any]],
    encode_audio: EncodeAudio | None,
    audio_input: str,
    base_dir: Path | None,
) -> Sequence[np.ndarray]:
    """Rows of each audio message, in order."""
    clips = []
    for i, (role, modality, content) in enumerate(messages):
        if modality != "audio":
            continue
        if role != "assistant" and audio_input != DISCRETE:
            raise DataError(
                f"message {i}: this checkpoint takes audio as {audio_input} (preprocessor.audio_input of its train.yaml), which "
                "is not supported yet; text prompts of it can be decoded"
            )
        if encode_audio is None:
            raise DataError(f"message {i} is audio, but the checkpoint has no codec to encode it with")
        clips.append(read_recording(content, base_dir) if isinstance(content, str) else content)
    rows = encode_audio(clips) if clips else []
    assert len(rows) == len(clips), f"{len(rows)} encodings of {len(clips)} clips"
    for clip in rows:
        assert clip.ndim == 2 and clip.shape[1] == layout.num_streams, f"encoding of shape {clip.shape}"
    return rows


def read_recording(spec: str, base_dir: Path | None) -> Clip:
    """A recording as ESPnet finds it, from the working directory, or else from ``base_dir``. DataError as ``read_audio``."""
    from ..audio import read_audio

    name, colon, offset = spec.strip().rpartition(":")
    path = name if colon and offset.isdecimal() else spec.strip()
    here = base_dir is None or spec.strip().endswith("|") or Path(path).exists() or Path(spec.strip()).exists()
    return read_audio(spec, base_dir=None if here else base_dir)
