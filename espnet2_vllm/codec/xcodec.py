"""Xcodec, the codec of the released Bagpiper models, through transformers' XcodecModel.

Source: X-Codec (arXiv:2408.17175); use as in ESPnet's DiscreteAudioIO, codec_choice Xcodec.
"""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import XcodecConfig, XcodecModel

from espnet2_vllm.codec.base import CodecDescription
from espnet2_vllm.codec.locate import locate_directory
from espnet2_vllm.codec.modules import for_inference
from espnet2_vllm.codec.torch_codec import TorchCodec
from espnet2_vllm.errors import CheckpointError

# What transformers raises on missing, damaged or foreign files (JSON errors are ValueErrors).
_LOADING_ERRORS = (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError, pickle.UnpicklingError)


class Xcodec(TorchCodec):
    """An XcodecModel that keeps its first ``num_codebooks`` codebooks."""

    def __init__(self, model: XcodecModel, num_codebooks: int | None, device: str) -> None:
        config = model.config
        available = config.num_quantizers
        super().__init__(
            sample_rate=config.sample_rate,
            hop=config.hop_length,
            num_codebooks=available if num_codebooks is None else min(available, num_codebooks),
            codebook_size=config.codebook_size,
            device=device,
        )
        self._model = for_inference(model, self.device)
        self._bandwidth = nearest_bandwidth(config, self.num_codebooks)

    def _encode_tensor(self, wav: torch.Tensor) -> torch.Tensor:
        codes = self._model.encode(wav, bandwidth=self._bandwidth, return_dict=False).transpose(1, 2)
        if codes.shape[2] < self.num_codebooks:
            raise CheckpointError(
                f"Xcodec encodes {codes.shape[2]} codebooks at {self._bandwidth} kbit/s, its target bandwidth nearest "
                f"to {self.num_codebooks} codebooks; keep at most {codes.shape[2]} (codec_max_token_per_frame)"
            )
        return codes

    def _decode_tensor(self, codes: torch.Tensor) -> torch.Tensor:
        return self._model.decode(codes.transpose(1, 2), return_dict=False)[:, 0]


def nearest_bandwidth(config: XcodecConfig, num_codebooks: int) -> float:
    """The target bandwidth (kbit/s) nearest to that of ``num_codebooks``; of two equally near, the first."""
    wanted = math.log2(config.codebook_size) * config.frame_rate / 1000 * num_codebooks
    return min(config.target_bandwidths, key=lambda bandwidth: abs(bandwidth - wanted))


def load(
    description: CodecDescription, *, device: str, base_dir: Path | None, state_dict: Mapping[str, Any] | None
) -> Xcodec:
    """See ``espnet2_vllm.codec.load_codec``."""
    if description.path is None or description.config_path or description.checkpoint_path:
        raise CheckpointError(f"a codec of kind 'xcodec' is described by path alone, got {description.to_dict()}")
    directory = locate_directory(description.path, base_dir=base_dir, what="Xcodec model")
    # Building the model draws initial weights; the caller's random stream must not depend on when a codec is loaded.
    with torch.random.fork_rng(devices=[]):
        model = _load_model(directory, state_dict)
    return Xcodec(model.eval(), description.num_codebooks, device)


def files(description: CodecDescription, base_dir: Path | None) -> list[Path]:
    """See ``espnet2_vllm.codec.codec_files``."""
    directory = locate_directory(description.path, base_dir=base_dir, what="Xcodec model")
    return [path for path in directory.iterdir() if path.suffix in (".json", ".safetensors", ".bin")]


def _load_model(directory: Path, state_dict: Mapping[str, Any] | None) -> XcodecModel:
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"Xcodec directory {directory} has no config.json")
    try:
        values, _ = XcodecConfig.get_config_dict(directory, local_files_only=True)
        # transformers only warns of a configuration that belongs to another model.
        if values.get("model_type") != XcodecConfig.model_type:
            raise CheckpointError(f"{config_file} describes a model of type {values.get('model_type')!r}, not 'xcodec'")
        config = XcodecConfig.from_dict(values)
    except _LOADING_ERRORS as error:
        raise CheckpointError(f"cannot read {config_file}: {error}") from error
    source = f"Xcodec directory {directory}" if state_dict is None else "the checkpoint's own codec weights"
    try:
        model, info = XcodecModel.from_pretrained(
            directory if state_dict is None else None,
            config=config,
            state_dict=None if state_dict is None else dict(state_dict),
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except _LOADING_ERRORS as error:
        raise CheckpointError(f"cannot load codec weights from {source}: {error}") from error
    for verb, keys in (("lacks", info["missing_keys"]), ("has unknown", info["unexpected_keys"])):
        if keys:
            raise CheckpointError(
                f"{source} {verb} {len(keys)} tensors of XcodecModel as {config_file} describes it: "
                f"{', '.join(sorted(keys)[:5])}{', ...' if len(keys) > 5 else ''}"
            )
    return model
