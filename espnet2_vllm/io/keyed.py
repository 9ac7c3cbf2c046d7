"""Kaldi files: one record a line, the key first."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from ..errors import DataError
from .files import whole_file

log = logging.getLogger(__name__)


def read_keyed(path: Path, faults: dict[str, DataError] | None = None) -> dict[str, str]:
    """``key value...`` lines -> {key: value}, in file order; the value of a line that holds a key alone is empty.

    A byte-order mark, carriage returns before line ends, blanks around the value and empty lines do not matter. Only a
    newline ends a line: values may hold other separators of Unicode.

    Args:
        faults: takes what is wrong with single lines, by key, so that it costs that key alone; such keys are left out. None: it is
            raised.

    Raises:
        DataError: naming file and line, for a missing file, a line that is not UTF-8, a key that comes twice.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    records: dict[str, str] = {}
    first_line: dict[str, int] = {}
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        fault = None
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            fault = DataError(f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start}); convert the file")
            line = raw.decode("utf-8", "replace").strip()
        if not line:
            continue
        key, value = (line.split(maxsplit=1) + [""])[:2]
        if key in first_line:
            fault = DataError(
                f"{path}:{number}: key {key!r} was already in line {first_line[key]}; keys must be unique"
            )
        if fault is not None:
            if faults is None:
                raise fault
            log.warning("%s", fault)
            faults[key] = fault
            records.pop(key, None)
        first_line.setdefault(key, number)
        if key not in (faults or ()):
            records[key] = value
    return records


def write_keyed(path: Path, records: Mapping[str, str], *, in_order: bool = False) -> None:
    """{key: value} -> lines, sorted (C locale) unless they are to stay ``in_order``; whole or not at all."""
    lines = records.items() if in_order else sorted_by_key(records)
    with whole_file(path) as file:
        file.writelines(f"{key} {value}".rstrip(" ") + "\n" for key, value in lines)


def sorted_by_key(records: Mapping[str, str]) -> list[tuple[str, str]]:
    """Records in the order of ``LC_ALL=C sort``: by the bytes of the key."""
    return sorted(records.items(), key=lambda item: item[0].encode("utf-8", "surrogatepass"))
