"""A model on which scenarios are played: its oracle, requests with their rows, and engines in several settings."""

import random

import numpy as np
from fuzz import draws
from fuzz.draws import DRAWN
from fuzz.oracle import Oracle, assert_same
from fuzz.served import Served

from espnet2_vllm.plan import Continuous, RowRequest
from espnet2_vllm.protocol import BagpiperRules, ModalityRules, OpusLMRules, Rules

CONTEXT, BLOCK, SEATS = 256, 32, 12
# Fewer blocks than as many requests need, so that a full batch preempts.
TIGHT = {"max_model_len": CONTEXT, "block_size": BLOCK, "max_num_seqs": SEATS, "num_gpu_blocks_override": 10}


class Stage:
    """A model: its oracle, requests with their rows, and engines in several settings, each started once.

    They end together: closing one takes vLLM's process groups from every other in this process, which holds nothing else.

    Args:
        settings: options of ``Served`` by name.
    """

    def __init__(self, checkpoint, settings: dict[str, dict], *, seed: int, requests: int) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        self.oracle = Oracle(checkpoint, CONTEXT)
        self.layout = self.oracle.layout
        self.seed, self.rng = seed, random.Random(seed)
        self.requests = self._draw(requests)
        self._engines: dict[str, Served] = {}

    def _draw(self, count: int) -> list[RowRequest]:
        """Half of them begin like another one."""
        made: list[RowRequest] = []

        def draw(name: str) -> RowRequest:
            request = draws.random_request(self.layout, self.rng, name, hidden=self.oracle.hidden)
            if not made or self.rng.random() < 0.5:
                return request
            return draws.begun_as(request, self.rng, self.rng.choice(made), CONTEXT // 2)

        for index in range(count):
            made.append(self.oracle.clear(lambda: draw(f"r{index}")))  # noqa: B023
        return made

    def engine(self, setting: str) -> Served:
        """Idle, with an empty prefix cache."""
        if setting not in self._engines:
            self._engines[setting] = Served(self.checkpoint, **{**TIGHT, **self.settings[setting]})
        served = self._engines[setting]
        assert served.engine.unfinished == 0
        served.engine._engine.reset_prefix_cache()
        served.forget()
        return served

    def add(self, name: str, rows: np.ndarray, made: Rules, *parts: Continuous) -> RowRequest:
        """A request with clear choices, of a seed that gives some; ``parts`` are its continuous rows."""
        return self.oracle.clear(
            lambda: draws.with_sound(RowRequest(name, rows, made, self.rng.getrandbits(63)), *parts)
        )

    def forced(self, count: int) -> list[RowRequest]:
        """Teacher forcing (OpusLM)."""
        return [
            self.oracle.clear(lambda: draws.forced_request(self.layout, self.rng, f"forced {i}"))  # noqa: B023
            for i in range(count)
        ]

    def fixed(self, modality: str, rows: int, low: int | None = None) -> Rules:
        """One drawn segment of ``rows`` rows (``low`` to ``rows``, if given)."""
        low = rows if low is None else low
        if self.layout.family == "opuslm":
            return OpusLMRules(self.layout, modality, DRAWN, low, rows)
        block = ModalityRules(DRAWN, low, rows)
        return BagpiperRules(self.layout, (modality,), block, block)

    def chain(self) -> list[RowRequest]:
        """Requests that pass through every phase."""
        if self.layout.family == "opuslm":
            return [
                self.add(f"chain {kind}", draws.prompt(self.layout, self.rng, 40, kind), self.fixed(kind, 24, 6))
                for kind in ("text", "audio")
            ]
        block = ModalityRules(DRAWN, 3, 9)
        made = BagpiperRules(self.layout, ("text", "audio", "text"), block, block)
        return [
            self.add(f"chain {i}", draws.prompt(self.layout, self.rng, rows), made) for i, rows in enumerate((7, 33))
        ]

    def check(self, found: dict[str, object]) -> None:
        """Outcomes by id, which may have a copy's mark behind a slash."""
        for name, outcome in found.items():
            assert_same(outcome, self.oracle.expected[name.split("/")[0]], f"seed {self.seed}: {name}")

    def sound(self, start: int, count: int) -> Continuous:
        return draws.sound(self.rng, start, count, self.oracle.hidden)

    def close(self) -> None:
        for served in [*self._engines.values()][:1]:
            served.close()
        self._engines.clear()
