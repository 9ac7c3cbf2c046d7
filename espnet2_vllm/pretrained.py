"""Checkpoints by tag or folder, and models behind a server: ``from_pretrained`` and ``from_server`` as ESPnet has them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .releases import AUTO, DEFAULT_TAG, OPUSLM, Release, read_release, refuse_base, release_files

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .served import ServedBagpiper
    from .speechlm import SpeechLM


def from_pretrained(tag_or_dir: str | Path = DEFAULT_TAG, **options: Any) -> SpeechLM:
    """Opens a checkpoint: ``SpeechLM.from_pretrained`` with a default."""
    from .speechlm import SpeechLM

    return SpeechLM.from_pretrained(tag_or_dir, **options)


def from_server(
    url: str | None = None, model: str | None = None, timeout: float = 3600.0, tts_system: str | None = AUTO
) -> ServedBagpiper:
    """A model behind a server that speaks ESPnet's wire. See ``served.ServedBagpiper``."""
    from .served import ServedBagpiper

    return ServedBagpiper(url, model, timeout, tts_system)


def open_pretrained(
    tag_or_dir: str | Path,
    *,
    train_config: str | Path | None = None,
    checkpoint: str | Path | None = None,
    vocab_order: str = "yaml",
    allow_base: bool = False,
) -> tuple[Checkpoint, Release]:
    """The checkpoint of a tag, a release or experiment folder or a converted directory, converted once, and what it says of itself.

    Raises:
        CheckpointError: if there is none, or it cannot be used; ReleaseFileError for a folder with several of a kind.
        UntunedError: for the pre-trained base without ``allow_base``.
    """
    from .checkpoint import ensure_converted
    from .checkpoint.hub import fetch_parts, find_folder

    name = str(tag_or_dir)
    refuse_base(name, allow_base)
    place = find_folder(tag_or_dir)
    folder = place if place.is_dir() else None
    config, weights = (place, checkpoint) if folder is None else release_files(folder, train_config, checkpoint)
    if folder is None and train_config is not None:
        config = Path(train_config)
    fetch_parts(config)
    opened = ensure_converted(config, weights, vocab_order=vocab_order)
    return opened, OPUSLM if opened.family == "opuslm" else read_release(name, folder or place.parent)


def one_of(checkpoint: str | Path | None, model_file: str | Path | None) -> str | Path | None:
    """Two names of one argument. ConfigError where both are given."""
    if checkpoint is not None and model_file is not None:
        raise ConfigError("checkpoint and model_file are one argument; give one of them")
    return model_file if checkpoint is None else checkpoint
