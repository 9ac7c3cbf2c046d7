"""Sampling noise as a function of (seed, position, stream, id).

No generator, no state: a row draws the same whatever else is in the batch, on any slot, after a preemption, on any backend.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def _mix(h: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finalizer on int64 tensors that hold 32-bit values.

    A product of two 32-bit values may wrap in int64; its low 32 bits are right all the same.
    """
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _MASK
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _MASK
    return h ^ (h >> 16)


def _absorb(h: torch.Tensor, value: torch.Tensor, constant: int) -> torch.Tensor:
    return _mix((h ^ (((value & _MASK) + 1) * constant & _MASK)) + 0x9E3779B9 & _MASK)


def row_key(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Hash of (seed, position), both int64 of one shape."""
    h = _mix(seed & _MASK)
    h = _absorb(h, seed >> 32, 0x2545F491)
    return _absorb(h, position, 0x27D4EB2F)


def uniform(key: torch.Tensor, stream: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Uniform float32 in (0, 1), 23 bits, never 0 or 1. ``key``, ``stream`` and ``ids`` broadcast."""
    h = _absorb(_absorb(key, stream, 0x165667B1), ids, 0x9E3779B1)
    return ((h >> 9).to(torch.float32) + 0.5) * (1.0 / (1 << 23))


def gumbel(seed: torch.Tensor, position: torch.Tensor, stream: torch.Tensor | int, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise.

    Args:
        seed: [n] int64.
        position: [n] int64, index of the sampled row in its sequence, prompt included.
        stream: [n] int64 or a number.
        ids: [n, k] int64 vocabulary ids.

    Returns:
        [n, k] float32. The argmax of ``log p + gumbel`` is a draw from p (Gumbel-max).
    """
    if not isinstance(stream, torch.Tensor):
        stream = torch.full_like(seed, stream)
    u = uniform(row_key(seed, position).unsqueeze(-1), stream.unsqueeze(-1), ids)
    return -torch.log(-torch.log(u))
