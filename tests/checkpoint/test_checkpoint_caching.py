"""Converting once, beside the checkpoint or in the user's cache; again when something has changed."""

import logging
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest
import torch
from checkpoint_samples import change_tensors, converted, copy_of, model_file, of_family

from espnet2_vllm.checkpoint import caching, ensure_converted, is_converted, open_checkpoint
from espnet2_vllm.checkpoint.checking import check_directory
from espnet2_vllm.errors import CheckpointError

CONFIGS = {"bagpiper": "train.yaml", "opuslm": "config.yaml"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("ESPNET2_VLLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def conversions(monkeypatch):
    """Counts conversions."""
    done = []
    original = caching.convert_source

    def counting(source, target, **options):
        done.append(target)
        return original(source, target, **options)

    monkeypatch.setattr(caching, "convert_source", counting)
    return done


@pytest.mark.parametrize("family", CONFIGS)
def test_converts_once_beside_the_checkpoint(family, tmp_path, conversions):
    folder = copy_of(family, tmp_path)
    first = ensure_converted(folder / CONFIGS[family], model_file(folder))
    assert first.path.parent == folder / ".espnet2_vllm_cache"
    assert first.family == family
    for arguments in ((folder / CONFIGS[family],), (folder,), (folder, model_file(folder).name)):
        assert ensure_converted(*arguments) == first
    assert len(conversions) == 1


def test_changed_source_is_converted_again(tmp_path, conversions, caplog):
    folder = copy_of("opuslm", tmp_path)
    first = ensure_converted(folder)
    change_tensors(folder, lambda tensors: tensors["corelm.head_emb.weight"].fill_(0.5))
    with caplog.at_level(logging.WARNING):
        second = ensure_converted(folder)
    assert len(conversions) == 2
    assert second.path != first.path
    assert first.path.name in caplog.text
    os.utime(folder / "hf_backbone/tokenizer.json", ns=(1, 1))
    assert ensure_converted(folder).path not in (first.path, second.path)


def test_changed_format_is_converted_again(tmp_path, monkeypatch):
    folder = copy_of("opuslm", tmp_path)
    first = ensure_converted(folder)
    monkeypatch.setattr(caching, "FORMAT_VERSION", 0)
    assert ensure_converted(folder).path != first.path


def test_converted_directory_is_opened(conversions):
    directory = converted(of_family("opuslm")[0])
    for arguments in (
        (directory,),
        (directory / "config.json",),
        (directory / "speechlm.json", None),
        ("gone", directory),
    ):
        assert ensure_converted(*arguments) == open_checkpoint(directory)
    assert conversions == []


def test_wrong_family(tmp_path, conversions):
    with pytest.raises(CheckpointError, match="of the opuslm family, expected one of the bagpiper family"):
        ensure_converted(copy_of("opuslm", tmp_path), family="bagpiper")
    with pytest.raises(CheckpointError, match="of the opuslm family, expected one of the bagpiper family"):
        ensure_converted(converted(of_family("opuslm")[0]), family="bagpiper")
    assert conversions == []


@pytest.mark.parametrize("how", ["no write permission", "a file is in the way"])
def test_user_cache_where_the_folder_cannot_be_written(how, tmp_path, caplog, conversions):
    folder = copy_of("opuslm", tmp_path)
    if how == "no write permission":
        folder.chmod(0o555)
    else:
        (folder / ".espnet2_vllm_cache").touch()
    before = sorted(folder.rglob("*"))
    with caplog.at_level(logging.WARNING):
        checkpoint = ensure_converted(folder)
    assert checkpoint.path.is_relative_to(tmp_path / "xdg/espnet2_vllm")
    assert str(checkpoint.path.parent) in caplog.text
    assert sorted(folder.rglob("*")) == before
    assert ensure_converted(folder) == checkpoint
    assert len(conversions) == 1


def test_chosen_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path / "chosen"))
    folders = [copy_of("opuslm", tmp_path / name) for name in "ab"]
    paths = [ensure_converted(folder).path for folder in folders]
    assert all(path.is_relative_to(tmp_path / "chosen") for path in paths)
    assert paths[0].parent != paths[1].parent


def test_no_place_at_all(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="no place to keep .* ESPNET2_VLLM_CACHE"):
        ensure_converted(copy_of("opuslm", tmp_path))


def test_without_cache(tmp_path):
    folder = copy_of("opuslm", tmp_path)
    before = sorted(folder.rglob("*"))
    checkpoint = ensure_converted(folder, cache=False)
    assert is_converted(checkpoint.path)
    assert sorted(folder.rglob("*")) == before
    assert not (tmp_path / "xdg").exists()
    shutil.rmtree(checkpoint.path.parent)


def test_failed_conversion_leaves_nothing(tmp_path):
    folder = copy_of("opuslm", tmp_path)
    change_tensors(folder, lambda tensors: tensors.pop("corelm.decoders.model.norm.weight"))
    with pytest.raises(CheckpointError, match="1 missing"):
        ensure_converted(folder)
    assert [path.suffix for path in (folder / ".espnet2_vllm_cache").iterdir()] == [".lock"]


PROCESS = """
import pathlib, sys, time
from espnet2_vllm.checkpoint import ensure_converted
import espnet2_vllm.checkpoint.caching as caching
import transformers
start = pathlib.Path(sys.argv[2])
start.with_name(sys.argv[3]).touch()
while not start.exists():
    time.sleep(0.01)
print(ensure_converted(sys.argv[1]).path)
"""


def test_two_processes_at_once(tmp_path, repo):
    """Both get the same whole directory, and it is converted once."""
    folder = copy_of("bagpiper", tmp_path)
    start = tmp_path / "start"
    environment = os.environ | {"PYTHONPATH": str(repo)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(folder), str(start), f"ready{k}"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in range(2)
    ]
    while not all((tmp_path / f"ready{k}").exists() for k in range(2)):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    start.touch()
    outputs = [process.communicate(timeout=300)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    directory = pathlib.Path(outputs[0])
    assert all(finding.ok for finding in check_directory(directory))
    left = {path.suffix for path in directory.parent.iterdir() if path != directory}
    assert left == {".lock"}


def test_weights_of_the_cache_are_the_checkpoints(tmp_path):
    from safetensors.torch import load_file

    folder = copy_of("opuslm", tmp_path)
    directory = ensure_converted(folder).path
    reference = converted(of_family("opuslm")[0])
    for path in reference.glob("*.safetensors"):
        mine = load_file(directory / path.name)
        assert all(torch.equal(tensor, mine[name]) for name, tensor in load_file(path).items())
