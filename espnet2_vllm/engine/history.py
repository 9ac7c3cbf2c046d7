"""The scheduler's record of what each request emitted: owner of the history over a request's whole life."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import channel


class History:
    """Codes of all streams per request and position, recorded a step at a time as one matrix.

    Rows are given out by request id and grow in number as needed; pages of a row are touched only where something is written.
    """

    def __init__(self, num_streams: int, max_rows: int, rows: int = 64) -> None:
        self.num_streams, self.max_rows = num_streams, max_rows
        self._codes = np.zeros((rows, max_rows + 1, num_streams), dtype=np.int32)
        self._logprobs = np.zeros((rows, max_rows + 1, num_streams), dtype=np.float32)
        self._row: dict[str, int] = {}
        self._free = list(range(rows))[::-1]

    def __len__(self) -> int:
        return len(self._row)

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def open(self, request_id: str) -> int:
        if request_id in self._row:
            return self._row[request_id]
        if not self._free:
            self._grow()
        row = self._row[request_id] = self._free.pop()
        return row

    def _grow(self) -> None:
        have = len(self._codes)
        self._codes, self._logprobs = (_doubled(table) for table in (self._codes, self._logprobs))
        self._free = list(range(have, 2 * have))[::-1]

    def close(self, request_id: str) -> None:
        row = self._row.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def record(self, request_ids: list[str], positions: list[int], codes: np.ndarray, logprobs: np.ndarray) -> None:
        """Stores ``codes`` and ``logprobs`` [n, S] as the rows of ``request_ids`` at ``positions``; opens those that are new."""
        known = self._row
        rows = [known[name] if name in known else self.open(name) for name in request_ids]
        self._codes[rows, positions] = codes
        self._logprobs[rows, positions] = logprobs

    def codes(self, request_id: str, start: int, stop: int) -> np.ndarray:
        """[stop - start, S] codes as recorded. ``positions`` count from the sequence's first row."""
        return self._codes[self._row[request_id], start:stop]

    def logprobs(self, request_id: str, start: int, stop: int) -> np.ndarray:
        """[stop - start, S] log-probabilities as recorded."""
        return self._logprobs[self._row[request_id], start:stop]

    def emitted(self, request_id: str, start: int, stop: int) -> np.ndarray:
        """[stop - start, S] ids as emitted."""
        return channel.decode(self.codes(request_id, start, stop)).ids

    def fed(self, request_id: str, start: int, stop: int) -> np.ndarray:
        """[stop - start, S-1] auxiliary ids as the model saw them."""
        return channel.fed_auxiliary(self.codes(request_id, start, stop))


def _doubled(table: np.ndarray) -> np.ndarray:
    grown = np.zeros((2 * len(table), *table.shape[1:]), dtype=table.dtype)
    grown[: len(table)] = table
    return grown
