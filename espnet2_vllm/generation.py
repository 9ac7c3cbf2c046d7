"""Utterances on their way through an engine's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from .drive import Driver, drive, drive_again, more_hypotheses
from .errors import AbortError, EngineError, SpeechLMError
from .plan import ABORT, REFUSED, Hypothesis, Result, Utterance

if TYPE_CHECKING:
    from .decoding import DecodingConfig
    from .streaming import EngineThread, Task


class Generation:
    """All hypotheses of an utterance on their way; ``future`` gets the result. Cancelling it drops the requests."""

    def __init__(self, thread: EngineThread, utterance: Utterance, config: DecodingConfig, seed: int) -> None:
        self._thread, self._utterance, self._config, self._seed = thread, utterance, config, seed
        self._layout = thread.engine.layout
        self._hypotheses: list[Hypothesis | None] = [None]
        self.future: Future[Result] = Future()
        self.future.add_done_callback(self._ended)
        self._tasks: list[Task] = []
        driver = drive(self._layout, utterance, config, seed=seed, context=thread.engine.max_rows)
        self._start(0, driver)

    def _start(self, index: int, driver: Driver) -> None:
        self._tasks.append(self._thread.start(driver, lambda outcome: self._done(index, outcome)))

    def _ended(self, future: Future[Result]) -> None:
        """Nobody waits any more: the caller has left, or one hypothesis has failed."""
        for task in self._tasks if None in self._hypotheses else ():
            self._thread.stop(task)

    def _finish(self, result: Result) -> None:
        # The caller may cancel at any moment, from another thread; behind this it cannot.
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(result)

    def _done(self, index: int, outcome: Hypothesis | SpeechLMError) -> None:
        from .backends.run import outcome_of

        if self.future.done():
            return
        if isinstance(outcome, SpeechLMError):
            found = ABORT if isinstance(outcome, AbortError) else REFUSED
            self._finish(Result(self._utterance.key, (), found, str(outcome), self._utterance))
            return
        self._hypotheses[index] = outcome
        if index == 0 and self._layout.family == "bagpiper":
            try:
                self._start_others(outcome)
            except EngineError as error:  # the thread was closed meanwhile
                self._done(index, error)
                return
        if all(hypothesis is not None for hypothesis in self._hypotheses):
            hypotheses = tuple(self._hypotheses)
            found, reason = outcome_of(self._layout, self._config, hypotheses)
            self._finish(Result(self._utterance.key, hypotheses, found, reason, self._utterance))

    def _start_others(self, first: Hypothesis) -> None:
        more = more_hypotheses(self._config, first)
        self._hypotheses += [None] * more
        for k in range(1, more + 1):
            again = drive_again(self._layout, self._utterance, self._config, first, seed=self._seed, hypothesis=k)
            self._start(k, again)
        if self.future.cancelled():  # before these were there to be stopped
            self._ended(self.future)


def cancel(futures: Iterable[Future[Result]]) -> None:
    """Drops the requests of all."""
    for future in futures:
        future.cancel()


async def begun_in_thread(begin: Callable[[], tuple[list[Future[Result]], bool]]) -> tuple[list[Future[Result]], bool]:
    """What ``begin`` gives, called in another thread. If the coroutine is cancelled meanwhile, its requests are dropped."""
    begun: list[Future[Result]] = []
    abandoned = threading.Event()

    def begin_all() -> tuple[list[Future[Result]], bool]:
        found = begin()
        begun.extend(found[0])
        if abandoned.is_set():
            cancel(begun)
        return found

    try:
        return await asyncio.to_thread(begin_all)
    except asyncio.CancelledError:  # the thread goes on: whichever of the two comes later drops the requests
        abandoned.set()
        cancel(begun)
        raise
