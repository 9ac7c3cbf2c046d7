"""How a GPU multiplies inside convolutions, which torch keeps for the whole process while threads come and go."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_lock = threading.Lock()
_inside: list[tuple[bool, bool]] = []  # what those who are inside asked for
_before: list[tuple[bool, bool]] = []  # what there was when nobody was


@contextlib.contextmanager
def convolutions(device: torch.device, *, tf32: bool = False, tune: bool = False) -> Iterator[None]:
    """Inside they are in float32, which torch would round to ten bits of mantissa on a GPU if it were not told.

    Threads that are inside at once and ask for the same get it until the last one leaves.

    Args:
        tf32: round.
        tune: choose cuDNN's algorithms by trying them.
    """
    if device.type != "cuda":
        yield
        return
    mine = tf32, tune
    with _lock:
        if not _inside:
            _before[:] = [_flags()]
        _inside.append(mine)
        _set_flags(mine)
    try:
        yield
    finally:
        with _lock:
            _inside.remove(mine)
            _set_flags(_inside[-1] if _inside else _before[0])


def _flags() -> tuple[bool, bool]:
    from torch.backends import cudnn

    return cudnn.allow_tf32, cudnn.benchmark


def _set_flags(flags: tuple[bool, bool]) -> None:
    from torch.backends import cudnn

    cudnn.allow_tf32, cudnn.benchmark = flags
