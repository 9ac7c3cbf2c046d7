"""What is finished, line by line, so that a restarted job goes on where it stopped.

Beside the results stands a hidden folder ``.journal`` (ESPnet's recipe takes every visible name in an output directory for an
entry) with

    journal.jsonl   first line: the settings that results depend on; then one line a finished utterance
    tokens.i32      token arrays of these utterances, raw int32 in order of completion
    lock            held while a process writes here; holder.json says by which

A line is written after the files of its utterance, so what the journal names is there. Of several lines of one key the last
counts. Each line ends in a digest of itself, and holds those of the files, parts of archives and token arrays of its utterance:
what is not as it was written is decoded again, and said.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..plan import FAILED, OUTCOMES, Given, Utterance
from .files import open_own, own_folder, whole_file
from .locks import Lock, is_held
from .scores import FOLDER as SCORES
from .sealing import Part, damage, digest_of, sealed, unsealed

log = logging.getLogger(__name__)

FOLDER = ".journal"
FORMAT = 2  # 1 had no digests
_TOKEN_BYTES = 4
CHECKPOINT_PATH = "checkpoint_path"  # in the settings, for reports; the same model elsewhere gives the same results
_SPEED = "rows_per_second"  # in a line for its reader; follows from the rest
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.part")  # ``files.whole_file`` and ``audio.writing``

Place = tuple[int, int, str]  # first byte, ids, digest


@dataclass(frozen=True)
class Record:
    """One line: how one utterance ended, and its results except arrays and waveforms.

    Attributes:
        input: digest of the utterance's rows (``digest``); empty if it could not be read.
        rows: generated rows of all hypotheses.
        seconds: from the moment it was read until its outcome.
        audio_seconds: duration of generated audio.
        files: paths relative to the journal's directory.
        parts: of each of ``files`` what it must be (``sealing.Part``): all of it, or in an archive one entry.
        ends: how each generated segment ended (``Segment.end``).
        outside: audio ids that were no code of their stream; the codec got the nearest one.
        tokens: places (byte, count, digest) of token arrays in ``tokens.i32``.
        result: JSON of the family's writer.
        prompt: texts that were given, where ``result`` does not hold them; for reports.
    """

    key: str
    outcome: str
    reason: str = ""
    input: str = ""
    rows: int = 0
    seconds: float = 0.0
    audio_seconds: float = 0.0
    files: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    tokens: tuple[Place, ...] = ()
    result: Any = None
    outside: int = 0
    prompt: str = ""
    parts: tuple[Part, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """KeyError, TypeError or ValueError for what is no record."""
        values = {name: value for name, value in values.items() if name != _SPEED}
        lists = {name: tuple(values[name]) for name in ("files", "ends")}
        for name in ("tokens", "parts"):
            lists[name] = tuple(tuple(entry) for entry in values.get(name, ()))
        record = cls(**{**values, **lists})
        record._check()
        return record

    def _check(self) -> None:
        kinds = dict.fromkeys(("key", "outcome", "reason", "input", "prompt"), str)
        kinds |= {"rows": int, "outside": int, "seconds": int | float, "audio_seconds": int | float}
        wrong = [name for name, kind in kinds.items() if not isinstance(getattr(self, name), kind)]
        wrong += [name for name in ("files", "ends") if not all(isinstance(one, str) for one in getattr(self, name))]
        if not all(map(_is_place, self.tokens)):
            wrong.append("tokens")
        if not all(_is_place((part[0] or 0, *part[1:])) for part in self.parts):
            wrong.append("parts")
        if wrong or self.outcome not in OUTCOMES:
            raise ValueError(f"{', '.join(wrong) or 'outcome'} cannot be so")


def _is_place(entry: Sequence[Any]) -> bool:
    """Two numbers and, in journals of today, a digest."""
    *numbers, digest = entry if len(entry) == 3 else (*entry, "")
    return (
        len(numbers) == 2 and all(type(number) is int and number >= 0 for number in numbers) and isinstance(digest, str)
    )


def digest(utterance: Utterance) -> str:
    """Digest of everything that an utterance gives to the model."""
    state = hashlib.blake2b(digest_size=16)
    for part in utterance.parts:
        arrays = (part.rows,) if isinstance(part, Given) else (part.header, part.reference)
        state.update(f"{type(part).__name__} {part.modality} {part.role}\n".encode())
        for array in arrays:
            rows = np.zeros((0, 0)) if array is None else array
            state.update(f"{rows.shape}\n".encode())
            state.update(np.ascontiguousarray(rows, dtype="<i4").tobytes())
        for heard in part.continuous if isinstance(part, Given) else ():
            state.update(f"{heard.start} {heard.count}\n".encode())
            state.update(np.ascontiguousarray(heard.wav, dtype="<f4").tobytes())
    return state.hexdigest()


def earlier_settings(directory: Path) -> dict[str, Any] | None:
    """Settings that the journal in ``directory`` was written under; None if there is no journal, or no readable one."""
    try:
        with open(directory / FOLDER / "journal.jsonl", "rb") as file:
            first = unsealed(file.readline())
    except (FileNotFoundError, ValueError):
        return None
    found = first.get("settings")
    return found if isinstance(found, dict) else None


def in_use(directory: Path) -> bool:
    """Whether a process writes results to ``directory`` at this moment."""
    return is_held(directory / FOLDER)


class Journal:
    """The journal of one output directory, open for this process alone.

    Args:
        directory: where the results go; created if missing.
        settings: JSON mapping of what results depend on; a journal written under others is set aside, with a warning that names
            what differs.
        resume: whether to look at an earlier journal at all.

    Raises:
        ConfigError: if another process writes to the directory, or what would be written to is a symbolic link.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, resume: bool = True) -> None:
        self.directory = directory
        self.records: dict[str, Record] = {}
        folder = own_folder(directory / FOLDER)
        self.path, self._tokens_path = folder / "journal.jsonl", folder / "tokens.i32"
        self._lock = Lock(folder, directory)
        try:
            _sweep(directory)
            settings = json.loads(json.dumps(settings))  # as it will be read back: tuples are lists, keys are strings
            self._file = self._tokens = None
            self._settings = settings
            if resume and self._load(settings):
                self._open()
            elif not self.path.exists():
                self.begin()
        except BaseException:
            self._lock.close()
            raise

    def begin(self) -> bool:
        """Sets an earlier journal aside if it cannot be gone on with, and says so; the first thing that is saved does so too.

        Not before, because a run may still be refused (by the engine, for an option): it must not cost what is finished.
        """
        if self._file is not None:
            return False
        aside = self._start(self._settings)
        self._open()
        return aside

    def _open(self) -> None:
        self._file = open_own(self.path, "ab")
        self._tokens = open_own(self._tokens_path, "ab")

    # -- reading ------------------------------------------------------------------------------------------------------
    def finished(self, key: str, input_digest: str) -> bool:
        """Whether ``key`` was decoded from the same rows, did not fail, and its files and tokens are still what was written."""
        record = self.records.get(key)
        if record is None or record.outcome in FAILED or record.input != input_digest:
            return False
        wrong = self._damage(record)
        if wrong is not None:
            log.warning("%s: decoded again: %s", key, wrong)
        return wrong is None

    def _damage(self, record: Record) -> str | None:
        """What of a record's files and tokens is not as it was written."""
        if len(record.parts) != len(record.files):
            return "the journal does not say what its files must be"
        self._tokens.flush()
        parts = [(self.directory / name, part) for name, part in zip(record.files, record.parts, strict=True)]
        parts += [(self._tokens_path, (start, count * _TOKEN_BYTES, digest)) for start, count, digest in record.tokens]
        return next((wrong for path, part in parts if (wrong := damage(path, part)) is not None), None)

    def load_tokens(self, place: Place) -> np.ndarray:
        """The array that ``save_tokens`` put at ``place``. [n] int32

        Raises:
            DataError: if it is not there any more.
        """
        self._tokens.flush()
        start, count, digest = place
        with open(self._tokens_path, "rb") as file:
            file.seek(start)
            data = file.read(count * _TOKEN_BYTES)
        if digest_of(data) != digest:
            raise DataError(f"{self._tokens_path}: changed while this run went on (from byte {start} on); run it again")
        return np.frombuffer(data, dtype="<i4").astype(np.int32)

    # -- writing ------------------------------------------------------------------------------------------------------
    def save_tokens(self, tokens: np.ndarray) -> Place:
        """Appends [n] ids; returns their place (byte, count, digest) for the record."""
        self.begin()
        start = self._tokens.tell()
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        self._tokens.write(data)
        return start, tokens.size, digest_of(data)

    def append(self, record: Record) -> None:
        """Writes one line, after the tokens before it have reached the file."""
        self.begin()
        self._tokens.flush()
        speed = round(record.rows / record.seconds, 2) if record.seconds else None
        self._file.write(sealed(asdict(record) | {_SPEED: speed}))
        self._file.flush()
        self.records[record.key] = record

    def close(self) -> None:
        for file in (self._file, self._tokens, self._lock):
            if file is not None:
                file.close()

    # -- opening ------------------------------------------------------------------------------------------------------
    def _start(self, settings: Mapping[str, Any]) -> bool:
        """Whether there was an earlier journal."""
        aside = self.path.exists()  # a link is moved, not what it points to
        if aside:
            old = self.path.with_name("journal.old.jsonl")
            os.replace(self.path, old)
            log.warning("%s: starting over; the earlier journal is now %s", self.directory, old)
            # Of tokens that are gone as well; whoever reads the results would take them for the new ones'.
            shutil.rmtree(self.directory / SCORES, ignore_errors=True)
            for name in ("run.json", "report.json", "report.html"):
                self.path.with_name(name).unlink(missing_ok=True)
        self._tokens_path.unlink(missing_ok=True)
        with open_own(self.path, "wb") as file:
            file.write(sealed({"journal": FORMAT, "settings": settings}))
        return aside

    def _load(self, settings: Mapping[str, Any]) -> bool:
        """Reads the earlier journal; False if there is none that fits ``settings``."""
        if not self.path.is_file():
            if self._tokens_path.is_file():
                log.warning("%s is gone, though there are results of an earlier run: all is decoded anew", self.path)
            return False
        data = self.path.read_bytes()
        first, *lines = data.split(b"\n")
        earlier = _settings_of(first, self.path)
        if earlier is None:
            return False
        changed = _differences(earlier | {CHECKPOINT_PATH: None}, settings | {CHECKPOINT_PATH: None})
        if changed:
            log.warning("%s: the earlier journal is of other settings: %s", self.directory, "; ".join(changed))
            return False
        kept = [first]
        for number, line in enumerate(lines[:-1], 2):
            try:
                record = Record.from_dict(unsealed(line))
            except (KeyError, TypeError, ValueError) as error:
                log.warning("%s:%d: is damaged (%s): its utterance is decoded again", self.path, number, error)
                continue
            self.records[record.key] = record
            kept.append(line)
        if lines[-1:] not in ([], [b""]):
            log.warning(
                "%s:%d: the last line was cut short and is dropped; its utterance is decoded again",
                self.path,
                len(lines) + 1,
            )
        whole = b"\n".join(kept) + b"\n"
        if whole != data:
            with whole_file(self.path, binary=True) as file:
                file.write(whole)
        return True


def _settings_of(line: bytes, path: Path) -> dict[str, Any] | None:
    """Those in the first line of a journal; None, with a warning that says why, if it cannot be gone on with."""
    try:
        head = unsealed(line)
        if head.get("journal") == FORMAT and isinstance(head.get("settings"), dict):
            return head["settings"]
        why = f"it has format {head.get('journal')!r}, this is {FORMAT}"
    except ValueError as error:
        why = f"its first line is damaged, or of an older version: {error}"
    log.warning("%s: cannot be gone on with (%s)", path, why)
    return None


def _sweep(directory: Path) -> None:
    """Takes away the unfinished files of a process that was killed; nobody else writes here while the lock is held."""
    for path in directory.rglob(".*.part"):
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """``name: old, now new`` for every setting that differs."""
    found = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name}: {before!r}, now {after!r}")
    return found
