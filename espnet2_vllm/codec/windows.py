"""Clips of any length cut into windows of few lengths, so that many of them are decoded as one batch.

A window overlaps its neighbours by the codec's reach, and only what lies within is kept; so the pieces put together are what the
decoder makes of the whole clip. The first window of a clip begins where the clip does and the last ends where it ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .reach import Reach
from .torch_codec import TorchCodec, convolutions

log = logging.getLogger(__name__)

_SHORTEST = 32  # frames of the shortest windows beyond the overlap
_LENGTHS = 3  # lengths of windows, each twice the one before
_BATCHES = 7  # sizes of captured batches: 1, 2, 4, ...
_WARM_UP = (
    3  # runs until algorithms are chosen and TorchScript has compiled, neither of which may happen inside a capture
)


@dataclass(frozen=True)
class Window:
    """Frames [start, stop) of a clip are decoded, those of [first, last) are kept."""

    start: int
    stop: int
    first: int
    last: int


def plan_windows(frames: int, length: int, reach: Reach) -> list[Window]:
    """Windows of ``length`` frames that cover a clip of ``frames``; one of the clip's own length if it is shorter."""
    if frames <= length:
        return [Window(0, frames, 0, frames)] if frames else []
    assert length > reach.left + reach.right, f"windows of {length} frames are no longer than {reach}"
    windows, start, first = [], 0, 0
    while True:
        if start + length >= frames:
            return [*windows, Window(frames - length, frames, first, frames)]
        last = start + length - reach.right
        windows.append(Window(start, start + length, first, last))
        start, first = last - reach.left, last


class WindowDecoder:
    """Decodes clips of one codec in windows.

    Args:
        reach: of the codec, finite.
        max_frames: decoded at once; bounds memory and how long the device is busy with one piece.
        tf32: let a GPU round the inputs of convolutions to ten bits of mantissa: faster, but pieces then differ from the whole
            by more than float32 does.
    """

    def __init__(self, codec: TorchCodec, reach: Reach, *, max_frames: int = 2048, tf32: bool = False) -> None:
        assert reach.finite, reach
        self.codec, self.reach, self.tf32 = codec, reach, tf32
        shortest = reach.left + reach.right + _SHORTEST
        self.lengths = [shortest << i for i in range(_LENGTHS)]
        self.max_frames = max(max_frames, self.lengths[-1])
        self._cuda = codec.device.type == "cuda"
        self._stream = torch.cuda.Stream(codec.device) if self._cuda else None
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._host = torch.empty(self.max_frames * codec.hop, pin_memory=True) if self._cuda else None

    @property
    def graphs(self) -> int:
        """CUDA graphs captured."""
        return len(self._graphs)

    # -- clips --------------------------------------------------------------------------------------------------------
    def decode(self, clips: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Codes [T, C] of each clip to [T * hop] float32."""
        wavs: list[np.ndarray] = []
        for done in self.decode_in_steps(clips):
            wavs = done
        return wavs

    def decode_in_steps(self, clips: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """As ``decode``, but the device is free again between two items; all give the same list, filled by and by."""
        with self.context():
            features = self.codec.features(clips)
        wavs = [np.empty(len(codes) * self.codec.hop, dtype=np.float32) for codes in clips]
        by_length: dict[int, list[tuple[int, Window]]] = defaultdict(list)
        for index, codes in enumerate(clips):
            for window in plan_windows(len(codes), self._length(len(codes)), self.reach):
                by_length[window.stop - window.start].append((index, window))
        for length, found in by_length.items():
            size = max(1, self.max_frames // length)
            for begin in range(0, len(found), size):
                batch = found[begin : begin + size]
                sounds = self.synthesize([features[index][w.start : w.stop] for index, w in batch])
                for sound, (index, window) in zip(sounds, batch, strict=True):
                    self._keep(sound, window, wavs[index])
                yield wavs
        if not by_length:
            yield wavs

    def _length(self, frames: int) -> int:
        """The length of windows that decodes the fewest frames of a clip, overlaps included."""
        fitting = [length for length in self.lengths if length <= frames] or self.lengths[:1]
        return min(fitting, key=lambda length: (length * len(plan_windows(frames, length, self.reach)), -length))

    def _keep(self, sound: torch.Tensor, window: Window, wav: np.ndarray) -> None:
        hop = self.codec.hop
        part = sound[(window.first - window.start) * hop : (window.last - window.start) * hop]
        # By torch, which leaves the interpreter to other threads meanwhile.
        torch.from_numpy(wav)[window.first * hop : window.last * hop].copy_(part)

    # -- the device ---------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """What is computed inside runs on this decoder's own CUDA stream, in its precision."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self._cuda:
                stack.enter_context(torch.cuda.stream(self._stream))
                stack.enter_context(convolutions(self.codec.device, tf32=self.tf32))
            yield

    def synthesize(self, windows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Features [N, F] of windows of one length -> [B, N * hop] on the host, valid until the next call."""
        length = len(windows[0])
        with self.context():
            graph = self._graph_for(len(windows), length)
            if graph is None:
                sounds = self.codec.synthesize(torch.stack(list(windows)))
            else:
                captured, inputs, outputs = graph
                for row, window in zip(inputs, windows, strict=False):
                    row.copy_(window)
                captured.replay()
                sounds = outputs[: len(windows)]
            expected = (len(windows), length * self.codec.hop)
            assert sounds.shape == expected, f"codec gave waveforms of shape {tuple(sounds.shape)}, expected {expected}"
            if not self._cuda:
                return sounds.float()
            if sounds.numel() > self._host.numel():
                self._host = torch.empty(sounds.numel(), pin_memory=True)
            host = self._host[: sounds.numel()].view(sounds.shape)
            host.copy_(sounds, non_blocking=True)
            self._stream.synchronize()
        return host

    def _graph_for(self, count: int, length: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor] | None:
        sizes = [size for size, of in self._graphs if of == length and size >= count]
        return self._graphs[min(sizes), length] if sizes else None

    def capture(self, extra: Sequence[tuple[int, int]] = ()) -> int:
        """Captures the batches that will be decoded in CUDA graphs; how many there are.

        None on a CPU, or if the codec waits for the device in the middle, as an inverse STFT does.

        Args:
            extra: (batch, frames) of further windows, as streams have them.
        """
        if not self._cuda:
            return 0
        shapes = set(extra)
        for length in self.lengths:
            shapes |= {(1 << i, length) for i in range(_BATCHES) if length << i <= self.max_frames}
        sample = self.codec.features([np.zeros((1, self.codec.num_codebooks), dtype=np.int64)])[0]
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the others then fit into the memory that it has taken.
        for count, length in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
            if count * length > self.max_frames:
                continue
            try:
                self._graphs[count, length] = self._capture(count, sample.expand(length, -1), pool)
            except RuntimeError as error:
                log.warning("codec: runs without CUDA graphs, because it cannot be captured: %s", error)
                self._graphs.clear()
                break
        return len(self._graphs)

    def _capture(
        self, count: int, sample: torch.Tensor, pool: tuple[int, int]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
        with self.context():
            inputs = sample.expand(count, *sample.shape).contiguous()
            for _ in range(_WARM_UP):
                self.codec.synthesize(inputs)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: an engine may be at work in another thread.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = self.codec.synthesize(inputs)
        return graph, inputs, outputs
