"""Speech while it is generated: ``async for`` over the samples of an utterance, as the engine's rows become frames.

    with EngineThread(engine) as thread, CodecService(codec) as service:
        async for item in Streamer(thread, service).stream(utterance, config, seed=0):
            ...  # SpeechChunk, SpeechChunk, ..., Result

The chunks of a segment put together are what the codec makes of the whole segment. A reader that is slow, stops or leaves costs
the engine nothing: rows go on to arrive, and no more than a few chunks are decoded ahead of it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .arriving import ArrivingFrames, rows_until
from .backends.run import outcome_of
from .background import Background
from .codes import frame_codes
from .drive import Driver, drive
from .errors import ConfigError, EngineError, SpeechLMError
from .plan import REFUSED, Hypothesis, Result, RowRequest, RowResult, Utterance, Wanted
from .protocol import BagpiperRules, Rules

if TYPE_CHECKING:
    from .backends import Engine
    from .codec.chunks import ChunkSizes
    from .codec.service import CodecService, GrowingClip
    from .decoding import DecodingConfig

log = logging.getLogger(__name__)

OnRows = Callable[[RowRequest, np.ndarray, bool], None]
OnDone = Callable[[Hypothesis | SpeechLMError], None]


@dataclass(frozen=True)
class SpeechChunk:
    """Samples that follow those of the chunk before.

    Attributes:
        key: of the utterance.
        segment: place of the audio segment in the hypothesis (``Hypothesis.segments``).
        samples: [n] float32 at ``sample_rate``; full scale is 1.
        last: nothing follows in this segment.
    """

    key: str
    segment: int
    samples: np.ndarray
    sample_rate: int
    last: bool


# -- the engine --------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Task:
    """A driver on its way through the engine."""

    driver: Driver
    stream_of: Callable[[RowRequest], tuple[int, int] | None]
    on_rows: OnRows
    on_done: OnDone
    request: RowRequest | None = None
    name: str = ""
    given: int = 0
    stopped: bool = False


class EngineThread(Background):
    """Runs an engine in a thread of its own, for any number of others. Nobody else may use the engine meanwhile.

    ``close`` drops what is in flight; the engine itself stays open.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__("engine")
        self.engine = engine
        self._inbox: deque[Callable[[], None]] = deque()
        self._tasks: dict[str, Task] = {}
        self._open: set[Task] = set()  # whose readers wait to be told the end
        self._numbers = itertools.count()
        self._broken: EngineError | None = None
        self._thread.start()

    def start(
        self,
        driver: Driver,
        on_done: OnDone,
        *,
        on_rows: OnRows = lambda *_: None,
        stream_of: Callable[[RowRequest], tuple[int, int] | None] = lambda _: None,
    ) -> Task:
        """Takes a driver to its end. The callbacks are called in the engine's thread and must be quick.

        Args:
            on_done: gets the hypothesis, or why there is none.
            on_rows: gets each request's rows in their order, once each, and whether they are its last.
            stream_of: the ``RowRequest.stream`` of a request; None leaves it to its end.

        Raises:
            EngineError: if the thread was closed, or the engine has failed as a whole; or in a process that was forked
                from the one with the thread.
        """
        self.check_process()
        task = Task(driver, stream_of, on_rows, on_done)
        with self._changed:
            if self._broken is not None:
                raise self._broken
            if self._closing:
                raise EngineError("the engine's thread is closed")
            self._open.add(task)
            self._inbox.append(lambda: self._resume(task, None))
            self._changed.notify_all()
        return task

    def stop(self, task: Task) -> None:
        """Drops a task; its callbacks are not called any more, apart from one that is under way."""
        task.stopped = True
        with self._changed:
            self._inbox.append(lambda: self._drop(task))
            self._changed.notify_all()

    def _run(self) -> None:
        end = EngineError("the engine's thread was closed")
        try:
            while self._turn():
                pass
            self.engine.abort(list(self._tasks))
        except Exception as error:  # noqa: BLE001 - whatever an engine raises ends everything that waits for it
            log.error("the engine failed", exc_info=error)
            end = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        with self._changed:
            self._broken, left = end, [*self._open]
            self._open.clear()
        for task in left:
            if not task.stopped:
                task.on_done(end)
        self._tasks.clear()

    def _turn(self) -> bool:
        with self._changed:
            while not (self._inbox or self._tasks or self._closing):
                self._changed.wait()
            inbox, self._inbox = self._inbox, deque()
            if self._closing:
                return False
        for action in inbox:
            action()
        outcomes = self.engine.step()
        for name, rows in self.engine.take_rows():
            if name in self._tasks:
                self._rows(self._tasks[name], rows, last=False)
        for name, outcome in outcomes:
            if name in self._tasks:
                task = self._tasks.pop(name)
                if isinstance(outcome, RowResult):
                    self._rows(task, outcome.rows[task.given :], last=True)
                self._resume(task, outcome)
        return True

    def _rows(self, task: Task, rows: np.ndarray, *, last: bool) -> None:
        task.given += len(rows)
        if not task.stopped:
            task.on_rows(task.request, rows, last)

    def _resume(self, task: Task, outcome: RowResult | SpeechLMError | None) -> None:
        """Carries a driver to its next request, or its hypothesis to whoever waits."""
        if task.stopped:
            task.driver.close()
            return
        try:
            if isinstance(outcome, SpeechLMError):
                raise outcome
            if outcome is not None and outcome.finish == "abort":
                raise EngineError(f"{task.request.request_id}: the engine dropped the request")
            request = next(task.driver) if outcome is None else task.driver.send(outcome)
            # Two utterances may well have the same key here.
            task.request, task.name, task.given = request, f"{next(self._numbers)}:{request.request_id}", 0
            self.engine.submit(replace(request, request_id=task.name, stream=task.stream_of(request)))
        except StopIteration as stop:
            self._end(task, stop.value)
        except SpeechLMError as error:
            task.driver.close()
            self._end(task, error)
        else:
            self._tasks[task.name] = task

    def _end(self, task: Task, outcome: Hypothesis | SpeechLMError) -> None:
        with self._changed:
            self._open.discard(task)
        task.on_done(outcome)

    def _drop(self, task: Task) -> None:
        with self._changed:
            self._open.discard(task)
        if self._tasks.pop(task.name, None) is not None:
            self.engine.abort([task.name])
        task.driver.close()


# -- speech ------------------------------------------------------------------------------------------------------------
class Streamer:
    """Turns utterances into streams of chunks.

    Args:
        sizes: frames of a chunk; the default is 5 for the first one and 25 behind it.
    """

    def __init__(self, engine: EngineThread, service: CodecService, sizes: ChunkSizes | None = None) -> None:
        from .codec.chunks import ChunkSizes

        if not isinstance(sizes, ChunkSizes | None):
            raise ConfigError(f"sizes: expected codec.chunks.ChunkSizes(first, then), got {sizes!r}")
        self.engine, self.service, self.sizes = engine, service, sizes or ChunkSizes()
        layout = engine.engine.layout
        # Rows that the engine hands out at a time: when a chunk can be made of them, and not before.
        self.rows = rows_until(layout, service.frames_until_first(self.sizes)), self.sizes.then

    async def stream(
        self, utterance: Utterance, config: DecodingConfig, *, seed: int, hypothesis: int = 0
    ) -> AsyncIterator[SpeechChunk | Result]:
        """The chunks of all audio segments, in their order, and the result behind them.

        One hypothesis, with the rows that ``backends.decode`` gives it under the same seed. Leaving the loop drops the request.

        Raises:
            CodecError: if the codec fails on this utterance.
            EngineError: if the engine cannot take it. What fails in the utterance is the result's reason instead.
        """
        session = _Session(self, utterance, config, asyncio.get_running_loop())
        engine = self.engine.engine
        driver = drive(engine.layout, utterance, config, seed=seed, hypothesis=hypothesis, context=engine.max_rows)
        task = self.engine.start(driver, session.done, on_rows=session.rows, stream_of=self._stream_of)
        try:
            while True:
                item = await session.queue.get()
                if isinstance(item, SpeechLMError):
                    raise item
                yield item
                if isinstance(item, Result):
                    return
                session.taken(item.segment)
        finally:
            self.engine.stop(task)
            session.cancel()

    def _stream_of(self, request: RowRequest) -> tuple[int, int] | None:
        return self.rows if request.reference is None and _may_speak(request.rules) else None


def _may_speak(rules: Rules) -> bool:
    return rules.audio is not None if isinstance(rules, BagpiperRules) else rules.modality == "audio"


class _Session:
    """One reader: which segments are under way, and what it has not taken yet. Called from three threads."""

    def __init__(
        self, streamer: Streamer, utterance: Utterance, config: DecodingConfig, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._streamer, self._utterance, self._config, self._loop = streamer, utterance, config, loop
        self.queue: asyncio.Queue[SpeechChunk | Result | SpeechLMError] = asyncio.Queue()
        self._places = [i for i, part in enumerate(utterance.parts) if isinstance(part, Wanted)]
        self._lock = threading.Lock()
        self._request: RowRequest | None = None
        self._requests = 0
        self._arriving: ArrivingFrames | None = None
        self._clips: dict[int, GrowingClip] = {}
        # Segments in their order; the first is being heard, chunks of the others wait here.
        self._held: dict[int, list[SpeechChunk]] = {}
        self._result: Result | None = None
        self._ended: set[int] = set()

    # -- from the engine's thread -------------------------------------------------------------------------------------
    def rows(self, request: RowRequest, rows: np.ndarray, last: bool) -> None:
        if request is not self._request:
            self._request, self._requests = request, self._requests + 1
            self._arriving = ArrivingFrames(request.rules) if request.reference is None else None
        if self._arriving is None:
            return
        arrived = self._arriving.push(rows)
        if last:
            arrived += self._arriving.finish()
        for one in arrived:
            codes, _ = frame_codes(request.rules.layout, one.frames)
            clip = self._clip(self._place(request, one.segment))
            clip.push(codes)
            if one.last:
                clip.end()

    def _place(self, request: RowRequest, segment: int) -> int:
        return segment if isinstance(request.rules, BagpiperRules) else self._places[self._requests - 1]

    def _clip(self, place: int) -> GrowingClip:
        if place not in self._clips:
            with self._lock:
                self._held[place] = []

            def on_chunk(chunk: np.ndarray | SpeechLMError, last: bool) -> None:
                self._chunk(place, chunk, last)

            self._clips[place] = self._streamer.service.open(self._streamer.sizes, on_chunk)
        return self._clips[place]

    def done(self, outcome: Hypothesis | SpeechLMError) -> None:
        key = self._utterance.key
        if isinstance(outcome, SpeechLMError):
            for clip in self._clips.values():
                clip.cancel()
            with self._lock:
                self._held.clear()
            result = Result(key, (), REFUSED, str(outcome), self._utterance)
        else:
            layout = self._streamer.engine.engine.layout
            found, reason = outcome_of(layout, self._config, (outcome,))
            result = Result(key, (outcome,), found, reason, self._utterance)
        with self._lock:
            self._result = result
            self._flush()

    # -- from the codec's thread --------------------------------------------------------------------------------------
    def _chunk(self, place: int, chunk: np.ndarray | SpeechLMError, last: bool) -> None:
        with self._lock:
            if isinstance(chunk, SpeechLMError):
                self._put(chunk)
                return
            if place not in self._held:
                return  # the request was refused meanwhile
            rate = self._streamer.service.codec.sample_rate
            self._held[place].append(SpeechChunk(self._utterance.key, place, chunk, rate, last))
            if last:
                self._ended.add(place)
            self._flush()

    def _flush(self) -> None:
        """Hands over what is in turn. Under the lock."""
        while self._held:
            place = next(iter(self._held))
            for chunk in self._held[place]:
                self._put(chunk)
            self._held[place] = []
            if place not in self._ended:
                return
            del self._held[place]
        if self._result is not None:
            self._put(self._result)

    def _put(self, item: SpeechChunk | Result | SpeechLMError) -> None:
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: its program ended in the middle of a stream
            log.debug("%s: nobody is left to hear the stream", self._utterance.key)

    # -- from the reader ----------------------------------------------------------------------------------------------
    def taken(self, place: int) -> None:
        self._clips[place].taken()

    def cancel(self) -> None:
        for clip in list(self._clips.values()):
            clip.cancel()
