"""What both families' protocols have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ..layout import Layout, Span

# Phases. The numbers index the engine's slot tensors.
MODALITY, TEXT, AUDIO, BRIDGE, DONE = range(5)
PHASES = ("modality", "text", "audio", "bridge", "done")

EVERY = 2**31 - 1  # a top-k that leaves no id out


@dataclass(frozen=True)
class Sampling:
    """How one id is chosen among the allowed ones: the ``topk`` best, divided by ``temperature``, cut by ``top_p``, one draw.

    ``topk`` 1 is the argmax, whatever the temperature. A ``top_p`` below 1 keeps, best first, the ids whose probabilities add
    up to at most ``top_p``, and the best one always (ESPnet ``logits_to_tokens``, ``topp_sampling``): the id that would go
    beyond it is left out.
    """

    temperature: float = 1.0
    topk: int = 1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        assert self.temperature > 0, f"temperature {self.temperature}: greedy is written topk 1"
        assert 1 <= self.topk <= EVERY, f"topk {self.topk}"
        assert 0 <= self.top_p <= 1, f"top_p {self.top_p}"

    @property
    def greedy(self) -> bool:
        return self.topk == 1


@dataclass(frozen=True)
class Constraint:
    """What the next row may be.

    Attributes:
        phase: one of the phase numbers.
        primary: spans of ids that stream 0 may take (end tokens included once they are open).
        audio: whether auxiliary streams choose among their own candidates; otherwise they are pad.
        sampling: how ids are chosen.
        forced: primary id of a forced row (its auxiliary ids are pad), or None.
        guidance: scale of classifier-free guidance; 1 is none.
    """

    phase: int
    primary: tuple[Span, ...]
    audio: bool
    sampling: Sampling
    forced: int | None = None
    guidance: float = 1.0


@dataclass(frozen=True)
class Advance:
    """What became of a row.

    Attributes:
        emitted: [S] ids as the row counts for the result.
        fed: [S] ids as the model sees the row; differs from ``emitted`` at the end of a Bagpiper segment.
        forced: [S] which ids were imposed, not chosen.
        done: nothing follows.
        ends_segment: the row is the last of its segment.
    """

    emitted: tuple[int, ...]
    fed: tuple[int, ...]
    forced: tuple[bool, ...]
    done: bool
    ends_segment: bool


class Rules(Protocol):
    """One request's rules: immutable; state is passed around."""

    layout: Layout

    def start(self) -> Any:
        """State before the first generated row."""

    def constraint(self, state: Any) -> Constraint:
        """What the next row may be."""

    def advance(self, state: Any, chosen: tuple[int, ...]) -> tuple[Any, Advance]:
        """Applies the rules to a chosen row, gives the next state."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that survive a trip to the engine's process."""


def replay(rules: Rules, rows: Iterable[tuple[int, ...]]) -> tuple[Any, list[Advance]]:
    """State after ``rows`` (ids as emitted) and what each became."""
    state, steps = rules.start(), []
    for row in rows:
        state, step = rules.advance(state, tuple(row))
        assert step.emitted == tuple(row), (
            f"row {len(steps)}: emitted {tuple(row)}, but the rules make it {step.emitted}"
        )
        steps.append(step)
    return state, steps
