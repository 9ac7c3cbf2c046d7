"""Two result trees of the same set: which keys both have, and where texts, ids and waveforms differ.

Reads what any of ESPnet's decoders or ours wrote: Kaldi files with their token arks, ``dialogue.json``, ``results.json``; the
merged files of a recipe where there are some, else those of the ranks and jobs below. Of hidden folders only ``.scores`` counts.
"""

from __future__ import annotations

import difflib
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..io.json_lines import keyed_messages, read_json_values
from ..io.kaldi import load_codes
from ..io.keyed import read_keyed
from ..io.names import safe_file_name
from ..io.scores import FOLDER as SCORES

_SOUND = (".wav", ".flac")


@dataclass(frozen=True)
class Item:
    """What a tree holds of one key. ``wav``: a file, or ``ark:byte``; ``ids``: how to load them, None where none were kept."""

    text: str | None = None
    wav: str | None = None
    ids: str | None = None


@dataclass(frozen=True)
class Difference:
    """Where one key differs. ``kind``: missing, text, ids or wav."""

    key: str
    kind: str
    detail: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TreeComparison:
    """Agreement of two trees; ``counts`` has, by kind, how many were compared and how many were equal."""

    counts: Mapping[str, tuple[int, int]]
    differences: tuple[Difference, ...]
    keys: int

    @property
    def differing(self) -> int:
        return len({difference.key for difference in self.differences})

    @property
    def share(self) -> float:
        """Keys that differ in anything, of all keys of both trees."""
        return self.differing / self.keys if self.keys else 0.0


def read_tree(root: Path) -> dict[str, Item]:
    """Items by ``entry/key`` (Kaldi files), ``key/turn`` (dialogues) or ``key/message`` (results.json).

    Raises:
        DataError: for a folder without results, or with a file that cannot be read, or with several results of one key, as
            where several sets lie in it.
    """
    if not root.is_dir():
        raise DataError(f"{root}: is no folder with results")
    items: dict[str, Item] = {}
    places: dict[str, Path] = {}
    for path, found in _contents(root):
        for key, item in found:
            earlier = items.get(key)
            if earlier is None or (earlier.text, earlier.wav) == (item.text, item.wav):
                items[key] = earlier if earlier is not None and item.ids is None else item
                places[key] = path
                continue
            raise DataError(
                f"{root}: {places[key]} and {path} hold different results of {key}; compare set by set, and remove what earlier "
                "runs left"
            )
    if not items:
        raise DataError(f"{root}: holds no results (results.json, dialogue.json, or Kaldi files with *_token.scp)")
    return items


def _contents(root: Path) -> Iterator[tuple[Path, Iterable[tuple[str, Item]]]]:
    """Each file with results, and what it holds."""
    yield from ((path, _messages(root, path)) for path in _files(root, "results.json"))
    yield from ((path, read_turns(path)) for path in _files(root, "dialogue.json"))
    yield from ((path, _lines(root, path)) for path in _entries(root))


def _files(root: Path, name: str) -> list[Path]:
    if (root / name).is_file():
        return [root / name]
    return sorted(path for path in root.rglob(name) if not _hidden(root, path))


def _hidden(root: Path, path: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _entries(root: Path) -> list[Path]:
    """Kaldi files: those beside which the scp of their tokens lies."""

    def of(folder: Path) -> list[Path]:
        names = [path.name for path in folder.glob("*.scp")]
        stems = {n.removesuffix("_token.scp") for n in names if n.endswith("_token.scp")}
        stems |= {n.removeprefix("token_").removesuffix(".scp") for n in names if n.startswith("token_")}
        return [folder / stem for stem in sorted(stems) if not stem.startswith("rank") and (folder / stem).is_file()]

    if found := of(root):
        return found
    folders = sorted(path for path in root.rglob("*") if path.is_dir() and not _hidden(root, path))
    return [path for folder in folders for path in of(folder)]


def _lines(root: Path, path: Path) -> Iterator[tuple[str, Item]]:
    scps = [path.with_name(f"{path.name}_token.scp"), path.with_name(f"token_{path.name}.scp")]
    ids = next((read_keyed(scp) for scp in scps if scp.is_file()), {})
    for key, value in read_keyed(path).items():
        sound = value.partition(":")[0].endswith((*_SOUND, ".ark"))
        item = Item(None if sound else value, value if sound else None, ids.get(key))
        yield f"{path.name}/{key}", item


def read_turns(path: Path) -> Iterator[tuple[str, Item]]:
    """Turns of a ``dialogue.json``, by ``key/turn``."""
    scp = path.with_name("dialogue_token.scp")
    ids = read_keyed(scp) if scp.is_file() else {}
    for key, turns in (item for records in _load(path) for item in keyed_messages(records, path, fields=(4,))):
        if not turns:
            yield key, Item()  # is there, and says nothing
        for number, (_, modality, _, content) in enumerate(turns):
            content, text = _said(content), modality == "text_bpe"
            name = f"{key}_segment{number}"
            yield f"{key}/{number}", Item(content if text else None, None if text else content, ids.get(name))


def _messages(root: Path, path: Path) -> Iterator[tuple[str, Item]]:
    (results,) = _load(path)
    for key, messages in keyed_messages(results, path, fields=(3,)):
        scores = path.parent / SCORES / safe_file_name(key, ".npz")
        if not messages:
            yield key, Item()
        for number, (_, modality, content) in enumerate(messages, 1):
            content = _said(content)
            text, ids = modality == "text", str(scores) if number == 1 and scores.is_file() else None
            yield f"{key}/{number}", Item(content if text else None, None if text else content, ids)


def _said(content: Any) -> str | None:
    """What a message holds, a list of one string as that string; as JSON, what is neither a string nor null."""
    one = content[0] if isinstance(content, list) and len(content) == 1 else content
    return one if one is None or isinstance(one, str) else json.dumps(content, ensure_ascii=False)


def _load(path: Path) -> list[Any]:
    values = read_json_values(path)
    if len(values) > 1 and path.name == "results.json":
        raise DataError(f"{path}: holds {len(values)} JSON values, expected one")
    return values


# -- comparing ---------------------------------------------------------------------------------------------------------
def compare_trees(a: Path, b: Path, *, wav_tolerance: int = 2) -> TreeComparison:
    """``wav_tolerance``: largest difference of two samples, in steps of 16 bits, that still counts as equal.

    Raises:
        DataError: see ``read_tree``. A sound, or ids, that cannot be read are a difference.
    """
    left, right = read_tree(a), read_tree(b)
    counts = {kind: [0, 0] for kind in ("text", "ids", "wav")}
    differences = []
    for key in sorted(left.keys() | right.keys()):
        if key not in left or key not in right:
            differences.append(Difference(key, "missing", f"only in {a if key in left else b}"))
            continue
        one, other = left[key], right[key]
        checks = {"text": _text_difference, "ids": _ids_difference, "wav": _wav_difference}
        for kind, check in checks.items():
            first, second = getattr(one, kind), getattr(other, kind)
            if first is None and second is None:
                continue
            if first is None or second is None:
                if kind != "ids":  # a tree without token arks says nothing about ids
                    differences.append(Difference(key, kind, f"{kind} only in {b if first is None else a}"))
                continue
            found = check(key, (a, first), (b, second), wav_tolerance)
            counts[kind][0] += 1
            counts[kind][1] += found is None
            differences += [] if found is None else [found]
    totals = {kind: (compared, equal) for kind, (compared, equal) in counts.items()}
    return TreeComparison(totals, tuple(differences), len(left.keys() | right.keys()))


def _text_difference(key: str, a: tuple[Path, str], b: tuple[Path, str], tolerance: int) -> Difference | None:
    if a[1] == b[1]:
        return None
    one, other = a[1].split(" "), b[1].split(" ")
    parts = []
    for kind, start, stop, begin, end in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind == "equal":
            words = one[start:stop]
            parts += words if len(words) < 7 else [*words[:3], "...", *words[-3:]]
            continue
        parts += [f"[-{' '.join(one[start:stop])}-]"] * (start < stop) + [f"{{+{' '.join(other[begin:end])}+}}"] * (
            begin < end
        )
    return Difference(key, "text", " ".join(parts), {"a": a[1], "b": b[1]})


def _ids_difference(key: str, a: tuple[Path, str], b: tuple[Path, str], tolerance: int) -> Difference | None:
    try:
        one, other = _load_ids(*a), _load_ids(*b)
    except DataError as error:
        return Difference(key, "ids", str(error))
    if np.array_equal(one, other):
        return None
    if one.shape[1:] != other.shape[1:]:
        shapes = [list(one.shape), list(other.shape)]
        return Difference(key, "ids", f"arrays of {shapes[0]} and {shapes[1]}", {"shapes": shapes})
    shared = min(len(one), len(other))
    unequal = np.flatnonzero((one[:shared] != other[:shared]).reshape(shared, -1).any(1))
    first = int(unequal[0]) if len(unequal) else shared
    same = shared - len(unequal)
    detail = f"{same} of {max(len(one), len(other))} equal, first difference at {first}"
    return Difference(key, "ids", detail, {"first": first, "equal": same, "lengths": [len(one), len(other)]})


def _load_ids(root: Path, where: str) -> np.ndarray:
    """Raises DataError."""
    name, colon, offset = where.rpartition(":")
    if not (colon and offset.isdecimal()):
        name, colon, offset = where, "", ""
    path = Path(name) if name.endswith(".npz") else _find(root, name)
    if path.suffix != ".npz":
        return load_codes(f"{path}{colon}{offset}", root)
    try:
        with np.load(path) as file:
            return file["ids"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: no ids can be read: {error}") from error


def _wav_difference(key: str, a: tuple[Path, str], b: tuple[Path, str], tolerance: int) -> Difference | None:
    try:
        (one, rate), (other, other_rate) = _load_wav(*a), _load_wav(*b)
    except DataError as error:
        return Difference(key, "wav", str(error))
    if rate != other_rate:
        return Difference(key, "wav", f"{rate} Hz and {other_rate} Hz", {"rates": [rate, other_rate]})
    shared = min(len(one), len(other))
    apart = np.abs(one[:shared] - other[:shared]) * 32768
    most = float(apart.max(initial=0.0))
    if len(one) == len(other) and most <= tolerance:
        return None
    far = np.flatnonzero(apart > tolerance)
    first = float(far[0] if len(far) else shared) / rate
    noise = float(np.mean((one[:shared] - other[:shared]) ** 2)) if shared else 0.0
    signal = float(np.mean(one[:shared] ** 2)) if shared else 0.0
    snr = 10 * np.log10(signal / noise) if noise and signal else None
    detail = f"{len(one)} and {len(other)} samples, up to {most:.0f} steps apart from {first:.3f} s on"
    detail += "" if snr is None else f", SNR {snr:.1f} dB"
    return Difference(
        key, "wav", detail, {"samples": [len(one), len(other)], "steps": most, "first_second": first, "snr_db": snr}
    )


def _load_wav(root: Path, where: str) -> tuple[np.ndarray, int]:
    from ..audio import read_audio

    name, colon, offset = where.rpartition(":")
    in_ark = bool(colon) and offset.isdecimal()
    path = _find(root, name if in_ark else where)
    wav, rate = read_audio(f"{path}:{offset}" if in_ark else str(path))
    return wav[0], rate


def _find(root: Path, name: str) -> Path:
    """A file that a tree names, below the tree, however that was called when the file was written.

    What the name says by itself may be a file of another tree, of which this one is a copy.
    """
    parts = Path(name).parts or ("",)
    places = [root.joinpath(*parts[start:]) for start in range(1 if parts[0] == "/" else 0, len(parts))]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(f"{name or 'nothing is named'}: no such file below {root}")
    return found
