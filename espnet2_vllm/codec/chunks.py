"""When which frames of a growing clip can be decoded: first chunk early, then larger ones, all as exact as the whole."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from .reach import Reach
from .windows import Window


@dataclass(frozen=True)
class ChunkSizes:
    """Frames of the first chunk of a clip, and of those behind it; the last one has what is left."""

    first: int = 5
    then: int = 25

    def __post_init__(self) -> None:
        for name in ("first", "then"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a chunk's {name} must be at least 1 frame, got {getattr(self, name)}")

    def needed(self, given: int, right: int) -> int:
        """Frames that must be known before the chunk behind ``given`` frames can be decoded, if the clip goes on."""
        return given + (self.then if given else self.first) + right


class Chunker:
    """The windows of one clip, in which each chunk is decoded.

    Args:
        reach: of the decoder over features.
    """

    def __init__(self, sizes: ChunkSizes, reach: Reach) -> None:
        self.sizes, self.reach = sizes, reach
        self.given = 0
        # Of windows inside a clip: all have this length, so that those of many clips are one batch.
        self.length = reach.left + sizes.then + reach.right

    @property
    def oldest(self) -> int:
        """The first frame that a window to come may still begin with."""
        return max(0, self.given - self.length)

    def next(self, known: int, *, ended: bool) -> Window | None:
        """The next chunk's window if it can be decoded when features of ``known`` frames are there."""
        if known >= self.sizes.needed(self.given, self.reach.right):
            last = self.given + (self.sizes.then if self.given else self.sizes.first)
            return self._window(last, last + self.reach.right)
        return self._window(known, known) if ended and known > self.given else None

    def _window(self, last: int, stop: int) -> Window:
        start = max(0, self.given - self.reach.left)
        if stop - start < self.length:
            start = max(0, stop - self.length)
        window = Window(start, stop, self.given, last)
        self.given = last
        return window


def window_lengths(sizes: ChunkSizes, reach: Reach) -> list[int]:
    """Lengths of the windows of a long clip, those at its beginning first; each is met in every clip."""
    chunker, lengths = Chunker(sizes, reach), []
    while not lengths or lengths[-1] < chunker.length:
        window = chunker.next(sizes.needed(chunker.given, reach.right), ended=False)
        lengths.append(window.stop - window.start)
    return lengths
