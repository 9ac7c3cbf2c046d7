"""The delay between streams: stream s of frame t stands in row t + s.

Two forms exist. Bagpiper interleaves T frames to T + S - 1 rows and fills with each stream's own pad (ESPnet discrete audio IO with
``delay_interleave``). OpusLM shifts rows that already end in pads and cuts the result to the number of rows (ESPnet
``ARDelayLM``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def interleave(frames: np.ndarray, pads: Sequence[int]) -> np.ndarray:
    """Delayed rows of ``frames``.

    Args:
        frames: [T, S] ids.
        pads: per stream the id that fills the corners.

    Returns:
        [T + S - 1, S] ids ([0, S] for no frame).
    """
    length, streams = frames.shape
    assert streams == len(pads), f"{streams} streams but {len(pads)} pads"
    if length == 0:
        return frames.copy()
    rows = np.empty((length + streams - 1, streams), dtype=frames.dtype)
    rows[:] = np.asarray(pads, dtype=frames.dtype)
    for s in range(streams):
        rows[s : s + length, s] = frames[:, s]
    return rows


def undo(rows: np.ndarray) -> np.ndarray:
    """Frames of delayed ``rows``: [R, S] to [max(R - S + 1, 0), S]."""
    length, streams = rows.shape
    frames = max(length - streams + 1, 0)
    result = np.empty((frames, streams), dtype=rows.dtype)
    for s in range(streams):
        result[:, s] = rows[s : s + frames, s]
    return result


def shift(rows: np.ndarray, pad: int = 0) -> np.ndarray:
    """Delay ``rows`` among themselves and cut to their number (ESPnet ``ARDelayLM``): [R, S] to [R, S]."""
    length, streams = rows.shape
    result = np.full_like(rows, pad)
    for s in range(min(streams, length)):
        result[s:, s] = rows[: length - s, s]
    return result


class StreamingUndo:
    """Undoes the delay as rows arrive: frame t is complete when row t + S - 1 is.

    Keeps only the last S - 1 rows.
    """

    def __init__(self, num_streams: int) -> None:
        self.num_streams = num_streams
        self._tail = np.empty((0, num_streams), dtype=np.int64)

    def push(self, rows: np.ndarray) -> np.ndarray:
        """Takes [n, S] rows, returns the frames that they complete, [m, S] with m <= n."""
        window = np.concatenate([self._tail, np.asarray(rows, dtype=np.int64).reshape(-1, self.num_streams)])
        self._tail = window[max(len(window) - self.num_streams + 1, 0) :]
        return undo(window)
