"""Checkpoints by name: a folder that is here, or a tag of the Hugging Face hub; and the small files that their yaml names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..codec.locate import locate_directory
from ..codec.packed import find_archive
from ..errors import CheckpointError, ReleaseFileError
from .describe import MODEL_FILES, tokenizer_files
from .sources import DESCRIPTION_FILE, read_yaml

log = logging.getLogger(__name__)

_TAG = re.compile(r"[\w.-]+(/[\w.-]+)?")  # what the hub takes as a name


def find_folder(name: str | Path) -> Path:
    """A file or folder that is here, or the hub's files of that tag.

    Raises:
        CheckpointError: if there are none; ReleaseFileError, a FileNotFoundError, for what can only be a folder.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise CheckpointError(f"expected the folder of a checkpoint, or its tag on the hub, got {name!r}")
    # Path.exists would raise for a name that is too long
    if os.path.exists(name):
        return Path(name)
    if not isinstance(name, str) or not _TAG.fullmatch(name) or name.startswith("."):
        raise ReleaseFileError(f"{name}: there is no such folder, and this is no tag of the hub (owner/name)")
    return _download(name)


def _download(tag: str) -> Path:
    """The hub's files of ``tag``, fetched if they are not here."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    log.info("looking for %s on the hub; a Bagpiper is 18 GB", tag)
    try:
        return Path(snapshot_download(tag))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{tag}: there is no such folder, and the hub gave no checkpoint of that name "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        ) from error


class Part(NamedTuple):
    """Files of another repository that a conversion needs: those that match ``patterns``; ``key`` of the yaml names it."""

    key: str
    tag: str
    patterns: tuple[str, ...]


def fetch_parts(train_config: Path) -> None:
    """Fetches from the hub what the conversion of a Bagpiper reads of other repositories and is not here: configurations and
    tokenizer, never weights, but for an ESPnet codec (a yaml and its weights).

    What cannot be fetched is logged; the conversion says what it lacks.
    """
    if (
        not train_config.is_file()
        or train_config.name == DESCRIPTION_FILE
        or train_config.suffix not in (".yaml", ".yml")
    ):
        return
    for part in _parts(read_yaml(train_config)):
        if _TAG.fullmatch(part.tag) and not _is_here(part, train_config.parent):
            _fetch(part)


def _parts(arguments: Mapping[str, Any]) -> Iterator[Part]:
    codec = "multimodal_io.discrete_audio"
    espnet = _value(arguments, f"{codec}.codec_choice") == "ESPnet"
    wanted = {
        "model.model_hf_tag": MODEL_FILES,
        "multimodal_io.text.tokenizer_name": MODEL_FILES,
        f"{codec}.codec_hf_model_tag": ("*.yaml", "*.pth") if espnet else ("config.json",),
        "multimodal_io.continuous_audio.encoder_hf_model_tag": ("config.json", "preprocessor_config.json"),
    }
    for key, patterns in wanted.items():
        tag = _value(arguments, key)
        if isinstance(tag, str):
            yield Part(key, tag, patterns)


def _value(arguments: Any, key: str) -> Any:
    for part in key.split("."):
        arguments = arguments.get(part) if isinstance(arguments, Mapping) else None
    return arguments


def _is_here(part: Part, base_dir: Path) -> bool:
    if find_archive(part.tag, base_dir) is not None:
        return True
    try:
        folder = locate_directory(part.tag, base_dir=base_dir, what=part.key, include=part.patterns)
    except CheckpointError:
        return False
    if part.patterns is not MODEL_FILES:
        return all(any(folder.rglob(pattern)) for pattern in part.patterns)
    tokenizer = any(path.name != "config.json" for path in tokenizer_files(folder))
    return (folder / "config.json").is_file() and (tokenizer or not part.key.endswith("tokenizer_name"))


def _fetch(part: Part) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    log.info("fetching %s of %s (%s)", ", ".join(part.patterns), part.tag, part.key)
    try:
        snapshot_download(part.tag, allow_patterns=list(part.patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        log.warning(
            "%s %r cannot be fetched: %s: %s", part.key, part.tag, type(error).__name__, str(error).partition("\n")[0]
        )
