"""JSON files: one object, or one a line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError


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
    except ValueError as error:
        raise DataError(f"{path}: no JSON: {error}") from error
    if not values:
        raise DataError(f"{path}: is empty, expected JSON")
    return values


def iterate_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a file, unpacked if its name ends in ``.gz``. Empty lines do not matter.

    Raises:
        DataError: naming file and line, for a line that is no JSON object.
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, 1):  # noqa: B007
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if not line.strip():
                    continue
                item = json.loads(line)
                if not isinstance(item, dict):
                    raise DataError(f"{path}:{number}: holds a {type(item).__name__}, expected an object")
                yield number, item
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: no JSON: {error.msg} at character {error.pos}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or cut short behind line {number}: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def read_json_lines(path: Path, key: str, value: str, kind: type) -> dict[str, Any]:
    """``{item[key]: item[value]}`` of all lines.

    Of an item whose value is missing or of another kind there is a DataError in its place: it costs that id alone.

    Raises:
        DataError: naming file and line, for an item without an id, and an id that comes twice.
    """
    found: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for number, item in iterate_json_lines(path):
        uid = item.get(key)
        if not isinstance(uid, str):
            raise DataError(f"{path}:{number}: expected {key!r} (a string) and {value!r} (a {kind.__name__})")
        if uid in found:
            raise DataError(f"{path}:{number}: id {uid!r} was already in line {lines[uid]}; ids must be unique")
        found[uid], lines[uid] = item.get(value), number
        if not isinstance(found[uid], kind):
            what = f"{value!r} is {found[uid]!r:.80}" if value in item else f"has no {value!r}"
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
