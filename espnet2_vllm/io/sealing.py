"""Lines and parts of files that tell whether they are as they were written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SEALED = re.compile(rb'(\{.*), "digest": "([0-9a-f]{16})"\}', re.DOTALL)
_BLOCK = 1 << 20


def digest_of(data: bytes) -> str:
    """16 hex digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def sealed(values: Mapping[str, Any]) -> bytes:
    """``values`` as a line of JSON that ends in a digest of the rest of it."""
    body = json.dumps(values).encode()
    return body[:-1] + f', "digest": "{digest_of(body)}"}}\n'.encode()


def unsealed(line: bytes) -> dict[str, Any]:
    """The inverse of ``sealed``, with or without the line's end. ValueError for a line that is not as it was written."""
    match = _SEALED.fullmatch(line.removesuffix(b"\n"))
    if match is None:
        raise ValueError("it has no digest")
    body, digest = match[1] + b"}", match[2].decode()
    if digest_of(body) != digest:
        raise ValueError("its digest does not fit")
    return json.loads(body)


# (first byte, or None for a file from its first to its last byte; bytes; digest)
Part = tuple[int | None, int, str]


def part_of(path: Path, start: int | None = None) -> Part:
    """A file, or what stands in it from byte ``start`` on."""
    size = path.stat().st_size - (start or 0)
    return start, size, _digest(path, start or 0, size)


def damage(path: Path, part: Part) -> str | None:
    """What is wrong with a part of a file; None if it is as it was written."""
    start, size, digest = part
    try:
        there = path.stat().st_size
        if (start or 0) + size > there or (start is None and size != there):
            end = f"{size} bytes" if start is None else f"at least {start + size}"
            return f"{path} has {there} bytes, expected {end}"
        if _digest(path, start or 0, size) != digest:
            return f"{path} is not as it was written" + ("" if start is None else f" (from byte {start} on)")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None


def _digest(path: Path, start: int, size: int) -> str:
    state = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        file.seek(start)
        while size > 0 and (data := file.read(min(size, _BLOCK))):
            state.update(data)
            size -= len(data)
    return state.hexdigest()
