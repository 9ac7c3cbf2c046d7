"""How a GPU multiplies inside convolutions, which torch keeps for the whole process while threads come and go."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class _Flags(NamedTuple):
    """torch's older switch (None: it does not say, which it refuses where the newer ones differ), its newer ones, and tuning."""

    tf32: bool | None
    convolution: str
    recurrent: str
    tune: bool


_lock = threading.Lock()
_inside: list[_Flags] = []  # what those who are inside asked for
_before: list[_Flags] = []  # what there was when nobody was


@contextlib.contextmanager
def convolutions(device: torch.device, *, tf32: bool = False, tune: bool = False) -> Iterator[None]:
    """Inside they are in float32, which torch would round to ten bits of mantissa on a GPU if it were not told.

    Threads that are inside at once and ask for the same get it until the last one leaves; of those that do not, all get what the
    last one to come asked for.

    Args:
        tf32: round.
        tune: choose cuDNN's algorithms by trying them.
    """
    if device.type != "cuda":
        yield
        return
    precision = "tf32" if tf32 else "ieee"
    mine = _Flags(tf32, precision, precision, tune)
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


def _flags() -> _Flags:
    from torch.backends import cudnn

    try:
        tf32 = cudnn.allow_tf32
    except RuntimeError:
        tf32 = None
    return _Flags(tf32, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.benchmark)


def _set_flags(flags: _Flags) -> None:
    from torch.backends import cudnn

    if flags.tf32 is not None:
        cudnn.allow_tf32 = flags.tf32  # before the others, which it sets to "tf32" or to what holds for all of torch
    cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = flags.convolution, flags.recurrent
    cudnn.benchmark = flags.tune
