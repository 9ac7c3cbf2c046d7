"""Releases as the hub's cache holds them, made of a recorded model: small enough for a CPU, complete enough for ESPnet itself."""

import hashlib
import json
import shutil
from pathlib import Path

import yaml
from conftest import golden_files

BACKBONE, CODEC = "Qwen/Qwen3-8B-Base", "hf-audio/xcodec-hubert-general"
TOWER = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
SFT, TTS, BASE = "espnet/bagpiper-sft", "espnet/bagpiper-tts-sft", "espnet/bagpiper"


def decoding(text, audio, enforced):
    """A decoding yaml; its values differ from file to file, so that it shows which was taken."""
    names = ("temperature", "topk", "cfg", "max_step", "min_step")
    blocks = {"text": dict(zip(names, text, strict=True)), "audio": dict(zip(names, audio, strict=True))}
    return {"dtype": "float32", "num_hypo": 1, "enforce_modality": enforced, **blocks}


# The files that each release has beside its training yaml and weights.
YAMLS = {
    SFT: {
        "inference_text.yaml": decoding((0.9, 7, 1, 12, 2), (1.1, 9, 2, 13, 6), ["text"]),
        "inference_audio.yaml": decoding((0.8, 6, 1.5, 11, 3), (1.2, 8, 3, 14, 7), ["text", "audio"]),
    },
    TTS: {"inference.yaml": decoding((0.7, 5, 1, 10, 1), (1.3, 4, 2.5, 15, 8), ["text", "audio"])},
    BASE: {},
}


def make_release(folder, yamls):
    """A release of the recorded model that hears continuous audio: training yaml, ``model.pt``, decoding yamls."""
    import torch

    (config,) = golden_files("bagpiper/qwen3-s4-cb32-contaudio/train.yaml")
    (file,) = golden_files("bagpiper/qwen3-s4-cb32-contaudio/mp_rank_00_model_states.pt")
    folder.mkdir(parents=True)
    content = yaml.safe_load(config.read_text())
    content["model"]["model_hf_tag"] = content["multimodal_io"]["text"]["tokenizer_name"] = BACKBONE
    content["multimodal_io"]["discrete_audio"]["codec_hf_model_tag"] = CODEC
    content["multimodal_io"]["continuous_audio"]["encoder_hf_model_tag"] = TOWER
    for key in ("compile_transformer_body", "freeze_text_embeddings"):  # of yamls before 202609
        content["model"]["model_conf"].pop(key)
    (folder / "train.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    weights = torch.load(file)["module"]
    weights["vocab_weight"] = torch.ones(len(weights["lm_head.weight"]))  # a buffer that ESPnet's strict loading wants
    torch.save({"module": weights}, folder / "model.pt")
    for name, value in yamls.items():
        (folder / name).write_text(yaml.safe_dump(value))
    return folder


def cached(hub, tag):
    """The folder of ``tag`` in the cache ``hub``, in its layout."""
    place = hub / f"models--{tag.replace('/', '--')}"
    commit = hashlib.sha1(tag.encode()).hexdigest()
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(commit)
    return place / "snapshots" / commit


def make_hub(hub, *, weights):
    """A cache with the three releases and what they name; ``weights``: with those that ESPnet loads and drops."""
    (golden,) = golden_files("bagpiper/qwen3-s4-cb32-contaudio/train.yaml")
    made = make_release(cached(hub, SFT), YAMLS[SFT])
    for tag in (TTS, BASE):
        folder = cached(hub, tag)
        folder.mkdir(parents=True)
        for name in ("train.yaml", "model.pt"):
            shutil.copy(made / name, folder / name)
        for name, value in YAMLS[tag].items():
            (folder / name).write_text(yaml.safe_dump(value))
    for tag, name in ((BACKBONE, "backbone"), (CODEC, "codec"), (TOWER, f"{TOWER}")):
        here = Path(golden.parent / name)
        shutil.copytree(here, cached(hub, tag), ignore=None if weights else shutil.ignore_patterns("*.safetensors"))
        cached(hub, tag).chmod(0o755)
    if weights:
        add_random_weights(cached(hub, BACKBONE))
        add_random_weights(cached(hub, TOWER))
    return hub


def add_random_weights(folder):
    """Weights that a checkpoint's own replace."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    with torch.random.fork_rng():
        model = getattr(transformers, name)(config)
    made = folder.parent / f"{folder.name}-weights"
    model.save_pretrained(made)
    target = folder / "model.safetensors"
    target.unlink(missing_ok=True)
    shutil.move(made / "model.safetensors", target)
    shutil.rmtree(made)
