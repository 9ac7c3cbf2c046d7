"""What every backend is: rows in, rows out. Nothing here knows utterances, files or modalities."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from ..errors import DataError, SpeechLMError
from ..layout import Layout
from ..plan import RowRequest, RowResult

Outcome = RowResult | SpeechLMError


@runtime_checkable
class Engine(Protocol):
    """Executes requests of rows, in any order and any number at once.

    Attributes:
        layout: of the checkpoint.
        max_rows: rows of a sequence at most, prompt included (the model's context).
        unfinished: requests submitted and not yet given back by ``step``.
    """

    layout: Layout
    max_rows: int

    @property
    def unfinished(self) -> int: ...

    def submit(self, request: RowRequest) -> None:
        """Takes a request in.

        Raises:
            SpeechLMError: if this request cannot be executed; the engine goes on with the others.
        """

    def step(self) -> list[tuple[str, Outcome]]:
        """Works for a while; gives the requests that finished, or failed, meanwhile, by id."""

    def take_rows(self) -> list[tuple[str, np.ndarray]]:
        """Rows [n, S] as emitted that streaming requests have handed out since the last call, by id, in their order.

        Those from the last time on until the end of a request are in its result only.
        """

    def abort(self, ids: Iterable[str]) -> None:
        """Forgets requests: ``step`` never gives them back. Unknown ids are passed over, for they may just have finished."""

    def close(self) -> None:
        """Frees the device. The engine cannot be used afterwards."""


def check_fits(request: RowRequest, max_rows: int) -> None:
    """Refuses a request that the context cannot hold.

    Raises:
        DataError: if the rows that are given, reference included, leave no room for another one.
    """
    assert len(request.prompt) >= 1, f"{request.request_id}: the prompt is empty"
    what, rows = f"{len(request.prompt)} prompt rows", len(request.prompt)
    if request.reference is not None:
        what, rows = f"{what} and {len(request.reference)} reference rows", rows + len(request.reference)
    if rows >= max_rows:
        raise DataError(
            f"{request.request_id}: {what} leave no room in the context of {max_rows} rows; shorten the utterance (its text, "
            "speaker prompt or dialogue history), or raise the context"
        )
