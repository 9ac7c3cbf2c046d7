"""What convert writes for variants of the golden checkpoints: wrappers, dtypes, shards, places."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_samples import (
    add_encoder,
    change_tensors,
    change_text,
    converted,
    copy_of,
    model_file,
    of_family,
    state_dict,
)
from safetensors.torch import load_file

from espnet2_vllm.checkpoint import convert, open_checkpoint
from espnet2_vllm.checkpoint.checking import check_directory
from espnet2_vllm.checkpoint.conversion import parse_size
from espnet2_vllm.errors import CheckpointError, ConfigError

BACKBONES = {"bagpiper": "backbone", "opuslm": "hf_backbone"}


def language_model(directory):
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def assert_same_weights(directory, other):
    mine, theirs = language_model(directory), language_model(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensors: tensors,
        lambda tensors: {"model": tensors, "epoch": 3},
        lambda tensors: {"module": tensors, "optimizer": {"state": {}}, "ds_version": "0.16"},
    ],
)
def test_wrapper_makes_no_difference(family, wrap, tmp_path):
    folder = copy_of(family, tmp_path)
    path = model_file(folder)
    torch.save(wrap(state_dict(path)), path)
    convert(folder, tmp_path / "converted")
    assert_same_weights(tmp_path / "converted", converted(of_family(family)[0]))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint(tmp_path):
    """A Titan experiment: the weights under checkpoints/step_N, beside the optimiser's."""
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    add_encoder(folder)
    convert(folder, tmp_path / "reference")
    path = model_file(folder)
    tensors = state_dict(path)
    path.unlink()
    moments = {"optimizer": {name: torch.zeros(1) for name in tensors}, "train_state": {"step": 20}}
    dcp.save({"model": tensors, **moments}, checkpoint_id=folder / "checkpoints/step_20", no_dist=True)
    report = convert(folder, tmp_path / "converted")
    for part in ("", "codec", "continuous_audio"):
        assert_same_weights(tmp_path / "converted" / part, tmp_path / "reference" / part)
    assert any("torch.distributed checkpoint step_20" in line for line in report.lines)


def test_views_of_one_flat_buffer(tmp_path):
    """As DeepSpeed keeps its parameters; one of them transposed."""
    folder = copy_of("bagpiper", tmp_path)

    def flatten(tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
        start = 0
        for name, tensor in tensors.items():
            part = flat[start : start + tensor.numel()]
            tensors[name] = part.view(tensor.shape)
            start += tensor.numel()
        tensors["lm_head.weight"] = tensors["lm_head.weight"].t().contiguous().t()
        assert not tensors["lm_head.weight"].is_contiguous()

    change_tensors(folder, flatten)
    convert(folder, tmp_path / "converted")
    assert_same_weights(tmp_path / "converted", converted(of_family("bagpiper")[0]))


def random_values(folder, seed=20):
    """Values that bfloat16 cannot hold, in float32."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)

    def change(tensors):
        for name, tensor in tensors.items():
            tensors[name] = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        if "criterion.lm_head.weight" in tensors:
            tensors["criterion.lm_head.weight"] = tensors["corelm.lm_head.weight"]

    change_tensors(folder, change)
    return state_dict(model_file(folder))


def test_opuslm_body_is_rounded_as_espnet_does(tmp_path):
    folder = copy_of("opuslm", tmp_path, "tiny-olmo2")
    source = random_values(folder)
    report = convert(folder, tmp_path / "converted")
    written = language_model(tmp_path / "converted")
    body = {name: tensor for name, tensor in source.items() if name.startswith("corelm.decoders.")}
    assert len(body) == 34
    for name, tensor in body.items():
        found = written[name.removeprefix("corelm.decoders.")]
        assert torch.equal(found, tensor.to(torch.bfloat16))
        assert not torch.equal(found.float(), tensor)
    assert torch.equal(written["model.embed_tokens.weight"], source["corelm.emb.weight"])
    assert torch.equal(written["lm_head.weight"], source["corelm.lm_head.weight"])
    assert torch.equal(written["stream_emb.weight"], source["corelm.head_emb.weight"][:9])
    (line,) = [line for line in report.lines if line.startswith("  rounded")]
    assert "34 tensors of model from float32 to bfloat16" in line
    assert "transformer_conf.dtype, by default" in line
    assert json.loads((tmp_path / "converted/config.json").read_text(encoding="utf-8"))["dtype"] == "float32"


def test_opuslm_body_dtype_of_the_yaml(tmp_path):
    folder = copy_of("opuslm", tmp_path, "tiny-olmo2")
    change_text(folder / "config.yaml", ("    n_ctx: 2048", "    n_ctx: 2048\n    dtype: float32"))
    source = random_values(folder)
    report = convert(folder, tmp_path / "converted")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(language_model(tmp_path / "converted")[name], source["corelm.decoders." + name])
    assert not any(line.startswith("  rounded") for line in report.lines)


def test_bagpiper_body_and_encoder_are_rounded_as_espnet_does(tmp_path):
    """The backbone is created in model_conf.dtype, the audio encoder in its own; embedding, heads, adaptor, codec are not."""
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    add_encoder(folder)
    text = (folder / "train.yaml").read_text(encoding="utf-8")
    assert text.count("dtype: float32") == 2
    (folder / "train.yaml").write_text(text.replace("dtype: float32", "dtype: bfloat16"), encoding="utf-8")
    source = random_values(folder)
    report = convert(folder, tmp_path / "converted")
    found = language_model(tmp_path / "converted")
    for name, tensor in load_file(tmp_path / "converted/continuous_audio/model.safetensors").items():
        prefix = "multimodal_io_dict.continuous_audio.model." if name.startswith("audio_tower.") else ""
        found[prefix + name.replace("adaptor.", "adaptor.continuous_audio.")] = tensor
    codec = load_file(tmp_path / "converted/codec/model.safetensors")
    found |= {f"multimodal_io_dict.discrete_audio.codec_model.{name}": tensor for name, tensor in codec.items()}
    assert found.keys() == source.keys()
    kept = ("model.embed_tokens.", "lm_head.", "stream_emb.", "adaptor.", "multimodal_io_dict.discrete_audio.")
    for name, tensor in source.items():
        assert torch.equal(found[name], tensor if name.startswith(kept) else tensor.to(torch.bfloat16)), name
    assert sum("as ESPnet does on loading" in line for line in report.lines) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype(dtype, tmp_path):
    model = of_family("bagpiper")[0]
    convert(model, tmp_path / "converted", dtype=dtype)
    source = state_dict(model_file(model))
    for name, tensor in language_model(tmp_path / "converted").items():
        assert torch.equal(tensor, source[name].to(getattr(torch, dtype)))
    assert json.loads((tmp_path / "converted/config.json").read_text(encoding="utf-8"))["dtype"] == dtype
    assert {tensor.dtype for tensor in load_file(tmp_path / "converted/codec/model.safetensors").values()} == {
        torch.float32
    }
    assert all(finding.ok for finding in check_directory(tmp_path / "converted"))


def test_small_shards_hold_the_same(tmp_path):
    model = of_family("opuslm")[0]
    convert(model, tmp_path / "converted", shard_size=100_000)
    names = sorted(path.name for path in (tmp_path / "converted").glob("*.safetensors"))
    assert len(names) > 3
    assert names == [f"model-{k:05d}-of-{len(names):05d}.safetensors" for k in range(1, len(names) + 1)]
    index = json.loads((tmp_path / "converted/model.safetensors.index.json").read_text(encoding="utf-8"))
    for name in names:
        held = load_file(tmp_path / "converted" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == held.keys()
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 100_000
    assert_same_weights(tmp_path / "converted", converted(model))
    assert all(finding.ok for finding in check_directory(tmp_path / "converted"))


def test_bagpiper_with_an_espnet_codec(tmp_path):
    """The codec's weights are the checkpoint's, its discriminator is dropped; the first 4 of 8 codebooks are used."""
    folder = copy_of("bagpiper", tmp_path / "bagpiper", "qwen3-s8-cb64")
    codec = copy_of("opuslm", tmp_path / "opuslm") / "codec"
    shutil.rmtree(folder / "codec")
    shutil.copytree(codec, folder / "codec")
    change_text(
        folder / "train.yaml", ("codec_choice: Xcodec", "codec_choice: ESPnet\n    codec_max_token_per_frame: 4")
    )
    text_size = 456 + 8 * (64 + 1) - 4 * (32 + 1)  # what streams of the other codec leave of the vocabulary
    change_text(folder / "backbone/config.json", ('"vocab_size": 456', f'"vocab_size": {text_size}'))
    prefix = "multimodal_io_dict.discrete_audio.codec_model."
    weights = {name: tensor * 2 for name, tensor in state_dict(codec / "360epoch.pth").items()}
    weights["codec.discriminator.discriminators.0.bias"] = torch.ones(1)  # a selection of golden data has none

    def change(tensors):
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]
        tensors.update({prefix + name: tensor for name, tensor in weights.items()})
        tensors["stream_emb.weight"] = tensors["stream_emb.weight"][:4].clone()

    change_tensors(folder, change)
    report = convert(folder, tmp_path / "converted")
    checkpoint = open_checkpoint(tmp_path / "converted")
    assert (checkpoint.codec.kind, checkpoint.codec.num_codebooks) == ("espnet", 4)
    assert [span.size for span in checkpoint.layout.streams] == [33] * 4
    written = state_dict(checkpoint.path / checkpoint.codec.checkpoint_path)
    kept = {name for name in weights if not name.startswith("codec.discriminator.")}
    assert written.keys() == kept
    assert set(report.dropped) == {prefix + name for name in weights.keys() - kept} != set()
    assert all(torch.equal(written[name], weights[name]) for name in kept)
    assert [finding.what for finding in check_directory(checkpoint.path) if not finding.ok] == []


def test_report_names_what_was_dropped(tmp_path):
    folder = copy_of("opuslm", tmp_path)

    def add_reference_model(tensors):
        for name in list(tensors):
            if name.startswith("corelm."):
                tensors[name.replace("corelm.", "reflm.", 1)] = tensors[name]

    change_tensors(folder, add_reference_model)
    report = convert(folder, tmp_path / "converted")
    count = sum(name.startswith("corelm.") for name in state_dict(model_file(folder)))
    assert set(report.dropped) == {name for name in state_dict(model_file(folder)) if not name.startswith("corelm.")}
    assert any(f"dropped {count} (reference model of preference training): reflm." in line for line in report.lines)
    assert any("dropped 1 (part of the loss" in line and "criterion.lm_head.weight" in line for line in report.lines)
    assert_same_weights(tmp_path / "converted", converted(of_family("opuslm")[0]))
    assert json.loads((tmp_path / "converted/speechlm.json").read_text(encoding="utf-8"))["dropped"] == dict(
        report.dropped
    )


def test_loss_buffer_of_bagpiper_is_dropped(tmp_path):
    folder = copy_of("bagpiper", tmp_path)
    change_tensors(folder, lambda tensors: tensors.update(vocab_weight=torch.ones(3)))
    report = convert(folder, tmp_path / "converted")
    assert report.dropped == {"vocab_weight": "buffer of the loss"}
    assert_same_weights(tmp_path / "converted", converted(of_family("bagpiper")[0]))


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
def test_paths_of_the_yaml_count_from_the_working_directory_next(family, tmp_path, monkeypatch):
    folder = copy_of(family, tmp_path)
    (tmp_path / "work").mkdir()
    for path in [path for path in folder.iterdir() if path.is_dir()]:
        path.rename(tmp_path / "work" / path.name)
    with pytest.raises(CheckpointError, match="not found: looked for a directory at"):
        convert(folder, tmp_path / "converted")
    monkeypatch.chdir(tmp_path / "work")
    convert(folder, tmp_path / "converted")
    assert_same_weights(tmp_path / "converted", converted(of_family(family)[0]))


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
def test_hub_tags_are_found_in_the_local_cache(family, tmp_path, monkeypatch):
    """As `hf download` leaves them: only the small files of one revision."""
    from huggingface_hub import constants

    folder = copy_of(family, tmp_path)
    cache = tmp_path / "hub"
    repository = cache / "models--maker--body"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40, encoding="utf-8")
    (repository / "snapshots").mkdir()
    (folder / BACKBONES[family]).rename(repository / "snapshots" / ("a" * 40))
    for path in repository.rglob("*.safetensors"):
        path.unlink()
    yaml = folder / ("train.yaml" if family == "bagpiper" else "config.yaml")
    text = yaml.read_text(encoding="utf-8")
    yaml.write_text(text.replace(f": {BACKBONES[family]}\n", ": maker/body\n"), encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    convert(folder, tmp_path / "converted")
    assert_same_weights(tmp_path / "converted", converted(of_family(family)[0]))
    (repository / "refs/main").unlink()
    with pytest.raises(CheckpointError, match=r"'maker/body' not found: .*hf download maker/body --include '\*.json'"):
        convert(folder, tmp_path / "again")


def test_rope_scaling_reaches_both_generations_of_transformers(tmp_path):
    from transformers import AutoConfig

    folder = copy_of("opuslm", tmp_path, "tiny-llama")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    change_text(folder / "hf_backbone/config.json", ('"rope_scaling": null', f'"rope_scaling": {json.dumps(scaling)}'))
    convert(folder, tmp_path / "converted")
    written = json.loads((tmp_path / "converted/config.json").read_text(encoding="utf-8"))
    assert written["rope_theta"] == 130000
    assert written["rope_scaling"] == scaling
    assert AutoConfig.from_pretrained(tmp_path / "converted").rope_parameters == scaling | {"rope_theta": 130000}


def test_description_does_not_depend_on_the_source(tmp_path):
    """Once converted, nothing of the source is needed any more."""
    folder = copy_of("opuslm", tmp_path)
    convert(folder, tmp_path / "converted")
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    checkpoint = open_checkpoint(tmp_path / "converted")
    assert checkpoint.tokenizer_dir.is_dir()
    assert (checkpoint.codec_base / checkpoint.codec.config_path).is_file()
    assert all(finding.ok for finding in check_directory(tmp_path / "converted"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9),
        ("500 MB", 5 * 10**8),
        ("2GiB", 2**31),
        ("1.5G", 15 * 10**8),
        ("123", 123),
        ("7B", 7),
        ("1tb", 10**12),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "4 GBs", "0", "1e9", "4XB"])
def test_bad_sizes(text):
    with pytest.raises(ConfigError, match="expected a number of bytes"):
        parse_size(text)
