"""Audio of Lhotse manifests. Recordings that are plain files are read here; everything else needs Lhotse itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..prompt.bagpiper import Clip, read_recording
from .json_lines import iterate_json_lines

# In this order, as ESPnet's ``LhotseAudioReader`` prefers them.
MANIFESTS = ("cuts.jsonl.gz", "recordings.jsonl.gz")


@dataclass(frozen=True)
class LhotseReader:
    """Items of a manifest by id, as they stand in it; their audio is read when it is asked for."""

    path: Path
    items: Mapping[str, Mapping[str, Any]]
    base_dir: Path

    @classmethod
    def open(cls, directory: Path, base_dir: Path) -> LhotseReader:
        """DataError for a folder without a manifest, and for a manifest that is damaged or has an id twice."""
        path = next((directory / name for name in MANIFESTS if (directory / name).is_file()), None)
        if path is None:
            raise DataError(f"{directory}: has neither {' nor '.join(MANIFESTS)}")
        items: dict[str, Mapping[str, Any]] = {}
        for number, item in iterate_json_lines(path):
            uid = item.get("id")
            if not isinstance(uid, str):
                raise DataError(f"{path}:{number}: the item has no id")
            if uid in items:
                raise DataError(f"{path}:{number}: id {uid!r} comes twice")
            items[uid] = item
        return cls(path, items, base_dir)

    def load(self, uid: str) -> Clip:
        if uid not in self.items:
            raise DataError(f"{self.path}: no item has the id {uid}")
        item = self.items[uid]
        source = _plain_file(item)
        try:
            if source is None:
                return _load_with_lhotse(item)
            wav, rate = read_recording(source, self.base_dir)
            if rate != item["sampling_rate"]:
                raise DataError(f"{source} is sampled at {rate} Hz, the manifest says {item['sampling_rate']} Hz")
        except DataError as error:
            raise DataError(f"{uid} of {self.path}: {error}") from error
        return wav, rate


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


def _load_with_lhotse(item: Mapping[str, Any]) -> Clip:
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
        wav = np.asarray(loaded.load_audio(), dtype=np.float32)
    except failures as error:
        raise DataError(f"Lhotse cannot read it: {type(error).__name__}: {error}") from error
    return (wav[None] if wav.ndim == 1 else wav), int(loaded.sampling_rate)
