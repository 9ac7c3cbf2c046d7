"""What data files name: tables of ids, paths, and codes in Kaldi arks."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..audio.reading import split_place
from ..errors import DataError
from .keyed import read_keyed

# How an array of an ark begins: binary, or text with or without a bracket. Everything else that kaldiio reads is audio, a
# numpy file or a pickle (which runs code).
_BINARY = b"\0B"
_TEXT_STARTS = b" [-0123456789"
_INT_VECTOR = b"\4"
_VALUE_BYTES = {"FM": 4, "FV": 4, "DM": 8, "DV": 8, "CM": 1, "CM2": 2, "CM3": 1}
_SHOWN = 300  # characters of a name
_RANGE = re.compile(r"(.+)\[([0-9:,\s]*)\]")


@dataclass(frozen=True)
class Table(Mapping[str, str]):
    """A Kaldi file: a value behind each id. ``table[id]`` may be empty; ``value`` refuses that.

    ``faults``: what is wrong with lines of other ids.
    """

    path: Path
    records: Mapping[str, str]
    faults: Mapping[str, DataError] = field(default_factory=dict)

    def __getitem__(self, key: str) -> str:
        return self.records[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def value(self, key: str) -> str:
        """Value of ``key``; DataError, naming the file, if the id is missing, stands alone in its line, or has a fault."""
        if key in self.faults:
            raise DataError(str(self.faults[key])) from self.faults[key]
        if key not in self.records:
            raise DataError(f"{self.path}: no line begins with {key}")
        if not self.records[key]:
            raise DataError(f"{self.path}: nothing stands behind {key} in its line")
        return self.records[key]


def read_table(path: Path) -> Table:
    """The file as a table, in its order; what is wrong with a line costs its id. DataError for a file that cannot be read."""
    faults: dict[str, DataError] = {}
    return Table(path, read_keyed(path, faults), faults)


def locate(name: str, base_dir: Path) -> Path:
    """A file or folder as ESPnet finds it, from the working directory, or else from ``base_dir``.

    Raises:
        DataError: if it is at neither place.
    """
    places = [Path(name), base_dir / name]
    for place in places:
        if os.path.exists(place):  # Path.exists raises for a name that is too long
            return place
    if len(name) > _SHOWN:
        raise DataError(f"{name[:_SHOWN]}...: no such file; the name has {len(name)} characters")
    looked = " and ".join(dict.fromkeys(str(place.absolute()) for place in places))
    raise DataError(f"{name}: no such file; looked at {looked}")


def locate_data(name: str, base_dir: Path) -> Path:
    """As ``locate``, for what data name: a plain file, since a pipe or a device would be waited for without end."""
    path = locate(name, base_dir)
    if not path.is_file():
        raise DataError(f"{name}: is no plain file, but a folder, pipe or device")
    return path


def load_codes(spec: str, base_dir: Path) -> np.ndarray:
    """Whole numbers that ``spec`` (``file.ark:offset`` or a file) names, found by ``locate``: [n] or [rows, columns] int32.

    ``file.ark:offset[0:9]`` are rows, ``[0:9,2:3]`` rows and columns, both ends included, as Kaldi has them.

    Raises:
        DataError: naming the ark and the offset, if there are none, or the ark is cut short or declares more than it holds.
    """
    import kaldiio

    if spec.endswith("|"):
        raise DataError(f"{spec}: codes are read from files, not from commands; copy them into an ark")
    whole, ranges = _split_ranges(spec)
    name, offset = split_place(whole)
    path, offset = locate_data(name, base_dir), offset or 0
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if offset >= size:
                raise DataError(f"{spec}: the offset lies behind the end of the ark ({size} bytes); is it cut short?")
            file.seek(offset)
            start = file.read(5)
            if not start.startswith(_BINARY) and start[:1] not in (bytes([b]) for b in _TEXT_STARTS):
                raise DataError(f"{spec}: no array of codes begins here, found {start!r}; is the offset right?")
            file.seek(offset)
            if start.startswith(_BINARY):
                _check_size(file, size - offset, spec)
                file.seek(offset)
            is_ints = start[2:3] == _INT_VECTOR
            array = _int_vector(file) if is_ints else kaldiio.matio.read_kaldi(file)
    except OSError as error:
        raise DataError(f"{spec}: cannot be read: {error.strerror}") from error
    except (
        ArithmeticError,
        AssertionError,
        EOFError,
        LookupError,
        MemoryError,
        RuntimeError,
        ValueError,
        struct.error,
    ) as error:
        raise DataError(
            f"{spec}: the array is damaged, or the ark is cut short ({type(error).__name__}: {error})"
        ) from error
    return _part(_whole_numbers(array, spec), ranges, spec)


def _split_ranges(spec: str) -> tuple[str, str]:
    """``x.ark:17[0:9]`` -> what is in front of the brackets, and what is within; there may be none."""
    found = _RANGE.fullmatch(spec.strip())
    return (found[1], found[2]) if found and split_place(found[1])[1] is not None else (spec.strip(), "")


def _part(array: np.ndarray, ranges: str, spec: str) -> np.ndarray:
    """Rows, and columns behind a comma, of Kaldi's ``first:last``."""
    if not ranges.strip():
        return array
    slices = []
    for axis, text in enumerate(ranges.split(",")):
        bounds = text.strip()
        if axis >= array.ndim:
            raise DataError(f"{spec}: [{ranges}] has more ranges than the array of shape {array.shape} has dimensions")
        if bounds in ("", ":"):
            slices.append(slice(None))
            continue
        first, _, last = (part.strip() for part in bounds.partition(":"))
        length = array.shape[axis]
        if not (first.isdecimal() and last.isdecimal() and max(len(first), len(last)) < 10):
            raise DataError(f"{spec}: the range {bounds!r} is not first:last, two whole numbers")
        if not int(first) <= int(last) < length:
            what = ("rows" if array.ndim > 1 else "values", "columns")[axis]
            raise DataError(f"{spec}: {what} {first} to {last} (both included) are not among its {length}")
        slices.append(slice(int(first), int(last) + 1))
    return array[tuple(slices)]


def _check_size(file: BinaryIO, left: int, spec: str) -> None:
    """Refuses an array that declares more than the ``left`` bytes from here to the end of the ark, before memory is asked for."""
    header = file.read(32)
    if header[2:3] == _INT_VECTOR:
        (count,) = struct.unpack_from("<i", header, 3)
        needed = 5 * count + 7
    else:
        kind = header[2:6].partition(b" ")[0].decode("ascii", "replace")
        if kind not in _VALUE_BYTES:
            return  # kaldiio says what it expects
        place = 3 + len(kind)
        if kind.startswith("CM"):
            count, columns = struct.unpack_from("<ii", header, place + 8)
        else:
            (count,) = struct.unpack_from("<i", header, place + 1)
            columns = struct.unpack_from("<i", header, place + 6)[0] if kind.endswith("M") else 1
        needed = place + count * columns * _VALUE_BYTES[kind]
        count = min(count, columns)
    if count < 0 or needed > left:
        raise DataError(
            f"{spec}: the array declares {needed} bytes, and {left} are there; the ark is damaged or cut short"
        )


def _int_vector(file: BinaryIO) -> np.ndarray:
    (count,) = struct.unpack("<i", file.read(7)[3:])
    values = np.frombuffer(file.read(5 * count), [("width", "u1"), ("value", "<i4")])
    if not (values["width"] == 4).all():
        raise ValueError("a value is not of four bytes")
    return values["value"].copy()


def _whole_numbers(array: np.ndarray, spec: str) -> np.ndarray:
    whole = array.astype(np.int32)
    if array.dtype.kind not in "iu" and not np.array_equal(whole, array):
        raise DataError(f"{spec}: codes must be whole numbers, found {array.dtype} values such as {array.flat[0]}")
    return whole
