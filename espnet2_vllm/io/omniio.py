"""Entries of omniio data sets: a parquet table that says where in large binary files each recording or text lies.

Formats: omniio (before ESPnet 202609 called arkive, github.com/wanchichen/arkive) and ESPnet's readers ``OmniIOAudioReader``,
``OmniIOTextReader`` and ``OmniIODialogueLoader`` (espnet2/speechlm/dataloader/multimodal_loader). A row has ``utt_id``, ``path``,
``start_byte_offset`` and ``file_size_bytes``; that of a part of a recording also ``start_time`` and ``end_time`` in seconds. The
path may be an http(s) address. Texts are compressed with Zstandard; a dialogue is a text that holds its messages as JSON.
"""

from __future__ import annotations

import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ConfigError, DataError, shown
from .kaldi import locate_data

if TYPE_CHECKING:
    from ..audio.reading import Reading

log = logging.getLogger(__name__)

_NEEDED = ("utt_id", "path", "start_byte_offset", "file_size_bytes")
_TIMES = ("start_time", "end_time")
_MOST_TEXT = 2**26  # bytes
ADDRESSES = ("http://", "https://")


class Place(NamedTuple):
    """Where the bytes of one id lie. Times in seconds, None for the whole recording."""

    path: str
    start: int
    size: int
    start_time: float | None
    end_time: float | None


@dataclass(frozen=True)
class OmniioTable:
    """A parquet table by id. What is wrong with a row costs its id alone. ``allow_url``: whether addresses are fetched."""

    path: Path
    places: Mapping[str, Place | DataError]
    allow_url: bool = False

    def read(self, uid: str, base_dir: Path) -> tuple[bytes, Place]:
        """Bytes of ``uid``. DataError, naming table, id and file, if they are not all there."""
        if uid not in self.places:
            raise DataError(f"{self.path}: no row has the utt_id {uid}")
        if isinstance(place := self.places[uid], DataError):
            raise place
        where = f"{uid} of {self.path}"
        try:
            return self._bytes(place, base_dir), place
        except OSError as error:
            raise DataError(f"{where}: {place.path}: cannot be read: {error.strerror}") from error
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    def _bytes(self, place: Place, base_dir: Path) -> bytes:
        if place.path.lower().startswith(ADDRESSES):
            from .fetching import fetch_range

            if not self.allow_url:
                raise DataError(f"{place.path!r} is an address, which is fetched only with --allow-url")
            return fetch_range(place.path, place.start, place.size)
        path = locate_data(place.path, base_dir)
        with path.open("rb") as file:
            left = max(0, file.seek(0, os.SEEK_END) - place.start)
            file.seek(min(place.start, file.tell()))
            data = file.read(min(place.size, left))
        if len(data) < place.size:
            there = f"{len(data)} of {place.size} bytes from byte {place.start} are there"
            raise DataError(f"{path} is cut short, {there}")
        return data


def open_table(path: Path, *, allow_url: bool = False) -> OmniioTable:
    """Reads the columns that are needed.

    Args:
        allow_url: whether recordings and texts may be fetched from http(s) addresses.

    Raises:
        DataError: naming the file, for one that is no such table.
        ConfigError: if pyarrow is not installed.
    """
    if path.is_dir():
        raise DataError(f"{path}: is a folder; expected the parquet file in it (metadata.parquet)")
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{path}: the data set needs pyarrow, which is not installed; pip install pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            absent = [name for name in _NEEDED if name not in names]
            if absent:
                raise DataError(f"{path}: has no column {', '.join(absent)}; its columns are {', '.join(names)}")
            columns = file.read([name for name in (*_NEEDED, *_TIMES) if name in names]).to_pydict()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from error
    return OmniioTable(path, _places(path, columns), allow_url)


def _places(path: Path, columns: Mapping[str, list]) -> dict[str, Place]:
    count = len(columns["utt_id"])
    times = [columns.get(name, [None] * count) for name in _TIMES]
    places: dict[str, Place | DataError] = {}
    rows = zip(*(columns[name] for name in _NEEDED), *times, strict=True)
    for number, (uid, file, start, size, begin, end) in enumerate(rows, 1):
        if not isinstance(uid, str):
            log.warning("%s: row %d: expected utt_id as text, got %s; the row is left out", path, number, shown(uid))
            continue
        if uid in places:
            places[uid] = DataError(f"{path}: row {number}: utt_id {uid!r} comes twice")
            continue
        places[uid] = Place(file, start, size, begin, end)
        if not _fits(places[uid]):
            places[uid] = DataError(
                f"{path}: row {number}: {uid}: expected a path as text, two whole numbers from 0, and times in seconds or none; "
                f"got {tuple(places[uid])}"
            )
    return places


def _fits(place: Place) -> bool:
    numbers = all(isinstance(value, int) and value >= 0 for value in (place.start, place.size))
    times = (value for value in (place.start_time, place.end_time) if value is not None)
    return (
        isinstance(place.path, str)
        and numbers
        and all(isinstance(value, int | float) and math.isfinite(value) for value in times)
    )


@dataclass(frozen=True)
class OmniioReader(ABC):
    """Content of one entry by id. DataError, naming table and id, for what it cannot give."""

    table: OmniioTable
    base_dir: Path

    @abstractmethod
    def load(self, uid: str, reading: Reading | None = None) -> Any: ...


class OmniioAudio(OmniioReader):
    """``(samples [channels, n] float32, rate)``."""

    def load(self, uid: str, reading: Reading | None = None) -> tuple[np.ndarray, int]:
        from ..audio.reading import read_audio_bytes

        data, place = self.table.read(uid, self.base_dir)
        where = f"{uid} of {self.table.path}"

        def span(rate: int) -> tuple[int, int | None]:
            first = 0 if place.start_time is None else int(place.start_time * rate)
            last = None if place.end_time is None else int(place.end_time * rate)
            return (first, last) if first >= 0 and (last is None or first < last) else (0, 0)

        wav, rate = read_audio_bytes(data, where, reading=reading, span=span)
        if not wav.shape[1]:
            raise DataError(
                f"{where}: the part from {place.start_time} to {place.end_time} s is not within the recording"
            )
        return wav, rate


class OmniioText(OmniioReader):
    """A text."""

    def load(self, uid: str, reading: Reading | None = None) -> Any:
        import pyarrow

        data, _ = self.table.read(uid, self.base_dir)
        where = f"{uid} of {self.table.path}"
        try:
            packed = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd")
            unpacked = packed.read(_MOST_TEXT + 1)
            if len(unpacked) > _MOST_TEXT:
                raise DataError(f"{where}: unpacks to more than {_MOST_TEXT} bytes of text")
            text = unpacked.decode("utf-8")
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{where}: is no text compressed with Zstandard: {error}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
        if not text.strip():
            raise DataError(f"{where}: the text is empty")
        return text


class OmniioDialogue(OmniioText):
    """Messages ``[role, modality, content]``."""

    def load(self, uid: str, reading: Reading | None = None) -> list:
        text = super().load(uid)
        try:
            messages = json.loads(text)
        except (ValueError, RecursionError, MemoryError) as error:
            raise DataError(f"{uid} of {self.table.path}: is no JSON: {shown(error)}") from error
        if isinstance(messages, dict) and "messages" in messages:
            messages = messages["messages"]
        if not isinstance(messages, list):
            raise DataError(
                f"{uid} of {self.table.path}: holds a {type(messages).__name__}, expected a list of messages"
            )
        return messages


_KINDS = {"audio": OmniioAudio, "text": OmniioText, "dialogue": OmniioDialogue}
# ESPnet's names, and those before 202609.
OMNIIO_READERS = {f"{tool}_{kind}": reader for tool in ("omniio", "arkive") for kind, reader in _KINDS.items()}
