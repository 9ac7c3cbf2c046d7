"""Runs the drivers of many utterances on one engine, and turns what they return into outcomes: exactly one for each key."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ..decoding import DecodingConfig
from ..drive import Driver, draw_seed, drive, drive_again, more_hypotheses
from ..errors import AbortError, ConfigError, DataError, SpeechLMError
from ..layout import Layout
from ..plan import (
    ABORT,
    LATER,
    LENGTH,
    NO_AUDIO,
    OK,
    OUTCOMES,
    REFUSED,
    Hypothesis,
    Result,
    RowResult,
    Segment,
    Utterance,
)
from .base import Engine, Outcome

Unreadable = tuple[str, SpeechLMError]
Progress = Callable[[int, int], None]
_WAIT = 0.001  # seconds until an utterance is asked for again, where nothing else is to do


def decode(
    engine: Engine,
    utterances: Iterable[Utterance | Unreadable | str],
    config: DecodingConfig,
    *,
    seed: int | None,
    nbest: int = 1,
    in_flight: int = 256,
    on_progress: Progress | None = None,
) -> Iterator[Result]:
    """Decodes ``utterances``, up to ``in_flight`` requests at once, and gives each result as soon as it is there.

    The order of the results is the order of completion; nothing else depends on it or on ``in_flight``.

    Args:
        utterances: read as there is room for them. A pair (key, error) stands for one that could not be read, ``plan.LATER`` for
            one that is still being made: the engine goes on meanwhile.
        seed: of the whole run; each hypothesis of each key gets its own from it. None draws one and logs it.
        nbest: hypotheses of an OpusLM utterance, drawn independently. A Bagpiper answer has as many as the ``num_hypo`` of its
            last segment's modality says.
        on_progress: called with the number of results and of generated rows so far, whenever either grew.

    Raises:
        ConfigError: if ``nbest`` does not fit the family, or is above 1 in a dialogue.
        DataError: if a key comes twice.
        EngineError: if the engine fails as a whole. What fails in one utterance is its result's reason instead.
    """
    if engine.layout.family == "bagpiper" and nbest != 1:
        raise ConfigError(f"nbest {nbest}: a bagpiper checkpoint takes num_hypo in the block of a modality instead")
    if nbest < 1 or in_flight < 1:
        raise ConfigError(f"nbest {nbest} and in_flight {in_flight} must be at least 1")
    run = _Run(engine, config, draw_seed() if seed is None else seed, nbest)
    source, exhausted, progress = iter(utterances), False, (0, 0)
    try:
        while True:
            while not exhausted and not run.finished and len(run.running) < in_flight:
                item = next(source, None)
                if item is LATER:
                    if run.running:
                        break
                    time.sleep(_WAIT)
                    continue
                exhausted = item is None
                if item is not None:
                    run.begin(item)
            if run.running:
                run.step()
            yield from run.take_finished()
            if on_progress is not None and progress != (run.results, run.rows):
                progress = (run.results, run.rows)
                on_progress(*progress)
            if exhausted and not run.running:
                return
    finally:
        # Also when the caller stops listening or interrupts: the engine may be used again.
        engine.abort(list(run.running))


@dataclass
class _Job:
    """One utterance on its way. ``hypotheses`` are filled in as their drivers return."""

    utterance: Utterance
    hypotheses: list[Hypothesis | None]
    requests: set[str] = field(default_factory=set)
    refused: bool = False


class _Run:
    """The state of one ``decode``: drivers that wait for their request, and results not yet given out."""

    def __init__(self, engine: Engine, config: DecodingConfig, seed: int, nbest: int) -> None:
        self.engine, self.config, self.seed, self.nbest = engine, config, seed, nbest
        self.running: dict[str, tuple[_Job, int, Driver]] = {}
        self.finished: deque[Result] = deque()
        self.results = self.rows = 0
        self._keys: set[str] = set()

    def begin(self, item: Utterance | Unreadable) -> None:
        key = item.key if isinstance(item, Utterance) else item[0]
        if key in self._keys:
            raise DataError(f"utterance {key} comes twice; every key is decoded once: rename or drop one of them")
        self._keys.add(key)
        if not isinstance(item, Utterance):
            self.finished.append(Result(key, (), REFUSED, str(item[1])))
            return
        layout = self.engine.layout
        if self.nbest > 1 and any(part.role for part in item.parts):
            raise ConfigError(f"{key}: nbest {self.nbest}, but a dialogue is decoded with nbest 1 only")
        job = _Job(item, [None] * self.nbest)
        context = self.engine.max_rows
        for index in range(self.nbest):
            driver = drive(layout, item, self.config, seed=self.seed, hypothesis=index, context=context)
            self._resume(job, index, driver, None)

    def step(self) -> None:
        for request_id, outcome in self.engine.step():
            if request_id not in self.running:
                continue  # another hypothesis of its utterance was refused in this very step
            job, index, driver = self.running.pop(request_id)
            job.requests.remove(request_id)
            if isinstance(outcome, RowResult):
                self.rows += len(outcome.rows)
            self._resume(job, index, driver, outcome)

    def take_finished(self) -> Iterator[Result]:
        while self.finished:
            self.results += 1
            yield self.finished.popleft()

    def _resume(self, job: _Job, index: int, driver: Driver, outcome: Outcome | None) -> None:
        """Carries a driver to its next request, or its hypothesis to the job."""
        if job.refused:
            driver.close()
            return
        try:
            if isinstance(outcome, SpeechLMError):
                raise outcome
            if outcome is not None and outcome.finish == "abort":
                raise AbortError(f"{job.utterance.key}: the engine dropped the request")
            request = next(driver) if outcome is None else driver.send(outcome)
            self.engine.submit(request)
        except StopIteration as stop:
            self._complete(job, index, stop.value)
        except SpeechLMError as error:
            driver.close()
            self._refuse(job, error)
        else:
            assert request.request_id not in self.running, f"request {request.request_id} is already in flight"
            self.running[request.request_id] = (job, index, driver)
            job.requests.add(request.request_id)

    def _refuse(self, job: _Job, error: SpeechLMError) -> None:
        self.engine.abort(list(job.requests))
        for request_id in job.requests:
            self.running.pop(request_id)[2].close()
        job.requests.clear()
        job.refused = True
        outcome = ABORT if isinstance(error, AbortError) else REFUSED
        self.finished.append(Result(job.utterance.key, (), outcome, str(error), job.utterance))

    def _complete(self, job: _Job, index: int, hypothesis: Hypothesis) -> None:
        job.hypotheses[index] = hypothesis
        layout = self.engine.layout
        if layout.family == "bagpiper" and index == 0:
            more = more_hypotheses(self.config, hypothesis)
            job.hypotheses += [None] * more
            for k in range(1, more + 1):
                again = drive_again(layout, job.utterance, self.config, hypothesis, seed=self.seed, hypothesis=k)
                self._resume(job, k, again, None)
        if not job.refused and all(h is not None for h in job.hypotheses):
            hypotheses = tuple(job.hypotheses)
            outcome, reason = outcome_of(layout, self.config, hypotheses)
            self.finished.append(Result(job.utterance.key, hypotheses, outcome, reason, job.utterance))


def outcome_of(layout: Layout, config: DecodingConfig, hypotheses: Iterable[Hypothesis]) -> tuple[str, str]:
    """The worst thing that happened in any segment of any hypothesis, and what it was.

    From bad to worse: ``ok``, ``length`` (a segment was cut: by the most rows that the settings allow, or by the context),
    ``no_audio`` (audio was asked for, or begun, and not one frame came), ``refused`` (the model announced what cannot be decoded).
    """
    found = [problem for h in hypotheses for problem in _problems(layout, config, h)]
    if not found:
        return OK, ""
    return max(found, key=lambda problem: OUTCOMES.index(problem[0]))


def _problems(layout: Layout, config: DecodingConfig, hypothesis: Hypothesis) -> Iterator[tuple[str, str]]:
    generated = [segment for segment in hypothesis.segments if segment.generated]
    for place, segment in enumerate(hypothesis.segments):
        where = f"segment {place} ({segment.name})"
        if segment.end == "refused":
            yield REFUSED, f"{where} was announced by the model, but {config.source} has no settings to decode it with"
        elif segment.generated and segment.modality == "audio" and not num_frames(layout, segment):
            yield NO_AUDIO, f"{where} has {len(segment.rows)} rows and no whole frame (it ended by {segment.end})"
        if segment.end == "context":
            yield LENGTH, f"{where} was cut after {len(segment.rows)} rows, because the context of the model is full"
        if segment.end in ("max_rows", "forced"):
            yield LENGTH, f"{where} was cut after {len(segment.rows)} rows, the most that {config.source} allows"
    asked = config.enforce_modality.count("audio") if layout.family == "bagpiper" else 0
    if asked > sum(segment.modality == "audio" for segment in generated):
        reached = ", ".join(segment.name for segment in generated) or "no segment"
        yield NO_AUDIO, f"enforce_modality asks for audio, but the answer ended after {reached}"


def num_frames(layout: Layout, segment: Segment) -> int:
    """Whole frames of an audio segment: its rows, less the delay where they are still delayed (Bagpiper)."""
    if layout.family == "bagpiper":
        return max(len(segment.rows) - layout.num_streams + 1, 0)
    return len(segment.rows)
