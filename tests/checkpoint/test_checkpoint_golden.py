"""Every golden model, converted: bit for bit the source's tensors, and loadable by transformers."""

import json

import numpy as np
import pytest
import torch
from checkpoint_samples import MODELS, converted, golden_layout, model_file, of_family, state_dict
from conftest import golden_files
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from espnet2_vllm.checkpoint import open_checkpoint
from espnet2_vllm.checkpoint.checking import check_directory

OPUSLM_NAMES = {
    "corelm.emb.weight": "model.embed_tokens.weight",
    "corelm.lm_head.weight": "lm_head.weight",
    "corelm.head_emb.weight": "stream_emb.weight",
}

each_model = pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
each_bagpiper = pytest.mark.parametrize("model", of_family("bagpiper"), ids=lambda path: path.name)
each_opuslm = pytest.mark.parametrize("model", of_family("opuslm"), ids=lambda path: path.name)


def language_model(directory):
    index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
    tensors = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(directory / name)
        assert {index["weight_map"][key] for key in part} == {name}
        tensors |= part
    assert tensors.keys() == index["weight_map"].keys()
    return tensors


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@each_bagpiper
def test_bagpiper_tensors_bit_for_bit(model):
    source = state_dict(model_file(model))
    directory = converted(model)
    codec = "multimodal_io_dict.discrete_audio.codec_model."
    tower = "multimodal_io_dict.continuous_audio.model."
    assert_same(load_file(directory / "codec/model.safetensors"), _below(source, codec))
    continuous = _below(source, tower) | {
        f"adaptor.{name}": tensor for name, tensor in _below(source, "adaptor.continuous_audio.").items()
    }
    if continuous:
        assert_same(load_file(directory / "continuous_audio/model.safetensors"), continuous)
    assert (directory / "continuous_audio").is_dir() == bool(continuous)
    rest = {k: v for k, v in source.items() if not k.startswith(("multimodal_io_dict.", "adaptor."))}
    assert_same(language_model(directory), rest)


def _below(tensors, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@each_opuslm
def test_opuslm_tensors_bit_for_bit(model):
    source = state_dict(model_file(model))
    assert source.pop("criterion.lm_head.weight") is not None
    wanted = {
        OPUSLM_NAMES.get(name, name.replace("corelm.decoders.", "", 1)): tensor for name, tensor in source.items()
    }
    wanted["stream_emb.weight"] = wanted["stream_emb.weight"][:9]
    assert_same(language_model(converted(model)), wanted)


@each_model
def test_layout_and_facts(model):
    checkpoint = open_checkpoint(converted(model), family=model.parent.name)
    assert checkpoint.layout == golden_layout(model)
    assert checkpoint.family == model.parent.name
    assert checkpoint.max_rows == _backbone(model)["max_position_embeddings"]
    assert checkpoint.source["model_file"] == str(model_file(model))
    if checkpoint.family == "opuslm":
        assert checkpoint.preprocessor["speaker_prompt_length"] == 16
        assert checkpoint.preprocessor["pad_speaker_prompt"] is True
        assert checkpoint.preprocessor["n_ctx"] == 2048
        assert checkpoint.preprocessor["codec_token_per_frame"] == 9
    else:
        assert checkpoint.preprocessor["audio_output"] == "discrete_audio"
        has_encoder = "contaudio" in model.name
        assert checkpoint.preprocessor["audio_input"] == ("continuous_audio" if has_encoder else "discrete_audio")
        assert (checkpoint.continuous_audio is not None) == has_encoder


def _backbone(model):
    folder = "hf_backbone" if model.parent.name == "opuslm" else "backbone"
    return json.loads((model / folder / "config.json").read_text(encoding="utf-8"))


@each_model
def test_config_is_the_backbones_own(model):
    original = _backbone(model)
    path = converted(model) / "config.json"
    config = AutoConfig.from_pretrained(converted(model))
    assert config.model_type == original["model_type"]
    same = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps hidden_act"
    for key in same.split():
        assert getattr(config, key) == original[key], key
    if "head_dim" in original:
        assert config.head_dim == original["head_dim"]
    assert config.vocab_size == open_checkpoint(converted(model)).layout.vocab_size
    assert config.tie_word_embeddings is False
    # transformers 5 reads the one, transformers 4 the other
    assert config.rope_parameters["rope_theta"] == original["rope_theta"]
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["rope_theta"] == original["rope_theta"]
    assert written["rope_scaling"] is None
    assert written["eos_token_id"] is written["bos_token_id"] is written["pad_token_id"] is None
    assert written["architectures"][0].startswith("SpeechLM")


@each_model
def test_transformers_loads_backbone_and_head(model):
    loaded, info = AutoModelForCausalLM.from_pretrained(converted(model), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) == {"stream_emb.weight"}
    tensors = language_model(converted(model))
    state = loaded.state_dict()
    assert state.keys() == tensors.keys() - {"stream_emb.weight"}
    for name, tensor in state.items():
        assert torch.equal(tensor.float(), tensors[name].float()), name
    assert loaded.get_input_embeddings().weight.data_ptr() != loaded.lm_head.weight.data_ptr()


@each_bagpiper
def test_forward_is_espnets(model):
    """Embedding, backbone and heads of the conversion reproduce what ESPnet computed for ten rows."""
    (path,) = golden_files(f"bagpiper/functions/forward_{model.name}.npz")
    recorded = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
    loaded = AutoModelForCausalLM.from_pretrained(converted(model), dtype=torch.float32, attn_implementation="eager")
    streams = language_model(converted(model))["stream_emb.weight"].clone()
    streams[0] = 0
    ids = recorded["ids"]
    embedded = loaded.get_input_embeddings()(ids)
    embedded[:, 1:][ids[:, 1:] == 0] = 0
    embeds = embedded.sum(dim=1)
    assert torch.allclose(embeds, recorded["embeds"], atol=1e-5)
    with torch.inference_mode():
        hidden = loaded.model(inputs_embeds=embeds[None]).last_hidden_state[0]
        logits = loaded.lm_head(hidden[-3:, None] + streams)
    assert torch.allclose(hidden, recorded["hidden"], atol=1e-3)
    assert torch.allclose(logits, recorded["logits_last3"], atol=1e-3)


@each_model
def test_check_finds_nothing(model):
    findings = check_directory(converted(model))
    assert [finding.what for finding in findings if not finding.ok] == []
    assert {"layout", "config", "weights", "tokenizer", "codec"} <= {finding.what.split(":")[0] for finding in findings}
