"""The training yaml as today's ESPnet takes it, where it does not take it as it lies."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ..checkpoint.sources import read_yaml

log = logging.getLogger(__name__)

# Places of names that ESPnet looks up from the working directory, then in the hub. The encoder's is none of them: ESPnet chooses
# its class by that very name.
_REFERENCES = (
    ("model", "model_hf_tag"),
    ("multimodal_io", "text", "tokenizer_name"),
    ("multimodal_io", "discrete_audio", "codec_hf_model_tag"),
)
_OF_TRAINING = ("compile_transformer_body", "freeze_text_embeddings")
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


def train_config_for_espnet(path: Path, folder: Path) -> Path:
    """``path``, or a changed copy of it in ``folder``, with a line in the log for each change.

    Names of files that lie beside the yaml are written in full: ESPnet counts from the working directory. Settings of training
    that ESPnet knew until 2026-05, and hands on to transformers since, go. A backbone without weights, as the checkpoint brings
    them, gets a file of weights that holds none, because ESPnet starts from that folder.

    Raises:
        CheckpointError: if ``path`` cannot be read.
    """
    arguments = dict(read_yaml(path))
    changes = [*_found_beside(arguments, path.parent), *_without_settings_of_training(arguments)]
    changes += _with_weights(arguments, folder / "backbone")
    if not changes:
        return path
    for change in changes:
        log.warning("%s: for ESPnet %s", path, change)
    changed = folder / path.name
    changed.write_text(yaml.safe_dump(arguments, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return changed


def _block(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    """The mapping at ``names``; an empty one where there is none, of which ESPnet will speak."""
    block: Any = arguments
    for name in names:
        block = block.get(name) if isinstance(block, dict) else None
    return block if isinstance(block, dict) else {}


def _found_beside(arguments: dict[str, Any], base: Path) -> Iterator[str]:
    for *names, key in _REFERENCES:
        block = _block(arguments, *names)
        name = block.get(key)
        if isinstance(name, str) and not Path(name).exists() and (base / name).exists():
            block[key] = str((base / name).resolve())
            yield f"{key} {name} is {block[key]}"


def _without_settings_of_training(arguments: dict[str, Any]) -> Iterator[str]:
    block = _block(arguments, "model", "model_conf")
    for name in _OF_TRAINING:
        if name in block:
            yield f"model_conf.{name}, a setting of training, is left out: {block.pop(name)!r}"


def _with_weights(arguments: dict[str, Any], copy: Path) -> Iterator[str]:
    block = _block(arguments, "model")
    name = block.get("model_hf_tag")
    if not isinstance(name, str) or not Path(name).is_dir() or any(any(Path(name).glob(w)) for w in _WEIGHTS):
        return
    shutil.copytree(name, copy)
    no_weights(copy)
    block["model_hf_tag"] = str(copy)
    yield f"the backbone {name}, which has no weights of its own, is read from {copy}"


def no_weights(folder: Path) -> None:
    """Writes ``model.safetensors`` of one number that no model has, so that transformers starts from random weights."""
    import torch
    from safetensors.torch import save_file

    save_file({"none": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
