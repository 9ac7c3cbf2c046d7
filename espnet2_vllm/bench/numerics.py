"""Ids and logits of the same requests from two engines, compared row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..layout import Layout
from ..plan import RowRequest, RowResult

Finished = Sequence[tuple[RowRequest, RowResult]]


@dataclass
class RequestDifference:
    """One request.

    Attributes:
        rows: (a's, b's).
        same_ids, ids: ids that are equal, and all ids, in the rows that both have; forced ones do not count.
        first: index of the first row that differs, or at which one of the two ends; None if all are equal.
        stream: the first stream that differs there; -1 where one ends.
        margin: by how much a's logit of its own choice exceeds that of b's there; None where that cannot be said.
    """

    request_id: str
    rows: tuple[int, int]
    same_ids: int
    ids: int
    first: int | None
    stream: int = -1
    margin: float | None = None


@dataclass
class Comparison:
    """All requests. Root mean squares of logit differences are one for each row before which both have the same history.

    Attributes:
        primary, auxiliary, all_streams: of stream 0 over the vocabulary, of the other streams over their candidates, of both.
        margins: distance between the best and the second best id where a chose, in the rows with the same history.
        apart: requests whose prompts differ, because an earlier segment did; not compared.
    """

    requests: list[RequestDifference] = field(default_factory=list)
    primary: list[float] = field(default_factory=list)
    auxiliary: list[float] = field(default_factory=list)
    all_streams: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not self.apart and all(request.first is None for request in self.requests)

    def first_difference(self) -> RequestDifference | None:
        """The request that differs first, by its rows."""
        differing = [request for request in self.requests if request.first is not None]
        return min(differing, key=lambda request: request.first) if differing else None

    def to_dict(self) -> dict:
        first = self.first_difference()
        return {
            "requests": len(self.requests),
            "requests_equal": sum(request.first is None for request in self.requests),
            "requests_apart": self.apart,
            "rows": [sum(request.rows[side] for request in self.requests) for side in (0, 1)],
            "ids": sum(request.ids for request in self.requests),
            "ids_equal": sum(request.same_ids for request in self.requests),
            "first_difference": None if first is None else vars(first),
            "rows_same_history": len(self.all_streams),
            "rmse": {name: _mean_max(getattr(self, name)) for name in ("all_streams", "primary", "auxiliary")},
            "margin_median": float(np.median(self.margins)) if self.margins else None,
            "margin_smallest": min(self.margins) if self.margins else None,
            "differences": [vars(request) for request in self.requests if request.first is not None],
        }


def _mean_max(values: list[float]) -> dict[str, float] | None:
    return {"mean": float(np.mean(values)), "max": float(np.max(values))} if values else None


def compare(layout: Layout, a: Finished, b: Finished) -> Comparison:
    """Compares what two engines made of the same requests; results must come with logits."""
    comparison, choices = Comparison(), _Choices(layout)
    others = {request.request_id: (request, result) for request, result in b}
    for request, result in sorted(a, key=lambda pair: pair[0].request_id):
        other = others.pop(request.request_id, None)
        if other is None or not np.array_equal(other[0].prompt, request.prompt):
            comparison.apart.append(request.request_id)
            continue
        difference = _ids(request.request_id, result, other[1])
        _logits(comparison, choices, difference, result, other[1])
        if difference.first is not None and difference.stream >= 0:
            difference.margin = choices.between(result, other[1], difference.first, difference.stream)
        comparison.requests.append(difference)
    comparison.apart += list(others)
    return comparison


def _ids(request_id: str, a: RowResult, b: RowResult) -> RequestDifference:
    rows = min(len(a.rows), len(b.rows))
    chosen = ~a.forced[:rows]
    same = a.rows[:rows] == b.rows[:rows]
    difference = RequestDifference(
        request_id, (len(a.rows), len(b.rows)), int((same & chosen).sum()), int(chosen.sum()), None
    )
    places = np.argwhere(~same)
    if len(places):
        difference.first, difference.stream = (int(value) for value in places[0])
    elif len(a.rows) != len(b.rows):
        difference.first = rows
    return difference


def _logits(
    comparison: Comparison, choices: _Choices, difference: RequestDifference, a: RowResult, b: RowResult
) -> None:
    """Adds the rows before which both sides have the same history."""
    assert a.logits is not None and b.logits is not None, f"{difference.request_id}: results without logits"
    shared = min(difference.rows)
    if difference.first is not None:
        shared = min(difference.first + 1, shared)
    for row in range(shared):
        squares = [
            np.square(mine - theirs, dtype=np.float64)
            for mine, theirs in zip(choices.logits(a, row), choices.logits(b, row), strict=True)
        ]
        sums, sizes = [part.sum() for part in squares], [part.size for part in squares]
        comparison.primary.append(float(np.sqrt(sums[0] / sizes[0])))
        comparison.auxiliary.append(float(np.sqrt(sums[1] / sizes[1])))
        comparison.all_streams.append(float(np.sqrt(sum(sums) / sum(sizes))))
        comparison.margins += choices.margins(a, row)


class _Choices:
    """What each stream chooses among."""

    def __init__(self, layout: Layout) -> None:
        self._auxiliary = [np.array(ids) for ids in layout.auxiliary_candidates()]
        self._primary = [np.arange(*span) for span in (layout.text, layout.streams[0])]
        sizes = np.array([len(ids) for ids in self._auxiliary])
        # Engines fill the columns of streams with fewer ids up, each in its own way.
        self._valid = np.arange(sizes.max())[None, :] < sizes[:, None]

    def logits(self, result: RowResult, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Of stream 0 over the vocabulary [V], and of all other streams over their candidates, in one array."""
        primary, auxiliary = (np.asarray(part) for part in result.logits[row][:2])
        return primary, auxiliary[self._valid]

    def margins(self, result: RowResult, row: int) -> Iterator[float]:
        """Best minus second best logit of each stream that had a choice, among the ids of the block that its id is of."""
        for stream in np.flatnonzero(~result.forced[row]):
            found = self._of(result, row, int(stream))
            if found is not None and len(found[1]) > 1:
                second, best = np.partition(found[1], -2)[-2:]
                yield float(best - second)

    def between(self, a: RowResult, b: RowResult, row: int, stream: int) -> float | None:
        """By how much a's logit of a's id exceeds a's logit of b's id; None if they are not of one block."""
        found = self._of(a, row, stream)
        if found is None:
            return None
        ids, logits = found
        mine, theirs = (np.flatnonzero(ids == side.rows[row, stream]) for side in (a, b))
        return float(logits[mine[0]] - logits[theirs[0]]) if len(mine) and len(theirs) else None

    def _of(self, result: RowResult, row: int, stream: int) -> tuple[np.ndarray, np.ndarray] | None:
        """(ids, their logits) of the block that the row's id in ``stream`` is of; None for an id outside of all."""
        primary, auxiliary = (np.asarray(part) for part in result.logits[row][:2])
        if stream:
            ids = self._auxiliary[stream - 1]
            return ids, auxiliary[stream - 1, : len(ids)]
        token = result.rows[row, 0]
        for ids in self._primary:
            if ids[0] <= token <= ids[-1]:
                return ids, primary[ids[0] : ids[-1] + 1]
        return None
