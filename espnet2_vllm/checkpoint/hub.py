"""Checkpoints by name: a folder that is here, or a tag of the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CheckpointError


def find_folder(name: str | Path) -> Path:
    """A file or folder that is here, or the hub's files of that tag. CheckpointError if there are none."""
    if not isinstance(name, (str, os.PathLike)):
        raise CheckpointError(f"expected the folder of a checkpoint, or its tag on the hub, got {name!r}")
    # Path.exists would raise for a name that is too long
    return Path(name) if os.path.exists(name) else _download(str(name))


def _download(tag: str) -> Path:
    """The hub's files of ``tag``, fetched if they are not here."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(tag))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{tag}: there is no such folder, and the hub gave no checkpoint of that name "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        ) from error
