"""Audio of Lhotse manifests. Recordings that are plain files are read here; everything else needs Lhotse itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError, shown
from ..prompt.bagpiper import Clip, read_recording
from .json_lines import iterate_json_lines
from .omniio import ADDRESSES

if TYPE_CHECKING:
    from ..audio.reading import Reading

# In this order, as ESPnet's ``LhotseAudioReader`` prefers them.
MANIFESTS = ("cuts.jsonl.gz", "recordings.jsonl.gz")


@dataclass(frozen=True)
class LhotseReader:
    """Items of a manifest by id, as they stand in it; their audio is read when it is asked for.

    ``allow_url``: whether addresses are fetched.
    """

    path: Path
    items: Mapping[str, Mapping[str, Any] | DataError]
    base_dir: Path
    allow_url: bool = False

    @classmethod
    def open(cls, directory: Path, base_dir: Path, *, allow_url: bool = False) -> LhotseReader:
        """DataError for a folder without a manifest, and for a manifest that cannot be read on."""
        path = next((directory / name for name in MANIFESTS if (directory / name).is_file()), None)
        if path is None:
            raise DataError(f"{directory}: has neither {' nor '.join(MANIFESTS)}")
        return cls(path, {uid: item for _, uid, item in iterate_json_lines(path, "id")}, base_dir, allow_url)

    def load(self, uid: str, reading: Reading | None = None) -> Clip:
        from ..audio.reading import Reading

        if uid not in self.items:
            raise DataError(f"{self.path}: no item has the id {uid}")
        item, reading = self.items[uid], reading or Reading()
        if isinstance(item, DataError):
            raise item
        source = _plain_file(item)
        try:
            if source is None:
                return _load_with_lhotse(self._checked(item, reading), reading)
            if source.rstrip().endswith("|"):
                raise DataError(f"{source[:80]}: the manifest calls it a file; a command is of type command")
            wav, rate = read_recording(source, self.base_dir, reading)
            if rate != item["sampling_rate"]:
                raise DataError(f"{source} is sampled at {rate} Hz, the manifest says {item['sampling_rate']} Hz")
        except DataError as error:
            raise DataError(f"{uid} of {self.path}: {error}") from error
        return wav, rate

    def _checked(self, item: Any, reading: Reading) -> Any:
        """The item with what its commands write in their places: none runs without limits, or where none may; so with addresses.

        Raises:
            DataError: for a source that is not allowed, or whose like Lhotse would run or wait for whatever its type says.
        """
        if isinstance(item, list):
            return [self._checked(one, reading) for one in item]
        if not isinstance(item, Mapping):
            return item
        kind, source = item.get("type"), item.get("source")
        if kind in ("command", "url", "file") and "source" in item:
            if not isinstance(source, str):
                raise DataError(f"the source of a {kind} is {shown(source)}, expected a text")
            if kind == "command":
                from ..audio.reading import output_of_command

                with output_of_command(source, self.base_dir, reading) as file:
                    return {**item, "type": "memory", "source": file.read()}
            if kind == "url" and not source.startswith(ADDRESSES):  # Lhotse runs "pipe:..."
                raise DataError(f"{shown(source)} is no address; expected {' or '.join(ADDRESSES)}...")
            if kind == "url" and not self.allow_url:
                raise DataError(f"{shown(source)} is an address, which is fetched only with --allow-url")
            if kind == "file" and os.path.exists(source) and not os.path.isfile(source):
                raise DataError(f"{shown(source)} is no plain file, but a folder, pipe or device")
        return {key: self._checked(value, reading) for key, value in item.items()}


def _plain_file(item: Mapping[str, Any]) -> str | None:
    """Path of a recording that is one whole file with nothing done to it, else None."""
    sources = item.get("sources")
    if not (isinstance(sources, list) and len(sources) == 1 and isinstance(sources[0], dict)):
        return None
    source, channels = sources[0].get("source"), sources[0].get("channels")
    plain = (
        sources[0].get("type") == "file"
        and isinstance(source, str)
        and isinstance(channels, list)
        and channels == list(range(len(channels)))
        and isinstance(item.get("sampling_rate"), int)
        and not item.get("transforms")
    )
    return source if plain else None


def _load_with_lhotse(item: Mapping[str, Any], reading: Reading) -> Clip:
    try:
        from lhotse import Recording
        from lhotse.audio import AudioLoadingError, DurationMismatchError
        from lhotse.serialization import deserialize_item
    except ImportError as error:
        raise DataError(
            "a cut, or a recording that is not one plain file, needs Lhotse, which is not installed; pip install lhotse"
        ) from error
    failures = (
        AudioLoadingError,
        DurationMismatchError,
        AssertionError,
        KeyError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    )
    try:
        loaded = Recording.from_dict(dict(item)) if "sources" in item else deserialize_item(dict(item))
        if (declared := loaded.num_samples) > reading.max_audio_samples:
            raise DataError(
                f"{declared} samples, beyond the {reading.max_audio_samples} that max_audio_samples allows; cut it into segments, "
                "or raise max_audio_samples"
            )
        wav = np.asarray(loaded.load_audio(), dtype=np.float32)
    except failures as error:
        raise DataError(f"Lhotse cannot read it: {type(error).__name__}: {error}") from error
    return (wav[None] if wav.ndim == 1 else wav), int(loaded.sampling_rate)
