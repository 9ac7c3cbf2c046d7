"""Streaming, and folders that appear whole or not at all."""

import dataclasses
import json
import os
import resource
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file

from espnet2_vllm.checkpoint.names import MODEL
from espnet2_vllm.checkpoint.tensors import TensorSpec
from espnet2_vllm.checkpoint.writing import appearing, split_into_shards, write_json, write_shards, write_tensors
from espnet2_vllm.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class CountedEntry:
    """An entry whose tensors are counted as long as they live."""

    name: str
    length: int
    alive: dict
    source: str = "somewhere"
    part: str = MODEL

    @property
    def spec(self):
        return TensorSpec((self.length,), "float32")

    def load(self, source):
        tensor = torch.full((self.length,), float(self.length))
        self.alive["now"] += tensor.nbytes
        self.alive["most"] = max(self.alive["most"], self.alive["now"])
        weakref.finalize(tensor, self._gone, tensor.nbytes)
        return tensor

    def _gone(self, nbytes):
        self.alive["now"] -= nbytes


def test_never_more_than_one_shard_and_one_tensor_in_memory(tmp_path):
    alive = {"now": 0, "most": 0}
    lengths = [70, 20, 30, 40, 10, 90, 5, 5, 100, 60, 35, 64]
    entries = [CountedEntry(f"t{k:02d}", length, alive) for k, length in enumerate(lengths)]
    write_shards(entries, None, tmp_path, shard_size=4 * 100)
    assert alive["now"] == 0
    assert 4 * 100 <= alive["most"] <= 4 * (100 + max(lengths))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == len(split_into_shards(entries, 400)) > 5
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert [len(written[f"t{k:02d}"]) for k in range(len(lengths))] == lengths
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == 4 * sum(lengths)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own():
    entries = [CountedEntry(str(k), length, {}) for k, length in enumerate([10, 500, 10, 10])]
    assert [len(shard) for shard in split_into_shards(entries, 400)] == [1, 1, 2]


def ours(folder, text="x"):
    write_json(folder / "speechlm.json", {"text": text})


def test_appears_whole(tmp_path):
    target = tmp_path / "deep" / "target"
    with appearing(target, 10) as folder:
        ours(folder)
        assert not target.exists()
        assert folder.parent == target.parent
    assert [path.name for path in target.iterdir()] == ["speechlm.json"]
    assert list(target.parent.iterdir()) == [target]


def test_failure_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="in the middle"), appearing(tmp_path / "target", 10) as folder:
        ours(folder)
        raise RuntimeError("in the middle")
    assert list(tmp_path.iterdir()) == []


def test_earlier_conversion_is_replaced_and_survives_a_failure(tmp_path):
    target = tmp_path / "target"
    for text in ("first", "second"):
        with appearing(target, 10) as folder:
            ours(folder, text)
            (folder / text).touch()
    assert sorted(path.name for path in target.iterdir()) == ["second", "speechlm.json"]
    with pytest.raises(RuntimeError), appearing(target, 10):
        raise RuntimeError
    assert (target / "second").is_file()
    assert list(tmp_path.iterdir()) == [target]


def test_empty_folder_is_taken(tmp_path):
    (tmp_path / "target").mkdir()
    with appearing(tmp_path / "target", 10) as folder:
        ours(folder)
    assert (tmp_path / "target/speechlm.json").is_file()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_not_ours_is_left_alone(kind, tmp_path):
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("mine", encoding="utf-8")
    else:
        target.mkdir()
        (target / "mine").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a converted directory; it is left alone"), appearing(target, 10):
        raise AssertionError("entered")
    assert (target if kind == "file" else target / "mine").read_text(encoding="utf-8") == "mine"
    assert list(tmp_path.iterdir()) == [target]


def test_disk_full(tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"needs 1000000000\.00 GB, but .* GB are free"),
        appearing(tmp_path / "t", 10**18),
    ):
        raise AssertionError("entered")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "codec.pth"])
def test_disk_that_fills_meanwhile(name, tmp_path):
    entry = CountedEntry("weight", 1_000_000, {"now": 0, "most": 0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # no file may grow further
    try:
        with pytest.raises(CheckpointError, match=f"{name} cannot be written .*is the disk full"):
            write_tensors([entry], None, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_a_killed_conversion_left_goes_with_the_next_one(tmp_path):
    code = "import os, pathlib, sys; from espnet2_vllm.checkpoint.writing import appearing\n"
    code += "with appearing(pathlib.Path(sys.argv[1]), 10) as folder: (folder / 'weights').write_text('x'); os._exit(9)"
    target = tmp_path / "target"
    assert subprocess.run([sys.executable, "-c", code, target], check=False).returncode == 9
    (left,) = tmp_path.glob(".target.*.part")
    with appearing(target, 10) as folder:
        ours(folder)
    assert left.exists(), "it may have been begun just now"
    os.utime(left, (0, 0))
    with appearing(target, 10) as folder:
        assert not left.exists()
        os.utime(folder, (0, 0))
        with appearing(target, 10) as other:  # the first is at work, however old it looks
            assert folder.exists()
            ours(other)
        ours(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_nothing_is_converted_below_a_file(tmp_path):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match="lies below one"), appearing(tmp_path / "file" / "target", 10):
        raise AssertionError("entered")


def test_writers_at_the_same_time_leave_one_whole_folder(tmp_path):
    """Without any lock: whoever comes last, the folder is one writer's work."""
    target, start, failures = tmp_path / "target", threading.Barrier(8), []

    def write(number):
        try:
            for _ in range(20):
                start.wait()
                with appearing(target, 10) as folder:
                    ours(folder, str(number))
                    (folder / f"by_{number}").touch()
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)
            start.abort()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    number = json.loads((target / "speechlm.json").read_text(encoding="utf-8"))["text"]
    assert sorted(path.name for path in target.iterdir()) == [f"by_{number}", "speechlm.json"]
    assert list(tmp_path.iterdir()) == [target]
