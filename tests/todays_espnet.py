"""Parts of the ESPnet that is installed, with the weights of a checkpoint: what tests hold our parts against."""

import pathlib
import shutil

import torch
from checkpoint_samples import model_file, state_dict

OMNI = {"Qwen/Qwen3-Omni-30B-A3B-Instruct": "Qwen3OmniMoe", "Qwen/Qwen2.5-Omni-7B": "Qwen2_5Omni"}


def omni_folder(folder: pathlib.Path, tag: str) -> None:
    """Give the Qwen-Omni configuration below ``folder`` the random weights that ESPnet wants to load, and throws away."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder / tag)
    model = getattr(transformers, f"{OMNI[tag]}ForConditionalGeneration")._from_config(config)
    kept = folder / "kept.json"
    shutil.copyfile(folder / tag / "config.json", kept)
    model.save_pretrained(folder / tag)
    shutil.move(kept, folder / tag / "config.json")


def continuous_audio_io(folder: pathlib.Path, tag: str, monkeypatch):
    """ESPnet's continuous encoder with the weights of the checkpoint in ``folder``, which becomes the working directory."""
    from espnet2.speechlm.model.speechlm.multimodal_io.audio import ContinuousAudioIO

    omni_folder(folder, tag)
    monkeypatch.chdir(folder)  # ESPnet takes two tags by their very names
    io = ContinuousAudioIO(encoder_hf_model_tag=tag, attn_implementation="sdpa", dtype="float32")
    prefix = "multimodal_io_dict.continuous_audio."
    tensors = state_dict(model_file(folder)).items()
    io.load_state_dict({name.removeprefix(prefix): t for name, t in tensors if name.startswith(prefix)}, strict=True)
    return io.eval()


@torch.inference_mode()
def heard(io, wavs) -> list[torch.Tensor]:
    """What ESPnet's encoder gives for the recordings of one prompt, before the adaptor. Each [n] at its rate -> [rows, D]."""
    from espnet2.speechlm.utils.data import pad_list

    found = [io.preprocess((wav[None], io.sample_rate)) for wav in wavs]
    features, lengths = pad_list([torch.from_numpy(features) for _, (_, features), _ in found])
    vectors = io.encode_batch(features, lengths)
    assert [len(v) for v in vectors] == [rows for _, (rows, _), _ in found]
    return list(vectors)


def job_of(folder: pathlib.Path, monkeypatch):
    """ESPnet's job of ``train.yaml`` in ``folder``, which becomes the working directory: its IOs, and what makes its model."""
    import yaml
    from espnet2.speechlm.model.speechlm.speechlm_job import SpeechLMJobTemplate

    arguments = yaml.safe_load((folder / "train.yaml").read_text(encoding="utf-8"))
    hears = arguments["multimodal_io"].get("continuous_audio")
    encoder = None if hears is None else hears.get("encoder_hf_model_tag", "Qwen/Qwen2.5-Omni-7B")
    if encoder is not None and not (folder / encoder / "model.safetensors").is_file():
        omni_folder(folder, encoder)
    monkeypatch.chdir(folder)
    return SpeechLMJobTemplate(arguments, is_train=False)


def model_of(folder: pathlib.Path, monkeypatch):
    """ESPnet's job and model of the checkpoint in ``folder``, the working directory then: loaded strictly, ready to decode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    job = job_of(folder, monkeypatch)
    conf = job.config["model"]["model_conf"]
    for key in ("compile_transformer_body", "freeze_text_embeddings"):  # of older ESPnet
        conf.pop(key, None)
    backbone = pathlib.Path(job.config["model"]["model_hf_tag"])
    kept = (backbone / "config.json").read_bytes()
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(backbone)).save_pretrained(backbone)
    (backbone / "config.json").write_bytes(kept)
    model = job.build_model()
    tensors = state_dict(model_file(folder))
    tensors.setdefault("vocab_weight", job.vocab_meta["vocab_weight"])
    model.load_state_dict(tensors, strict=True)
    model.prepare_inference()
    return job, model.eval()


@torch.inference_mode()
def answered(job, model, messages, settings) -> list:
    """What ESPnet answers to a dialogue, as its command line asks it. Audio as (samples [n], rate)."""
    dialogue = [[role, kind, (c[0][None], c[1]) if kind == "audio" else c] for role, kind, c in messages]
    batch = job.build_preprocessor().collate_fn([(("dialogue", "set", "a"), {"dialogue": dialogue})])
    answer, _ = model.inference(settings, **batch)
    return answer
