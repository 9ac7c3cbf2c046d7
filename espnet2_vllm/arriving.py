"""Audio frames of a request as its rows arrive: the delay undone, ends, cuts and drains seen, frame by frame.

What comes out in the end is what ``drive`` makes of all rows at once (``Segment.rows``, and ``delay.undo`` for Bagpiper).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .delay import StreamingUndo
from .layout import Layout
from .protocol import AUDIO, MODALITY, BagpiperRules, OpusLMRules, Rules


@dataclass(frozen=True)
class Arrived:
    """Frames that became known.

    Attributes:
        segment: number of the audio segment's place among the segments of the request, from 0.
        frames: [m, S] ids; m may be 0 where only the end became known.
        last: no frame of the segment follows.
    """

    segment: int
    frames: np.ndarray
    last: bool


class ArrivingFrames:
    """Takes the rows of one request in their order, gives the frames of its audio segments."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        kinds = {BagpiperRules: _BagpiperFrames, OpusLMRules: _OpusLMFrames}
        self._frames = kinds[type(rules)](rules)
        self.rows = 0

    def push(self, rows: np.ndarray) -> list[Arrived]:
        """Rows [n, S] as emitted; what they complete, at most one entry a segment."""
        self.rows += len(rows)
        return self._frames.push(np.asarray(rows))

    def finish(self) -> list[Arrived]:
        """Nothing follows: the rest of a segment that has not ended by itself (the context was full)."""
        return self._frames.finish()


class _BagpiperFrames:
    """A segment's rows are content but for an end token's; the last one counts where the segment was cut."""

    def __init__(self, rules: BagpiperRules) -> None:
        self.rules, self.state, self.segment = rules, rules.start(), -1
        self._undo: StreamingUndo | None = None

    def push(self, rows: np.ndarray) -> list[Arrived]:
        arrived: list[Arrived] = []
        content: list[np.ndarray] = []
        for row in rows:
            before = self.state.phase
            self.state, step = self.rules.advance(self.state, tuple(map(int, row)))
            if before == MODALITY:
                self.segment += 1
                self._undo = StreamingUndo(self.rules.layout.num_streams) if self.state.phase == AUDIO else None
            elif before == AUDIO:
                if int(row[0]) not in self.rules.layout.end_tokens:
                    content.append(row)
                if step.ends_segment:
                    arrived += self._take(content, last=True)
                    content = []
        return arrived + (self._take(content, last=False) if content else [])

    def _take(self, content: list[np.ndarray], *, last: bool) -> list[Arrived]:
        streams = self.rules.layout.num_streams
        frames = self._undo.push(np.array(content, dtype=np.int64).reshape(-1, streams))
        if last:
            self._undo = None
        return [Arrived(self.segment, frames, last)] if last or len(frames) else []

    def finish(self) -> list[Arrived]:
        return self._take([], last=True) if self._undo is not None else []


class _OpusLMFrames:
    """Frames up to ESPnet's ``finish_idx - 1`` are content: known in the row behind a natural end, or in that of a forced one."""

    def __init__(self, rules: OpusLMRules) -> None:
        self.rules, self.state = rules, rules.start()
        self._undo = StreamingUndo(rules.layout.num_streams)
        self._held = np.empty((0, rules.layout.num_streams), dtype=np.int64)
        self._given = 0
        self._done = rules.modality != "audio"

    def push(self, rows: np.ndarray) -> list[Arrived]:
        if self._done:
            return []
        done = False
        for row in rows:
            self.state, step = self.rules.advance(self.state, tuple(map(int, row)))
            done |= step.done
        self._held = np.concatenate([self._held, self._undo.push(rows)])
        return self.finish() if done else self._take(self._bound(), last=False)

    def _bound(self) -> int | None:
        """Frames that the segment has at most; None while it may have any number."""
        if self.state.finish >= 0:
            return max(self.state.finish - 1, 0)
        return self.state.step - 1 if self.state.ended else None

    def _take(self, bound: int | None, *, last: bool) -> list[Arrived]:
        count = len(self._held) if bound is None else min(max(bound - self._given, 0), len(self._held))
        frames, self._held = self._held[:count], self._held[count:]
        self._given += count
        # The end is known before the drain is over.
        self._done = last or (self.state.finish >= 0 and self._given == bound)
        return [Arrived(0, frames, self._done)] if self._done or count else []

    def finish(self) -> list[Arrived]:
        if self._done:
            return []
        # A context that ends with the end token's row leaves ESPnet's index unset, so every whole frame counts.
        return self._take(self._bound() if self.state.finish >= 0 else None, last=True)


def rows_until(layout: Layout, frames: int) -> int:
    """Rows of an audio segment until so many of its frames are known."""
    return frames + layout.num_streams - 1
