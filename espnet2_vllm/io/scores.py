"""Log-probabilities of all streams of every generated row: one npz file an utterance (``--write_scores``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..layout import Layout
from ..plan import Hypothesis, RowResult
from .files import whole_file
from .names import safe_file_name

# Hidden, as ESPnet's recipe takes every visible name in an output directory for an entry.
FOLDER = ".scores"

Scores = dict[str, np.ndarray]


def scores_of(layout: Layout, hypotheses: Sequence[Hypothesis]) -> Scores:
    """What the file of one utterance holds: a line a generated row, hypotheses one after the other, rows in the order of time.

    Returns:
        hypothesis: [N] int32, from 0.
        segment: [N] int32, index among the segments of the answer (Bagpiper) or the parts of the utterance (OpusLM). A row that
            announces a segment counts as that segment's.
        ids: [N, S] int32, as emitted: delayed, with the end row and the drain.
        logprobs: [N, S] float32, natural logarithm of the probability with which each id was drawn, after mask, guidance,
            top-k, temperature and top-p; 0 where it was forced, and where it was the argmax (top-k 1).
        forced: [N, S] bool, ids that the protocol imposed: they are no choice of the model and count for nothing.
    """
    parts = [
        (number, segment, result)
        for number, hypothesis in enumerate(hypotheses)
        for segment, result in _rows_of(layout, hypothesis, len(hypotheses[0].segments) - 1 if number else 0)
    ]
    streams, none = layout.num_streams, np.zeros(0, np.int32)

    def stacked(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros((0, streams), dtype), *(getattr(result, name) for *_, result in parts)])

    return {
        "hypothesis": np.concatenate([none, *(np.full_like(segment, number) for number, segment, _ in parts)]),
        "segment": np.concatenate([none, *(segment for _, segment, _ in parts)]),
        "ids": stacked("rows", np.int32),
        "logprobs": stacked("logprobs", np.float32),
        "forced": stacked("forced", bool),
    }


def _rows_of(layout: Layout, hypothesis: Hypothesis, shared: int) -> Iterator[tuple[np.ndarray, RowResult]]:
    """Of each request of a hypothesis the segment of each of its rows, and its result.

    Args:
        shared: segments in front that another hypothesis has generated (Bagpiper).
    """
    places = [place for place, segment in enumerate(hypothesis.segments) if segment.generated]
    results = [result for _, result in hypothesis.requests]
    if layout.family == "opuslm":  # a request a segment
        for place, result in zip(places, results, strict=True):
            yield np.full(len(result.rows), place, np.int32), result
        return
    for result in results:  # one, of all segments
        segment = np.full(len(result.rows), len(hypothesis.segments), np.int32)
        for place in reversed(places[shared:]):
            one = hypothesis.segments[place]
            segment[: one.first + len(one.emitted)] = place
        yield segment, result


def scores_file(key: str) -> str:
    """Path of an utterance's file, relative to the output directory."""
    return f"{FOLDER}/{safe_file_name(key, '.npz')}"


def write_scores(path: Path, scores: Scores) -> None:
    """Writes one file, whole or not at all; ``numpy.load`` reads it."""
    with whole_file(path, binary=True) as file:
        np.savez_compressed(file, **scores)
