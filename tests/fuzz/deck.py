"""Cards: requests of every kind on one model, with the rows that must come out."""

import dataclasses
import functools
import random
from dataclasses import dataclass

import numpy as np

from espnet2_vllm.plan import RowRequest, RowResult
from espnet2_vllm.protocol import BagpiperRules, ModalityRules

from . import draws
from .oracle import CloseError, Oracle, fed_rows, phase_before


@dataclass(frozen=True)
class Scale:
    """How large a deck's requests are: rows of the context, of a prompt at most, of a segment at most."""

    context: int
    prompt: int
    segment: int


SCALES = {"usual": Scale(256, 70, 24), "small": Scale(128, 30, 8)}


@dataclass(frozen=True)
class Card:
    """A request and its rows.

    Attributes:
        kind: which of the functions below made it.
        parent: the card whose prompt or rows it begins with; None if it has none.
    """

    kind: str
    request: RowRequest
    expected: RowResult
    parent: int | None = None

    @property
    def guided(self) -> bool:
        return draws.is_guided(self.request.rules)

    @property
    def forced(self) -> bool:
        return self.request.reference is not None

    def phase_before(self, row: int) -> str:
        return phase_before(self.request, self.expected, row)


def kind_of(seed: int, index: int, family: str) -> tuple[str, int | None]:
    """Kind and parent of a card."""
    rng = random.Random(f"kind {seed}/{index}")
    kinds = ["plain", "plain", "at_boundary", "at_context"]
    kinds += ["relative", "turn"] * 2 if index else []
    kinds += ["chain", "chain"] if family == "bagpiper" else ["teacher"]
    kind = rng.choice(kinds)
    return kind, rng.randrange(index) if kind in ("relative", "turn") else None


class Deck:
    """Each card is a function of (seed, its index) and of the cards before it, and is made when first asked for."""

    def __init__(self, oracle: Oracle, seed: int, scale: str, block: int) -> None:
        self.oracle, self.layout, self.block = oracle, oracle.layout, block
        self.seed, self.scale = seed, SCALES[scale]
        # By decks, since a step with such a row is not sampled by the kernels.
        self.top_p = random.Random(f"top-p {seed}").random() < 0.25
        self.card = functools.cache(self._card)

    def _card(self, index: int) -> Card:
        rng = random.Random(f"{self.seed}/{index}")
        kind, parent = kind_of(self.seed, index, self.layout.family)
        for _ in range(20):
            make = self._with_top_p if self.top_p and index % 3 == 0 else lambda made: made
            draw = functools.partial(getattr(self, kind), rng, f"card {index}", parent)
            try:
                request = self.oracle.clear(lambda: make(draw()), tries=10)  # noqa: B023
            except CloseError:
                kind, parent = "plain", None  # a prompt or rules whose choices are always close
                continue
            expected = dataclasses.replace(self.oracle.expected.pop(request.request_id), logits=None)
            return Card(kind, request, expected, parent)
        raise CloseError(f"card {index} of deck {self.seed}: the margin asked for is too large")

    def _with_top_p(self, request: RowRequest) -> RowRequest:
        rng = random.Random(f"top-p {self.seed}/{request.seed}")
        return request if request.reference is not None else draws.with_top_p(request, rng)

    def cut(self, card: Card, prompt: int | None, rows: int | None) -> Card | None:
        """A shorter card: the last ``prompt`` rows of its prompt, segments of at most ``rows`` rows; None if it is not clear."""
        if prompt is None and rows is None:
            return card
        request = card.request
        made = request.rules if rows is None or card.forced else draws.shortened(request.rules, rows)
        start = 0 if prompt is None else max(len(request.prompt) - prompt, 0)
        heard = draws.cropped(request.continuous, start, len(request.prompt))
        shorter = dataclasses.replace(request, prompt=request.prompt[start:], rules=made, continuous=heard)
        try:
            self.oracle.clear(lambda: shorter, tries=1)
        except CloseError:
            return None
        expected = dataclasses.replace(self.oracle.expected.pop(shorter.request_id), logits=None)
        return dataclasses.replace(card, request=shorter, expected=expected)

    # -- kinds --------------------------------------------------------------------------------------------------------
    def _random(self, rng: random.Random, name: str, low: int, high: int) -> RowRequest:
        options = {"longest": self.scale.segment, "guided": True, "hidden": self.oracle.hidden}
        return draws.random_request(self.layout, rng, name, (low, high), **options)

    def plain(self, rng: random.Random, name: str, parent: int | None) -> RowRequest:
        return self._random(rng, name, 2, self.scale.prompt)

    def relative(self, rng: random.Random, name: str, parent: int) -> RowRequest:
        """Begins like another one."""
        return draws.begun_as(self.plain(rng, name, None), rng, self.card(parent).request, self.scale.context // 2)

    def turn(self, rng: random.Random, name: str, parent: int) -> RowRequest:
        """The next turn of a dialogue: behind another one's prompt and answer, in which one id may be altered."""
        known, layout = self.card(parent), self.layout
        answer = known.request.reference if known.forced else fed_rows(known.request, known.expected)
        rows = np.concatenate([known.request.prompt, answer])
        if rng.random() < 0.25:
            rows = draws.altered(layout, rng, rows, rng.randrange(len(rows)), rng.randint(1, layout.num_streams - 1))
        request = self.plain(rng, name, None)
        room = self.scale.context - self.scale.segment - layout.num_streams
        if len(rows) + len(request.prompt) > room:
            most = len(request.prompt)
            heard = draws.cropped(request.continuous, max(most - 5, 0), most)
            request = dataclasses.replace(request, prompt=request.prompt[-5:], continuous=heard)
        # A dialogue that has outgrown the context loses its beginning, and with it what is cached of it.
        return draws.behind(request, rows, known.request.continuous, room)

    def at_boundary(self, rng: random.Random, name: str, parent: int | None) -> RowRequest:
        """A prompt that ends around the boundary of a block."""
        most = max((self.scale.prompt + 10) // self.block, 1)
        rows = max(rng.randint(1, most) * self.block + rng.choice([-2, -1, 0, 1]), 2)
        return self._random(rng, name, rows, rows)

    def at_context(self, rng: random.Random, name: str, parent: int | None) -> RowRequest:
        """Most of the context is taken, so that it cuts the answer, or just does not."""
        rows = self.scale.context - rng.choice([1, 2, 3, rng.randint(4, 2 * self.scale.segment)])
        return self._random(rng, name, rows, rows)

    def chain(self, rng: random.Random, name: str, parent: int | None) -> RowRequest:
        """Bagpiper: several segments, guided and not."""

        def block() -> ModalityRules:
            high = rng.randint(1, self.scale.segment // 2)
            return ModalityRules(draws.sampling(rng), rng.randint(0, high), high, rng.choice([1.0, 1.5, 3.0]))

        enforce = tuple(rng.choice(["text", "audio", "audio"]) for _ in range(rng.randint(2, 5)))
        made = BagpiperRules(self.layout, enforce, block(), block())
        rows = draws.prompt(self.layout, rng, rng.randint(2, self.scale.prompt))
        return RowRequest(name, rows, made, rng.getrandbits(63))

    def teacher(self, rng: random.Random, name: str, parent: int | None) -> RowRequest:
        """OpusLM: teacher forcing."""
        rows = (2, self.scale.prompt)
        return draws.forced_request(self.layout, rng, name, rows, longest=2 * self.scale.segment)
