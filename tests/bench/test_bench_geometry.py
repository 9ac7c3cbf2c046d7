"""Geometries by name and by directory; what a row costs."""

import json
import math
from dataclasses import replace

import pytest
from bench_models import converted_model, tiny_bagpiper, tiny_opuslm

from espnet2_vllm.bench.cost import Peaks, Shape, Work, head_columns, peaks_of, use_of
from espnet2_vllm.bench.geometry import NAMES, find_geometry
from espnet2_vllm.checkpoint.expected import ARCHITECTURES, backbone_shapes
from espnet2_vllm.errors import CheckpointError, ConfigError

# ids, streams and parameters of the released checkpoints
RELEASED = {"bagpiper-8b": (160392, 8), "opuslm-7b": (113870, 9), "opuslm-dialogue-1.7b": (62670, 9)}


@pytest.mark.parametrize("name", NAMES)
def test_released_geometries_have_their_vocabulary_and_transformers_counts_the_same_weights(name):
    from transformers import AutoConfig

    geometry = find_geometry(name)
    assert (geometry.layout.vocab_size, geometry.layout.num_streams) == RELEASED[name]
    assert geometry.backbone["vocab_size"] == geometry.layout.vocab_size
    assert geometry.backbone["architectures"] == [ARCHITECTURES[geometry.backbone["model_type"]]]
    shapes = backbone_shapes(
        AutoConfig.for_model(**geometry.backbone), geometry.layout.vocab_size, geometry.layout.num_streams
    )
    matrices = [shape for tensor, shape in shapes.items() if ".layers." in tensor and len(shape) == 2]
    assert Shape.of(geometry.backbone).weights == sum(map(math.prod, matrices))


def test_unknown_models_are_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match="did you mean bagpiper-8b"):
        find_geometry("bagpiper-7b")
    with pytest.raises(CheckpointError, match="run espnet2-vllm convert"):
        find_geometry(str(tmp_path))


def test_a_converted_directory_keeps_its_own_layout_and_weights(tmp_path):
    directory = converted_model("bagpiper", "qwen3-s8-cb64")
    geometry = find_geometry(str(directory))
    opened = geometry.open(tmp_path)
    assert opened.path == directory.absolute() and opened.layout == geometry.layout
    assert not list(tmp_path.iterdir())
    plain = json.loads((geometry.write_plain(tmp_path / "plain") / "config.json").read_text(encoding="utf-8"))
    assert plain == {**geometry.backbone, "architectures": ["Qwen3ForCausalLM"]}


def test_a_row_chooses_among_its_own_ids():
    layout = tiny_bagpiper(4).layout
    assert head_columns(layout, "audio") == 2 + 4 * 9 and head_columns(layout, "text") == 2 + 50
    assert head_columns(layout, "plain") == layout.vocab_size
    layout = tiny_opuslm(3).layout
    # The end token, the modality's own start, SSL units, and per codebook a pad besides the codes.
    assert head_columns(layout, "audio") == 2 + 12 + 3 * 9


def test_work_is_counted_row_by_row():
    shape = Shape(weights=1000, hidden=10, attention=7, cache=6)
    work = Work(units=3, prompt=5, output=4, columns={"text": (0.25, 50), "audio": (0.75, 20)}, steps=11)
    flops = read = 0
    for _ in range(3):
        for fed in range(1, 5 + 4):
            flops += 2 * 1000 + 7 * fed
        flops += 2 * 10 * (1 * 50 + 3 * 20)
        for chosen in range(1, 4):
            read += 2 * 6 * (5 + chosen)
    read += 2 * 11 * (1000 + 50 * 10)
    assert work.flops(shape) == flops
    assert work.bytes(shape, "bfloat16") == read
    assert work.bytes(shape, "float32") == 2 * read
    two = replace(work, engines=2)  # each reads the weights, and what the units cost stays
    assert two.flops(shape) == flops and two.bytes(shape, "bfloat16") == read + 2 * 11 * (1000 + 50 * 10)


def test_shares_are_of_the_device_that_is_known():
    assert peaks_of("NVIDIA H200", "bfloat16") == Peaks(989e12, 4.8e12)
    assert peaks_of("NVIDIA H100 PCIe", "bfloat16").bandwidth == 2.0e12
    assert peaks_of("NVIDIA H200", "float32") == Peaks(None, 4.8e12)
    assert peaks_of("CPU (x86_64, 2 cores)", "bfloat16") == Peaks()
    assert Peaks(2.0, None).of(3) == Peaks(6.0, None)
    shape, work = Shape(1000, 10, 7, 6), Work(1, 1, 2, {"text": (1.0, 5)}, 2)
    use = use_of(work, shape, "bfloat16", 2.0, Peaks(flops=1e6))
    assert use["flops"] == work.flops(shape) / 2 and use["flops_share"] == use["flops"] / 1e6
    assert use["bandwidth"] == work.bytes(shape, "bfloat16") / 2 and use["bandwidth_share"] is None
