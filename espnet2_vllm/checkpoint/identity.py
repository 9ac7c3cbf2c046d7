"""What a checkpoint is, so that the results of one are never taken for another's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .sources import DESCRIPTION_FILE
from .writing import write_json

if TYPE_CHECKING:
    from .opening import Checkpoint

FILE = "digests.json"
_MOST_HASHED = 10**9  # bytes of a file of unknown digest; larger ones are told by size and time of the last change
_LENGTH = 16  # hex digits of what a journal says
# Of speechlm.json what a model is; where it came from and with what it was made is not.
_FACTS = ("layout", "preprocessor", "codec", "continuous_audio", "max_rows")
# First folder of a file of a converted directory -> the part that messages name.
_PARTS = {"tokenizer": "tokenizer", "codec": "codec", "continuous_audio": "audio encoder"}


def write_digests(directory: Path) -> None:
    """``digests.json`` of a directory that has just been converted: SHA-256, size and time of the last change of each file."""
    write_json(directory / FILE, {name: _state(path) | {"sha256": _sha256(path)} for name, path in _files(directory)})


def identity(checkpoint: Checkpoint, others: Iterable[Path] = ()) -> dict[str, str]:
    """Digests of weights, tokenizer, codec, audio encoder and description, cheap to come by.

    A file that has its size and time of the conversion still is not read; others are, up to a gigabyte each.

    Args:
        others: files of a codec that lies elsewhere.
    """
    from .opening import read_description

    directory = checkpoint.path
    recorded = _recorded(directory)
    parts: dict[str, list[str]] = {}
    for name, path in _files(directory):
        folder, _, rest = name.partition("/")
        part = _PARTS.get(folder, "weights") if rest else "weights"
        parts.setdefault(part, []).append(f"{name} {_digest(path, recorded.get(name))}")
    elsewhere = sorted(path for path in others if not path.is_relative_to(directory))
    parts["codec"] = parts.get("codec", []) + [f"{path.name} {_digest(path)}" for path in elsewhere]
    content = read_description(directory)
    parts["description"] = [json.dumps({name: content[name] for name in _FACTS}, sort_keys=True)]
    return {
        part: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_LENGTH] for part, lines in parts.items() if lines
    }


def _files(directory: Path) -> Iterable[tuple[str, Path]]:
    """Everything that an engine, tokenizer, codec or audio encoder may read, by its path below ``directory``."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if (
            path.is_file()
            and not any(part.startswith(".") for part in name.parts)
            and name.name not in (DESCRIPTION_FILE, FILE)
        ):
            yield name.as_posix(), path


def _recorded(directory: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((directory / FILE).read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        RecursionError,
    ):  # converted before there was such a file, or damaged: files are read instead
        return {}
    return found if isinstance(found, dict) else {}


def _digest(path: Path, recorded: Any = None) -> str:
    state = _state(path)
    if isinstance(recorded, dict) and isinstance(recorded.get("sha256"), str) and state.items() <= recorded.items():
        return recorded["sha256"]
    return _sha256(path) if state["size"] <= _MOST_HASHED else f"{state['size']} bytes of {state['mtime_ns']}"


def _state(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
