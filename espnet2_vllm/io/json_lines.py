"""JSON files: one object, or one a line."""

from __future__ import annotations

import gzip
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError, shown

log = logging.getLogger(__name__)

_MOST_LINE = 2**26  # bytes: a packed file may hold a line without end


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. DataError, naming the file and the line, for anything else."""
    try:
        data = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: no JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except (
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # numbers of thousands of digits, brackets within brackets
        raise DataError(f"{path}: no JSON that can be read: {type(error).__name__}: {shown(error)}") from error
    if not isinstance(data, dict):
        raise DataError(f"{path}: holds a {type(data).__name__}, expected an object")
    return data


def read_json_values(path: Path) -> list[Any]:
    """The JSON values of a file: one, or several one behind the other, as ESPnet merges the dialogues of several ranks.

    Raises:
        DataError: naming the file, for one that cannot be read, is no JSON or is empty.
    """
    values: list[Any] = []
    start, decoder = 0, json.JSONDecoder()
    try:
        text = path.read_bytes().decode("utf-8-sig").strip()
        while start < len(text):
            value, start = decoder.raw_decode(text, start)
            values.append(value)
            start += len(text) - start - len(text[start:].lstrip())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{path}: no JSON: {shown(error)}") from error
    if not values:
        raise DataError(f"{path}: is empty, expected JSON")
    return values


def iterate_json_lines(path: Path, key: str) -> Iterator[tuple[int, str, dict[str, Any] | DataError]]:
    """Line number, id and object of each line of a file, unpacked if its name ends in ``.gz``. Empty lines do not matter.

    In place of an object there is a DataError, naming file and line, for a line that is no JSON object, as far as its id (``key``)
    can be made out, and for the second line of an id. A line without an id is left out, with a warning.

    Raises:
        DataError: if the file cannot be read on.
    """
    number, lines = 0, {}
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while raw := file.readline(_MOST_LINE + 1):
                number += 1
                if len(raw) > _MOST_LINE:
                    raise DataError(f"{path}:{number}: a line of more than {_MOST_LINE} bytes; is this the right file?")
                if not raw.strip() or (number == 1 and raw.strip() == b"\xef\xbb\xbf"):
                    continue
                uid, found = _object(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw, f"{path}:{number}", key)
                if uid is None:
                    log.warning("%s; the line is left out", found)
                    continue
                if uid in lines:
                    found = DataError(
                        f"{path}:{number}: id {uid!r} was already in line {lines[uid]}; ids must be unique"
                    )
                lines.setdefault(uid, number)
                yield number, uid, found
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or cut short behind line {number}: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _object(raw: bytes, where: str, key: str) -> tuple[str | None, dict[str, Any] | DataError]:
    """Id and object of a line, or the id as far as it can be made out and what is wrong."""
    try:
        item = json.loads(raw.decode("utf-8"))
    except json.JSONDecodeError as error:
        return _id_in(raw, key), DataError(f"{where}: no JSON: {error.msg} at character {error.pos}")
    except UnicodeDecodeError as error:
        return _id_in(raw, key), DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})")
    except (ValueError, RecursionError, MemoryError) as error:
        reason = f"no JSON that can be read: {type(error).__name__}: {shown(error)}"
        return _id_in(raw, key), DataError(f"{where}: {reason}")
    if not isinstance(item, dict):
        return None, DataError(f"{where}: holds a {type(item).__name__}, expected an object")
    uid = item.get(key)
    if not isinstance(uid, str):
        return None, DataError(f"{where}: expected {key!r}, a string")
    return uid, item


def _id_in(raw: bytes, key: str) -> str | None:
    """The id in a line that is no JSON."""
    found = re.search(rb'"%s"\s*:\s*("(?:[^"\\]|\\.){1,4096}")' % re.escape(key.encode()), raw)
    try:
        return json.loads(found[1]) if found else None
    except ValueError:
        return None


def read_json_lines(path: Path, key: str, value: str, kind: type) -> dict[str, Any]:
    """``{item[key]: item[value]}`` of all lines.

    Of an item that cannot be read, comes twice, or whose value is missing or of another kind, there is a DataError in its place: it
    costs that id alone.
    """
    found: dict[str, Any] = {}
    for number, uid, item in iterate_json_lines(path, key):
        found[uid] = item if isinstance(item, DataError) else item.get(value)
        if not isinstance(found[uid], kind | DataError):
            what = f"{value!r} is {shown(found[uid])[:80]}" if value in item else f"has no {value!r}"
            found[uid] = DataError(f"{path}:{number}: {what}; expected a {kind.__name__}")
    return found


def distinct_ids(values: list[Any], where: str) -> tuple[str, ...]:
    """The ids of a list in JSON. DataError, beginning with ``where``, if it is empty, or holds no id or one twice."""
    if not values:
        raise DataError(f"{where} is empty, there is nothing to decode")
    if not all(isinstance(uid, str) and uid for uid in values):
        raise DataError(f"{where} must be a list of ids")
    twice = [uid for uid, count in Counter(values).items() if count > 1]
    if twice:
        raise DataError(f"{where} come twice: {', '.join(twice[:5])}")
    return tuple(values)


def keyed_messages(
    found: Any, path: Path, *, fields: Collection[int] = (3, 4)
) -> Iterator[tuple[str, list[list[Any]]]]:
    """Key and messages of each utterance in what ESPnet's ``results.json`` (a mapping) or ``dialogue.json`` (a list of them) holds.

    Args:
        path: of the file, for messages. fields: how many a message has (3 in ``results.json``, 4 in ``dialogue.json``).

    Raises:
        DataError: if it holds something else.
    """
    for record in found if isinstance(found, list) else [found]:
        if not isinstance(record, dict):
            raise DataError(f"{path}: expected messages by key, found {type(record).__name__}")
        for key, messages in record.items():
            if not isinstance(messages, list) or not all(isinstance(m, list) and len(m) in fields for m in messages):
                raise DataError(f"{path}: {key}: expected a list of [role, modality, ...], found {str(messages)[:80]}")
            yield key, messages
