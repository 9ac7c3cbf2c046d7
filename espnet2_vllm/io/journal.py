"""What is finished, line by line, so that a restarted job goes on where it stopped.

Beside the results stands a hidden folder ``.journal`` (ESPnet's recipe takes every visible name in an output directory for an
entry) with

    journal.jsonl   first line: the settings that results depend on; then one line a finished utterance
    tokens.i32      token arrays of these utterances, raw int32 in order of completion
    lock            held while a process writes here

A line is written after the files of its utterance, so what the journal names is there. Nothing is ever rewritten; of several
lines of one key the last counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError
from ..plan import FAILED, Given, Utterance
from .scores import FOLDER as SCORES

log = logging.getLogger(__name__)

FOLDER = ".journal"
FORMAT = 1
_TOKEN_BYTES = 4
_SPEED = "rows_per_second"  # in a line for its reader; follows from the rest
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.part")  # ``files.whole_file`` and ``audio.writing``


@dataclass(frozen=True)
class Record:
    """One line: how one utterance ended, and its results except arrays and waveforms.

    Attributes:
        input: digest of the utterance's rows (``digest``); empty if it could not be read.
        rows: generated rows of all hypotheses.
        seconds: from the moment it was read until its outcome.
        audio_seconds: duration of generated audio.
        files: paths relative to the journal's directory.
        ends: how each generated segment ended (``Segment.end``).
        outside: audio ids that were no code of their stream; the codec got the nearest one.
        tokens: places (byte, count) of token arrays in ``tokens.i32``.
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
    tokens: tuple[tuple[int, int], ...] = ()
    result: Any = None
    outside: int = 0
    prompt: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        values = {name: value for name, value in values.items() if name != _SPEED}
        lists = {name: tuple(values[name]) for name in ("files", "ends")}
        return cls(**{**values, **lists, "tokens": tuple((start, count) for start, count in values["tokens"])})


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
            first = json.loads(file.readline())
    except (FileNotFoundError, ValueError):
        return None
    found = first.get("settings") if isinstance(first, dict) else None
    return found if isinstance(found, dict) else None


def in_use(directory: Path) -> bool:
    """Whether a process writes results to ``directory`` at this moment."""
    path = directory / FOLDER / "lock"
    if not path.is_file():
        return False
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


class Journal:
    """The journal of one output directory, open for this process alone.

    Args:
        directory: where the results go; created if missing.
        settings: JSON mapping of what results depend on; a journal written under others is set aside, with a warning that names
            what differs.
        resume: whether to look at an earlier journal at all.

    Raises:
        ConfigError: if another process writes to the directory.
        DataError: if the earlier journal is damaged before its last line.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, resume: bool = True) -> None:
        self.directory = directory
        self.records: dict[str, Record] = {}
        folder = directory / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._tokens_path = folder / "journal.jsonl", folder / "tokens.i32"
        self._lock = _lock(folder / "lock", directory)
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
        self._file = open(self.path, "ab")  # noqa: SIM115
        self._tokens = open(self._tokens_path, "ab")  # noqa: SIM115

    # -- reading ------------------------------------------------------------------------------------------------------
    def finished(self, key: str, input_digest: str) -> bool:
        """Whether ``key`` was decoded from the same rows, did not fail, and its files are still there."""
        record = self.records.get(key)
        return (
            record is not None
            and record.outcome not in FAILED
            and record.input == input_digest
            and all(start + count * _TOKEN_BYTES <= self._tokens.tell() for start, count in record.tokens)
            and all((self.directory / name).is_file() for name in record.files)
        )

    def load_tokens(self, place: tuple[int, int]) -> np.ndarray:
        """The array that ``save_tokens`` put at ``place``. [n] int32"""
        self._tokens.flush()
        start, count = place
        return np.fromfile(self._tokens_path, dtype="<i4", count=count, offset=start).astype(np.int32, copy=False)

    # -- writing ------------------------------------------------------------------------------------------------------
    def save_tokens(self, tokens: np.ndarray) -> tuple[int, int]:
        """Appends [n] ids; returns their place (byte, count) for the record."""
        self.begin()
        start = self._tokens.tell()
        self._tokens.write(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
        return start, tokens.size

    def append(self, record: Record) -> None:
        """Writes one line, after the tokens before it have reached the file."""
        self.begin()
        self._tokens.flush()
        speed = round(record.rows / record.seconds, 2) if record.seconds else None
        self._file.write(json.dumps(asdict(record) | {_SPEED: speed}).encode() + b"\n")
        self._file.flush()
        self.records[record.key] = record

    def close(self) -> None:
        for file in (self._file, self._tokens, self._lock):
            if file is not None:
                file.close()

    # -- opening ------------------------------------------------------------------------------------------------------
    def _start(self, settings: Mapping[str, Any]) -> bool:
        """Whether there was an earlier journal."""
        aside = self.path.exists()
        if aside:
            old = self.path.with_name("journal.old.jsonl")
            os.replace(self.path, old)
            log.warning("%s: starting over; the earlier journal is now %s", self.directory, old)
            # Of tokens that are gone as well; whoever reads the results would take them for the new ones'.
            shutil.rmtree(self.directory / SCORES, ignore_errors=True)
            for name in ("run.json", "report.json", "report.html"):
                self.path.with_name(name).unlink(missing_ok=True)
        self._tokens_path.unlink(missing_ok=True)
        self.path.write_bytes(json.dumps({"journal": FORMAT, "settings": settings}).encode() + b"\n")
        return aside

    def _load(self, settings: Mapping[str, Any]) -> bool:
        """Reads the earlier journal; False if there is none that fits ``settings``."""
        if not self.path.is_file():
            return False
        lines, whole = _read_lines(self.path)
        if not lines or lines[0].get("journal") != FORMAT or not isinstance(lines[0].get("settings"), dict):
            return False
        changed = _differences(lines[0]["settings"], settings)
        if changed:
            log.warning("%s: the earlier journal is of other settings: %s", self.directory, "; ".join(changed))
            return False
        for number, line in enumerate(lines[1:], 2):
            try:
                record = Record.from_dict(line)
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"{self.path}:{number}: is no record of a finished utterance ({error!r}); begin anew with --no_resume, or "
                    "remove the file"
                ) from error
            self.records[record.key] = record
        os.truncate(self.path, whole)
        return True


def _sweep(directory: Path) -> None:
    """Takes away the unfinished files of a process that was killed; nobody else writes here while the lock is held."""
    for path in directory.rglob(".*.part"):
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _lock(path: Path, directory: Path) -> Any:
    file = open(path, "ab")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"{directory}: another process is writing results there; wait for it, end it, or give another output directory"
        ) from None
    except OSError as error:
        log.warning(
            "%s: this file system has no locks (%s); see to it that no other job writes there", directory, error
        )
    return file


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All whole lines and their length in bytes; a last line that a crash cut short is left out."""
    data = path.read_bytes()
    lines, whole = [], 0
    for number, raw in enumerate(data.splitlines(keepends=True), 1):
        parsed = None
        with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
            parsed = json.loads(raw)
        if isinstance(parsed, dict) and raw.endswith(b"\n"):
            lines.append(parsed)
            whole += len(raw)
            continue
        if whole + len(raw) < len(data):
            raise DataError(
                f"{path}:{number}: is damaged, expected one JSON object a line; begin anew with --no_resume, or remove the file"
            )
        log.warning("%s:%d: the last line was cut short and is dropped; its utterance is decoded again", path, number)
    return lines, whole


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
