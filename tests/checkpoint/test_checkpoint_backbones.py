"""What a backbone's configuration may say: released ones pass, and what engines read differently is refused by name.

That the settings that pass mean the same everywhere is shown by ``tests/backends/test_backbone_settings.py``.
"""

import json

import pytest
from checkpoint_samples import copy_of
from released import OLMO2_7B, QWEN3_8B, SMOLLM2_1_7B
from transformers import AutoConfig

from espnet2_vllm.checkpoint import convert
from espnet2_vllm.checkpoint.backbones import check_backbone
from espnet2_vllm.errors import CheckpointError

# The keys that the released files have beside the geometry.
WITH_ALL_KEYS = {
    "Qwen3-8B": {
        **QWEN3_8B, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "initializer_range": 0.02, "max_window_layers": 36, "rope_scaling": None, "sliding_window": None,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    },
    "Qwen3-8B-Base": {
        **QWEN3_8B, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 32768, "max_window_layers": 36,
        "rope_scaling": None, "sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": True, "use_sliding_window": False,
    },
    "OLMo-2-1124-7B": {
        **OLMO2_7B, "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu",
        "initializer_range": 0.02, "pad_token_id": 100277, "rope_scaling": None, "torch_dtype": "float32",
        "transformers_version": "4.47.0.dev0", "use_cache": False,
    },
    "SmolLM2-1.7B": {
        **SMOLLM2_1_7B, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0,
        "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
    },
    "SmolLM2-1.7B-Instruct": {
        **SMOLLM2_1_7B, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False, "pad_token_id": 2, "pretraining_tp": 1,
        "rope_scaling": None, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "SmolLM2-360M": {
        **SMOLLM2_1_7B, "hidden_size": 960, "is_llama_config": True, "rope_interleaved": False, "hidden_act": "silu",
    },
}  # fmt: skip


def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", WITH_ALL_KEYS)
def test_released_configurations_pass_in_both_spellings(name, tmp_path):
    """As released, as transformers 5 saves them again, and with all defaults written out."""
    check_backbone(write(tmp_path / "released", WITH_ALL_KEYS[name]), "backbone")
    config = AutoConfig.from_pretrained(tmp_path / "released")
    config.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/config.json").read_text(encoding="utf-8"))
    assert saved["rope_parameters"]["rope_theta"] == WITH_ALL_KEYS[name]["rope_theta"] and "rope_theta" not in saved
    assert "dtype" in saved or "torch_dtype" not in WITH_ALL_KEYS[name]
    check_backbone(tmp_path / "saved", "backbone")
    check_backbone(write(tmp_path / "full", config.to_dict()), "backbone")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
REFUSED = {
    "qwen3": [
        ({"attention_bias": True}, "attention_bias is true: expected false"),
        ({"attention_bias": 0}, "attention_bias is 0: expected false"),
        ({"use_sliding_window": True}, "use_sliding_window is true: expected false"),
        ({"layer_types": ["sliding_attention"] * 36}, 'layer_types is .*: expected "full_attention" for every layer'),
        ({"num_experts": 128}, "num_experts is 128: the key is not known here, leave it out"),
    ],
    "llama": [
        ({"qkv_bias": True}, "qkv_bias is true: expected false"),
        ({"bias": True}, "bias is true: expected false"),
        ({"sliding_window": 512}, "sliding_window is 512: expected null"),
        ({"layer_types": ["sliding_attention"] * 24}, "layer_types is"),
        ({"rope_interleaved": True}, "rope_interleaved is true: expected false"),
    ],
    "olmo2": [
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0: expected null"),
        ({"sliding_window": 512}, "sliding_window is 512: expected null"),
        ({"mlp_bias": True}, "mlp_bias is true: expected false"),
    ],
}
FOR_ALL = [
    ({"hidden_act": "gelu"}, 'hidden_act is "gelu": expected "silu"'),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: expected 1.0 or null"),
    ({"is_causal": False}, "is_causal is false: expected true"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*: expected null"),
    ({"dual_chunk_attention_config": {"chunk_size": 4}}, "dual_chunk_attention_config is"),
    ({"num_hidden_layers": "2"}, 'num_hidden_layers is "2": expected a positive whole number'),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0: expected a positive number"),
    ({"something": {"new": "x" * 100}}, r"something is .{50,70}\.\.\.: the key is not known here, leave it out"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 'rope_scaling.rope_type is "linear": expected one of default'),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling.rope_type is "dynamic"'),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, 'rope_scaling.rope_type is "longrope"'),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 'rope_parameters.rope_type is "linear"'),
    ({"rope_scaling": 2.0}, "rope_scaling is 2.0: expected a mapping or null"),
    ({"rope_scaling": {**YARN, "attention_factor": 1.2}}, "rope_scaling.attention_factor is 1.2: expected null"),
    ({"rope_scaling": {**YARN, "attn_factor": 1.2}}, "rope_scaling.attn_factor is 1.2: expected null"),
    ({"rope_scaling": {**YARN, "mscale": 0.7}}, "rope_scaling.mscale is 0.7: expected null"),
    ({"rope_scaling": {**YARN, "mscale_all_dim": 1}}, "rope_scaling.mscale_all_dim is 1: expected null"),
    ({"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling.truncate is false: expected true or null"),
    ({"rope_scaling": {**YARN, "extrapolation_factor": 1}}, "rope_scaling.extrapolation_factor is 1: the key is not known"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling lacks original_max_position_embeddings"),
    (
        {"rope_scaling": YARN, "max_position_embeddings": 40960},
        "factor 4.0 times original_max_position_embeddings 8192 is not max_position_embeddings 40960",
    ),
    ({"rope_scaling": LLAMA3}, "rope_scaling lacks original_max_position_embeddings, which llama3 needs"),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "rope_parameters.partial_rotary_factor is 0.25",
    ),
    (
        {"rope_scaling": YARN, "max_position_embeddings": 32768, "rope_parameters": {**YARN, "beta_fast": 8}},
        "rope_scaling and rope_parameters differ",
    ),
]  # fmt: skip
BASE = {"qwen3": "Qwen3-8B", "llama": "SmolLM2-1.7B", "olmo2": "OLMo-2-1124-7B"}
CASES = [
    pytest.param(kind, changes, words, id=f"{kind}-{'-'.join(changes)}-{place}")
    for kind in BASE
    for place, (changes, words) in enumerate([*REFUSED[kind], *FOR_ALL])
]


@pytest.mark.parametrize(("kind", "changes", "words"), CASES)
def test_what_is_read_differently_is_refused_by_key_and_value(kind, changes, words, tmp_path):
    folder = write(tmp_path / "body", WITH_ALL_KEYS[BASE[kind]] | changes)
    with pytest.raises(CheckpointError, match=words) as caught:
        check_backbone(folder, "model.model_hf_tag of train.yaml")
    assert f"{folder}/config.json (model.model_hf_tag of train.yaml): a {kind} backbone" in str(caught.value)


def test_every_key_is_named_at_once_and_nothing_is_converted(tmp_path):
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    path = folder / "backbone/config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"attention_bias": True, "new_key": 3}), "utf-8")
    with pytest.raises(CheckpointError, match="attention_bias is true.*new_key is 3"):
        convert(folder, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_keys_of_another_architecture_stay_behind(tmp_path):
    """Where they are neutral they are let through, but no engine is to see them."""
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    path = folder / "backbone/config.json"
    strays = {
        "qkv_bias": False,
        "bias": False,
        "clip_qkv": None,
        "quantization_config": None,
        "partial_rotary_factor": 1.0,
    }
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | strays), "utf-8")
    convert(folder, tmp_path / "converted")
    written = json.loads((tmp_path / "converted/config.json").read_text(encoding="utf-8"))
    assert not strays.keys() & written.keys()
    assert "partial_rotary_factor" not in written["rope_parameters"]
