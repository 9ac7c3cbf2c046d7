"""Clips of any length cut into windows of few lengths, so that many of them are decoded as one batch.

A window overlaps its neighbours by the codec's reach, and only what lies within is kept; so the pieces put together are what the
decoder makes of the whole clip. The first window of a clip begins where the clip does and the last ends where it ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..precision import convolutions
from .reach import Reach
from .share import Share, make_stream
from .torch_codec import TorchCodec

log = logging.getLogger(__name__)

_SHORTEST = 32  # frames of the shortest windows beyond the overlap
_LENGTHS = 4  # lengths of windows, each twice the one before
_BATCHES = 7  # sizes of captured batches: 1, 2, 4, ...
# Runs until algorithms are chosen and TorchScript has compiled, neither of which may happen inside a capture.
_WARM_UP = 3
_WASTE = 300  # frames that fill up a captured batch at most, rather than what is left over becoming one of its own
_AT_REST = 416  # frames decoded at once where there are rests, so that no layer keeps the device for long
_LAYERS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d)

Rest = Callable[[float], None]


def at_a_stretch() -> Rest | None:
    """No rests."""
    return None


@dataclass(frozen=True)
class Window:
    """Frames [start, stop) of a clip are decoded, those of [first, last) are kept."""

    start: int
    stop: int
    first: int
    last: int


def plan_windows(frames: int, lengths: Sequence[int], reach: Reach) -> list[Window]:
    """The windows of these ``lengths`` that cover a clip of ``frames`` with the fewest frames, overlaps included.

    One of the clip's own length if it is shorter than all of them.
    """
    if not frames:
        return []
    fitting = tuple(length for length in sorted(lengths) if length <= frames)
    if not fitting:
        return [Window(0, frames, 0, frames)]
    longest, overlap = fitting[-1], reach.left + reach.right
    assert fitting[0] > overlap, f"windows of {fitting[0]} frames are no longer than {reach}"
    windows, start, first = [], 0, 0
    while start < frames:
        rest = frames - start
        length = longest if rest > 2 * longest else _shortest_cover(rest, fitting, overlap)[1]
        if length >= rest:
            return [*windows, Window(frames - length, frames, first, frames)]
        last = start + length - reach.right
        windows.append(Window(start, start + length, first, last))
        start, first = last - reach.left, last
    raise AssertionError(f"{frames} frames are not covered by windows of {fitting}")


@functools.lru_cache(maxsize=1 << 14)
def _shortest_cover(frames: int, lengths: tuple[int, ...], overlap: int) -> tuple[int, int]:
    """The fewest frames of windows that cover ``frames``, and the length of the first of them (the longest of equals)."""
    covers = []
    for length in lengths:
        rest = 0 if length >= frames else _shortest_cover(frames - length + overlap, lengths, overlap)[0]
        covers.append((length + rest, -length))
    cost, length = min(covers)
    return cost, -length


class WindowDecoder:
    """Decodes clips of one codec in windows.

    Args:
        reach: of the codec, finite.
        max_frames: decoded at once; bounds memory and how long the device is busy with one piece.
        tf32: let a GPU round the inputs of convolutions to ten bits of mantissa: faster, but pieces then differ from the whole
            by more than float32 does.
        share: where it is one by space, everything runs on so many multiprocessors.
        tune: try cuDNN's algorithms on the batches that are captured, and take the fastest, instead of what it guesses.
    """

    def __init__(
        self,
        codec: TorchCodec,
        reach: Reach,
        *,
        max_frames: int = 2048,
        tf32: bool = False,
        share: Share | None = None,
        tune: bool = False,
    ) -> None:
        assert reach.finite, reach
        self.codec, self.reach, self.tf32, self.tune = codec, reach, tf32, tune
        shortest = reach.left + reach.right + _SHORTEST
        self.lengths = [shortest << i for i in range(_LENGTHS)]
        self.max_frames = max(max_frames, self.lengths[-1])
        self._cuda = codec.device.type == "cuda"
        self.one_by_one = codec.one_by_one
        self._stream, self._owner = make_stream(codec.device, share or Share()) if self._cuda else (None, None)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._host = torch.empty(self.max_frames * codec.hop, pin_memory=True) if self._cuda else None
        self._resting = threading.local()  # encoding goes through the same modules, in other threads
        layers = [module for module in codec.modules() if isinstance(module, _LAYERS)]
        # Weak: a codec does not keep its decoders.
        hooks = [layer.register_forward_hook(_weak(self._behind_layer)) for layer in layers]
        weakref.finalize(self, _remove, hooks)

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

    def decode_in_steps(
        self, clips: Sequence[np.ndarray], rest_for: Callable[[], Rest | None] = at_a_stretch
    ) -> Iterator[list[np.ndarray]]:
        """As ``decode``, but the device is free again between two items; all give the same list, filled by and by.

        Args:
            rest_for: asked before each batch what ``synthesize`` calls behind its layers.
        """
        with self.context():
            features = self.codec.features(clips)
        wavs = [np.empty(len(codes) * self.codec.hop, dtype=np.float32) for codes in clips]
        by_length: dict[int, list[tuple[int, Window]]] = defaultdict(list)
        for index, codes in enumerate(clips):
            for window in plan_windows(len(codes), self.lengths, self.reach):
                by_length[window.stop - window.start].append((index, window))
        for found in by_length.values():
            windows = [features[index][w.start : w.stop] for index, w in found]
            for part, sounds in self.in_batches(windows, rest_for):
                for sound, (index, window) in zip(sounds, found[part], strict=True):
                    self._keep(sound, window, wavs[index])
                yield wavs
        if not by_length:
            yield wavs

    def _together(self, count: int, length: int, rest: Rest | None) -> int:
        """How many of ``count`` windows are decoded at once: as many as may be, and rather a captured batch than one filled up."""
        if self.one_by_one:
            return 1
        if rest is not None:
            return min(count, max(_AT_REST // length, 1))
        count = min(count, max(self.max_frames // length, 1))
        sizes = [size for size, of in self._graphs if of == length]
        above = [size for size in sizes if size >= count]
        if not sizes or (above and (min(above) - count) * length <= _WASTE):
            return count
        return max([size for size in sizes if size <= count], default=count)

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

    def in_batches(
        self, windows: Sequence[torch.Tensor], rest_for: Callable[[], Rest | None] = at_a_stretch
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """``synthesize`` of any number of windows of one length: which of them, and their samples, valid until the next item."""
        begin = 0
        while begin < len(windows):
            rest = rest_for()
            part = slice(begin, begin + self._together(len(windows) - begin, len(windows[0]), rest))
            yield part, self.synthesize(windows[part], rest)
            begin = part.stop

    def synthesize(self, windows: Sequence[torch.Tensor], rest: Rest | None = None) -> torch.Tensor:
        """Features [N, F] of windows of one length -> [B, N * hop] on the host, valid until the next call.

        Args:
            rest: called behind each layer with the seconds that it took; the device is free meanwhile. It may itself synthesize.
        """
        length = len(windows[0])
        with self.context():
            graph = self._graph_for(len(windows), length) if rest is None else None
            if graph is None:
                with self._rests(rest):
                    sounds = self.codec.synthesize(torch.stack(list(windows)))
            else:
                captured, inputs, outputs = graph
                torch.stack(list(windows), out=inputs[: len(windows)])
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

    @contextlib.contextmanager
    def _rests(self, rest: Rest | None) -> Iterator[None]:
        outer = getattr(self._resting, "rest", None), getattr(self._resting, "since", 0.0)
        self._resting.rest, self._resting.since = rest, time.perf_counter()
        try:
            yield
        finally:
            self._resting.rest, self._resting.since = outer

    def _behind_layer(self) -> None:
        """Rests, if that is wanted in this thread."""
        rest = getattr(self._resting, "rest", None)
        if rest is None:
            return
        if self._cuda:
            self._stream.synchronize()
        work = time.perf_counter() - self._resting.since
        with self._rests(None):  # what is decoded meanwhile is in a hurry, its features too
            rest(work)
        self._resting.since = time.perf_counter()

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
        with self.context(), convolutions(self.codec.device, tf32=self.tf32, tune=self.tune):
            inputs = sample.expand(count, *sample.shape).contiguous()
            for _ in range(_WARM_UP):
                self.codec.synthesize(inputs)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: an engine may be at work in another thread.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = self.codec.synthesize(inputs)
        return graph, inputs, outputs


def _weak(method: Callable[[], None]) -> Callable[..., None]:
    """A hook that calls ``method`` while its object is there."""
    found = weakref.WeakMethod(method)

    def hook(*_: object) -> None:
        if (behind := found()) is not None:
            behind()

    return hook


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
