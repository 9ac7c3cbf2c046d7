"""The two audio encoders that ESPnet takes, Qwen3-Omni's and Qwen2.5-Omni's: what is theirs alone around the same layers.

A clip of mel frames is cut into chunks of ``2 * n_window`` frames; a chunk goes through the convolutions by itself, which leave it
some rows. The layers attend within windows. Modules and arithmetic are transformers' own; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import gelu

from .listening import QWEN3_OMNI, QWEN25_OMNI, ROW_COUNTS


class Qwen3Omni:
    """Three halvings of each chunk; windows of ``n_window_infer`` frames.

    Args:
        tower: transformers' module.

    Attributes:
        chunk: frames that go through the convolutions together.
    """

    model_type = QWEN3_OMNI

    def __init__(self, tower: Any) -> None:
        self.tower, self.chunk = tower, 2 * tower.n_window
        # cuDNN convolves this layout several times faster.
        for convolution in self._convolutions():
            convolution.to(memory_format=torch.channels_last)

    def _convolutions(self) -> tuple[Any, ...]:
        return self.tower.conv2d1, self.tower.conv2d2, self.tower.conv2d3

    def rows_of_chunk(self, frames: int) -> int:
        """Rows behind the convolutions of a chunk, or of a shorter clip."""
        return ROW_COUNTS[self.model_type].rows(frames, self.chunk)

    def window(self, width: int) -> int:
        """Rows that attend to one another at most, where chunks are ``width`` frames wide."""
        return self.rows_of_chunk(width) * (self.tower.n_window_infer // self.chunk)

    def convolve(self, chunks: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """[chunks, frames, bins], each filled up behind its length -> [chunks, rows, d]."""
        images = chunks.transpose(1, 2).unsqueeze(1)
        parts = images.split(self.tower.conv_chunksize)
        return torch.cat([self._convolve(part) for part in parts])

    def _convolve(self, images: torch.Tensor) -> torch.Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        for convolution in self._convolutions():
            images = gelu(convolution(images))
        return self.tower.conv_out(images.permute(0, 3, 1, 2).flatten(2))

    def finish(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The layers' output of clips of so many rows each, behind one another -> what ESPnet calls the encoder's output."""
        tower = self.tower
        return tower.proj2(tower.act(tower.proj1(tower.ln_post(hidden))))


class Qwen25Omni:
    """One halving of each chunk, which is a window as well; pairs of rows are averaged behind the layers. As ``Qwen3Omni``."""

    model_type = QWEN25_OMNI

    def __init__(self, tower: Any) -> None:
        self.tower, self.chunk = tower, 2 * tower.n_window

    def rows_of_chunk(self, frames: int) -> int:
        return (frames - 1) // 2 + 1

    def window(self, width: int) -> int:
        return self.rows_of_chunk(width)

    def convolve(self, chunks: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        tower = self.tower
        inside = torch.arange(chunks.shape[1])[None, :] < torch.tensor(lengths)[:, None]
        embedded = gelu(tower.conv1(chunks.transpose(1, 2))) * inside.to(chunks.device).unsqueeze(1)
        return gelu(tower.conv2(embedded)).transpose(1, 2)

    def finish(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        tower = self.tower
        pairs = [clip[: len(clip) // 2 * 2].unflatten(0, (-1, 2)) for clip in hidden.split(list(rows))]
        pooled = torch.cat([(pair[:, 0] + pair[:, 1]) / 2 for pair in pairs])
        return tower.proj(tower.ln_post(pooled))


ENCODERS: Mapping[str, type[Qwen3Omni | Qwen25Omni]] = {kind.model_type: kind for kind in (Qwen3Omni, Qwen25Omni)}
