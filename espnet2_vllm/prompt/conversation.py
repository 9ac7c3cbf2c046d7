"""Conversations as the Python interface takes them, for checkpoints of either family."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..audio.reading import as_float
from ..errors import DataError
from ..layout import Layout
from ..plan import Given, Utterance, Wanted
from .opuslm import Facts, Tokenizer, Turn, opuslm_sequence, segment_bounds
from .tasks import find_task

# Modalities in plain words -> the names of OpusLM.
OPUSLM_NAMES = {"text": "text_bpe", "audio": "codec_ssl"}
TEXTS = ("text", "text_bpe")


def checked_messages(messages: Any, where: str = "messages") -> list[list[Any]]:
    """``[role, modality, content]`` each, as lists; roles and modalities are looked at by the families themselves.

    Raises:
        DataError: if they are nothing of the kind.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise DataError(f"{where}: expected a list of [role, modality, content], got {messages!r}")
    found = []
    for i, message in enumerate(messages):
        if isinstance(message, (str, bytes)) or not isinstance(message, Sequence) or len(message) != 3:
            raise DataError(f"{where}[{i}] is {message!r}, expected [role, modality, content]")
        role, modality, content = message
        if not isinstance(role, str) or not isinstance(modality, str):
            raise DataError(f"{where}[{i}]: role {role!r} and modality {modality!r} must be texts")
        try:
            found.append([role, modality, content if modality in TEXTS else _content(content)])
        except DataError as error:
            raise DataError(f"{where}[{i}]: {error}") from error
    return found


def _content(content: Any) -> Any:
    """A path becomes its name; samples of any library and type float32."""
    if hasattr(content, "__fspath__"):
        path = content.__fspath__()
        if str(path).rstrip().endswith("|"):
            raise DataError(f"{path}: a path that ends in | would be taken for a command; rename the file")
        return path
    if isinstance(content, Sequence) and not isinstance(content, str) and len(content) == 2:
        samples, rate = content
        if _many(rate) and not _many(samples):
            raise DataError(
                f"audio is (rate, samples), with {samples!r:.20} in front; expected (samples, rate): swap them"
            )
        if _many(samples) or hasattr(samples, "__array__"):
            return _samples(samples), _rate(rate)
    return content


def samples_of(content: Any) -> tuple[np.ndarray, int]:
    """(samples, rate) as a message holds them -> [n] or [channels, n] float32, full scale 1, and Hz. DataError for what is none."""
    found = _content(content)
    if not isinstance(found, tuple):
        raise DataError(f"audio must be a path or (samples, rate), got {type(content).__name__}")
    return found


def _many(values: Any) -> bool:
    """Whether it is an array with axes, a tensor or a list."""
    if hasattr(values, "__array__"):
        return getattr(values, "ndim", 1) > 0
    return isinstance(values, Sequence) and not isinstance(values, (str, bytes))


def _rate(rate: Any) -> int:
    numbers = (int, float, np.integer, np.floating)
    if isinstance(rate, (bool, np.bool_)) or not isinstance(rate, numbers) or not float(rate).is_integer():
        raise DataError(f"audio must be (samples, rate) with a whole number of Hz, got the rate {rate!r}")
    return int(rate)


def _samples(samples: Any) -> np.ndarray:
    """[n] or [channels, n] float32, full scale 1, of an array, a tensor or lists."""
    if hasattr(samples, "is_floating_point"):  # a tensor: on any device, with a gradient, bfloat16
        samples = samples.detach()
        samples = samples.float() if samples.is_floating_point() else samples
    try:
        wav = np.asarray(samples.cpu() if hasattr(samples, "cpu") else samples)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the samples cannot be made an array: {error}") from error
    if wav.ndim not in (1, 2) or wav.size == 0:
        raise DataError(f"samples of shape {wav.shape}, expected [n] or [channels, n], and at least one sample")
    if wav.ndim == 2 and wav.shape[0] > wav.shape[1]:
        raise DataError(
            f"samples of shape {wav.shape} are [n, channels]; expected [n] or [channels, n]: transpose them"
        )
    wav = as_float(wav, "audio")
    if not np.isfinite(wav).all():
        raise DataError(f"{int((~np.isfinite(wav)).sum())} samples are NaN or infinite")
    return wav


def is_conversation(messages: Any) -> bool:
    """Whether it is one conversation, not a list of them. One good conversation makes a list of whatever stands beside it."""
    if not isinstance(messages, Sequence) or any(map(_looks_like_one, messages)):
        return False
    first = messages[0] if len(messages) else None
    return isinstance(first, Sequence) and len(first) > 0 and isinstance(first[0], str)


def _looks_like_one(item: Any) -> bool:
    """Whether its first entry is a message, as far as that can be seen: [role, ...]."""
    inner = item[0] if isinstance(item, Sequence) and not isinstance(item, (str, bytes)) and len(item) else None
    return (
        isinstance(inner, Sequence)
        and not isinstance(inner, (str, bytes))
        and len(inner) > 0
        and isinstance(inner[0], str)
    )


def load_codes(content: Any) -> np.ndarray:
    """Codes of an audio message of OpusLM: an array of whole numbers, or ``ark:offset``.

    Raises:
        DataError: for what holds none.
    """
    from ..io.kaldi import load_codes as from_ark

    if isinstance(content, np.ndarray):
        return content
    if isinstance(content, str):
        return from_ark(content, Path("."))
    raise DataError(
        f"audio for OpusLM must be codes (whole numbers, [frames, streams]) or ark:offset, got {type(content).__name__}; "
        "tokenise the recording with espnet2_vllm.bin.tokenize_audio, or open the model with units=UnitsDescription(...)"
    )


def opuslm_conversation(
    layout: Layout,
    tokenizer: Tokenizer,
    facts: Facts,
    messages: Sequence[Sequence[Any]],
    *,
    key: str,
    answer: Sequence[str],
    load_audio: Callable[[Any], np.ndarray],
    seed: int = 0,
) -> Utterance:
    """A dialogue whose turns are given, the assistant's earlier ones too, and the turns of the ``answer`` wanted.

    Args:
        messages: roles ``system``, ``user``, ``assistant``; modalities ``text`` and ``audio`` (or OpusLM's own names). The audio
            of a system message is the voice that is asked for.
        answer: modalities of the turns to generate, in their order.
        load_audio: content of an audio message to codes as arks hold them.
        seed: of the place of a voice prompt that is too long.

    Raises:
        DataError: for a role, modality or content that cannot be prompted, or a dialogue that is too long.
    """
    turns = []
    for i, (role, modality, content) in enumerate(messages):
        name = OPUSLM_NAMES.get(modality, modality)
        try:
            codes = load_audio(content) if name == "codec_ssl" else content
        except DataError as error:
            raise DataError(f"message {i}: {error}") from error
        turns.append(Turn(role, name, False, codes))
    sequence = isinstance(answer, Sequence) and not isinstance(answer, str)
    if not sequence or not answer or not all(isinstance(name, str) for name in answer):
        raise DataError(
            f"answer: expected the modalities of the assistant's turns, as ('text', 'audio'), got {answer!r}"
        )
    names = [OPUSLM_NAMES.get(modality, modality) for modality in answer]
    turns += [Turn("assistant", name, True, "" if name == "text_bpe" else np.zeros(0, np.int32)) for name in names]
    spoken = any(turn.modality == "codec_ssl" for turn in turns)
    task = find_task("audio_dialogue" if spoken else "text_dialogue", "messages")
    rows = opuslm_sequence(layout, tokenizer, task, {"dialogue": turns}, facts, random.Random(seed))
    bounds = segment_bounds(layout, rows, task)
    if len(bounds) < len(turns):
        raise DataError(
            f"a dialogue of {len(turns)} turns is longer than the {facts.n_ctx} rows of the checkpoint's n_ctx; shorten it"
        )
    parts: list[Given | Wanted] = []
    for bound, turn in zip(bounds, turns, strict=True):
        if turn.is_target:
            parts.append(Wanted(rows[bound.start : bound.mark + 1], turn.modality, turn.role))
        else:
            modality = layout.modality_of(int(rows[bound.mark, 0]))
            parts.append(Given(rows[bound.start : bound.stop], modality, turn.role))
    return Utterance(key, tuple(parts), {"task": task.name, "chat": True})
