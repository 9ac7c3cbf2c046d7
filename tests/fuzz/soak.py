"""Thousands of requests on one engine, half of them aborted: what finishes is right, nothing is left, memory is flat."""

from __future__ import annotations

import ctypes
import gc
import random
from collections import Counter
from dataclasses import dataclass

from .draws import replaced
from .groups import RECORDED
from .oracle import LOGPROB_TOLERANCE, assert_same
from .playing import GUIDED_TOLERANCE
from .running import Bench
from .served import Served
from .world import SEATS, World

MODELS = ("qwen3-s8-cb64", "tiny-llama")
SEED = 20261129
CARDS = 30
IN_FLIGHT = 2 * SEATS
CHECKPOINTS = 10
WARM = 3  # checkpoints that pools, caches and allocators may take to fill
GROWTH = 4 * 2**20  # bytes that the host may take from then on, whatever the number of requests


@dataclass(frozen=True)
class Memory:
    """Bytes at one moment. ``device``: what the allocator of a CUDA device holds, 0 without one."""

    host: int
    device: int

    @classmethod
    def now(cls, cuda: bool) -> Memory:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed is no growth
        with open("/proc/self/statm", encoding="ascii") as file:
            host = int(file.read().split()[1]) * 4096
        if not cuda:
            return cls(host, 0)
        import torch

        torch.cuda.synchronize()
        return cls(host, torch.cuda.memory_allocated())


class Soak:
    """Requests of a deck one after the other, always ``IN_FLIGHT`` of them."""

    def __init__(self, bench: Bench, model: str) -> None:
        world = World(SEED, model, "async-16", "small", SEED, SEATS, 0, (), ())
        deck = bench.deck(world)
        self.cards = [deck.card(index) for index in range(CARDS)]
        self.served: Served = bench.engine(world)
        self.rng = random.Random(SEED)
        self.aborts: dict[str, int] = {}  # step at which a request is aborted
        self.live: set[str] = set()
        self.step = 0
        self.made = 0
        self.counts: Counter[str] = Counter()

    def run(self, requests: int) -> None:
        """Until so many more have ended, in either way."""
        served, stop = self.served, self.made + requests
        # Little more than the largest pair needs, so that preemption is part of it.
        served.limit(blocks=26)
        while self.made < stop or self.live:
            while self.made < stop and len(self.live) < IN_FLIGHT:
                self._submit()
            gone = [name for name in self.live if self.aborts.get(name, self.step + 1) <= self.step]
            if gone:
                served.engine.abort(gone)
                self.counts["aborted"] += len(gone)
                self._forget(gone)
            finished = served.engine.step()
            for name, outcome in finished:
                card = self.cards[int(name.split("/")[1])]
                assert_same(outcome, card.expected, name, GUIDED_TOLERANCE if card.guided else LOGPROB_TOLERANCE)
                self.counts["finished"] += 1
                self.counts["rows"] += len(outcome.rows)
            self._forget([name for name, _ in finished])
            self.step += 1
        served.limit()
        served.assert_empty()
        self.counts["preempted"] += len(served.preempted)
        served.forget()

    def _submit(self) -> None:
        index = self.rng.randrange(CARDS)
        name = f"{self.made}/{index}"
        if self.made % 2:
            self.aborts[name] = self.step + self.rng.choice([0, 1, self.rng.randint(0, 30)])
        self.served.submit(replaced(self.cards[index].request, name))
        self.live.add(name)
        self.made += 1

    def _forget(self, names: list[str]) -> None:
        for name in names:
            self.live.remove(name)
            self.aborts.pop(name, None)
            del self.served.known[name]
            self.served.hits.pop(name, None)


def main(bench: Bench, requests: int, models: tuple[str, ...] = MODELS) -> int:
    """Plays ``requests`` on each model and prints memory on the way; 1 if it grows."""
    return max(_soak(bench, model, requests) for model in models)


def _soak(bench: Bench, model: str, requests: int) -> int:
    soak, cuda = Soak(bench, model), bench.place.device == "cuda"
    print(f"{model} ({RECORDED[model]}), {requests} requests, every other one to be aborted", flush=True)
    seen: list[Memory] = []
    for _ in range(CHECKPOINTS):
        soak.run(requests // CHECKPOINTS)
        seen.append(Memory.now(cuda))
        counts = " ".join(f"{key} {value}" for key, value in sorted(soak.counts.items()))
        device = f", device {seen[-1].device / 2**20:.1f} MiB" if cuda else ""
        print(f"{soak.made} requests: {counts}; host {seen[-1].host / 2**20:.1f} MiB{device}", flush=True)
    companions = getattr(soak.served.scheduler, "counts", {}).get("companions", 0)
    after = (CHECKPOINTS - WARM) * (requests // CHECKPOINTS)
    host, device = ((getattr(seen[-1], kind) - getattr(seen[WARM - 1], kind)) / after for kind in ("host", "device"))
    print(
        f"{model}: nothing left in any table, {companions} companions came and went; growth over the last {after} requests: "
        f"{host / after:.0f} bytes a request on the host, {device / after:.0f} on the device",
        flush=True,
    )
    return int(host > GROWTH or device > 0)
