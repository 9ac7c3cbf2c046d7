"""Names and shapes that a model's configuration implies, from transformers' own classes on the meta device."""

import importlib
import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]

# model_type of a backbone -> the architecture that our engine registers.
ARCHITECTURES = {
    "qwen3": "SpeechLMQwen3ForCausalLM",
    "llama": "SpeechLMLlamaForCausalLM",
    "olmo2": "SpeechLMOlmo2ForCausalLM",
}

# model_type of an audio encoder -> (module, class); AutoModel does not know them.
_ENCODERS = {
    "qwen3_omni_moe_audio_encoder": (
        "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe",
        "Qwen3OmniMoeAudioEncoder",
    ),
    "qwen2_5_omni_audio_encoder": (
        "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni",
        "Qwen2_5OmniAudioEncoder",
    ),
}

# What transformers raises on a config.json that is missing, no JSON, or of an unknown type.
_CONFIG_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def read_hf_config(directory: Path, what: str) -> Any:
    """The transformers configuration in ``directory``. CheckpointError if there is none or it cannot be read.

    Python that lies beside it (``auto_map``) is never run: transformers reads the models that it knows, others are refused.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{what} {directory} has no config.json")
    try:
        plain = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if "auto_map" in plain and plain.get("model_type") not in CONFIG_MAPPING:
            raise CheckpointError(
                f"{directory / 'config.json'} ({what}): model_type {plain.get('model_type')!r} is defined by Python code of its "
                "own (auto_map), which is never run; supported backbones are " + ", ".join(ARCHITECTURES)
            )
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except _CONFIG_ERRORS as error:
        raise CheckpointError(f"cannot read {directory / 'config.json'} ({what}): {error}") from error


def backbone_shapes(config: Any, vocab_size: int, num_streams: int) -> Shapes:
    """The language model with an untied head over ``vocab_size`` ids, and its stream embedding."""
    import copy

    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.vocab_size = vocab_size
    config.tie_word_embeddings = False
    shapes = _on_meta(lambda: AutoModelForCausalLM.from_config(config))
    return shapes | {"stream_emb.weight": (num_streams, config.hidden_size)}


def xcodec_shapes(config: Any) -> Shapes:
    from transformers import XcodecModel

    return _on_meta(lambda: XcodecModel(config))


def encoder_config(config: Any) -> Any:
    """The audio encoder's part of a Qwen-Omni configuration. CheckpointError if there is no known encoder in it."""
    audio = getattr(getattr(config, "thinker_config", config), "audio_config", None)
    kind = getattr(audio, "model_type", None)
    if kind not in _ENCODERS:
        raise CheckpointError(
            f"{config.model_type} has no audio encoder that is known here (found {kind}); expected one of "
            f"{', '.join(_ENCODERS)}"
        )
    return audio


def encoder_class(model_type: str) -> Any:
    """transformers' class of an audio encoder, whose weights and arithmetic are ESPnet's."""
    module, name = _ENCODERS[model_type]
    return getattr(importlib.import_module(module), name)


def continuous_audio_shapes(audio: Any, hidden_size: int) -> Shapes:
    """The audio encoder (an ``encoder_config``) and the linear adaptor behind it."""
    encoder = encoder_class(audio.model_type)
    shapes = {f"audio_tower.{key}": shape for key, shape in _on_meta(lambda: encoder._from_config(audio)).items()}
    return shapes | {"adaptor.weight": (hidden_size, audio.output_dim), "adaptor.bias": (hidden_size,)}


def _on_meta(build: Any) -> Shapes:
    import torch

    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in build().state_dict().items()}
