"""Tiny models with random weights, one a family, and recorded ones."""

import pathlib

from conftest import golden_models

from espnet2_vllm.bench.geometry import Geometry, opuslm_layout, random_geometry
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.layout import Layout

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
}


def tiny_bagpiper(streams: int = 4) -> Geometry:
    backbone = {**_SMALL, "architectures": ["SpeechLMQwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
    return random_geometry("tiny-bagpiper", backbone, Layout.bagpiper(50, [9] * streams))


def tiny_opuslm(codebooks: int = 3) -> Geometry:
    backbone = {**_SMALL, "architectures": ["SpeechLMLlamaForCausalLM"], "model_type": "llama"}
    layout = opuslm_layout(50, ssl_units=12, codes=8, codebooks=codebooks, phonemes=3)
    return random_geometry("tiny-opuslm", backbone, layout)


FAMILIES = {"bagpiper": tiny_bagpiper, "opuslm": tiny_opuslm}


def converted_model(family: str, name: str) -> pathlib.Path:
    """The conversion of a recorded model, made once in a session. Do not change it."""
    (model,) = [path for path in golden_models(family) if path.name == name]
    return ensure_converted(model).path
