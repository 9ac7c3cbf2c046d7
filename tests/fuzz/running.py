"""Runs worlds one after the other in this process: engines are kept, a world that fails is shrunk and told."""

from __future__ import annotations

import json
import pathlib
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from . import models
from .deck import SCALES, Deck
from .oracle import Oracle
from .playing import Play, cards_of
from .served import Served
from .shrinking import shrink
from .world import SEATS, Setting, World

MOST_FAILURES = 5


@dataclass(frozen=True)
class Place:
    """Where worlds run.

    Attributes:
        runner: ``v1`` or ``v2``; must be what this process was started for.
        device: ``cpu`` or ``cuda``.
        fused: on a CPU, the kernels under Triton's interpreter in place of the plain step.
    """

    runner: str = "v1"
    device: str = "cpu"
    fused: bool = False


class Bench:
    """Models, their oracles and engines, each made when first used.

    They end together: closing an engine takes vLLM's process groups from every other in this process.
    """

    def __init__(self, place: Place, folder: pathlib.Path) -> None:
        self.place, self.folder = place, folder
        self._checkpoints: dict[str, object] = {}
        self._oracles: dict[tuple[str, int], Oracle] = {}
        self._decks: dict[tuple, Deck] = {}
        self._engines: dict[tuple, Served] = {}

    def _checkpoint(self, model: str):
        if model not in self._checkpoints:
            self._checkpoints[model] = models.open_model(model, self.folder)
        return self._checkpoints[model]

    def deck(self, world: World) -> Deck:
        key = (world.model, world.scale, world.deck, Setting.named(world.setting).block)
        if key not in self._decks:
            place = (world.model, SCALES[world.scale].context)
            if place not in self._oracles:
                self._oracles[place] = Oracle(self._checkpoint(world.model), place[1])
            self._decks.clear()
            self._decks[key] = Deck(self._oracles[place], world.deck, world.scale, key[-1])
        return self._decks[key]

    def engine(self, world: World) -> Served:
        key = (world.model, world.setting, world.scale)
        if key not in self._engines:
            setting, context = Setting.named(world.setting), SCALES[world.scale].context
            options = {
                "max_model_len": context, "block_size": setting.block, "max_num_seqs": SEATS,
                "num_gpu_blocks_override": setting.blocks(context), "max_num_batched_tokens": context,
                "enable_prefix_caching": setting.cached,
            }  # fmt: skip
            if self.place.device == "cuda":
                # Each engine keeps what it takes until the process ends. Given in bytes, nothing is measured first, which other
                # processes on the device would disturb.
                options |= {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 2**29}
            self._engines[key] = Served(
                self._checkpoint(world.model), asynchronous=setting.asynchronous, fused=self.place.fused, **options
            )
        return self._engines[key]

    def play(self, world: World) -> Counter:
        """Counts of a world. Whatever it raises, its engine is not used again."""
        cards = cards_of(world, self.deck(world))
        if cards is None:
            raise ValueError("a shortened request has a close choice")
        key = (world.model, world.setting, world.scale)
        served = self.engine(world)
        # Kept only if nothing goes wrong: a failed world leaves requests behind.
        del self._engines[key]
        counts = Play(world, cards, served).run()
        self._engines[key] = served
        return counts

    def fails(self, world: World) -> bool:
        try:
            if cards_of(world, self.deck(world)) is None:
                return False
            self.play(world)
        except Exception:  # noqa: BLE001 - whatever is raised, the world fails
            return True
        return False

    def close(self) -> None:
        for served in [*self._engines.values()][:1]:
            served.close()
        self._engines.clear()


@dataclass
class Report:
    """What a run of worlds came to."""

    counts: Counter = field(default_factory=Counter)
    failures: list[dict] = field(default_factory=list)
    last: int | None = None
    models: set[str] = field(default_factory=set)


def command_of(world: World, place: Place) -> str:
    options = f"--runner {place.runner} --device {place.device}{' --fused' if place.fused else ''}"
    return f"tools/fuzz.sh {options} --replay '{world.to_json()}'"


class Interrupted:
    """Whether this process was asked to end (SIGINT or SIGTERM): the world at hand is played to its end first."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True


def run(
    bench: Bench,
    worlds: Iterable[World],
    *,
    seconds: float = 1e9,
    shrinking: float = 120.0,
    interrupted: Interrupted | None = None,
) -> Report:
    """Plays ``worlds`` until ``seconds`` are over, ``MOST_FAILURES`` have failed, or the process was asked to end.

    Args:
        shrinking: seconds that may go into making a failing world smaller; 0 leaves it as it is.
    """
    report, deadline = Report(), time.monotonic() + seconds
    for world in worlds:
        over = time.monotonic() > deadline or (interrupted is not None and interrupted.asked)
        if over or len(report.failures) >= MOST_FAILURES:
            break
        report.last = world.seed
        report.models.add(world.model)
        started = time.monotonic()
        try:
            counts = bench.play(world)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is what is looked for
            report.failures.append(_told(bench, world, error, shrinking))
            continue
        report.counts += counts
        told = " ".join(f"{key} {value}" for key, value in sorted(counts.items()) if key != "worlds")
        taken = time.monotonic() - started
        print(f"world {world.seed} ({world.model}, {world.setting}): equal, {told}, {taken:.1f} s", flush=True)
    return report


def _told(bench: Bench, world: World, error: Exception, shrinking: float) -> dict:
    """Prints a failure, shrunk if it fails on a fresh engine too."""
    trace = "".join(traceback.format_exception(error))
    print(f"world {world.seed} FAILED\n{trace}\n{command_of(world, bench.place)}", flush=True)
    smallest = None
    if shrinking:
        if bench.fails(world):
            smallest = shrink(world, bench.fails, shrinking)
            print(f"world {world.seed} shrunk:\n{command_of(smallest, bench.place)}", flush=True)
        else:
            print(f"world {world.seed} passes on a fresh engine: it needs the worlds before it", flush=True)
    message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return {"seed": world.seed, "error": message, "world": json.loads((smallest or world).to_json())}
