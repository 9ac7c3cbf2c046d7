"""One system under one load after the other."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import ConfigError, SpeechLMError
from ..layout import Layout
from ..protocol import Sampling
from .cost import Peaks, Shape, Work, head_columns, use_of
from .geometry import Geometry
from .profile import profile_steps
from .systems import PLAIN, PYTORCH, SAME, System
from .timing import Trace
from .workload import Unit, Workload, plain_unit, random_prompt, run_units, speech_unit

log = logging.getLogger(__name__)

_WARM_UP = 32  # output rows of a run that compiles and fills what a load needs; its prompts are as many and as long


@dataclass(frozen=True)
class Load:
    """Units that are handed over at once, and run to their end.

    Attributes:
        workload: None for plain text.
        guidance: scale for audio rows; 1 is none.
        in_flight: units.
        prompt, output: rows of each.
    """

    workload: Workload | None
    guidance: float
    in_flight: int
    prompt: int
    output: int

    @property
    def longest(self) -> int:
        """Rows of a sequence at most; between the segments of an OpusLM unit two rows are given."""
        return self.prompt + self.output + 2


@dataclass(frozen=True)
class Settings:
    """What to measure. Every combination is measured once for each system that it concerns."""

    workloads: tuple[Workload, ...]
    guidance: tuple[float, ...]
    in_flight: tuple[int, ...]
    lengths: tuple[tuple[int, int], ...]
    sampling: Sampling
    dtype: str
    pytorch_rows: int = 64
    repeat: int = 1
    seed: int = 0
    profile: bool = False

    def loads(self, system: str) -> list[Load]:
        """For ``system``: plain text knows no workloads, and the sequential backend no requests in flight."""
        if system in (PLAIN, SAME):
            return [Load(None, 1.0, n, *lengths) for lengths in self.lengths for n in self.in_flight]
        kinds = [
            (workload, scale)
            for workload in self.workloads
            for scale in self.guidance
            if scale == 1 or "audio" in workload.modalities
        ]
        if system == PYTORCH:
            return [Load(workload, scale, 1, self.lengths[0][0], self.pytorch_rows) for workload, scale in kinds]
        return [Load(*kind, n, *lengths) for kind in kinds for lengths in self.lengths for n in self.in_flight]

    def check(self, geometry: Geometry, systems: Sequence[str]) -> int:
        """Rows that the longest sequence needs.

        Raises:
            ConfigError: if a load has too few rows, or more than the model's context.
        """
        loads = [load for system in systems for load in self.loads(system)]
        for load in loads:
            if load.workload is not None:
                load.workload.content_rows(geometry.layout, load.output)
        longest = max(load.longest for load in loads)
        if longest > geometry.max_rows:
            raise ConfigError(
                f"{geometry.name}: prompt and output need {longest} rows, but the context has {geometry.max_rows}"
            )
        return longest


class Measurement:
    """Runs loads on one system.

    Args:
        peaks: of all devices that ``system`` takes.
    """

    def __init__(self, system: System, geometry: Geometry, settings: Settings, peaks: Peaks) -> None:
        self.system, self.geometry, self.settings, self.peaks = system, geometry, settings, peaks
        self._shape = Shape.of(geometry.backbone)
        self._runs = itertools.count()
        self._warm: set[Load] = set()

    def cells(self) -> Iterator[dict[str, Any]]:
        """One dictionary a load: the load, and what was measured or why the system refused it (``refused``)."""
        if self.settings.profile and self.system.runner is None and self.system.name != PYTORCH:
            log.warning(
                "%s: no profile, what its steps do is not seen in this process; set VLLM_ENABLE_V1_MULTIPROCESSING=0, and no "
                "tensor_parallel_size or data_parallel_size",
                self.system.name,
            )
        for load in self.settings.loads(self.system.name):
            cell = _described(self.system.name, load)
            try:
                cell |= self._measure(load)
                log.info("%s", _line(cell))
            except SpeechLMError as error:
                cell["refused"] = str(error)
                log.warning("%s %s: refused: %s", cell["system"], cell["workload"], error)
            yield cell

    def _measure(self, load: Load) -> dict[str, Any]:
        if load.guidance != 1 and self.geometry.layout.family == "opuslm":
            raise ConfigError("the opuslm family has no guidance")
        warm = replace(load, output=min(_WARM_UP, load.output))
        if warm not in self._warm:
            self._run(warm)
            self._warm.add(warm)
        runs = [self._run(load) for _ in range(self.settings.repeat)]
        runs.sort(key=lambda run: run["rows_per_s"])
        measured = runs[len(runs) // 2] | {"rows_per_s_all": [run["rows_per_s"] for run in runs]}
        if self.settings.profile and self.system.runner is not None:
            measured["profile"] = profile_steps(self.system, self._units(load), load.output)
        return measured

    def _run(self, load: Load) -> dict[str, Any]:
        layout = self.geometry.layout
        units = self._units(load)
        trace = Trace(self.system.first_rows)
        run_units(self.system, units, trace.step)
        first_codes = load.workload.first_codes(layout, self._last_rows(load)) if load.workload else None
        summary = trace.summary(load.output, first_codes)
        if not self.system.steps_seen:
            # A call of ``step`` is not a step of the model: a request takes as many as it has rows, all together.
            summary |= {"steps": load.output, "row_p50_s": None, "row_p99_s": None, "first_codes_s": None}
        columns = _columns(layout, load)
        passes = 1.0 if load.guidance == 1 else 1.0 + columns["audio"][0]
        work = Work(
            load.in_flight, load.prompt, load.output, columns, int(summary["steps"]), passes, self.system.engines
        )
        return summary | use_of(work, self._shape, self.settings.dtype, trace.seconds, self.peaks)

    def _last_rows(self, load: Load) -> int:
        """Rows of a unit's last request: all of a Bagpiper answer, the last segment of OpusLM's."""
        if self.geometry.layout.family == "bagpiper":
            return load.output
        return list(load.workload.content_rows(self.geometry.layout, load.output).values())[-1]

    def _units(self, load: Load) -> list[Unit]:
        """Never the same prompts twice: the prefix cache of an earlier run must not help."""
        layout, sampling = self.geometry.layout, self.settings.sampling
        number = next(self._runs)
        rng = np.random.default_rng([self.settings.seed, number])
        units = []
        for index in range(load.in_flight):
            key = f"r{number}u{index}"
            modality = load.workload.modalities[0] if load.workload else "text"
            prompt = random_prompt(layout, rng, load.prompt, modality)
            if load.workload is None:
                units.append(plain_unit(key, prompt, load.output, sampling))
                continue
            seed = int(rng.integers(2**62))
            units.append(
                speech_unit(
                    layout, load.workload, key, prompt, load.output, sampling, guidance=load.guidance, seed=seed
                )
            )
        return units


def _columns(layout: Layout, load: Load) -> dict[str, tuple[float, int]]:
    if load.workload is None:
        return {"text": (1.0, head_columns(layout, "plain"))}
    content = load.workload.content_rows(layout, load.output)
    return {name: (rows / load.output, head_columns(layout, name)) for name, rows in content.items()}


def _described(system: str, load: Load) -> dict[str, Any]:
    return {
        "system": system,
        "workload": "text" if load.workload is None else str(load.workload),
        "guidance": load.guidance,
        "in_flight": load.in_flight,
        "prompt": load.prompt,
        "output": load.output,
    }


def _line(cell: dict[str, Any]) -> str:
    return (
        f"{cell['system']} {cell['workload']} cfg {cell['guidance']:g}, {cell['in_flight']} in flight, "
        f"{cell['prompt']}+{cell['output']} rows: {cell['rows_per_s']:.1f} rows/s"
    )
