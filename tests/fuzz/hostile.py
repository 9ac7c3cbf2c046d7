"""Hostile inputs: damaged files of every kind that is read. Each is an error that can be said in a sentence, or is read.

A draw damages one file of a kind and reads what there is. It fails by an exception that is no ``SpeechLMError``, by taking longer
than ``SECONDS``, by taking ``BYTES`` of memory, and by another result for an entry that the damage did not touch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import random
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

from .hostile_kinds import KINDS, Kind

SECONDS = 20
BYTES = 1 << 30
DIGITS = (b"9" * 30, b"4294967296", b"-1", b"1e999", b"0", b"99999999999999999999", b"9" * 5000)
TEXTS = (
    b"",
    b"\n",
    b"\r",
    b"\0",
    b'"',
    b"{",
    b"]",
    b"\xff\xfe",
    b"\\ud800",
    b"../",
    b"| ",
    b":",
    b"[" * 3000,
    b"\xed\xa0\x80",
)


def damage(data: bytes, noise: random.Random) -> bytes:
    """``data`` with one to three changes: bits flipped, cut, doubled, numbers and words put in, another length."""
    for _ in range(noise.choice((1, 1, 1, 2, 3))):
        place = noise.randrange(len(data) + 1)
        # Headers decide on most: half of all changes are at the beginning.
        place = min(place, noise.randrange(200)) if noise.random() < 0.5 else place
        stop = min(len(data), place + noise.choice((1, 4, 16, 100)))
        what = noise.randrange(7)
        if what == 0 and data:
            flipped = bytearray(data)
            for _ in range(noise.choice((1, 2, 8))):
                flipped[min(place, len(data) - 1)] ^= 1 << noise.randrange(8)
            data = bytes(flipped)
        elif what == 1:
            data = data[:place]
        elif what == 2:
            data = data[:place] + data[stop:]
        elif what == 3:
            data = data[:stop] + data[place:]
        elif what == 4:
            data = data[:place] + noise.choice(DIGITS) + data[noise.choice((place, stop)) :]
        elif what == 5:
            data = data[:place] + noise.choice(TEXTS) + data[place:]
        else:
            data = data[:place] + noise.randbytes(stop - place) + data[stop:]
    return data


class Hostile:
    """Draws by seed.

    Args:
        folder: for what the kinds make; gone with the caller.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self._whole = folder, {}

    def _made(self, name: str) -> tuple[pathlib.Path, dict[str, Any]]:
        """The undamaged files of a kind, and what they are read as."""
        if name not in self._whole:
            made = self.folder / "whole" / name.replace(" ", "_")
            made.mkdir(parents=True)
            KINDS[name].make(made)
            with tempfile.TemporaryDirectory(dir=self.folder) as copy:
                here = shutil.copytree(made, pathlib.Path(copy) / "data")
                read = KINDS[name].read(here)
            assert read and not any(str(value).startswith("refused") for value in read.values()), (name, read)
            self._whole[name] = made, read
        return self._whole[name]

    def play(self, seed: int) -> str | None:
        """What is wrong with the draw ``seed``; None if nothing is."""
        noise = random.Random(seed)
        name = noise.choice(sorted(KINDS))
        kind = KINDS[name]
        made, whole = self._made(name)
        with tempfile.TemporaryDirectory(dir=self.folder) as copy:
            here = shutil.copytree(made, pathlib.Path(copy) / "data")
            path = here / noise.choice(kind.damaged)
            before = path.read_bytes()
            path.write_bytes(damage(before, noise))
            what = f"seed {seed}: {name}: {path.name}"
            wrong = self._read(kind, here, whole, kind.untouched(before, path.read_bytes()))
            return wrong and f"{what}: {wrong}"

    def _read(self, kind: Kind, here: pathlib.Path, whole: dict[str, Any], untouched: set[str]) -> str | None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        try:
            with _at_most(SECONDS):
                read = kind.read(here)
        except _TooLongError:
            return f"took more than {SECONDS} s"
        except Exception:  # noqa: BLE001 - what a reader lets through is what is looked for
            return traceback.format_exc()
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak
        if more > BYTES:
            return f"took {more >> 20} MiB"
        for key in untouched & whole.keys():
            if kind.everything not in read and read.get(key) != whole[key]:
                return f"{key}, which was not damaged, is {str(read.get(key))[:200]!r}, not {str(whole[key])[:200]!r}"
        return None


class _TooLongError(BaseException):
    """Not an Exception, which a reader may catch."""


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(first: int, count: int) -> int:
    """Plays draws and prints the failures; the exit code. Beyond four times what may be taken, memory is refused."""
    logging.disable(logging.CRITICAL)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        hostile = Hostile(pathlib.Path(folder))
        for name in KINDS:
            hostile._made(name)
        size = int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 4 * BYTES, size + 4 * BYTES))
        for seed in range(first, first + count):
            if wrong := hostile.play(seed):
                failures += 1
                print(wrong, flush=True)
    print(json.dumps({"draws": count, "first": first, "failures": failures}), flush=True)
    return 1 if failures else 0
