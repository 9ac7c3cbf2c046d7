"""What is asked of a model: units of work with random prompts and a length that is known beforehand.

A unit is a generator like a driver of ``drive``: it yields a ``RowRequest``, is sent the ``RowResult``, and ends.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..layout import Layout
from ..plan import RowRequest, RowResult
from ..protocol import BagpiperRules, ModalityRules, OpusLMRules, Rules, Sampling

Unit = Generator[RowRequest, RowResult, None]
KINDS = ("audio", "text", "text-audio")


@dataclass(frozen=True)
class Workload:
    """What the rows are.

    Attributes:
        kind: ``audio``, ``text``, or ``text-audio``: a text segment and then an audio segment.
        ratio: text rows for one audio row (``text-audio`` only).
    """

    kind: str
    ratio: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind}:{self.ratio:g}" if self.kind == "text-audio" else self.kind

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self.kind.split("-"))

    def content_rows(self, layout: Layout, rows: int) -> dict[str, int]:
        """Rows of each segment's content; the rest of ``rows`` are forced rows between segments (Bagpiper).

        Raises:
            ConfigError: if ``rows`` are too few.
        """
        forced = 2 * len(self.modalities) - 1 if layout.family == "bagpiper" else 0
        least = 1 if layout.family == "bagpiper" else layout.num_streams  # an OpusLM segment has a drain
        free = rows - forced
        if free < least * len(self.modalities):
            needed = forced + least * len(self.modalities)
            raise ConfigError(f"{rows} output rows are too few for workload {self}; at least {needed} are needed")
        if len(self.modalities) == 1:
            return {self.kind: free}
        text = round(free * self.ratio / (1 + self.ratio))
        text = min(max(text, least), free - least)
        return {"text": text, "audio": free - text}

    def first_codes(self, layout: Layout, rows: int) -> int | None:
        """Index of the row that completes the first frame of audio among those of a unit's last request; None without audio."""
        if "audio" not in self.modalities:
            return None
        before = 0
        if layout.family == "bagpiper":
            before = rows - self.content_rows(layout, rows)["audio"]
        return before + layout.num_streams - 1


def parse_workload(text: str) -> Workload:
    """``audio``, ``text`` or ``text-audio[:RATIO]``.

    Raises:
        ConfigError: for anything else.
    """
    kind, colon, ratio = text.partition(":")
    if kind in KINDS and not colon:
        return Workload(kind)
    try:
        value = float(ratio)
    except ValueError:
        value = 0.0
    if kind != "text-audio" or not 0 < value < float("inf"):
        raise ConfigError(
            f"workload {text!r} is unknown; expected audio, text, or text-audio[:RATIO] (text rows for one audio row)"
        )
    return Workload(kind, value)


@dataclass(frozen=True)
class PlainText:
    """Stands in for rules in requests to plain-text vLLM: so many rows of one id."""

    sampling: Sampling
    max_rows: int


def random_prompt(layout: Layout, rng: np.random.Generator, rows: int, modality: str) -> np.ndarray:
    """[rows, S] int32: random text ids, and what stands in front of a segment of ``modality`` (OpusLM) or an answer (Bagpiper)."""
    prompt = np.zeros((rows, layout.num_streams), dtype=np.int32)
    prompt[:, 0] = rng.integers(layout.text.start, layout.text.stop, rows)
    prompt[-1, 0] = layout.specials["assistant"] if layout.family == "bagpiper" else layout.modality_token(modality)
    return prompt


def plain_unit(key: str, prompt: np.ndarray, rows: int, sampling: Sampling) -> Unit:
    yield RowRequest(key, prompt, PlainText(sampling, rows))


def speech_unit(
    layout: Layout,
    workload: Workload,
    key: str,
    prompt: np.ndarray,
    rows: int,
    sampling: Sampling,
    *,
    guidance: float = 1.0,
    seed: int = 0,
) -> Unit:
    """``rows`` rows behind ``prompt``; no segment can end by itself, so that every run has the same work to do.

    Args:
        guidance: scale for the audio rows (Bagpiper).

    Raises:
        ConfigError: (from the generator) if ``rows`` are too few.
    """
    content = workload.content_rows(layout, rows)
    if layout.family == "bagpiper":
        blocks = {name: ModalityRules(sampling, n, n) for name, n in content.items()}
        if "audio" in content:
            blocks["audio"] = ModalityRules(sampling, content["audio"], content["audio"], guidance)
        rules: Rules = BagpiperRules(layout, workload.modalities, blocks.get("text"), blocks.get("audio"))
        yield RowRequest(key, prompt, rules, seed)
        return
    history = prompt
    for index, (name, count) in enumerate(content.items()):
        rules = OpusLMRules(layout, name, sampling, count, count)
        if index:
            history = np.concatenate([history, _opuslm_header(layout, name)])
        result = yield RowRequest(f"{key}/{index}", history, rules, seed)
        history = np.concatenate([history, result.rows])


def _opuslm_header(layout: Layout, modality: str) -> np.ndarray:
    header = np.zeros((2, layout.num_streams), dtype=np.int32)
    header[:, 0] = layout.specials["assistant"], layout.modality_token(modality)
    return header


def run_units(engine: Any, units: list[Unit], on_step: Any = None) -> list[tuple[RowRequest, RowResult]]:
    """Runs all units at once; every request with its result, in the order of completion.

    Args:
        engine: anything with ``submit`` and ``step`` of ``backends.base.Engine``.
        on_step: called after each step with the requests that finished in it, before those that follow are submitted.

    Raises:
        SpeechLMError: as soon as one request is refused or fails; all others are aborted.
    """
    waiting: dict[str, tuple[Unit, RowRequest]] = {}
    done: list[tuple[RowRequest, RowResult]] = []

    def resume(unit: Unit, result: RowResult | None) -> None:
        try:
            request = next(unit) if result is None else unit.send(result)
        except StopIteration:
            return
        waiting[request.request_id] = (unit, request)
        engine.submit(request)

    try:
        for unit in units:
            resume(unit, None)
        while waiting:
            finished = engine.step()
            if on_step is not None:
                on_step(finished)
            for request_id, outcome in finished:
                unit, request = waiting.pop(request_id)
                if not isinstance(outcome, RowResult):
                    raise outcome
                done.append((request, outcome))
                resume(unit, outcome)
    finally:
        engine.abort(list(waiting))
    return done
