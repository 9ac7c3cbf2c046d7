"""What data files name: tables of ids, paths, and codes in Kaldi arks."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DataError
from .keyed import read_keyed

# How an array of an ark begins: binary, or text with or without a bracket. Everything else that kaldiio reads is audio, a
# numpy file or a pickle (which runs code).
_BINARY = b"\0B"
_TEXT_STARTS = b" [-0123456789"


@dataclass(frozen=True)
class Table(Mapping[str, str]):
    """A Kaldi file: a value behind each id. ``table[id]`` may be empty; ``value`` refuses that."""

    path: Path
    records: Mapping[str, str]

    def __getitem__(self, key: str) -> str:
        return self.records[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def value(self, key: str) -> str:
        """Value of ``key``; DataError, naming the file, if the id is missing or stands alone in its line."""
        if key not in self.records:
            raise DataError(f"{self.path}: no line begins with {key}")
        if not self.records[key]:
            raise DataError(f"{self.path}: nothing stands behind {key} in its line")
        return self.records[key]


def read_table(path: Path) -> Table:
    """The file as a table, in its order. DataError for what ``read_keyed`` refuses, with file and line."""
    return Table(path, read_keyed(path))


def locate(name: str, base_dir: Path) -> Path:
    """A file or folder as ESPnet finds it, from the working directory, or else from ``base_dir``.

    Raises:
        DataError: if it is at neither place.
    """
    places = [Path(name), base_dir / name]
    for place in places:
        if place.exists():
            return place
    looked = " and ".join(dict.fromkeys(str(place.absolute()) for place in places))
    raise DataError(f"{name}: no such file; looked at {looked}")


def load_codes(spec: str, base_dir: Path) -> np.ndarray:
    """Whole numbers that ``spec`` (``file.ark:offset`` or a file) names, found by ``locate``: [n] or [rows, columns] int32.

    Raises:
        DataError: naming the ark and the offset, if there are none, or the ark is cut short.
    """
    import kaldiio

    if spec.endswith("|"):
        raise DataError(f"{spec}: codes are read from files, not from commands; copy them into an ark")
    name, colon, offset = spec.rpartition(":")
    if not (colon and offset.isdecimal()):
        name, offset = spec, "0"
    path = locate(name, base_dir)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if int(offset) >= size:
                raise DataError(f"{spec}: the offset lies behind the end of the ark ({size} bytes); is it cut short?")
            file.seek(int(offset))
            start = file.read(5)
            if not start.startswith(_BINARY) and start[:1] not in (bytes([b]) for b in _TEXT_STARTS):
                raise DataError(f"{spec}: no array of codes begins here, found {start!r}; is the offset right?")
            file.seek(int(offset))
            array = kaldiio.matio.read_kaldi(file)
    except OSError as error:
        raise DataError(f"{spec}: cannot be read: {error.strerror}") from error
    except (AssertionError, EOFError, IndexError, MemoryError, RuntimeError, ValueError, struct.error) as error:
        raise DataError(
            f"{spec}: the array is damaged, or the ark is cut short ({type(error).__name__}: {error})"
        ) from error
    return _whole_numbers(array, spec)


def _whole_numbers(array: np.ndarray, spec: str) -> np.ndarray:
    whole = array.astype(np.int32)
    if array.dtype.kind not in "iu" and not np.array_equal(whole, array):
        raise DataError(f"{spec}: codes must be whole numbers, found {array.dtype} values such as {array.flat[0]}")
    return whole
