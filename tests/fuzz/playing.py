"""Plays a world on an engine and compares what comes out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import numpy as np

from .deck import Card, Deck
from .draws import replaced
from .oracle import LOGPROB_TOLERANCE, assert_same
from .served import Served
from .world import World

STEPS_A_BUDGET = 5
MOST_STEPS = 6000
GUIDED_TOLERANCE = 2e-3  # a scale of 3 multiplies the error of either member


class Play:
    """One world on one engine, which must be idle."""

    def __init__(self, world: World, cards: Mapping[int, Card], served: Served) -> None:
        """``cards``: by index of the entry."""
        self.world, self.cards, self.served = world, cards, served
        self.waiting = dict(enumerate(world.entries))
        self.live: set[int] = set()
        self.ended: set[int] = set()
        self.aborted: set[int] = set()
        self.done: set[tuple[int, int]] = set()  # (entry, row) of forced preemptions
        self.found: dict[str, object] = {}
        self.handed: dict[str, list[np.ndarray]] = {}
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter:
        """Counts of what was played.

        Raises:
            AssertionError: what came out is not what must come out, or something is left behind.
        """
        served, budgets = self.served, self.world.budgets
        assert served.engine._engine.reset_prefix_cache(), "blocks are in use"
        served.forget()
        served.limit(seats=self.world.seats, blocks=self.world.blocks, budget=budgets[0])
        companions = getattr(served.scheduler, "counts", {}).get("companions", 0)
        step = 0
        while self.waiting or self.live:
            self._admit(step)
            self._disturb()
            served.limit(budget=budgets[step // STEPS_A_BUDGET % len(budgets)])
            for name, outcome in served.engine.step():
                self.found[name] = outcome
                self.live.remove(int(name))
                self.ended.add(int(name))
            for name, rows in served.engine.take_rows():
                self.handed.setdefault(name, []).append(rows)
            step += 1
            assert step < MOST_STEPS, f"stuck: {served.describe()}"
        self._compare()
        served.assert_empty()
        served.limit()
        self.counts["companions"] = getattr(served.scheduler, "counts", {}).get("companions", 0) - companions
        self.counts["preempted"] += len(served.preempted)
        self.counts["cached"] += sum(served.hits.values())
        return self.counts

    def _admit(self, step: int) -> None:
        due = [i for i, entry in self.waiting.items() if entry.after is None or entry.after in self.ended]
        if not self.live and due and all(self.waiting[i].arrival > step for i in due):
            due = [min(due, key=lambda i: self.waiting[i].arrival)]  # nobody waits for an idle engine
        else:
            due = [i for i in due if self.waiting[i].arrival <= step]
        for index in due:
            entry = self.waiting.pop(index)
            stream = None if self.cards[index].forced else entry.stream
            self.served.submit(replaced(self.cards[index].request, str(index), stream=stream))
            self.live.add(index)
            if entry.abort == -1:
                self._abort(index)

    def _disturb(self) -> None:
        for index in sorted(self.live):
            entry, rows = self.world.entries[index], self.served.rows_of(str(index))
            if entry.abort is not None and rows >= entry.abort:
                self._abort(index)
            elif rows in entry.preempt and (index, rows) not in self.done and self.served.runs(str(index)):
                self.done.add((index, rows))
                self.served.preempt(str(index))
            elif rows in entry.reset and (index, -rows) not in self.done and self._may_reset():
                self.done.add((index, -rows))
                self.served.preempt_all()

    def _may_reset(self) -> bool:
        """vLLM itself fails if it drops the step that ends the prompt of a request with prompt log-probabilities."""
        known = self.served.known
        return not any(known[str(i)].num_output_placeholders for i in self.live if self.cards[i].forced)

    def _abort(self, index: int) -> None:
        self.served.engine.abort([str(index)])
        self.live.remove(index)
        self.ended.add(index)
        self.aborted.add(index)

    def _compare(self) -> None:
        expected = {str(i) for i in range(len(self.world.entries)) if i not in self.aborted}
        assert self.found.keys() == expected, f"outcomes of {sorted(self.found)}, expected {sorted(expected)}"
        for name, outcome in self.found.items():
            card = self.cards[int(name)]
            tolerance = GUIDED_TOLERANCE if card.guided else LOGPROB_TOLERANCE
            assert_same(outcome, card.expected, f"entry {name} ({card.kind}, card {self._card(name)})", tolerance)
            self.counts["rows"] += len(outcome.rows)
        self._compare_handed()
        self.counts.update(
            worlds=1, requests=len(self.cards), aborted=len(self.aborted),
            guided=sum(card.guided for card in self.cards.values()),
        )  # fmt: skip

    def _compare_handed(self) -> None:
        """Rows before the end: a beginning of the result, of an aborted request too."""
        for name, parts in self.handed.items():
            entry, card = self.world.entries[int(name)], self.cards[int(name)]
            assert entry.stream is not None and not card.forced, f"entry {name} hands out rows unasked"
            assert all(map(len, parts)), f"entry {name} hands out nothing, {list(map(len, parts))}"
            rows = np.concatenate(parts)
            assert np.array_equal(rows, card.expected.rows[: len(rows)]), f"entry {name}: rows before the end differ"
            self.counts["streamed"] += len(rows)
        for name, outcome in self.found.items():
            entry, card = self.world.entries[int(name)], self.cards[int(name)]
            if entry.stream is None or card.forced:
                continue
            # Less than an interval, or an audio segment that had not reached its first.
            left = len(outcome.rows) - sum(map(len, self.handed.get(name, ())))
            assert left <= sum(entry.stream), f"entry {name}: {left} rows were not handed out before the end"

    def _card(self, name: str) -> int:
        return self.world.entries[int(name)].card


def cards_of(world: World, deck: Deck) -> dict[int, Card] | None:
    """The cards of a world's entries; None if a shortened one has a close choice."""
    cards = {i: deck.cut(deck.card(e.card), e.prompt, e.rows) for i, e in enumerate(world.entries)}
    return None if None in cards.values() else cards


def without(world: World, index: int) -> World:
    """The world without an entry; those that waited for it wait for what it waited for."""
    gone = world.entries[index].after

    def moved(after: int | None) -> int | None:
        after = gone if after == index else after
        return after if after is None or after < index else after - 1

    rest = [e for i, e in enumerate(world.entries) if i != index]
    return dataclasses.replace(world, entries=tuple(dataclasses.replace(e, after=moved(e.after)) for e in rest))
