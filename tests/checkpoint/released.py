"""The released models at their true shapes, without their weights: yaml, configurations and headers only.

Names and shapes are written out here from the published geometry, not asked of the package.
"""

import json
import pathlib
from dataclasses import dataclass, field

import torch
from transformers import XcodecConfig, XcodecModel
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from espnet2_vllm.checkpoint.sources import find_source
from espnet2_vllm.checkpoint.tensors import TensorSpec

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
OLMO2_7B = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "vocab_size": 100352,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 500000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
SMOLLM2_1_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 8192,
    "rope_theta": 130000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@dataclass
class HeaderSource:
    """Tensors of which only the headers exist."""

    path: pathlib.Path
    specs: dict[str, TensorSpec]
    notes: list[str] = field(default_factory=list)

    def load(self, name):
        raise AssertionError(f"{name} was read, though its header should do")


@dataclass(frozen=True)
class Release:
    """A model of the hub. trained_from: name and configuration of its backbone."""

    family: str
    file: str
    trained_from: tuple[str, dict]
    rows: int
    streams: int
    extra: tuple[str, ...] = ()


RELEASES = {
    "bagpiper-tts-sft": Release("bagpiper", "model.pt", ("Qwen/Qwen3-8B", QWEN3_8B), 160392, 8),
    "bagpiper-sft": Release("bagpiper", "model.pt", ("Qwen/Qwen3-8B", QWEN3_8B), 160392, 8),
    "bagpiper": Release("bagpiper", "base.pt", ("Qwen/Qwen3-8B", QWEN3_8B), 160392, 8),
    "OpusLM_7B_Anneal": Release("opuslm", "model.pth", ("allenai/OLMo-2-1124-7B", OLMO2_7B), 113870, 9),
    "OpusLM_1.7B_Anneal": Release("opuslm", "model.pth", ("HuggingFaceTB/SmolLM2-1.7B", SMOLLM2_1_7B), 62670, 9),
    "multi_turn_SDS_RLAIF": Release(
        "opuslm", "2epoch.pth", ("HuggingFaceTB/SmolLM2-1.7B", SMOLLM2_1_7B), 62670, 9, extra=("reflm",)
    ),
}
ENCODER = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_ffn_dim": 5120,
    "encoder_attention_heads": 20,
    "output_dim": 2048,
}


def lay_out(release: Release, folder: pathlib.Path):
    """The folder of ``release``, with everything beside it that a hub cache would give; its model file is empty."""
    name, config = release.trained_from
    _write_json(folder / name / "config.json", config)
    _write_json(folder / name / "tokenizer.json", {})
    (folder / release.file).write_bytes(b"")
    if release.family == "bagpiper":
        _write_json(folder / "hf-audio/xcodec-hubert-general/config.json", XcodecConfig().to_dict())
        omni = {"model_type": "qwen3_omni_moe", "thinker_config": {"audio_config": ENCODER}}
        _write_json(folder / "Qwen/Qwen3-Omni-30B-A3B-Instruct/config.json", omni)
        (folder / "train.yaml").write_text(_train_yaml(name), encoding="utf-8")
    else:
        (folder / "config.yaml").write_text(_config_yaml(name, config["vocab_size"]), encoding="utf-8")
    return find_source(folder)


def headers(release: Release, path: pathlib.Path) -> HeaderSource:
    """What the model file of ``release`` holds."""
    _, config = release.trained_from
    specs = _bagpiper(config, release.rows) if release.family == "bagpiper" else _opuslm(config, release)
    return HeaderSource(path, specs)


def _bagpiper(config: dict, rows: int) -> dict[str, TensorSpec]:
    hidden = config["hidden_size"]
    specs = {"model.embed_tokens.weight": _bf16(rows, hidden), **_decoder(config, "model.")}
    specs |= {"lm_head.weight": _bf16(rows, hidden), "stream_emb.weight": _bf16(8, hidden), "vocab_weight": _bf16(rows)}
    specs |= {"adaptor.continuous_audio.weight": _bf16(hidden, 2048), "adaptor.continuous_audio.bias": _bf16(hidden)}
    with torch.device("meta"):
        codec = XcodecModel(XcodecConfig()).state_dict()
        tower = Qwen3OmniMoeAudioEncoder(Qwen3OmniMoeAudioEncoderConfig(**ENCODER)).state_dict()
    io = "multimodal_io_dict."
    specs |= {f"{io}discrete_audio.codec_model.{name}": _bf16(*tensor.shape) for name, tensor in codec.items()}
    specs |= {f"{io}continuous_audio.model.audio_tower.{name}": _bf16(*tensor.shape) for name, tensor in tower.items()}
    return specs


def _opuslm(config: dict, release: Release) -> dict[str, TensorSpec]:
    hidden = config["hidden_size"]
    specs = {}
    for prefix in ("corelm.", *(f"{name}." for name in release.extra)):
        specs |= _decoder(config, f"{prefix}decoders.model.")
        specs |= {f"{prefix}{name}.weight": _bf16(release.rows, hidden) for name in ("emb", "lm_head")}
        specs |= {f"{prefix}head_emb.weight": _bf16(12, hidden)}
    return specs | {"criterion.lm_head.weight": _bf16(release.rows, hidden)}


def _decoder(config: dict, prefix: str) -> dict[str, TensorSpec]:
    """The layers and the final norm; Llama, OLMo-2 and Qwen3 differ in their norms only."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "post_attention_layernorm": (hidden,),
    }
    layer |= {
        "qwen3": {"input_layernorm": (hidden,), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,)},
        "llama": {"input_layernorm": (hidden,)},
        "olmo2": {"post_feedforward_layernorm": (hidden,), "self_attn.q_norm": (q,), "self_attn.k_norm": (kv,)},
    }[config["model_type"]]
    specs = {
        f"{prefix}layers.{number}.{name}.weight": _bf16(*shape)
        for number in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    return specs | {f"{prefix}norm.weight": _bf16(hidden)}


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec(tuple(shape), "bfloat16")


def _write_json(path: pathlib.Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def _train_yaml(backbone: str) -> str:
    return f"""job_type: speechlm
multimodal_io:
  text:
    tokenizer_name: {backbone}
  discrete_audio:
    codec_choice: Xcodec
    codec_hf_model_tag: hf-audio/xcodec-hubert-general
    delay_interleave: true
  continuous_audio:
    encoder_choice: huggingface
    encoder_hf_model_tag: Qwen/Qwen3-Omni-30B-A3B-Instruct
    attn_implementation: flash_attention_2
    dtype: bfloat16
model:
  model_choice: parallel
  model_hf_tag: {backbone}
  model_conf:
    attn_implementation: flash_attention_2
    dtype: bfloat16
preprocessor:
  audio_input: continuous_audio
  audio_output: discrete_audio
"""


def _config_yaml(backbone: str, text: int) -> str:
    """5,000 SSL units, 8 x 1,024 codec codes, the text, 70 phonemes."""
    specials = {
        0: "<pad>",
        1: "<unk>",
        5: "<sos/eos>",
        8: "<system_prompt>",
        9: "<user_input>",
        10: "<assistant_output>",
    }
    specials |= {
        34: "<codec_ssl_start/end>",
        35: "<text_bpe_start/end>",
        37: "<spk_start/end>",
        81: "<codec_ssl_tts_task>",
    }
    names = [specials.get(i, f"<unused_token_{i}>") for i in range(256)]
    names += [f"<ssl_{i}>" for i in range(5000)] + [f"<codec_{i}>" for i in range(8192)]
    names += [f"<text_{i}>" for i in range(text)] + [f"<g2p_{i}>" for i in range(70)]
    end = 13448 + text
    listed = "\n".join(f"- {name}" for name in names)
    return f"""token_list:
{listed}
token_bias:
    text_bpe: [13448, {end}]
    g2p: [{end}, {end + 70}]
    special_token: [0, 256]
    ssl: [256, 5256]
    codec: [5256, 13448]
speaker_prompt_length: 500
pad_speaker_prompt: true
subword_choice: huggingface
subword_model: {backbone}
codec_token_per_frame: 9
codec_token_in_use: 9
audio_modality: codec_ssl
transformer: huggingface
transformer_conf:
    hf_model_tag: {backbone}
    n_ctx: 8192
corelm: ar_delay
corelm_conf:
    share_emb: false
"""
