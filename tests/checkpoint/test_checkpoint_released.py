"""The released models at their true shapes: layout, name map, what is dropped, shards. No weights."""

import dataclasses
import itertools
from collections import Counter

import pytest
from released import RELEASES, headers, lay_out

from espnet2_vllm.checkpoint.conversion import backbone_config
from espnet2_vllm.checkpoint.describe import describe
from espnet2_vllm.checkpoint.plan import make_plan
from espnet2_vllm.checkpoint.tensors import TensorSpec
from espnet2_vllm.checkpoint.writing import split_into_shards
from espnet2_vllm.errors import CheckpointError

each_release = pytest.mark.parametrize("name", RELEASES)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Name of a release -> (description, headers, plan)."""
    made = {}

    def get(name):
        if name not in made:
            source = lay_out(RELEASES[name], tmp_path_factory.mktemp(name))
            description = describe(source)
            tensors = headers(RELEASES[name], source.model_file)
            made[name] = description, tensors, make_plan(description, tensors)
        return made[name]

    return get


@each_release
def test_vocabulary_closes(name, planned):
    description, _, plan = planned(name)
    release = RELEASES[name]
    assert description.source.family == release.family
    assert description.source.model_file.name == release.file
    assert description.layout.vocab_size == release.rows
    assert description.layout.num_streams == release.streams
    specs = {entry.name: entry.spec for entry in plan.part("model")}
    hidden = release.trained_from[1]["hidden_size"]
    assert (
        specs["model.embed_tokens.weight"] == specs["lm_head.weight"] == TensorSpec((release.rows, hidden), "bfloat16")
    )
    assert specs["stream_emb.weight"].shape == (release.streams, hidden)


def test_bagpiper_layout(planned):
    layout = planned("bagpiper-tts-sft")[0].layout
    assert layout.text == (256, 152192)
    assert [span.size for span in layout.streams] == [1025] * 8
    assert layout.streams[0].start == 152192
    assert layout.streams[-1].stop == 160392


@pytest.mark.parametrize(("name", "text"), [("OpusLM_7B_Anneal", 100352), ("OpusLM_1.7B_Anneal", 49152)])
def test_opuslm_layout(name, text, planned):
    description = planned(name)[0]
    layout = description.layout
    assert layout.streams[0] == (256, 5256)
    assert layout.streams[1] == (5256, 6280)
    assert layout.streams[8].stop == layout.text.start == 13448
    assert layout.text.size == text
    assert description.preprocessor["speaker_prompt_length"] == 500


@pytest.mark.parametrize("name", ["bagpiper", "bagpiper-sft", "bagpiper-tts-sft"])
def test_bagpiper_counts(name, planned):
    """1,382 tensors are published, one of them a buffer of the loss."""
    _, tensors, plan = planned(name)
    assert len(tensors.specs) == 1382
    assert list(plan.dropped) == ["vocab_weight"]
    assert Counter(entry.part for entry in plan.entries) == {"model": 400, "codec": 454, "continuous_audio": 527}


@pytest.mark.parametrize(
    ("name", "layers", "a_layer"),
    [("OpusLM_7B_Anneal", 32, 11), ("OpusLM_1.7B_Anneal", 24, 9), ("multi_turn_SDS_RLAIF", 24, 9)],
)
def test_opuslm_counts(name, layers, a_layer, planned):
    """Body, final norm, embedding, head and stream embedding; nothing else is kept."""
    _, tensors, plan = planned(name)
    kept = layers * a_layer + 4
    assert Counter(entry.part for entry in plan.entries) == {"model": kept}
    reference = kept if RELEASES[name].extra else 0
    assert Counter(key.partition(".")[0] for key in plan.dropped) == Counter({"criterion": 1}) + Counter(
        reflm=reference
    )
    assert len(tensors.specs) == kept + reference + 1


@each_release
def test_every_tensor_is_accounted_for(name, planned):
    _, tensors, plan = planned(name)
    assert {entry.source for entry in plan.entries} | set(plan.dropped) == set(tensors.specs)
    assert len(plan.entries) + len(plan.dropped) == len(tensors.specs)


@each_release
@pytest.mark.parametrize("limit", [4 * 10**9, 10**9])
def test_shards(name, limit, planned):
    """In order, never above the limit, and no shard closed while the next tensor had room."""
    entries = planned(name)[2].part("model")
    shards = split_into_shards(entries, limit)
    sizes = [sum(entry.spec.nbytes for entry in shard) for shard in shards]
    largest = max(entry.spec.nbytes for entry in entries)
    assert list(itertools.chain(*shards)) == entries
    assert max(sizes) <= max(limit, largest)
    for size, following in itertools.pairwise(zip(sizes, shards, strict=True)):
        assert size[0] + following[1][0].spec.nbytes > limit
    assert len(shards) == 1 or sum(sizes) > limit


@each_release
def test_config_keeps_the_backbones_constants(name, planned):
    description, _, plan = planned(name)
    original = RELEASES[name].trained_from[1]
    config = backbone_config(description, plan)
    for key in ("rms_norm_eps", "rope_theta", "model_type", "num_hidden_layers", "max_position_embeddings"):
        assert config[key] == original[key]
    assert config["rope_parameters"]["rope_theta"] == original["rope_theta"]
    assert config["vocab_size"] == RELEASES[name].rows
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] == "bfloat16"


def test_float32_body_is_rounded_as_espnet_does(planned):
    description, tensors, _ = planned("OpusLM_1.7B_Anneal")
    wide = dataclasses.replace(
        tensors, specs={name: TensorSpec(spec.shape, "float32") for name, spec in tensors.specs.items()}
    )
    plan = make_plan(description, wide)
    dtypes = Counter(entry.spec.dtype for entry in plan.entries)
    assert dtypes == {"bfloat16": 24 * 9 + 1, "float32": 3}
    kept = {entry.name for entry in plan.entries if entry.spec.dtype == "float32"}
    assert kept == {"model.embed_tokens.weight", "lm_head.weight", "stream_emb.weight"}


def test_compiled_body_has_other_names(planned):
    """compile_transformer_body and activation checkpointing put their own words into the names."""
    description, tensors, plan = planned("bagpiper")
    renamed = {
        name.replace("model.layers.", "model._orig_mod.layers.", 1).replace(
            ".mlp.", "._checkpoint_wrapped_module.mlp."
        ): spec
        for name, spec in tensors.specs.items()
    }
    assert sum("_orig_mod" in name for name in renamed) == 36 * 11
    again = make_plan(description, dataclasses.replace(tensors, specs=renamed))
    assert [entry.name for entry in again.entries] == [entry.name for entry in plan.entries]


def _without(specs, *names):
    return {name: spec for name, spec in specs.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda specs: _without(specs, "model.layers.35.mlp.up_proj.weight"),
            ["1 missing", "model.layers.35.mlp.up_proj.weight [12288, 4096]"],
        ),
        (
            lambda specs: specs | {"model.layers.36.mlp.up_proj.weight": TensorSpec((12288, 4096), "bfloat16")},
            ["1 unknown", "model.layers.36.mlp.up_proj.weight bfloat16 [12288, 4096]"],
        ),
        (
            lambda specs: specs | {"model.norm.weight": TensorSpec((2048,), "bfloat16")},
            ["1 of another shape", "model.norm.weight is [2048], expected [4096]"],
        ),
        (
            lambda specs: specs | {"lm_head.weight": TensorSpec((160384, 4096), "bfloat16")},
            ["does not close", "lm_head.weight", "[160384, 4096]", "= 160392 ids"],
        ),
        (
            lambda specs: specs | {"stream_emb.weight": TensorSpec((9, 4096), "bfloat16")},
            ["codec does not fit", "8 streams", "9 rows"],
        ),
        (
            lambda specs: _without(specs, "multimodal_io_dict.discrete_audio.codec_model.fc.weight"),
            ["1 missing", "multimodal_io_dict.discrete_audio.codec_model.fc.weight [1024, 1024]"],
        ),
        (
            lambda specs: _without(specs, "adaptor.continuous_audio.bias"),
            ["1 missing", "adaptor.continuous_audio.bias [4096]"],
        ),
        (
            lambda specs: specs | {"model._orig_mod.norm.weight": TensorSpec((4096,), "bfloat16")},
            ["model.norm.weight and model._orig_mod.norm.weight are both model.norm.weight"],
        ),
    ],
)
def test_bagpiper_refusals_name_tensor_and_shape(change, words, planned):
    description, tensors, _ = planned("bagpiper-tts-sft")
    with pytest.raises(CheckpointError) as caught:
        make_plan(description, dataclasses.replace(tensors, specs=change(tensors.specs)))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda specs: _without(specs, "corelm.decoders.model.layers.0.self_attn.q_norm.weight"),
            ["1 missing", "corelm.decoders.model.layers.0.self_attn.q_norm.weight [4096]"],
        ),
        (
            lambda specs: specs | {"corelm.aux_lm_head.weight": TensorSpec((8192, 4096), "bfloat16")},
            ["1 unknown", "corelm.aux_lm_head.weight bfloat16 [8192, 4096]"],
        ),
        (
            lambda specs: specs | {"corelm.head_emb.weight": TensorSpec((8, 4096), "bfloat16")},
            ["9 streams", "corelm.head_emb.weight", "8 rows"],
        ),
        (
            lambda specs: specs | {"corelm.emb.weight": TensorSpec((113920, 4096), "bfloat16")},
            ["does not close", "[113920, 4096]", "= 113870 ids"],
        ),
    ],
)
def test_opuslm_refusals_name_tensor_and_shape(change, words, planned):
    description, tensors, _ = planned("OpusLM_7B_Anneal")
    with pytest.raises(CheckpointError) as caught:
        make_plan(description, dataclasses.replace(tensors, specs=change(tensors.specs)))
    for word in words:
        assert word in str(caught.value)


def test_other_familys_tensors(planned):
    description = planned("bagpiper")[0]
    with pytest.raises(CheckpointError, match="opuslm family.*corelm.emb.weight.*bagpiper family"):
        make_plan(description, planned("OpusLM_1.7B_Anneal")[1])


def test_encoder_configuration_may_be_elsewhere(tmp_path):
    """Without the 70 GB repository of the encoder all but continuous audio input still works; the report says so."""
    source = lay_out(RELEASES["bagpiper"], tmp_path)
    (tmp_path / "Qwen/Qwen3-Omni-30B-A3B-Instruct/config.json").unlink()
    (tmp_path / "Qwen/Qwen3-Omni-30B-A3B-Instruct").rmdir()
    description = describe(source)
    plan = make_plan(description, headers(RELEASES["bagpiper"], source.model_file))
    assert description.continuous_audio.facts["config"] is None
    assert any("Qwen/Qwen3-Omni-30B-A3B-Instruct is not on this machine" in note for note in description.notes)
    assert len(plan.part("continuous_audio")) == 527
