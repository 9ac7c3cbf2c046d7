"""Makes a failing world smaller, as long as it fails."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from .deck import SCALES
from .playing import without
from .world import SEATS, Setting, World


def shrink(world: World, fails: Callable[[World], bool], seconds: float = 120.0) -> World:
    """The smallest world found within ``seconds`` that still fails: fewer requests, fewer features, shorter.

    Args:
        fails: plays a world; may be asked for the same one twice.
    """
    deadline = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for step in (_fewer, _calmer, _roomier, _shorter):
            for candidate in step(world):
                if time.monotonic() > deadline:
                    return world
                if candidate != world and fails(candidate):
                    world, smaller = candidate, True
                    break
            if smaller:
                break
    return world


def _fewer(world: World) -> Iterator[World]:
    count = len(world.entries)
    size = count // 2
    while size:
        for start in range(0, count, size):
            candidate = world
            for index in reversed(range(start, min(start + size, count))):
                if len(candidate.entries) > 1:
                    candidate = without(candidate, index)
            yield candidate
        size //= 2


def _with_entry(world: World, index: int, **changes) -> World:
    entries = list(world.entries)
    entries[index] = dataclasses.replace(entries[index], **changes)
    return dataclasses.replace(world, entries=tuple(entries))


def _calmer(world: World) -> Iterator[World]:
    for index, entry in enumerate(world.entries):
        yield _with_entry(world, index, abort=None)
        yield _with_entry(world, index, reset=())
        yield _with_entry(world, index, stream=None)
        for row in entry.preempt:
            yield _with_entry(world, index, preempt=tuple(r for r in entry.preempt if r != row))
        yield _with_entry(world, index, after=None)
        yield _with_entry(world, index, arrival=0)


def _roomier(world: World) -> Iterator[World]:
    context = SCALES[world.scale].context
    yield dataclasses.replace(world, budgets=(context,))
    yield dataclasses.replace(world, budgets=world.budgets[:1])
    yield dataclasses.replace(world, seats=SEATS)
    yield dataclasses.replace(world, blocks=Setting.named(world.setting).blocks(context))
    yield dataclasses.replace(world, setting=dataclasses.replace(Setting.named(world.setting), asynchronous=False).name)


def _shorter(world: World) -> Iterator[World]:
    for index, entry in enumerate(world.entries):
        for name, lengths in (("prompt", (2, 8, 20)), ("rows", (2, 5, 12))):
            now = getattr(entry, name)
            for length in lengths:
                if now is None or length < now:
                    yield _with_entry(world, index, **{name: length})
