"""Clips that are heard while they grow: which frames have come, and when their next chunk is wanted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import CodecError, SpeechLMError
from .chunks import Chunker, ChunkSizes
from .reach import Reach
from .torch_codec import GrowingFeatures

if TYPE_CHECKING:
    from .service import CodecService

log = logging.getLogger(__name__)

_UNLIMITED = Reach(0, 0)
# Seconds that a first chunk waits for those of others, which become due in the same step of the engine.
_FIRST_S = 0.002
_NEXT_S = 0.1  # seconds that a later chunk waits for others, ...
MARGIN_S = 0.3  # ... unless no more than so many seconds are left to be heard


def outcome_of(error: Exception) -> SpeechLMError:
    """What a codec raised, as the outcome of its clip."""
    if isinstance(error, SpeechLMError):
        return error
    log.debug("codec: a clip could not be decoded", exc_info=error)  # its outcome says it in a sentence
    return CodecError(f"the codec could not decode the clip: {type(error).__name__}: {error}")


class GrowingClip:
    """A clip that is heard while it grows. ``push``, ``end``, ``taken`` and ``cancel`` may be called from any thread.

    Attributes:
        gone: nothing more will be delivered.
        at_work: its next chunk is being made.
        deadline: ``time.monotonic`` when the sound that was delivered is at an end, if it is heard as it comes; of a first chunk,
            when it became due.
        start_by: when its chunk should be begun at the latest, alone if no other is due.
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
        self._ended = self._taken_end = self.gone = self.at_work = False
        self._untaken = 0
        self._given_s = 0.0
        self._heard_since: float | None = None
        self.deadline = self.start_by = 0.0

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
            self._service.settle(self)

    def set_times(self) -> None:
        """Sets ``deadline`` and ``start_by`` of a chunk that is due from now on."""
        now = time.monotonic()
        if self._heard_since is None:
            self.deadline, self.start_by = now, now + _FIRST_S
        else:
            self.deadline = self._heard_since + self._given_s
            self.start_by = min(now + _NEXT_S, self.deadline - MARGIN_S)

    @property
    def awaited(self) -> bool:
        """Whether a chunk would be made if there were enough frames."""
        return not (self.gone or self.at_work or self._untaken >= self._service.ahead)

    @property
    def frames(self) -> int:
        """Of the next chunk's window, at most, about."""
        chunker = self._chunker
        return chunker.length if chunker.given else chunker.sizes.first + chunker.reach.left + chunker.reach.right

    @property
    def due(self) -> bool:
        """Whether a chunk can be made. Under the service's lock."""
        if not self.awaited:
            return False
        if self._ended:
            return True
        if self._features is None or self._codes <= self._service.silent_frames:
            return False
        right = self._chunker.reach.right + self._features.right
        return self._codes >= self._chunker.sizes.needed(self._chunker.given, right)

    def deliver_plainly(self) -> bool:
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
                service.fail(self, error)
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
                self._heard_since = self._heard_since or time.monotonic()
                self._given_s += len(chunk) / service.codec.sample_rate
        if not isinstance(chunk, SpeechLMError):
            service.count(len(chunk))
            service.usage.chunks += 1
        self._on_chunk(chunk, last)
