"""Checkpoints as ESPnet writes them, values rounded to float16.

Bagpiper: train.yaml, mp_rank_00_model_states.pt, backbone/, and what a release says of itself. OpusLM: config.yaml, model.pth,
hf_backbone/, decode_default.yaml. The codec lies in a folder beside both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from codec_of import codec_files
from lm_model import Net
from transformers import PretrainedConfig

SHIPPED = Path(__file__).resolve().parent.parent / "models" / "bagpiper"
RELEASE_FILES = (
    "release.json",
    "inference_text.yaml",
    "inference_audio.yaml",
)  # turns and settings, whatever was trained
CODEC = "../codec"  # from a checkpoint's folder
SSL_NAME = "log-mel k-means of this recipe (local/logmel_units.py), in place of XEUS"

_SPECIALS = {
    0: "<pad> <unk> <blank> <space> <continuous_placeholder> <sos/eos> <local_sos/eos> <unkown_task_identifer> <system_prompt> "
    "<user_input> <assistant_output> <eou>",
    32: "codec ssl codec_ssl text_bpe g2p spk class bool video_ssl svs_lb image wav text_emb ssl_feat dialogue",
    64: "textlm audiolm ssl_audiolm tts ssl_tts bpe_tts asr ssl_asr mt text2audio visual_tts vc ssl2codec svs st se codec_ssl_asr "
    "codec_ssl_tts codec_ssl_plain_tts codec_ssl_audiolm codec_ssl_se codec_ssl_tse aac_codecssl ag_codecssl text_dialogue "
    "audio_dialogue vision_dialogue image_to_text text_to_image",
}
_SUFFIXES = {0: "{}", 32: "<{}_start/end>", 64: "<{}_task>"}
_NUM_SPECIALS = 256
SPEAKER_ROWS = 30  # of a speaker prompt


def opuslm_special_names() -> list[str]:
    """The 256 special tokens in ESPnet's fixed slots."""
    names = [f"<unused_token_{i}>" for i in range(_NUM_SPECIALS)]
    for start, words in _SPECIALS.items():
        for i, word in enumerate(words.split(), start):
            names[i] = _SUFFIXES[start].format(word)
    return names


def opuslm_tokens(
    tokenizer: Path, text_size: int, units: int, books: int, entries: int
) -> tuple[list[str], dict[str, list[int]]]:
    """(token_list, token_bias). ``units`` counts the unused unit 0."""
    names = opuslm_special_names()
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    text = [f"<unused_text_{i}>" for i in range(text_size)]
    for word, i in vocabulary.items():
        text[i] = word
    blocks = {
        "ssl": [f"<ssl_code{i}>" for i in range(1, units + 1)],
        "codec": [f"<codec_layer{book}_code{i}>" for book in range(books) for i in range(entries)],
        "text_bpe": text,
    }
    bias, start = {"special_token": [0, _NUM_SPECIALS]}, _NUM_SPECIALS
    for name, block in blocks.items():
        bias[name] = [start, start + len(block)]
        names += block
        start += len(block)
    return names, bias


def write_backbone(folder: Path, config: PretrainedConfig, tokenizer: Path) -> None:
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    config.architectures = [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[config.model_type]]
    config.dtype = "float32"
    config.save_pretrained(folder)


def export_bagpiper(
    net: Net, config: PretrainedConfig, tokenizer: Path, codec: Path, out: Path, dropout: float
) -> None:
    write_backbone(out / "backbone", config, tokenizer)
    _, weights = codec_files(codec)
    tensors = {f"model.{name}": tensor for name, tensor in net.model.state_dict().items()}
    tensors["model.embed_tokens.weight"] = net.emb.weight
    tensors["lm_head.weight"] = net.lm_head.weight
    tensors["stream_emb.weight"] = net.stream_emb.weight
    for name, tensor in torch.load(weights, map_location="cpu", weights_only=True).items():
        if not name.startswith("codec.discriminator."):
            tensors[f"multimodal_io_dict.discrete_audio.codec_model.{name}"] = tensor
    _save({"module": rounded(tensors)}, out / "mp_rank_00_model_states.pt")
    _write_yaml(out / "train.yaml", _bagpiper_yaml(net.layout.num_streams, dropout))
    for name in RELEASE_FILES:
        (out / name).write_bytes((SHIPPED / name).read_bytes())


def _bagpiper_yaml(streams: int, dropout: float) -> dict[str, Any]:
    return {
        "job_type": "speechlm",
        "multimodal_io": {
            "text": {"tokenizer_name": "backbone"},
            "discrete_audio": {
                "codec_choice": "ESPnet",
                "codec_hf_model_tag": CODEC,
                "codec_max_token_per_frame": streams,
                "ssl_choice": None,
                "ssl_hf_model_tag": None,
                "delay_interleave": True,
                "stream_weights": [1 / streams] * streams,
            },
        },
        "model": {
            "model_choice": "parallel",
            "model_hf_tag": "backbone",
            "model_conf": {"attn_implementation": "sdpa", "dtype": "float32"},
            "activation_checkpointing": False,
        },
        "preprocessor": {
            "audio_input": "discrete_audio",
            "audio_output": "discrete_audio",
            "loss_region": "assistant",
            "audio_cfg": dropout,
        },
    }


def export_opuslm(
    net: Net,
    config: PretrainedConfig,
    tokenizer: Path,
    codec: Path,
    out: Path,
    tokens: tuple[list[str], dict[str, list[int]]],
) -> None:
    write_backbone(out / "hf_backbone", config, tokenizer)
    tensors = {f"corelm.decoders.model.{name}": tensor for name, tensor in net.model.state_dict().items()}
    tensors["corelm.emb.weight"] = net.emb.weight
    tensors["corelm.head_emb.weight"] = net.stream_emb.weight
    tensors["corelm.lm_head.weight"] = net.lm_head.weight
    found = rounded(tensors)
    found["criterion.lm_head.weight"] = found["corelm.lm_head.weight"]  # ESPnet's loss shares it
    _save(found, out / "model.pth")
    _write_yaml(out / "config.yaml", _opuslm_yaml(net.layout.num_streams, tokens))
    _write_yaml(out / "decode_default.yaml", decode_yaml(codec))


def _opuslm_yaml(streams: int, tokens: tuple[list[str], dict[str, list[int]]]) -> dict[str, Any]:
    names, bias = tokens
    return {
        "token_list": names,
        "token_bias": bias,
        "encoder_decoder_format": False,
        "speaker_prompt_length": SPEAKER_ROWS,
        "pad_speaker_prompt": True,
        "use_preprocessor": True,
        "subword_choice": "huggingface",
        "subword_model": "hf_backbone",
        "codec_token_per_frame": streams,
        "codec_token_in_use": streams,
        "loss_region": "target",
        "audio_modality": "codec_ssl",
        "transformer": "huggingface",
        "transformer_conf": {"hf_model_tag": "hf_backbone", "dtype": "float32", "n_ctx": 2048},
        "corelm": "ar_delay",
        "corelm_conf": {"share_emb": False},
        "model": "espnet",
        "model_conf": {},
    }


def decode_yaml(codec: Path) -> dict[str, Any]:
    config, weights = codec_files(codec)
    codec_config = {
        "codec_choice": "ESPnet",
        "codec_fs": 16000,
        "config_path": f"{CODEC}/{config.name}",
        "checkpoint_path": f"{CODEC}/{weights.name}",
    }
    lengths = {"length_method": "absolute", "maxlen": 500}
    return {
        "nproc": 1,
        "dtype": "float32",
        "inference_last_segment": False,
        "nbest": 1,
        "codec_ssl": {
            "search_algo": "topk_sampling",
            "sampling_temperature": 0.6,
            "topk": 20,
            **lengths,
            "minlen": 10,
            "tokenizer": {"codec_config": codec_config, "ssl_config": {"hf_model_tag": SSL_NAME}},
        },
        "text_bpe": {"search_algo": "greedy_search", "sampling_temperature": 0.8, "topk": 20, **lengths, "minlen": 1},
    }


def rounded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the CPU; floats in float16."""
    return {
        name: (tensor.detach().half() if tensor.is_floating_point() else tensor.detach()).cpu().contiguous()
        for name, tensor in tensors.items()
    }


def _save(content: Any, path: Path) -> None:
    """A reader never sees half a file."""
    half = path.with_suffix(".part")
    torch.save(content, half)
    half.replace(path)


def _write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=1000), encoding="utf-8")
