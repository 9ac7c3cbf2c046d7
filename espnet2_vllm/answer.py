"""What a conversation was answered, from Python."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import DataError
from .plan import FAILED, Result, Segment


@dataclass(frozen=True)
class Answer:
    """What a conversation was answered.

    Attributes:
        messages: ``["assistant", modality, content]`` of each segment; audio as (samples [n] float32, rate).
        outcome: of ``plan.Result``: ``ok``, ``length``, ``no_audio``, ``abort`` or ``refused``; ``reason`` says why.
        result: rows, log-probabilities and further hypotheses.
    """

    messages: tuple[tuple[str, str, Any], ...]
    outcome: str
    reason: str
    result: Result

    @property
    def text(self) -> str:
        """Of all text segments, a line each."""
        return "\n".join(content for _, modality, content in self.messages if modality == "text")

    @property
    def audio(self) -> tuple[np.ndarray, int] | None:
        """The last audio segment that has samples."""
        spoken = [content for _, modality, content in self.messages if modality == "audio" and content is not None]
        return spoken[-1] if spoken else None


def wav_bytes(samples: np.ndarray, rate: int) -> bytes:
    """A 16-bit wav file of [n] float samples, as ESPnet writes them."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, subtype="PCM_16", format="WAV")
    return buffer.getvalue()


def generated_segments(result: Result) -> list[Segment]:
    """Generated segments of the first hypothesis, then the last one of each other."""
    if not result.hypotheses:
        return []
    first, *others = result.hypotheses
    return [*(s for s in first.segments if s.generated), *(other.segments[-1] for other in others)]


def only_answer(answers: list[Answer]) -> Answer:
    """The answer of the one conversation. DataError if it has none."""
    (answer,) = answers
    if answer.outcome in FAILED:
        raise DataError(answer.reason)
    return answer
