"""Triton kernel of ``modules.FusedSnake``, whose plain twin is ``modules.snake``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def snake_kernel(out, x, alpha, channels, length, ONE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """``x``, ``out``: [rows, length] of [batch, channel]; ``alpha``: [channels], or one for all if ``ONE``."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < length
    place = row.to(tl.int64) * length + column
    frequency = tl.load(alpha) if ONE else tl.load(alpha + row % channels)
    value = tl.load(x + place, mask=inside)
    wave = tl.sin(frequency * value)
    tl.store(out + place, value + (1.0 / (frequency + 1e-9)) * (wave * wave), mask=inside)
