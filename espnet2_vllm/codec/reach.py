"""How far the decoder of a codec looks: measured on the codec itself, by changing one frame and seeing which samples move."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from .torch_codec import TorchCodec

log = logging.getLogger(__name__)

_LIMITS = (32, 128)  # frames on either side that are tried, one after the other
_TRIALS = 3
# Of the peak, on a GPU, whose convolutions may spread rounding errors over neighbours that do not depend on each other.
_NOISE = 1e-6
_SEED = 20240607


@dataclass(frozen=True)
class Reach:
    """The samples of frame t depend on frames t - ``left`` to t + ``right``; None: no limit was found."""

    left: int | None
    right: int | None

    @property
    def finite(self) -> bool:
        return self.left is not None and self.right is not None


def measure_reach(codec: TorchCodec) -> Reach:
    """Of ``codec.synthesize``: from features, which a recurrent part has already made, to samples."""
    rng = np.random.default_rng(_SEED)

    def draw(frames: int) -> torch.Tensor:
        codes = rng.integers(0, codec.codebook_size, (frames, codec.num_codebooks))
        return codec.features([codes])[0]

    return reach_of(lambda features: codec.synthesize(features[None])[0], draw)


def reach_of(function: Callable[[torch.Tensor], torch.Tensor], draw: Callable[[int], torch.Tensor]) -> Reach:
    """Of any function from frames [T, F] to T equal shares of output. ``draw`` gives random frames."""
    reach = Reach(None, None)
    for limit in _LIMITS:
        moved = [offset for _ in range(_TRIALS) for offset in _moved(function, draw, limit)]
        if not moved:
            break  # nothing that depends on its input says nothing of its reach
        left, right = max(*moved, 0), -min(*moved, 0)
        reach = Reach(left if left < limit else None, right if right < limit else None)
        if reach.finite:
            break
    return reach


@torch.inference_mode()
def _moved(
    function: Callable[[torch.Tensor], torch.Tensor], draw: Callable[[int], torch.Tensor], limit: int
) -> list[int]:
    """Offsets in frames, from the changed one, at which the output changes."""
    frames = draw(2 * limit + 1)
    changed = frames.clone()
    changed[limit] = draw(limit + 1)[limit]
    before, again, after = (function(one).float().reshape(len(frames), -1) for one in (frames, frames, changed))
    noise = (before - again).abs().max()
    if before.is_cuda:
        noise = torch.maximum(noise, _NOISE * before.abs().max())
    moves = ((after - before).abs() > noise).any(dim=1)
    return (moves.nonzero()[:, 0] - limit).tolist()
