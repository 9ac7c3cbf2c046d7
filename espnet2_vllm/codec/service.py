"""A codec at work beside the engine: finished clips and growing ones, in a thread and on a CUDA stream of its own.

Clips that wait are decoded together, in batches of windows. Chunks of growing clips come first, between two batches. What goes
wrong with a clip is that clip's outcome.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from ..background import Background
from ..errors import CodecError, SpeechLMError
from .base import Codec
from .chunks import Chunker, ChunkSizes, window_lengths
from .reach import Reach, measure_reach
from .torch_codec import GrowingFeatures, TorchCodec
from .windows import WindowDecoder

log = logging.getLogger(__name__)

_TOGETHER = 64  # clips whose features are made at once
_STREAM_BATCHES = (1, 2, 4, 8, 16)  # sizes of captured batches of chunks
_UNLIMITED = Reach(0, 0)


@dataclass
class Usage:
    """What the service has done: clips, seconds of sound, seconds at work, chunks of growing clips, failures."""

    clips: int = 0
    sound_s: float = 0.0
    busy_s: float = 0.0
    chunks: int = 0
    failed: int = 0


@dataclass
class _Clip:
    codes: np.ndarray
    future: Future = field(default_factory=Future)


class CodecService(Background):
    """Decodes for any number of threads. ``close``, or leaving the block, finishes what was handed over but growing clips.

    Args:
        silent_frames: clips of so many frames or fewer are zeros (ESPnet's ``CodecTokenizer.decode``; OpusLM only).
        waiting: clips that may wait or be at work; ``submit`` of one more waits.
        ahead: chunks of a growing clip that may wait for its reader before no more of it is decoded.
        max_frames, tf32: as ``WindowDecoder``'s.

    Attributes:
        reach: of the codec's decoder. Where it is not finite, clips are decoded whole, and a growing one is one chunk.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        silent_frames: int = 0,
        waiting: int = 256,
        ahead: int = 8,
        max_frames: int = 2048,
        tf32: bool = False,
    ) -> None:
        super().__init__("codec")
        self.codec, self.silent_frames, self.ahead = codec, silent_frames, ahead
        self.max_frames = max_frames
        self.reach = measure_reach(codec) if isinstance(codec, TorchCodec) else Reach(None, None)
        self.decoder = WindowDecoder(codec, self.reach, max_frames=max_frames, tf32=tf32) if self.reach.finite else None
        self.usage = Usage()
        self._room = threading.BoundedSemaphore(waiting)
        self._clips: deque[_Clip] = deque()
        self._streams: list[GrowingClip] = []
        self._threads = torch.get_num_threads()  # a new thread would have as many as there are cores
        self._thread.start()

    def _on_close(self) -> None:
        for stream in self._streams:
            stream.gone = True

    # -- what it takes ------------------------------------------------------------------------------------------------
    def submit(self, codes: np.ndarray) -> Future:
        """Codes [T, C] of a finished clip; the future gives [T * hop] float32, or raises CodecError or DataError.

        Waits while ``waiting`` clips are under way.
        """
        self._room.acquire()
        clip = _Clip(np.asarray(codes))
        clip.future.add_done_callback(lambda _: self._room.release())
        with self._changed:
            assert not self._closing, "the codec service is closed"
            self._clips.append(clip)
            self._changed.notify_all()
        return clip.future

    def decode(self, clips: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Waits for all clips."""
        return [future.result() for future in [self.submit(codes) for codes in clips]]

    def open(self, sizes: ChunkSizes, on_chunk: Callable[[np.ndarray | SpeechLMError, bool], None]) -> GrowingClip:
        """A clip whose codes come by and by.

        Args:
            on_chunk: called in the service's thread with the samples of each chunk, or with what went wrong, and whether it is
                the last one.
        """
        stream = GrowingClip(self, sizes, on_chunk)
        with self._changed:
            assert not self._closing, "the codec service is closed"
            self._streams.append(stream)
        return stream

    def frames_until_first(self, sizes: ChunkSizes) -> int:
        """Frames that must be known before the first chunk of a clip that goes on can be decoded."""
        return max(sizes.needed(0, (self.reach.right or 0) + self.features_right), self.silent_frames + 1)

    @property
    def features_right(self) -> int:
        """Frames that must be known behind one before a recurrent decoder's features of it are."""
        return 0 if self.decoder is None else self.codec.growing_features().right

    def prepare(self, sizes: ChunkSizes | None = None) -> int:
        """Captures CUDA graphs of what will be decoded, chunks of ``sizes`` included; bytes of the device that it all takes.

        To be called before the engine starts, so that its share can be cut by so much.
        """
        if self.decoder is None or self.codec.device.type != "cuda":
            return 0
        began = time.monotonic()
        chunks = [] if sizes is None else window_lengths(sizes, self.reach)
        count = self.decoder.capture([(batch, length) for length in chunks for batch in _STREAM_BATCHES])
        reserved = torch.cuda.memory_reserved(self.codec.device)
        log.info(
            "codec: %d CUDA graphs in %.1f s; %.2f GiB of the device are the codec's",
            count, time.monotonic() - began, reserved / 2**30,
        )  # fmt: skip
        return reserved

    # -- the thread ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        work: Iterator[None] | None = None
        while True:
            with self._changed:
                while not (work or self._clips or self._due() or self._closing):
                    self._changed.wait()
                self._streams = [stream for stream in self._streams if not stream.gone]
                streams = self._due()
                if self._closing and not (work or self._clips):
                    return
                if not streams and work is None and self._clips:
                    work = self._decode([self._clips.popleft() for _ in range(min(_TOGETHER, len(self._clips)))])
            began = time.monotonic()
            if streams:
                self._serve(streams)
            elif work is not None and next(work, self) is self:
                work = None
            self.usage.busy_s += time.monotonic() - began

    def _due(self) -> list[GrowingClip]:
        return [stream for stream in self._streams if stream.due]

    def _decode(self, clips: list[_Clip]) -> Iterator[None]:
        """Decodes finished clips together, giving way now and then; if that fails, one by one: the guilty one alone fails."""
        try:
            loud = [clip for clip in clips if len(clip.codes) > self.silent_frames]
            wavs: list[np.ndarray] = []
            for wavs in self._waveforms([clip.codes for clip in loud]) if loud else ():  # noqa: B007
                yield
            found = {id(clip): wav for clip, wav in zip(loud, wavs, strict=True)}
        except Exception as error:  # noqa: BLE001 - whatever a codec raises is the outcome of its clip
            if len(clips) > 1:
                log.warning("codec: %d clips could not be decoded together (%s); one by one instead", len(clips), error)
                for clip in clips:
                    yield from self._decode([clip])
                return
            self.usage.failed += 1
            clips[0].future.set_exception(_outcome(error))
            return
        for clip in clips:
            wav = found.get(id(clip))
            wav = np.zeros(len(clip.codes) * self.codec.hop, dtype=np.float32) if wav is None else wav
            self._count(len(wav))
            self.usage.clips += 1
            clip.future.set_result(wav)

    def _waveforms(self, clips: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
        if self.decoder is not None:
            yield from self.decoder.decode_in_steps(clips)
            return
        wavs: list[np.ndarray] = []
        while len(wavs) < len(clips):
            # As many as are decoded at once in windows, but at least one.
            frames = np.cumsum([len(codes) for codes in clips[len(wavs) :]])
            count = max(int((frames <= self.max_frames).sum()), 1)
            wavs += self.codec.decode_batch(clips[len(wavs) : len(wavs) + count])
            yield wavs

    def _count(self, samples: int) -> None:
        self.usage.sound_s += samples / self.codec.sample_rate

    def _serve(self, streams: list[GrowingClip]) -> None:
        """One chunk of each growing clip that has one to give, those of equal windows together."""
        ready: dict[int, list[tuple[GrowingClip, torch.Tensor, slice, bool]]] = {}
        for stream, window, kept, last in self._windows([stream for stream in streams if not stream.settle()]):
            ready.setdefault(len(window), []).append((stream, window, kept, last))
        for length, found in ready.items():
            size = max(1, self.decoder.max_frames // length)
            for begin in range(0, len(found), size):
                self._synthesize(found[begin : begin + size])

    def _windows(self, streams: list[GrowingClip]) -> Iterator[tuple[GrowingClip, torch.Tensor, slice, bool]]:
        """The next chunk's window of each growing clip."""
        taken = [stream.take() for stream in streams]
        with self.decoder.context() if streams else contextlib.nullcontext():
            try:
                features = self.codec.push_features(taken) if taken else []
                found = [stream.window(part) for stream, part in zip(streams, features, strict=True)]
            except SpeechLMError as error:  # codes that are none, found before anything was changed
                if len(streams) == 1:
                    self._fail(streams[0], error)
                    return
                for stream, part in zip(streams, taken, strict=True):
                    stream.put_back(part)
                    yield from self._windows([stream])
                return
            except Exception as error:  # noqa: BLE001 - as in _decode; nobody knows how far each clip came
                for stream in streams:
                    self._fail(stream, error)
                return
        for stream, window in zip(streams, found, strict=True):
            if window is not None:
                yield stream, *window

    def _synthesize(self, batch: list[tuple[GrowingClip, torch.Tensor, slice, bool]]) -> None:
        try:
            sounds = self.decoder.synthesize([window for _, window, _, _ in batch])
            samples = [sound[kept].numpy().copy() for sound, (_, _, kept, _) in zip(sounds, batch, strict=True)]
        except Exception as error:  # noqa: BLE001 - as in _decode
            if len(batch) > 1:
                for one in batch:
                    self._synthesize([one])
            else:
                self._fail(batch[0][0], error)
            return
        for (stream, _, _, last), part in zip(batch, samples, strict=True):
            stream.deliver(part, last)

    def _fail(self, stream: GrowingClip, error: Exception) -> None:
        self.usage.failed += 1
        stream.deliver(_outcome(error), True)


def _outcome(error: Exception) -> SpeechLMError:
    if isinstance(error, SpeechLMError):
        return error
    log.debug("codec: a clip could not be decoded", exc_info=error)  # its outcome says it in a sentence
    return CodecError(f"the codec could not decode the clip: {type(error).__name__}: {error}")


class GrowingClip:
    """A clip that is heard while it grows. ``push``, ``end``, ``taken`` and ``cancel`` may be called from any thread.

    Attributes:
        gone: nothing more will be delivered.
    """

    def __init__(
        self, service: CodecService, sizes: ChunkSizes, on_chunk: Callable[[np.ndarray | SpeechLMError, bool], None]
    ) -> None:
        self._service, self._on_chunk = service, on_chunk
        self._features = None if service.decoder is None else service.codec.growing_features()
        self._chunker = Chunker(sizes, service.reach if service.reach.finite else _UNLIMITED)
        self._fresh: list[np.ndarray] = []
        self._codes = 0
        self._kept: torch.Tensor | None = None  # features from frame ``_start`` on
        self._start = self._known = 0
        self._ended = self._taken_end = self.gone = False
        self._untaken = 0

    def push(self, codes: np.ndarray) -> None:
        """The next codes [m, C]."""
        self._change(codes=np.asarray(codes))

    def end(self) -> None:
        """No codes follow."""
        self._change(ended=True)

    def taken(self) -> None:
        """The reader has taken a chunk."""
        self._change(taken=1)

    def cancel(self) -> None:
        """The reader has left."""
        self._change(gone=True)

    def _change(
        self, *, codes: np.ndarray | None = None, ended: bool = False, taken: int = 0, gone: bool = False
    ) -> None:
        with self._service._changed:
            if codes is not None and len(codes):
                assert not self._ended, "codes behind the end of a clip"
                self._fresh.append(codes)
                self._codes += len(codes)
            self._ended |= ended
            self._untaken -= taken
            self.gone |= gone
            self._service._changed.notify_all()

    @property
    def due(self) -> bool:
        """Whether a chunk can be made. Under the service's lock."""
        if self.gone or self._untaken >= self._service.ahead:
            return False
        if self._ended:
            return True
        if self._features is None or self._codes <= self._service.silent_frames:
            return False
        right = self._chunker.reach.right + self._features.right
        return self._codes >= self._chunker.sizes.needed(self._chunker.given, right)

    def settle(self) -> bool:
        """Delivers what needs no windows; whether that was all."""
        service = self._service
        with service._changed:
            ended, codes = self._ended, self._codes
        if ended and codes <= service.silent_frames:
            self.deliver(np.zeros(codes * service.codec.hop, dtype=np.float32), True)
            return True
        if service.decoder is None:
            _, whole, _ = self.take()
            try:
                self.deliver(service.codec.decode(whole), True)
            except Exception as error:  # noqa: BLE001 - as in CodecService._decode
                service._fail(self, error)
            return True
        return False

    def take(self) -> tuple[GrowingFeatures | None, np.ndarray, bool]:
        """What the codec makes the next features of: the clip's state, its new codes, and whether they are its last."""
        with self._service._changed:
            fresh, self._fresh = self._fresh, []
            self._taken_end = self._ended
        blank = np.zeros((0, self._service.codec.num_codebooks), dtype=np.int64)
        return self._features, np.concatenate([blank, *fresh]), self._taken_end

    def put_back(self, taken: tuple[GrowingFeatures | None, np.ndarray, bool]) -> None:
        """Undoes ``take``."""
        with self._service._changed:
            self._fresh.insert(0, taken[1])

    def window(self, features: torch.Tensor) -> tuple[torch.Tensor, slice, bool] | None:
        """Features [N, F], which of its samples are the next chunk, and whether it is the last one; None for an empty one."""
        hop = self._service.codec.hop
        self._take_in(features)
        window = self._chunker.next(self._known, ended=self._taken_end)
        if window is None:
            assert self._taken_end, f"{self._codes} codes are enough for a chunk, {self._known} features are not"
            self.deliver(np.zeros(0, dtype=np.float32), True)
            return None
        part = self._kept[window.start - self._start : window.stop - self._start]
        oldest = self._chunker.oldest - self._start
        if oldest > 0:
            self._kept, self._start = self._kept[oldest:], self._start + oldest
        kept = slice((window.first - window.start) * hop, (window.last - window.start) * hop)
        return part, kept, self._taken_end and window.last == self._known

    def _take_in(self, features: torch.Tensor) -> None:
        self._kept = features if self._kept is None else torch.cat([self._kept, features])
        self._known += len(features)

    def deliver(self, chunk: np.ndarray | SpeechLMError, last: bool) -> None:
        """Hands a chunk to the reader."""
        service = self._service
        with service._changed:
            if self.gone:
                return
            self.gone = last
            self._untaken += 1
        if not isinstance(chunk, SpeechLMError):
            service._count(len(chunk))
            service.usage.chunks += 1
        self._on_chunk(chunk, last)
