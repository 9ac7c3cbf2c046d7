"""Bagpiper: an answer is a chain of segments, each announced by ``<|assistant|>`` and a modality token.

Source: ESPnet ``espnet2/speechlm/model/speechlm/lm/parallel.py`` (``inference``, ``inference_segment``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..layout import PAD, Layout, Span
from .rules import AUDIO, BRIDGE, DONE, MODALITY, TEXT, Advance, Constraint, Sampling

MAX_ENFORCED = 32  # entries of enforce_modality that an engine's slot holds


@dataclass(frozen=True)
class ModalityRules:
    """One modality's block of the decoding yaml: rows are counted from the one behind the modality token.

    Attributes:
        sampling: how ids are chosen.
        min_rows: the segment cannot end at a row below this index.
        max_rows: the segment is cut after so many rows.
        guidance: scale of classifier-free guidance; at most 1 is none.
        last: nothing follows a segment of this modality (ESPnet with ``num_hypo`` above 1).
    """

    sampling: Sampling
    min_rows: int
    max_rows: int
    guidance: float = 1.0
    last: bool = False


class BagpiperState(NamedTuple):
    """Phase, rows of the running segment so far, modality tokens so far."""

    phase: int
    step: int
    segments: int


@dataclass(frozen=True)
class BagpiperRules:
    """Rules of one request. The prompt ends with the ``<|assistant|>`` row; the first generated row is a modality token.

    Attributes:
        enforce: names of modalities that the first segments must have; a name other than text or audio leaves the choice to the
            model at that place, as ESPnet does.
        text, audio: rules of the segments; None if the yaml has no such block.
    """

    layout: Layout
    enforce: tuple[str, ...]
    text: ModalityRules | None
    audio: ModalityRules | None

    def start(self) -> BagpiperState:
        return BagpiperState(MODALITY, 0, 0)

    def _rules(self, phase: int) -> ModalityRules:
        rules = self.text if phase == TEXT else self.audio
        assert rules is not None, f"phase {phase} has no rules"
        return rules

    def enforced(self, index: int) -> str | None:
        """Modality imposed on segment ``index``, or None if the model chooses."""
        if index < len(self.enforce) and self.enforce[index] in ("text", "audio"):
            return self.enforce[index]
        return None

    def constraint(self, state: BagpiperState) -> Constraint:
        if state.phase == BRIDGE:
            return Constraint(BRIDGE, (), False, Sampling(), forced=self.layout.specials["assistant"])
        if state.phase == MODALITY:
            name = self.enforced(state.segments)
            forced = None if name is None else self.layout.modality_token(name)
            return Constraint(MODALITY, (self.layout.modality_span,), False, Sampling(), forced=forced)
        assert state.phase in (TEXT, AUDIO), f"no row follows phase {state.phase}"
        rules = self._rules(state.phase)
        primary = self.layout.primary_spans("text" if state.phase == TEXT else "audio")
        if state.step >= rules.min_rows:
            primary = (*(Span(t, t + 1) for t in self.layout.end_tokens), *primary)
        guidance = rules.guidance if rules.guidance > 1 else 1.0
        return Constraint(state.phase, primary, state.phase == AUDIO, rules.sampling, guidance=guidance)

    def advance(self, state: BagpiperState, chosen: tuple[int, ...]) -> tuple[BagpiperState, Advance]:
        pads = (PAD,) * (self.layout.num_streams - 1)
        if state.phase == BRIDGE:
            row = (self.layout.specials["assistant"], *pads)
            return BagpiperState(MODALITY, 0, state.segments), self._forced(row)
        if state.phase == MODALITY:
            return self._enter(state, chosen)
        assert state.phase in (TEXT, AUDIO), f"no row follows phase {state.phase}"
        rules = self._rules(state.phase)
        emitted = chosen if state.phase == AUDIO else (chosen[0], *pads)
        aux_forced = (state.phase == TEXT,) * len(pads)
        ended = chosen[0] in self.layout.end_tokens
        last = ended or state.step + 1 >= rules.max_rows
        if not last:
            return state._replace(step=state.step + 1), Advance(emitted, emitted, (False, *aux_forced), False, False)
        # The last row of a segment is fed with its auxiliary streams empty, whatever was emitted.
        fed = (chosen[0], *pads)
        goes_on = not rules.last and (chosen[0] == self.layout.specials["eot"] or state.segments < len(self.enforce))
        after = BagpiperState(BRIDGE if goes_on else DONE, 0, state.segments)
        return after, Advance(emitted, fed, (False, *aux_forced), not goes_on, True)

    def _forced(self, row: tuple[int, ...]) -> Advance:
        return Advance(row, row, (True,) * len(row), False, False)

    def _enter(self, state: BagpiperState, chosen: tuple[int, ...]) -> tuple[BagpiperState, Advance]:
        pads = (PAD,) * (self.layout.num_streams - 1)
        name = self.enforced(state.segments)
        token = chosen[0] if name is None else self.layout.modality_token(name)
        row = (token, *pads)
        modality = self.layout.modality_of(token)
        phase = {"text": TEXT, "audio": AUDIO}.get(modality or "", DONE)
        if phase == DONE or (self.text if phase == TEXT else self.audio) is None:
            # A modality that cannot be decoded (image, video, toolcall) or has no block in the yaml ends the request.
            after = BagpiperState(DONE, 0, state.segments + 1)
            return after, Advance(row, row, (name is not None, *(True,) * len(pads)), True, True)
        after = BagpiperState(phase, 0, state.segments + 1)
        return after, Advance(row, row, (name is not None, *(True,) * len(pads)), False, False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "enforce": list(self.enforce),
            "text": _modality_to_dict(self.text),
            "audio": _modality_to_dict(self.audio),
        }

    @classmethod
    def from_dict(cls, layout: Layout, data: Mapping[str, Any]) -> BagpiperRules:
        return cls(
            layout, tuple(data["enforce"]), _modality_from_dict(data["text"]), _modality_from_dict(data["audio"])
        )


def _modality_to_dict(rules: ModalityRules | None) -> dict[str, Any] | None:
    if rules is None:
        return None
    return {
        "temperature": rules.sampling.temperature,
        "topk": rules.sampling.topk,
        "top_p": rules.sampling.top_p,
        "min_rows": rules.min_rows,
        "max_rows": rules.max_rows,
        "guidance": rules.guidance,
        "last": rules.last,
    }


def _modality_from_dict(data: Mapping[str, Any] | None) -> ModalityRules | None:
    if data is None:
        return None
    sampling = Sampling(data["temperature"], data["topk"], data["top_p"])
    return ModalityRules(sampling, data["min_rows"], data["max_rows"], data["guidance"], data["last"])
