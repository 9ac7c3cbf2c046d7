"""Reading tensors: wrappers, file formats, torch.distributed folders, damaged files."""

import pathlib
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from espnet2_vllm.checkpoint.tensors import TensorSpec, open_tensors
from espnet2_vllm.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # on saving

TENSORS = {
    "model.norm.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "lm_head.weight": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "step": torch.tensor(7),
}


def saved(path: pathlib.Path, content, **options) -> pathlib.Path:
    torch.save(content, path, **options)
    return path


def assert_holds(source, tensors=TENSORS):
    assert source.specs == {
        name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        loaded = source.load(name)
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor), name


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: {"module": t, "ds_version": "1"}, lambda t: {"model": t, "epoch": 3}]
)
def test_wrappers(wrap, tmp_path):
    assert_holds(open_tensors(saved(tmp_path / "model.pt", wrap(TENSORS))))


def test_file_is_mapped_not_read(tmp_path):
    path = saved(tmp_path / "model.pt", TENSORS)
    source = open_tensors(path)
    assert str(path) in pathlib.Path("/proc/self/maps").read_text(encoding="utf-8")
    assert source.notes == ()


def test_old_file_format(tmp_path):
    source = open_tensors(saved(tmp_path / "model.pt", TENSORS, _use_new_zipfile_serialization=False))
    assert_holds(source)
    assert "as a whole" in source.notes[0]


@pytest.mark.parametrize("keep", [0.99, 0.5, 0.01, 0.0])
def test_cut_short(keep, tmp_path):
    path = saved(tmp_path / "model.pt", {"weight": torch.zeros(5000)})
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CheckpointError, match="cut short" if keep else "cannot read") as caught:
        open_tensors(path)
    assert str(path) in str(caught.value)


class Foreign:
    pass


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (Foreign(), "cannot read .* as a torch checkpoint"),
        ([1, 2], "expected a mapping of tensors, got list"),
        ({}, "found nothing"),
        ({"weight": torch.zeros(1), 3: torch.zeros(1)}, "1 entries that are no plain tensors: 3"),
        ({"weight": torch.zeros(2, 2).to_sparse()}, "1 entries that are no plain tensors: weight"),
        ({"weight": torch.zeros(2, device="meta")}, "1 entries that are no plain tensors: weight"),
        (
            {"weight": torch.zeros(1), "epoch": 3, "optimizer": {"a": 1}},
            "2 entries that are no plain tensors: epoch, optimizer",
        ),
    ],
)
def test_other_content(content, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        open_tensors(saved(tmp_path / "model.pt", content))


def test_not_a_torch_file(tmp_path):
    (tmp_path / "model.pt").write_text("hello", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot read"):
        open_tensors(tmp_path / "model.pt")


@pytest.fixture
def distributed(tmp_path):
    """A torch.distributed folder with a model, an optimiser and a plain value."""
    state = {"model": TENSORS, "optimizer": {"moment": torch.zeros(4)}, "train_state": {"step": 5}}
    dcp.save(state, checkpoint_id=tmp_path / "step_5", no_dist=True)
    return tmp_path / "step_5"


def test_distributed_folder(distributed):
    source = open_tensors(distributed)
    assert_holds(source)
    assert "torch.distributed checkpoint step_5" in source.notes[0]


def test_distributed_folder_without_metadata(distributed):
    (distributed / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"not a complete torch.distributed checkpoint.*export_checkpoint.py"):
        open_tensors(distributed)


def test_distributed_folder_without_a_model(tmp_path):
    dcp.save({"optimizer": {"moment": torch.zeros(4)}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match="no tensor stands under 'model.' among 1 entries"):
        open_tensors(tmp_path)


def test_distributed_folder_with_a_damaged_shard(distributed):
    (shard,) = distributed.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    source = open_tensors(distributed)
    with pytest.raises(CheckpointError, match=r"step_5: tensor model.norm.weight \(float32 \[2, 3\]\) cannot be read"):
        source.load("model.norm.weight")


def test_distributed_metadata_runs_no_code(distributed):
    class Touch:
        def __reduce__(self):
            return pathlib.Path.touch, (distributed / "touched",)

    (distributed / ".metadata").write_bytes(pickle.dumps(Touch()))
    with pytest.raises(CheckpointError, match="has no place in the metadata"):
        open_tensors(distributed)
    assert not (distributed / "touched").exists()
