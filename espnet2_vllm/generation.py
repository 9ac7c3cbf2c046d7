"""One utterance on its way through an engine's thread."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from .drive import drive, drive_again, more_hypotheses
from .errors import AbortError, SpeechLMError
from .plan import ABORT, REFUSED, Hypothesis, Result, Utterance

if TYPE_CHECKING:
    from .decoding import DecodingConfig
    from .streaming import EngineThread


class Generation:
    """All hypotheses of an utterance on their way; ``future`` gets the result."""

    def __init__(self, thread: EngineThread, utterance: Utterance, config: DecodingConfig, seed: int) -> None:
        self._thread, self._utterance, self._config, self._seed = thread, utterance, config, seed
        self._layout = thread.engine.layout
        self._hypotheses: list[Hypothesis | None] = [None]
        self.future: Future[Result] = Future()
        driver = drive(self._layout, utterance, config, seed=seed, context=thread.engine.max_rows)
        thread.start(driver, lambda outcome: self._done(0, outcome))

    def _done(self, index: int, outcome: Hypothesis | SpeechLMError) -> None:
        from .backends.run import outcome_of

        if self.future.done():
            return
        if isinstance(outcome, SpeechLMError):
            found = ABORT if isinstance(outcome, AbortError) else REFUSED
            self.future.set_result(Result(self._utterance.key, (), found, str(outcome), self._utterance))
            return
        self._hypotheses[index] = outcome
        if index == 0 and self._layout.family == "bagpiper":
            more = more_hypotheses(self._config, outcome)
            self._hypotheses += [None] * more
            for k in range(1, more + 1):
                again = drive_again(self._layout, self._utterance, self._config, outcome, seed=self._seed, hypothesis=k)
                self._thread.start(again, lambda found, k=k: self._done(k, found))
        if all(hypothesis is not None for hypothesis in self._hypotheses):
            hypotheses = tuple(self._hypotheses)
            found, reason = outcome_of(self._layout, self._config, hypotheses)
            self.future.set_result(Result(self._utterance.key, hypotheses, found, reason, self._utterance))
