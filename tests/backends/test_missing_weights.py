"""A converted directory whose tensors are not all there, or of another shape, is refused by name when it is opened."""

import json
import shutil

import pytest
from conftest import golden_models
from safetensors.torch import load_file, save_file

from espnet2_vllm.backends import make_engine
from espnet2_vllm.backends import vllm as backend
from espnet2_vllm.checkpoint import convert, open_checkpoint
from espnet2_vllm.checkpoint.writing import INDEX
from espnet2_vllm.errors import CheckpointError

MODELS = {model.name: model for family in ("bagpiper", "opuslm") for model in golden_models(family)}
SOME = ["qwen3-s8-cb64", "tiny-llama", "tiny-olmo2"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("converted")
    for name in SOME:
        convert(MODELS[name], root / name)
    return root


def changed(directories, name, tmp_path, change):
    """A copy of a converted directory after ``change`` of its tensors, its index in accord with them."""
    folder = shutil.copytree(directories / name, tmp_path / name)
    (shard,) = folder.glob("model*.safetensors")
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(sorted(tensors), shard.name)
    (folder / INDEX).write_text(json.dumps(index))
    return open_checkpoint(folder)


GONE = ["lm_head", "model.norm", "model.embed_tokens", "stream_emb"]
IN_A_LAYER = ["self_attn.o_proj", "self_attn.k_proj", "mlp.down_proj", "mlp.up_proj", "post_attention_layernorm"]


@pytest.mark.parametrize("which", ["vllm", "pytorch"])
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("part", [*GONE, *(f"model.layers.1.{part}" for part in IN_A_LAYER)])
def test_a_tensor_that_is_not_there_is_named(directories, name, part, which, tmp_path):
    checkpoint = changed(directories, name, tmp_path, lambda tensors: tensors.pop(f"{part}.weight"))
    with pytest.raises(CheckpointError, match=rf"missing.*{part}\.weight|no safetensors file holds {part}\.weight"):
        make_engine(which, checkpoint, "float32")


@pytest.mark.parametrize("which", ["vllm", "pytorch"])
@pytest.mark.parametrize("part", ["lm_head", "model.embed_tokens", "stream_emb", "model.layers.0.self_attn.k_proj"])
def test_a_tensor_of_another_shape_is_named(directories, part, which, tmp_path):
    def cut(tensors):
        tensors[f"{part}.weight"] = tensors[f"{part}.weight"][:-2].clone()

    checkpoint = changed(directories, "qwen3-s8-cb64", tmp_path, cut)
    with pytest.raises(CheckpointError, match=rf"{part}\.weight"):
        make_engine(which, checkpoint, "float32")


@pytest.mark.parametrize("which", ["vllm", "pytorch"])
def test_a_tensor_that_nobody_knows_is_named(directories, which, tmp_path):
    def add(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = tensors["model.norm.weight"].clone()

    checkpoint = changed(directories, "qwen3-s8-cb64", tmp_path, add)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        make_engine(which, checkpoint, "float32")


@pytest.mark.parametrize("name", SOME)
def test_what_reaches_the_engine_is_counted_too(directories, name, tmp_path, monkeypatch):
    """As where vLLM is given the directory by another program: its own check finds nothing amiss."""
    checkpoint = changed(
        directories, name, tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight")
    )
    monkeypatch.setattr(backend, "check_weights", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"tensors missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        make_engine("vllm", checkpoint, "float32")


def test_plain_models_can_be_built_after_an_engine_that_changes_their_class(directories):
    """vLLM changes transformers' OLMo-2 for the whole process; the pytorch backend and conversions need it as it was."""
    checkpoint = open_checkpoint(directories / "tiny-olmo2")
    for _ in range(2):
        engine = make_engine("vllm", checkpoint, "float32")
        engine.close()
        make_engine("pytorch", checkpoint, "float32").close()
    from espnet2_vllm.checkpoint.expected import backbone_shapes, read_hf_config

    assert "lm_head.weight" in backbone_shapes(read_hf_config(checkpoint.path, "converted directory"), 99, 3)


def test_a_tied_head_is_not_looked_for(directories, tmp_path):
    from espnet2_vllm.checkpoint.expected import read_hf_config
    from espnet2_vllm.checkpoint.headers import check_weights

    checkpoint = changed(directories, "qwen3-s8-cb64", tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    config = read_hf_config(checkpoint.path, "converted directory")
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        check_weights(checkpoint.path, config, checkpoint.layout)
    config.tie_word_embeddings = True
    check_weights(checkpoint.path, config, checkpoint.layout)
