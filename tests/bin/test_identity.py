"""Results of another model are not taken over, whatever differs between the two; those of the same model are, wherever it lies."""

import json
import logging
import os
import shutil

import pytest
import torch
from commands import chat, edited_yaml, writable
from conftest import golden_models
from safetensors.torch import load_file, save_file

from espnet2_vllm.bin import inference, job
from espnet2_vllm.checkpoint import convert

BAGPIPER = next(model for model in golden_models("bagpiper") if (model / "Qwen").exists())
OPUSLM = golden_models("opuslm")[0]
SETTINGS = {
    "dtype": "float32",
    "enforce_modality": ["text", "audio"],
    "text": {"temperature": 0.0, "topk": 20, "max_step": 4},
    "audio": {"temperature": 0.0, "topk": 20, "max_step": 8},
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "converted"
    convert(BAGPIPER, folder)
    return folder


@pytest.fixture
def place(original, tmp_path, monkeypatch):
    """A folder with a data set of one text, settings, and a converted directory that a test may change."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(original, tmp_path / "converted")
    (tmp_path / "text").write_text("a hello there\n")
    entry = {"name": "text1", "path": str(tmp_path / "text"), "reader": "text"}
    (tmp_path / "dataset.json").write_text(json.dumps({"data_entry": [entry], "samples": ["a"]}))
    (tmp_path / "inference.yaml").write_text(json.dumps(SETTINGS))
    return tmp_path


def run(place, caplog, converted="converted"):
    """What a run says."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    words = ["--train-config", f"{converted}/config.json", "--model-checkpoint", converted, "--backend", "pytorch"]
    words += ["--inference-config", "inference.yaml", "--output-dir", "out"]
    assert inference.main([*words, "--test-unregistered-specifier", f"text_to_audio:set:{place}/dataset.json"]) == 0
    return caplog.text


def nudged(path):
    """One number of one tensor becomes another; size and header stay."""
    tensors = load_file(path)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(-1)[0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def respaced(path):
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")


def other_rows(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | {"max_rows": content["max_rows"] - 1}), encoding="utf-8")


@pytest.mark.parametrize(
    ("part", "pattern", "change"),
    [
        ("weights", "model-*.safetensors", nudged),
        ("weights", "config.json", respaced),
        ("tokenizer", "tokenizer/tokenizer.json", respaced),
        ("codec", "codec/*.safetensors", nudged),
        ("codec", "codec/config.json", respaced),
        ("audio encoder", "continuous_audio/*.safetensors", nudged),
        ("description", "speechlm.json", other_rows),
    ],
)
def test_results_of_another_model_are_not_taken_over(place, caplog, part, pattern, change):
    run(place, caplog)
    assert "1 of them taken over" in run(place, caplog)
    (path,) = (place / "converted").glob(pattern)
    change(path)
    said = run(place, caplog)
    assert f"the earlier journal is of other settings: checkpoint.{part}: " in said and "taken over" not in said
    assert "1 of them taken over" in run(place, caplog)


def test_results_of_other_rules_are_not_taken_over(place, caplog, monkeypatch):
    run(place, caplog)
    monkeypatch.setattr(job, "RULES", job.RULES + 1)
    said = run(place, caplog)
    assert "of other settings: rules: 1, now 2" in said and "taken over" not in said


def test_the_same_model_elsewhere_and_with_other_times_is_the_same_model(place, caplog):
    run(place, caplog)
    (place / "converted").rename(place / "moved")
    for path in (place / "moved").rglob("*"):
        os.utime(path, (1, 1))
    assert "1 of them taken over" in run(place, caplog, "moved")


def test_large_files_of_the_conversion_are_not_read_again(place, caplog, monkeypatch):
    """And one that was changed since is told by its size and time."""
    from espnet2_vllm.checkpoint import identity

    monkeypatch.setattr(identity, "_MOST_HASHED", 0)
    run(place, caplog)
    monkeypatch.setattr(identity, "_sha256", None)
    assert "1 of them taken over" in run(place, caplog)
    (shard,) = (place / "converted").glob("model-*.safetensors")
    os.utime(shard, (1, 1))
    assert "checkpoint.weights: " in run(place, caplog)


def test_another_codec_of_the_decoding_yaml_is_another_model(tmp_path, caplog, monkeypatch):
    """Its files lie elsewhere than in the converted directory."""
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path / "conversions"))
    caplog.set_level(logging.INFO)
    model = writable(OPUSLM, tmp_path / "model")
    monkeypatch.chdir(model)
    codec = shutil.copytree(model / "codec", tmp_path / "elsewhere")

    def change(values):
        del values["nproc"]
        for name in ("codec_ssl", "text_bpe"):
            values[name].update(maxlen=20, search_algo="topk_sampling", topk=1)
        places = {"config_path": str(codec / "config.yaml"), "checkpoint_path": str(codec / "360epoch.pth")}
        values["codec_ssl"]["tokenizer"]["codec_config"].update(places)

    decode = edited_yaml(model / "decode_default.yaml", model / "decode.yaml", change)
    data = json.loads((model / "data/codec_ssl_tts/data.json").read_text())
    (model / "one.json").write_text(json.dumps({**data, "examples": ["u00"]}))
    arguments = model, decode, model / "one.json", tmp_path / "out"
    assert chat(*arguments) == 0
    assert chat(*arguments) == 0
    assert "1 of them taken over" in caplog.text
    caplog.clear()
    weights = torch.load(codec / "360epoch.pth", weights_only=True)
    name = next(name for name in weights if name.endswith("weight"))
    weights[name].view(-1)[0] += 1
    torch.save(weights, codec / "360epoch.pth")
    assert chat(*arguments) == 0
    assert "checkpoint.codec: " in caplog.text and "taken over" not in caplog.text
