"""check_directory and the two command lines: damage is found and named."""

import atexit
import functools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import pytest
import torch
from checkpoint_samples import add_encoder, change_text, copy_of, model_file, of_family
from safetensors.torch import load_file, save_file

from espnet2_vllm.bin import check as check_command
from espnet2_vllm.bin import convert as convert_command
from espnet2_vllm.checkpoint import convert, is_converted, open_checkpoint
from espnet2_vllm.checkpoint.checking import check_directory
from espnet2_vllm.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def directory(tmp_path):
    """A conversion with an audio encoder, to be damaged."""
    shutil.copytree(converted_with_encoder(), tmp_path / "converted")
    return tmp_path / "converted"


@functools.cache
def converted_with_encoder():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="with_encoder."))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = copy_of("bagpiper", folder, "qwen3-s8-cb64")
    add_encoder(model)
    convert(model, folder / "converted")
    return folder / "converted"


def change_shard(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_json(path, change):
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


DAMAGE = {
    "missing tensor": (lambda d: change_shard(d / SHARD, lambda t: t.pop("model.norm.weight")), "model.norm.weight"),
    "unknown tensor": (lambda d: change_shard(d / SHARD, lambda t: t.update(x=torch.zeros(1))), "1 tensors unknown: x"),
    "shape": (
        lambda d: change_shard(d / SHARD, lambda t: t.update({"model.norm.weight": torch.zeros(3)})),
        r"model.norm.weight is float32 \[3\], expected float32 \[64\]",
    ),
    "dtype": (
        lambda d: change_shard(d / SHARD, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].half()})),
        r"model.norm.weight is float16 \[64\], expected float32 \[64\]",
    ),
    "shard cut": (lambda d: cut(d / SHARD), f"cannot read .*{SHARD}"),
    "shard gone": (lambda d: (d / SHARD).unlink(), f"cannot read .*{SHARD}"),
    "stray shard": (lambda d: shutil.copy(d / SHARD, d / "more.safetensors"), "does not know more.safetensors"),
    "index": (lambda d: (d / "model.safetensors.index.json").write_text("{"), "cannot read .*index.json"),
    "tokenizer": (lambda d: (d / "tokenizer/tokenizer.json").unlink(), "tokenizer"),
    "vocabulary": (
        lambda d: change_json(d / "config.json", lambda c: c.update(vocab_size=900)),
        "vocab_size is 900, expected 1232",
    ),
    "tied": (
        lambda d: change_json(d / "config.json", lambda c: c.update(tie_word_embeddings=True)),
        "tie_word_embeddings is True",
    ),
    "layers": (
        lambda d: change_json(
            d / "config.json", lambda c: c.update(num_hidden_layers=4, layer_types=["full_attention"] * 4)
        ),
        "11 tensors missing: model.layers.3.",
    ),
    "architecture": (
        lambda d: change_json(d / "config.json", lambda c: c.update(architectures=["Qwen3ForCausalLM"])),
        "architectures is .'Qwen3ForCausalLM'., expected .'SpeechLMQwen3ForCausalLM'.",
    ),
    "codec cut": (lambda d: cut(d / "codec/model.safetensors"), "codec/model.safetensors"),
    "codec tensor": (
        lambda d: change_shard(d / "codec/model.safetensors", lambda t: t.pop("fc.weight")),
        "1 tensors missing: fc.weight",
    ),
    "codec size": (
        lambda d: change_json(d / "speechlm.json", lambda c: c["codec"].update(num_codebooks=2)),
        "codec gives 2 codebooks of 64 codes, the vocabulary has 8 codebooks of 64",
    ),
    "encoder": (
        lambda d: change_shard(d / "continuous_audio/model.safetensors", lambda t: t.pop("adaptor.bias")),
        "1 tensors missing: adaptor.bias",
    ),
    "description": (lambda d: (d / "speechlm.json").write_text("{"), "cannot read .*speechlm.json"),
    "other description": (
        lambda d: (d / "speechlm.json").write_text("{}"),
        "not the description of a converted directory",
    ),
    "version": (lambda d: change_json(d / "speechlm.json", lambda c: c.update(format_version=99)), "format version 99"),
    "layout": (
        lambda d: change_json(d / "speechlm.json", lambda c: c["layout"].pop("text")),
        "layout description lacks text",
    ),
    "layout of another kind": (
        lambda d: change_json(d / "speechlm.json", lambda c: c.update(layout=["text"])),
        "speechlm.json is damaged .layout: .*convert the checkpoint again",
    ),
    "tensors of another kind": (
        lambda d: change_json(d / "speechlm.json", lambda c: c.update(tensors=3)),
        "cannot be read",
    ),
    "index of another kind": (lambda d: change_json(d / INDEX, lambda c: c.update(weight_map="x")), "cannot read"),
    "index to elsewhere": (
        lambda d: change_json(d / INDEX, lambda c: c["weight_map"].update({"model.norm.weight": f"../x/{SHARD}"})),
        "the file of 'model.norm.weight' is '../x/.*expected a file below its folder",
    ),
    "nested": (lambda d: (d / "speechlm.json").write_text("[" * 100_000), "cannot read .*speechlm.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(name, directory):
    damage, words = DAMAGE[name]
    damage(directory)
    bad = [finding.what for finding in check_directory(directory) if not finding.ok]
    assert bad
    assert any(re.search(words, what) for what in bad), bad


def test_every_fault_is_reported(directory):
    (directory / "tokenizer/tokenizer.json").unlink()
    cut(directory / "codec/model.safetensors")
    cut(directory / SHARD)
    bad = [finding.what for finding in check_directory(directory) if not finding.ok]
    assert len(bad) == 4  # the codec's file is bad for the comparison and for loading


@pytest.mark.parametrize(
    ("key", "value"),
    [("layout", 3), ("max_rows", "many"), ("preprocessor", None), ("source", []), ("codec", {"kind": []})],
)
def test_a_damaged_description_is_not_opened(directory, key, value):
    change_json(directory / "speechlm.json", lambda content: content.update({key: value}))
    with pytest.raises(CheckpointError, match=f"speechlm.json is damaged .{key}.*convert the checkpoint again"):
        open_checkpoint(directory)


@pytest.mark.parametrize("damage", ["weights cut", "weights gone", "index", "config"])
def test_damaged_weights_are_not_run(directory, damage):
    from espnet2_vllm.backends.network import Network

    checkpoint = open_checkpoint(directory)
    if damage == "weights cut":
        cut(directory / SHARD)
    elif damage == "weights gone":
        (directory / SHARD).unlink()
    else:
        (directory / {"index": INDEX, "config": "config.json"}[damage]).write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot read "):
        Network(checkpoint, torch.float32, torch.device("cpu"), "eager")


def test_no_converted_directory(tmp_path):
    with pytest.raises(CheckpointError, match="no such converted directory"):
        open_checkpoint(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="is no converted directory"):
        open_checkpoint(tmp_path)
    assert not is_converted(tmp_path)
    assert [finding.ok for finding in check_directory("x" * 300)] == [False]


# -- command lines ----------------------------------------------------------------------------------------------------
def test_convert_and_check(tmp_path, capsys):
    model = of_family("bagpiper")[0]
    target = tmp_path / "converted"
    assert convert_command.main([str(model), str(target), "--shard-size", "300KB", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    for word in (str(model_file(model)), "vocabulary: 256 special + ", "tensors of model from float32 to bfloat16"):
        assert word in printed
    assert len(list(target.glob("*.safetensors"))) > 1
    assert check_command.main([str(target)]) == 0
    printed = capsys.readouterr().out
    assert "BAD" not in printed
    assert printed.rstrip().endswith("whole and consistent")
    cut(next(iter(sorted(target.glob("*.safetensors")))))
    assert check_command.main([str(target)]) == 1
    printed = capsys.readouterr().out
    assert "BAD  cannot read" in printed
    assert re.search(r"1 of \d findings are bad", printed)


def test_exit_codes(tmp_path, capsys):
    folder = copy_of("opuslm", tmp_path)
    target = str(tmp_path / "converted")
    assert convert_command.main([str(tmp_path / "gone"), target]) == 1
    assert "espnet2-vllm convert: no such checkpoint" in capsys.readouterr().err
    assert convert_command.main([str(folder), target, "--shard-size", "lots"]) == 2
    assert "size 'lots'" in capsys.readouterr().err
    assert convert_command.main([str(folder), target, "--model_file", "gone.pth"]) == 1
    assert "no such model file" in capsys.readouterr().err
    for arguments in (
        [],
        [str(folder)],
        [str(folder), target, "--dtype", "int4"],
        [str(folder), target, "--vocab-order", "x"],
    ):
        with pytest.raises(SystemExit) as caught:
            convert_command.main(arguments)
        assert caught.value.code == 2
    assert check_command.main([str(tmp_path / "gone")]) == 1
    assert not (tmp_path / "converted").exists()


def test_vocab_order_option(tmp_path):
    folder = copy_of("bagpiper", tmp_path)
    change_text(
        folder / "train.yaml",
        ("  text:\n    tokenizer_name: backbone\n", ""),
        ("model:\n  model_choice", "  text:\n    tokenizer_name: backbone\nmodel:\n  model_choice"),
    )
    assert convert_command.main([str(folder), str(tmp_path / "by_keys")]) == 0
    assert open_checkpoint(tmp_path / "by_keys").layout.streams[0].start == 256
    assert convert_command.main([str(folder), str(tmp_path / "by_name"), "--vocab_order", "name"]) == 0
    assert open_checkpoint(tmp_path / "by_name").layout.text.start == 256


@pytest.mark.parametrize("command", ["convert", "check"])
def test_help_is_quick(command, repo):
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", f"espnet2_vllm.bin.{command}", "--help"],
        cwd=repo,
        capture_output=True,
        text=True,
        check=True,
    )
    assert time.perf_counter() - start < 0.5
    assert done.stdout.startswith(f"usage: espnet2-vllm {command}")
