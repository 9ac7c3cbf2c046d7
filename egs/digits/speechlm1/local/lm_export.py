"""Checkpoints as ESPnet writes them, values rounded to float16.

Bagpiper: train.yaml, mp_rank_00_model_states.pt, backbone/, and what a release says of itself. OpusLM: config.yaml, model.pth,
hf_backbone/, decode_default.yaml. The codec lies in a folder beside both.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from codec_of import codec_files
from lm_model import Net
from transformers import PretrainedConfig

from espnet2_vllm.backends.espnet_files import no_weights
from espnet2_vllm.layout import Layout

SHIPPED = Path(__file__).resolve().parent.parent / "models" / "bagpiper"
RELEASE_FILES = (
    "release.json",
    "inference_text.yaml",
    "inference_audio.yaml",
)  # turns and settings, whatever was trained
CODEC = "../codec"  # from a checkpoint's folder
PACKED_CODEC = "codec.zip"  # in it
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
    # ESPnet starts from the weights of that folder, all of which the checkpoint then replaces.
    no_weights(out / "backbone")
    tensors = {f"model.{name}": tensor for name, tensor in net.model.state_dict().items()}
    tensors["model.embed_tokens.weight"] = net.emb.weight
    tensors["lm_head.weight"] = net.lm_head.weight
    tensors["stream_emb.weight"] = net.stream_emb.weight
    write_bagpiper(tensors, net.layout, codec, out, dropout)


def write_bagpiper(tensors: Mapping[str, torch.Tensor], layout: Layout, codec: Path, out: Path, dropout: float) -> None:
    """What ESPnet's trainer writes: every tensor of its model, the codec's too, and the training yaml with its vocabulary."""
    arguments = _bagpiper_yaml(layout, dropout)
    tensors = {**tensors, "vocab_weight": loss_weights(arguments)}
    for name, tensor in whole_codec(codec).items():
        tensors[f"multimodal_io_dict.discrete_audio.codec_model.{name}"] = tensor
    _save({"module": rounded(tensors)}, out / "mp_rank_00_model_states.pt")
    pack_codec(codec, out / PACKED_CODEC)
    _write_yaml(out / "train.yaml", arguments)


def loss_weights(arguments: Mapping[str, Any]) -> torch.Tensor:
    """[V] weight of each id in ESPnet's loss: that of its stream for audio, else 1."""
    intervals = arguments["vocab_intervals"]
    weights = torch.ones(intervals["discrete_audio"][-1][1])
    of_streams = arguments["multimodal_io"]["discrete_audio"]["stream_weights"]
    for (start, stop), weight in zip(intervals["discrete_audio"], of_streams, strict=True):
        weights[start:stop] = weight
    return weights


def whole_codec(folder: Path) -> dict[str, torch.Tensor]:
    """The codec's state: its weights, and the discriminator that ESPnet builds with it, random if it has none."""
    from espnet2.bin.gan_codec_inference import AudioCoding

    config, weights = codec_files(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = AudioCoding(train_config=config, model_file=None, device="cpu").model.state_dict()
    state.update(torch.load(weights, map_location="cpu", weights_only=True))
    return state


def pack_codec(folder: Path, out: Path) -> None:
    """The codec as ESPnet's model zoo packs one, which is what ESPnet takes for a codec that lies on a disk."""
    config, weights = codec_files(folder)
    about = {"files": {"model_file": weights.name}, "yaml_files": {"train_config": config.name}}
    half = out.with_suffix(".part")
    with zipfile.ZipFile(half, "w") as archive:
        for name, content in (
            ("meta.yaml", yaml.safe_dump(about).encode("utf-8")),
            (config.name, config.read_bytes()),
            (weights.name, weights.read_bytes()),
        ):
            archive.writestr(zipfile.ZipInfo(name), content)  # of no time: the same files make the same bytes
    half.replace(out)


def _bagpiper_yaml(layout: Layout, dropout: float) -> dict[str, Any]:
    streams = layout.num_streams
    return {
        "job_type": "speechlm",
        "multimodal_io": {
            "text": {"tokenizer_name": "backbone"},
            "discrete_audio": {
                "codec_choice": "ESPnet",
                "codec_hf_model_tag": PACKED_CODEC,
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
        "data_loading": {"batchfy_method": "bucket", "batch_size": 2048, "num_workers": 0},
        "vocab_intervals": {
            "special_token": [[0, _NUM_SPECIALS]],
            "text": [list(layout.text)],
            "discrete_audio": [list(span) for span in layout.streams],
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
