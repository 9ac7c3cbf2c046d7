"""A codec at work beside the engine: finished clips and growing ones, in a thread and on a CUDA stream of its own.

Clips that wait are decoded together, in batches of windows. Chunks of growing clips come first, between two batches: those whose
readers have the least left to hear before others (of a first chunk, nothing), and as many together as are due. What goes wrong
with a clip is that clip's outcome.
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
from ..errors import SpeechLMError
from .base import Codec
from .chunks import ChunkSizes, window_lengths
from .growing import MARGIN_S, GrowingClip, outcome_of
from .reach import Reach, measure_reach
from .share import SPACE, TIME, Share
from .torch_codec import TorchCodec
from .windows import Rest, WindowDecoder

log = logging.getLogger(__name__)

_TOGETHER = 64  # clips whose features are made at once
_LOOK_S = 0.02  # nobody says when an engine has nothing more to do, so a rest looks every so many seconds
_STREAM_BATCHES = 8  # sizes of captured batches of chunks: 1, 2, 4, ...; those of more than max_frames are left out


@dataclass
class Usage:
    """What the service has done: clips, seconds of sound, seconds at work (rests are none), chunks of growing clips, failures."""

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
        max_frames, tf32, tune: as ``WindowDecoder``'s.
        share: of the device, while an engine is at work (``beside``) and no more than half of ``waiting`` clips are under way, for
            soon it would wait for the codec. Growing clips do not rest while little is left to be heard of them.

    Attributes:
        beside: whether an engine is at work that should not be disturbed; may be replaced.
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
        share: Share | None = None,
        tune: bool = False,
    ) -> None:
        super().__init__("codec")
        self.codec, self.silent_frames, self.ahead = codec, silent_frames, ahead
        self.max_frames, self.share = max_frames, share or Share()
        self.beside: Callable[[], bool] = lambda: True
        self.reach = measure_reach(codec) if isinstance(codec, TorchCodec) else Reach(None, None)
        self.decoder = None
        if self.reach.finite:
            self.decoder = WindowDecoder(
                codec, self.reach, max_frames=max_frames, tf32=tf32, share=self.share, tune=tune
            )
        for what in self._without_effect(tf32):
            log.warning("codec: %s", what)
        self.usage, self._rested = Usage(), 0.0
        self._room, self._waiting, self._under_way = threading.BoundedSemaphore(waiting), waiting, 0
        self._clips: deque[_Clip] = deque()
        self._streams: set[GrowingClip] = set()
        self._due: set[GrowingClip] = set()
        self._threads = torch.get_num_threads()  # a new thread would have as many as there are cores
        self._thread.start()

    def _without_effect(self, tf32: bool) -> Iterator[str]:
        """What was asked for and cannot be had."""
        if self.decoder is None:
            if self.share.fraction < 1 or tf32:
                yield "clips can only be decoded whole, so neither a share of the device nor TF32 has an effect"
            return
        kind = self.codec.device.type
        if kind != "cuda" and self.share.by == SPACE:
            yield f"share {self.share} has no effect on a {kind}, which is divided by {TIME} only"
        if kind != "cuda" and tf32:
            yield f"TF32 has no effect on a {kind}; only GPUs have it"

    def _on_close(self) -> None:
        for stream in self._streams:
            stream.gone = True
        self._streams.clear()
        self._due.clear()

    # -- what it takes ------------------------------------------------------------------------------------------------
    def submit(self, codes: np.ndarray) -> Future:
        """Codes [T, C] of a finished clip; the future gives [T * hop] float32, or raises CodecError or DataError.

        Waits while ``waiting`` clips are under way. EngineError in a process that was forked from the one with the codec.
        """
        self.check_process()
        self._room.acquire()
        clip = _Clip(np.asarray(codes))
        clip.future.add_done_callback(lambda _: self._done())
        with self._changed:
            assert not self._closing, "the codec service is closed"
            self._clips.append(clip)
            self._under_way += 1
            self._changed.notify_all()
        return clip.future

    def _done(self) -> None:
        with self._changed:
            self._under_way -= 1
        self._room.release()

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
            self._streams.add(stream)
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
        count = self.decoder.capture([(1 << i, length) for length in chunks for i in range(_STREAM_BATCHES)])
        reserved = torch.cuda.memory_reserved(self.codec.device)
        log.info(
            "codec: %d CUDA graphs in %.1f s; %.2f GiB of the device are the codec's",
            count, time.monotonic() - began, reserved / 2**30,
        )  # fmt: skip
        return reserved

    def settle(self, stream: GrowingClip) -> None:
        """Notes whether a growing clip has a chunk to give. With ``_changed`` held."""
        if stream.gone:
            self._streams.discard(stream)
        if not stream.due:
            self._due.discard(stream)
        elif stream not in self._due:
            stream.set_times()
            self._due.add(stream)
            self._changed.notify_all()

    # -- the thread ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        work: Iterator[None] | None = None
        while True:
            with self._changed:
                while not (streams := self._next_streams()) and not (work or self._clips or self._closing):
                    self._changed.wait(self._until_next())
                if self._closing and not (work or self._clips):
                    return
                if not streams and work is None and self._clips:
                    work = self._decode([self._clips.popleft() for _ in range(min(_TOGETHER, len(self._clips)))])
            began, self._rested = time.monotonic(), 0.0
            if streams:
                self._serve(streams)
            elif work is not None and next(work, self) is self:
                work = None
            self.usage.busy_s += time.monotonic() - began - self._rested

    def _next_streams(self, *, urgent: bool = False) -> list[GrowingClip]:
        """Growing clips whose chunks are made together now, if it is time for one; they are at work then. With ``_changed`` held.

        Args:
            urgent: only if there is one that does not rest.
        """
        now = time.monotonic()
        waiting = [stream for stream in self._due if now < stream.start_by]
        if len(waiting) == len(self._due) and (urgent or any(one.awaited for one in self._streams - self._due)):
            return []
        chosen = sorted(self._due, key=lambda stream: stream.deadline)
        if urgent and not self._hurries(chosen[:1]):
            return []
        if self.decoder is not None and chosen:
            chosen = chosen[: max(self.max_frames // max(stream.frames for stream in chosen), 1)]
        for stream in chosen:
            stream.at_work = True
            self._due.discard(stream)
        return chosen

    def _until_next(self) -> float | None:
        """Seconds until a chunk that waits for others is made without them."""
        return max(min(stream.start_by for stream in self._due) - time.monotonic(), 0) if self._due else None

    def _hurries(self, streams: Sequence[GrowingClip]) -> bool:
        return any(stream.deadline - MARGIN_S < time.monotonic() for stream in streams)

    # -- rests --------------------------------------------------------------------------------------------------------
    def _rest_for(self, streams: Sequence[GrowingClip] = ()) -> Rest | None:
        """What is called between layers while these chunks, or finished clips, are decoded; None: they are decoded at a stretch."""

        def rest(work: float) -> None:
            until = time.monotonic() + self.share.rest(work)
            while self._rests(streams) and (left := until - time.monotonic()) > 0:
                with self._changed:
                    hurried = self._next_streams(urgent=True)
                    if not hurried:
                        begun = time.monotonic()
                        self._changed.wait(min(left, self._until_hurried()))
                        self._rested += time.monotonic() - begun
                if hurried:
                    self._serve(hurried)

        return rest if self._rests(streams) else None

    def _until_hurried(self) -> float:
        """Seconds until a chunk that is due does not rest, at most ``_LOOK_S``. With ``_changed`` held."""
        if not self._due:
            return _LOOK_S
        begun = min(stream.start_by for stream in self._due)
        near = min(stream.deadline for stream in self._due) - MARGIN_S
        return min(max(begun, near) - time.monotonic(), _LOOK_S)

    def _rests(self, streams: Sequence[GrowingClip]) -> bool:
        crowded = self._under_way > self._waiting // 2
        return self.share.rests and not crowded and not self._hurries(streams) and not self._closing and self.beside()

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
            clips[0].future.set_exception(outcome_of(error))
            return
        for clip in clips:
            wav = found.get(id(clip))
            wav = np.zeros(len(clip.codes) * self.codec.hop, dtype=np.float32) if wav is None else wav
            self.count(len(wav))
            self.usage.clips += 1
            clip.future.set_result(wav)

    def _waveforms(self, clips: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
        if self.decoder is not None:
            yield from self.decoder.decode_in_steps(clips, self._rest_for)
            return
        wavs: list[np.ndarray] = []
        while len(wavs) < len(clips):
            # As many as are decoded at once in windows, but at least one.
            frames = np.cumsum([len(codes) for codes in clips[len(wavs) :]])
            count = max(int((frames <= self.max_frames).sum()), 1)
            wavs += self.codec.decode_batch(clips[len(wavs) : len(wavs) + count])
            yield wavs

    def count(self, samples: int) -> None:
        self.usage.sound_s += samples / self.codec.sample_rate

    def _serve(self, streams: list[GrowingClip]) -> None:
        """One chunk of each of these, those of equal windows together."""
        ready: dict[int, list[tuple[GrowingClip, torch.Tensor, slice, bool]]] = {}
        plain = {stream for stream in streams if stream.deliver_plainly()}
        for stream, window, kept, last in self._windows([stream for stream in streams if stream not in plain]):
            ready.setdefault(len(window), []).append((stream, window, kept, last))
        for found in ready.values():
            self._synthesize(found)
        with self._changed:
            for stream in streams:
                stream.at_work = False
                self.settle(stream)

    def _windows(self, streams: list[GrowingClip]) -> Iterator[tuple[GrowingClip, torch.Tensor, slice, bool]]:
        """The next chunk's window of each growing clip."""
        taken = [stream.take() for stream in streams]
        with self.decoder.context() if streams else contextlib.nullcontext():
            try:
                features = self.codec.push_features(taken) if taken else []
                found = [stream.window(part) for stream, part in zip(streams, features, strict=True)]
            except SpeechLMError as error:  # codes that are none, found before anything was changed
                if len(streams) == 1:
                    self.fail(streams[0], error)
                    return
                for stream, part in zip(streams, taken, strict=True):
                    stream.put_back(part)
                    yield from self._windows([stream])
                return
            except Exception as error:  # noqa: BLE001 - as in _decode; nobody knows how far each clip came
                for stream in streams:
                    self.fail(stream, error)
                return
        for stream, window in zip(streams, found, strict=True):
            if window is not None:
                yield stream, *window

    def _synthesize(self, batch: list[tuple[GrowingClip, torch.Tensor, slice, bool]]) -> None:
        streams, given = [stream for stream, _, _, _ in batch], 0
        try:
            for part, sounds in self.decoder.in_batches(
                [window for _, window, _, _ in batch], lambda: self._rest_for(streams)
            ):
                samples = [
                    sound[kept].numpy().copy() for sound, (_, _, kept, _) in zip(sounds, batch[part], strict=True)
                ]
                for (stream, _, _, last), one in zip(batch[part], samples, strict=True):
                    stream.deliver(one, last)
                given = part.stop
        except Exception as error:  # noqa: BLE001 - as in _decode
            left = batch[given:]
            if len(left) > 1:
                for one in left:
                    self._synthesize([one])
            else:
                self.fail(left[0][0], error)

    def fail(self, stream: GrowingClip, error: Exception) -> None:
        self.usage.failed += 1
        stream.deliver(outcome_of(error), True)
