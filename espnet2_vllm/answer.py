"""What a conversation was answered, from Python."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .errors import DataError, SpeechLMError
from .io.content import bagpiper_content, opuslm_content
from .layout import Layout
from .plan import FAILED, OK, REFUSED, Result, Segment

_SHOWN = 80  # characters of a text in a repr


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        said = ", ".join(_shown(modality, content) for _, modality, content in self.messages)
        why = f": {self.reason}" if self.reason else ""
        return f"<Answer {self.outcome}{why}: {said or 'nothing'}>"

    def _repr_html_(self) -> str:
        """For notebooks: texts, a player for each sound, and how it ended where that was not well."""
        parts = [] if self.outcome == OK else [f"<p><b>{html.escape(self.outcome)}</b>: {html.escape(self.reason)}</p>"]
        for _, modality, content in self.messages:
            if modality == "text":
                parts.append(f'<p style="white-space: pre-wrap">{html.escape(content)}</p>')
            elif content is not None:
                data = base64.b64encode(wav_bytes(*content)).decode("ascii")
                parts.append(f'<audio controls src="data:audio/wav;base64,{data}"></audio>')
        return "\n".join(parts)


def _shown(modality: str, content: Any) -> str:
    if content is None:
        return f"no {modality}"
    if isinstance(content, str):
        return repr(content if len(content) <= _SHOWN else f"{content[: _SHOWN - 3]}...")
    return f"{len(content[0]) / content[1]:.2f} s of {modality} at {content[1]} Hz"


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


def answers_of(
    layout: Layout,
    results: Sequence[Result],
    decode_text: Callable[[np.ndarray], str],
    decode_sounds: Callable[[Sequence[np.ndarray]], tuple[Sequence[np.ndarray | SpeechLMError], int]],
) -> list[Answer]:
    """An answer for each result. A clip that cannot be decoded refuses its answer alone.

    Args:
        decode_text: ids of a segment to text.
        decode_sounds: codes [frames, codebooks] of all clips to (samples [n] or why there are none of each, rate in Hz).
    """
    content_of = bagpiper_content if layout.family == "bagpiper" else opuslm_content
    messages: list[list[list[Any]]] = []
    spoken: list[tuple[int, list[Any], np.ndarray]] = []
    results = list(results)
    for place, result in enumerate(results):
        messages.append([])
        for segment in generated_segments(result):
            content = content_of(layout, segment)
            message = ["assistant", segment.modality, None]
            if content.text is not None:
                message[2] = decode_text(content.text)
            elif content.codes is not None and len(content.codes):
                spoken.append((place, message, content.codes))
            messages[-1].append(message)
    sounds, rate = decode_sounds([codes for _, _, codes in spoken]) if spoken else ([], 0)
    for (place, message, _), sound in zip(spoken, sounds, strict=True):
        if isinstance(sound, SpeechLMError):
            results[place] = replace(results[place], outcome=REFUSED, reason=str(sound))
        else:
            message[2] = sound, rate
    return [
        Answer(tuple(map(tuple, found)), result.outcome, result.reason, result)
        for found, result in zip(messages, results, strict=True)
    ]


def only_answer(answers: list[Answer]) -> Answer:
    """The answer of the one conversation. DataError if it has none."""
    (answer,) = answers
    if answer.outcome in FAILED:
        raise DataError(answer.reason)
    return answer
