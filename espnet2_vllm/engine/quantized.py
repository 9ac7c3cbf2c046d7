"""Weights and cache in fewer bits, made by vLLM as it loads a checkpoint: what a word of ours stands for in its options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError

PRECISIONS = ("fp8",)
# Ours: (vLLM's option, its value for fp8). Weights have a scale for each row of a matrix, activations one for each row of the
# batch; only matrices of layers are changed: embeddings and the heads of all streams stay as they are.
MEANINGS = {"precision": ("quantization", "fp8_per_channel"), "kv_cache_precision": ("kv_cache_dtype", "fp8")}


def vllm_options(options: Mapping[str, Any], directory: Path, *, cpu: bool) -> dict[str, Any]:
    """``options`` with vLLM's own names in place of ``precision`` and ``kv_cache_precision``.

    Args:
        directory: of the checkpoint.

    Raises:
        ConfigError: for another precision, on a CPU, beside vLLM's own option, or for a checkpoint that is quantised already.
    """
    result = dict(options)
    for name, (theirs, value) in MEANINGS.items():
        wanted = result.pop(name, None)
        if wanted is None:
            continue
        if wanted not in PRECISIONS:
            raise ConfigError(f"{name} {wanted!r} is unknown; expected {' or '.join(PRECISIONS)}, or leave it out")
        if cpu:
            raise ConfigError(f"{name} {wanted}: vLLM has it on GPUs only; leave it out here")
        if theirs in result:
            raise ConfigError(
                f"{name} {wanted} and the engine option {theirs}={result[theirs]} say the same thing; give one"
            )
        if name == "precision" and (method := _quantised(directory)):
            raise ConfigError(f"precision {wanted}: {directory} is quantised already ({method}); leave it out")
        result[theirs] = value
    return result


def _quantised(directory: Path) -> str | None:
    """The method that the model's configuration names, if any."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; convert the checkpoint again") from error
    return None if not config else str(config.get("quant_method", "quantization_config in config.json"))
