"""From when each step ended and which requests it served: rates and latencies of one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..plan import RowResult


@dataclass
class Trace:
    """Records a run step by step.

    Attributes:
        first_rows: gives the requests whose first row came in the step that just ended; None if that cannot be seen.
        ends: seconds since the start at which each step ended.
        first, last, rows: by request: the step of its first row, the step it finished in, its rows.
    """

    first_rows: Callable[[], Iterable[str]] | None
    begun: float = field(default_factory=time.perf_counter)
    ends: list[float] = field(default_factory=list)
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def step(self, finished: list[tuple[str, Any]]) -> None:
        """Called as a step ends, with what finished in it."""
        self.ends.append(time.perf_counter() - self.begun)
        now = len(self.ends) - 1
        if self.first_rows is not None:
            for request in self.first_rows():
                self.first[request] = now
        for request, outcome in finished:
            self.last[request] = now
            self.rows[request] = len(outcome.rows) if isinstance(outcome, RowResult) else 0

    @property
    def seconds(self) -> float:
        return self.ends[-1]

    @property
    def total_rows(self) -> int:
        return sum(self.rows.values())

    def first_row_seconds(self) -> np.ndarray:
        """From the start of the run to the first row of each unit (of its first request)."""
        firsts: dict[str, int] = {}
        for request, step in self.first.items():
            unit = request.partition("/")[0]
            firsts[unit] = min(step, firsts.get(unit, step))
        return np.array([self.ends[step] for step in firsts.values()])

    def row_seconds(self, row: int) -> np.ndarray:
        """From the start of the run to row ``row`` (from 0) of each unit's last request, one row a step behind its first."""
        lasts: dict[str, str] = {}
        for request in self.first:
            unit = request.partition("/")[0]
            lasts[unit] = max(request, lasts.get(unit, request))
        steps = [self.first[request] + row for request in lasts.values()]
        return np.array([self.ends[min(step, len(self.ends) - 1)] for step in steps])

    def row_latencies(self, q: Iterable[float]) -> list[float] | None:
        """Percentiles of the seconds between two rows of a request, over all rows of all requests but their first ones.

        None where it cannot be seen in which steps a request got its rows.
        """
        if not self.first or len(self.ends) < 2:
            return None
        served = np.zeros(len(self.ends))
        for request, step in self.first.items():
            served[step + 1 : self.last.get(request, step) + 1] += 1
        gaps = np.diff(self.ends, prepend=0.0)
        order = np.argsort(gaps)
        reached = np.cumsum(served[order])
        if not reached[-1]:
            return None
        places = np.searchsorted(reached, np.asarray(list(q)) / 100 * reached[-1])
        return [float(gaps[order][min(place, len(gaps) - 1)]) for place in places]

    def summary(self, output: int, first_codes: int | None) -> dict[str, float | int | None]:
        """What the table shows; seconds, and None where something cannot be seen.

        Args:
            output: rows of each unit.
            first_codes: index of the row that completes the first frame, in a unit's last request; None without audio.
        """
        latencies = self.row_latencies((50, 99))
        seen = bool(self.first)
        return {
            "rows": self.total_rows,
            "seconds": self.seconds,
            "steps": len(self.ends),
            "rows_per_s": self.total_rows / self.seconds,
            "ms_per_step": self.seconds / output * 1e3,
            "first_row_s": float(np.median(self.first_row_seconds())) if seen else None,
            "first_codes_s": float(np.median(self.row_seconds(first_codes)))
            if seen and first_codes is not None
            else None,
            "row_p50_s": latencies[0] if latencies else None,
            "row_p99_s": latencies[1] if latencies else None,
        }
