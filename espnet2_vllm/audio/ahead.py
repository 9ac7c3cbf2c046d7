"""Encodes the sound of utterances ahead of the engine: many utterances together, in a thread of its own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import EngineError, SpeechLMError
from ..plan import LATER, Given, Utterance

if TYPE_CHECKING:
    from .tower import AudioTower

log = logging.getLogger(__name__)

# Of sound that are encoded together, at most: one batch keeps the device from decoding for a bounded time.
SECONDS = 640.0
_BATCHES = 2  # that wait or are being encoded

Item = Any  # Utterance, or (key, error) of one that could not be read


def encoded(items: Iterable[Item], make_tower: Callable[[], AudioTower], *, together: int = 64) -> Iterator[Item]:
    """``items`` in their order, continuous rows with their vectors. What has none passes as it is.

    While a batch is being encoded ``plan.LATER`` is given, so that whoever waits for the next utterance can do something else.
    An utterance that cannot be encoded, for want of memory too, becomes (key, error), whoever is beside it.

    Args:
        make_tower: called once, when the first sound comes. What it raises ends the iteration.
        together: utterances that are encoded at once, at most.
    """
    source, exhausted = iter(items), False
    encoder = _Encoder(make_tower)
    batches: deque[tuple[list[Item], Future | None]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="audio") as pool:
        while True:
            while not exhausted and len(batches) < _BATCHES:
                batch, exhausted = _next_batch(source, together)
                if batch:
                    heard = any(map(sounds, batch))
                    batches.append((batch, pool.submit(encoder, batch) if heard else None))
            if not batches:
                return
            batch, future = batches[0]
            while future is not None and not future.done():
                yield LATER
            batches.popleft()
            yield from batch if future is None else future.result()


def sounds(item: Item) -> list[Any]:
    """The continuous rows of an item."""
    if not isinstance(item, Utterance):
        return []
    return [rows for part in item.parts if isinstance(part, Given) for rows in part.continuous]


def _next_batch(source: Iterator[Item], together: int) -> tuple[list[Item], bool]:
    """Utterances with sound up to the limits, or one item without; and whether ``source`` has ended."""
    batch: list[Item] = []
    samples = 0
    while len(batch) < together and samples < SECONDS * 16000:
        item = next(source, None)
        if item is None:
            return batch, True
        batch.append(item)
        rows = sounds(item)
        if not rows:
            break  # nothing to wait for
        samples += sum(len(one.wav) for one in rows)
    return batch, False


class _Encoder:
    """What runs in the thread."""

    def __init__(self, make_tower: Callable[[], AudioTower]) -> None:
        self._make, self._tower = make_tower, None

    def __call__(self, batch: Sequence[Item]) -> list[Item]:
        self._tower = self._tower or self._make()
        return encode_each(batch, self._tower)


def encode_each(batch: Sequence[Item], tower: AudioTower) -> list[Item]:
    """``encode_batch``; where that fails, in halves: the guilty utterance alone becomes (key, error)."""
    if not any(map(sounds, batch)):
        return list(batch)
    try:
        return encode_batch(batch, tower)
    except Exception as error:  # noqa: BLE001 - whatever an encoder raises is the outcome of its utterance
        if len(batch) > 1:
            log.warning("audio: %d utterances could not be encoded together (%s); in halves instead", len(batch), error)
            half = len(batch) // 2
            return [*encode_each(batch[:half], tower), *encode_each(batch[half:], tower)]
        return [(batch[0].key, _outcome_of(error, batch[0].key))]


def _outcome_of(error: Exception, key: str) -> SpeechLMError:
    if isinstance(error, SpeechLMError):
        return error
    log.debug("audio: %s could not be encoded", key, exc_info=error)  # its outcome says it in a sentence
    if "out of memory" in str(error):
        return EngineError(f"{key}: no memory left on the device to encode its audio; lower gpu_memory_utilization")
    return EngineError(f"{key}: its audio could not be encoded: {type(error).__name__}: {error}")


def encode_batch(batch: Sequence[Item], tower: AudioTower) -> list[Item]:
    """The same items with the vectors of their continuous rows."""
    places = [place for place, item in enumerate(batch) if sounds(item)]
    found = tower.encode([[rows.wav for rows in sounds(batch[place])] for place in places])
    result = list(batch)
    for place, vectors in zip(places, found, strict=True):
        left = iter(vectors)
        parts = [
            replace(part, continuous=tuple(replace(rows, vectors=next(left)) for rows in part.continuous))
            if isinstance(part, Given)
            else part
            for part in batch[place].parts
        ]
        result[place] = replace(batch[place], parts=tuple(parts))
    return result
