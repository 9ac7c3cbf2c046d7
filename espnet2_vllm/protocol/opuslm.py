"""OpusLM: one request generates one segment, delayed, with a drain behind its end.

Source: ESPnet ``espnet2/speechlm/core_lm/ar_delay.py`` (``ARDelayLM.inference``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..layout import PAD, Layout, Span
from .rules import AUDIO, TEXT, Advance, Constraint, Sampling


class OpusLMState(NamedTuple):
    """Rows so far; ESPnet's ``finish_idx`` (-1 while unset); whether the row before had the end token in stream 0."""

    step: int
    finish: int
    ended: bool


@dataclass(frozen=True)
class OpusLMRules:
    """Rules of one segment. The prompt ends with the modality token's row.

    Attributes:
        modality: ``text`` or ``audio``.
        min_rows: ``minlen``; the end token is closed at rows below this index.
        max_rows: ``maxlen``, in delayed rows; the end is forced at row ``max_rows - (S - 1)``.
    """

    layout: Layout
    modality: str
    sampling: Sampling
    min_rows: int
    max_rows: int

    def __post_init__(self) -> None:
        assert self.modality in ("text", "audio"), self.modality
        assert self.max_rows >= self.layout.num_streams, (
            f"max_rows {self.max_rows} leaves no room for the drain of {self.layout.num_streams} streams"
        )

    @property
    def drain(self) -> int:
        return self.layout.num_streams - 1

    def start(self) -> OpusLMState:
        return OpusLMState(0, -1, False)

    def constraint(self, state: OpusLMState) -> Constraint:
        primary = self.layout.primary_spans(self.modality)
        if state.step >= self.min_rows:
            primary = (*(Span(t, t + 1) for t in self.layout.end_tokens), *primary)
        phase = AUDIO if self.modality == "audio" else TEXT
        return Constraint(phase, primary, phase == AUDIO, self.sampling)

    def advance(self, state: OpusLMState, chosen: tuple[int, ...]) -> tuple[OpusLMState, Advance]:
        streams = self.layout.num_streams
        row, forced = list(chosen), [False] * streams
        emptied = state.step - state.finish + 1 if state.finish >= 0 else 0
        for s in range(streams):
            # Streams that have not started yet, streams that have run out, and text's auxiliary streams are pad.
            if s > state.step or s < emptied or (s > 0 and self.modality == "text"):
                row[s], forced[s] = PAD, True
        finish = state.finish
        if finish < 0 and state.ended:
            finish = state.step
        if finish < 0 and state.step == self.max_rows - self.drain:
            row[0], forced[0] = self.layout.specials["eos"], True
            finish = state.step
        done = (finish >= 0 and state.step - finish >= self.drain) or state.step + 1 >= self.max_rows
        after = OpusLMState(state.step + 1, finish, row[0] == self.layout.specials["eos"])
        emitted = tuple(row)
        return after, Advance(emitted, emitted, tuple(forced), done, done)

    def to_dict(self) -> dict[str, Any]:
        return {
            "modality": self.modality,
            "temperature": self.sampling.temperature,
            "topk": self.sampling.topk,
            "top_p": self.sampling.top_p,
            "min_rows": self.min_rows,
            "max_rows": self.max_rows,
        }

    @classmethod
    def from_dict(cls, layout: Layout, data: Mapping[str, Any]) -> OpusLMRules:
        sampling = Sampling(data["temperature"], data["topk"], data["top_p"])
        return cls(layout, data["modality"], sampling, data["min_rows"], data["max_rows"])
