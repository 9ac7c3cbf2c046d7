"""The vocabulary against ESPnet's own intervals, names and masks."""

import json

import numpy as np
import pytest
from conftest import golden_files, golden_models
from golden_layouts import bagpiper_layout, opuslm_config, opuslm_layout

from espnet2_vllm.errors import CheckpointError
from espnet2_vllm.layout import NUM_SPECIALS, Layout, Span, bagpiper_offsets


def spans_of(ids) -> list[list[int]]:
    """Sorted ids as [start, stop) ranges."""
    ids = sorted(ids)
    cuts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1] + 1] + [len(ids)]
    return [[ids[a], ids[b - 1] + 1] for a, b in zip(cuts, cuts[1:], strict=False)]


def allowed(layout: Layout, modality: str, stream: int) -> list[int]:
    """Ids that a row of ``modality`` may have in ``stream``, the end tokens apart."""
    if stream == 0:
        return sorted(i for span in layout.primary_spans(modality) for i in range(*span))
    return sorted(layout.auxiliary_candidates()[stream - 1]) if modality == "audio" else [layout.pad]


# -- Bagpiper ----------------------------------------------------------------------------------------------------------
VOCABS = golden_files("bagpiper/functions/vocab_*.json")


@pytest.mark.parametrize("path", VOCABS, ids=lambda p: p.stem)
def test_bagpiper_vocabulary(path):
    data, layout = json.loads(path.read_text(encoding="utf-8")), bagpiper_layout(path)
    intervals = data["vocab_intervals"]
    assert intervals["special_token"] == [[0, NUM_SPECIALS]]
    assert [list(layout.text)] == intervals["text"]
    assert [list(s) for s in layout.streams] == intervals["discrete_audio"]
    assert data["loss_intervals"] == [[layout.streams[0].start, layout.streams[-1].stop]]
    assert (layout.num_streams, layout.vocab_size) == (data["num_stream"], data["vocab_size"])
    assert (layout.specials["eos"], layout.specials["eot"]) == (data["eos_token_id"], data["eot_token_id"])
    assert layout.end_tokens == (data["eos_token_id"], data["eot_token_id"])
    assert {name: data["vocab"].index(f"<|{name}|>") for name in layout.specials} == dict(layout.specials)
    sizes = {"text": layout.text.size, "discrete_audio": sum(s.size for s in layout.streams)}
    assert bagpiper_offsets(sizes)["discrete_audio"] == layout.streams[0].start


@pytest.mark.parametrize("path", golden_files("bagpiper/functions/masks_*.npz"), ids=lambda p: p.stem)
def test_bagpiper_masks(path):
    layout = bagpiper_layout(path.with_name(path.stem.replace("masks_", "vocab_") + ".json"))
    with np.load(path) as masks:
        for stream in range(layout.num_streams):
            for modality in ("text", "audio"):
                assert allowed(layout, modality, stream) == masks[f"{modality}_allowed_s{stream}"].tolist()
            pads = [layout.pad]
            specials = list(range(NUM_SPECIALS)) if stream == 0 else pads
            assert specials == masks[f"special_token_allowed_s{stream}"].tolist()
            modalities = list(range(*layout.modality_span)) if stream == 0 else pads
            assert modalities == masks[f"modality_allowed_s{stream}"].tolist()
        for name in ("assistant", "audio", "text", "eos", "eot"):
            row = [layout.specials[name]] + [layout.pad] * (layout.num_streams - 1)
            assert row == masks[f"{name}_token"].tolist()
    for stream, pad in enumerate(layout.stream_pads):
        assert (pad, pad + 1) == (layout.streams[stream].start, layout.code_spans[stream].start)
    assert list(layout.codec_streams) == list(range(layout.num_streams))


def test_ids_follow_the_keys_of_the_yaml_or_their_names():
    by_name = {"text": 10, "discrete_audio": 20, "other": 5}
    assert bagpiper_offsets(by_name) == {"text": 256, "discrete_audio": 266, "other": 286}
    swapped = {"other": 5, "discrete_audio": 20, "text": 10}
    assert bagpiper_offsets(swapped) == {"other": 256, "discrete_audio": 261, "text": 281}
    assert bagpiper_offsets(swapped, vocab_order="name") == bagpiper_offsets(by_name)
    with pytest.raises(CheckpointError, match="vocab_order"):
        bagpiper_offsets(swapped, vocab_order="keys")
    with pytest.raises(CheckpointError, match="no 'text'"):
        bagpiper_offsets({"discrete_audio": 20})


# -- OpusLM ------------------------------------------------------------------------------------------------------------
def _special_names() -> list[str]:
    names = [f"<unused_token_{i}>" for i in range(NUM_SPECIALS)]
    for i, name in {0: "<pad>", 1: "<unk>", 5: "<sos/eos>"}.items():
        names[i] = name
    names[8:12] = ["<system_prompt>", "<user_input>", "<assistant_output>", "<eou>"]
    for i, modality in enumerate(["codec", "ssl", "codec_ssl", "text_bpe", "g2p", "spk"]):
        names[32 + i] = f"<{modality}_start/end>"
    names[64], names[80] = "<textlm_task>", "<codec_ssl_asr_task>"
    return names


def _mask_cases():
    for path in golden_files("opuslm/functions/build_mask.json"):
        for name, case in json.loads(path.read_text(encoding="utf-8")).items():
            yield pytest.param(case, id=name)


@pytest.mark.parametrize("case", _mask_cases())
def test_opuslm_masks(case):
    layout = Layout.opuslm(_special_names(), case["token_bias"], case["nq"])
    assert (layout.vocab_size, layout.num_streams) == (case["vocab_size"], case["nq"])
    for stream in range(layout.num_streams):
        assert spans_of(allowed(layout, "text", stream)) == case["text_bpe"][stream]
        assert spans_of(allowed(layout, "audio", stream)) == case["codec_ssl"][stream]


@pytest.mark.parametrize("model", golden_models("opuslm"), ids=lambda p: p.name)
def test_opuslm_dense_masks(model):
    layout = opuslm_layout(model)
    for path in golden_files("opuslm/functions/build_mask.npz"):
        with np.load(path) as masks:
            for modality, name in (("text", "text_bpe"), ("audio", "codec_ssl")):
                dense = masks[f"{model.name}.{name}.allowed"]
                assert dense.shape == (layout.num_streams, layout.vocab_size)
                for stream in range(layout.num_streams):
                    assert np.flatnonzero(dense[stream]).tolist() == allowed(layout, modality, stream)


@pytest.mark.parametrize("model", golden_models("opuslm"), ids=lambda p: p.name)
def test_opuslm_specials_are_looked_up_by_name(model):
    layout = opuslm_layout(model)
    config = opuslm_config(model)
    names = config["token_list"]
    assert len(names) == layout.vocab_size
    for name, token in layout.specials.items():
        if "/" in name:
            kind, value = name.split("/", 1)
            assert names[token] == f"<{value}_start/end>" if kind == "modality" else f"<{value}_task>"
    assert layout.modality_of(layout.modality_token("audio")) == "codec_ssl"
    assert layout.modality_of(layout.modality_token("text")) == "text_bpe"
    assert layout.modality_of(layout.specials["eos"]) is None
    moved = list(names)
    moved[34], moved[40] = moved[40], moved[34]
    other = Layout.opuslm(moved, config["token_bias"], config["codec_token_in_use"])
    assert other.modality_token("audio") == 40


# -- both --------------------------------------------------------------------------------------------------------------
def _layouts() -> list[Layout]:
    layouts = [bagpiper_layout(path) for path in VOCABS] + [opuslm_layout(m) for m in golden_models("opuslm")]
    bias = {"text_bpe": [40_000, 40_500], "ssl": [256, 300], "codec": [300, 364]}
    return [*layouts, Layout.bagpiper(100, [9] * 4, offset=7), Layout.opuslm(_special_names(), bias, 3)]


@pytest.mark.parametrize("layout", _layouts(), ids=lambda x: f"{x.family}-{x.num_streams}-{x.vocab_size}")
def test_layout_survives_json(layout):
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert not any(span.holds(layout.stop_token) for m in ("text", "audio") for span in layout.primary_spans(m))
    assert layout.stop_token not in layout.end_tokens


def test_contradictory_layouts_are_refused():
    good = Layout.bagpiper(100, [9] * 4).to_dict()
    for change, message in [
        ({"num_streams": 3}, "stream spans"),
        ({"vocab_size": 300}, "beyond the vocabulary"),
        ({"text": [200, 300]}, "overlap"),
        ({"text": [300, 300]}, "empty"),
        ({"family": "other"}, "family"),
        ({"specials": {"eos": 256}}, "special eos"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            Layout.from_dict(good | change)
    with pytest.raises(CheckpointError, match="lacks text"):
        Layout.from_dict({k: v for k, v in good.items() if k != "text"})
    bias = {"text_bpe": [400, 500], "ssl": [256, 300], "codec": [300, 365]}
    with pytest.raises(CheckpointError, match="shared evenly"):
        Layout.opuslm(_special_names(), bias, 3)
    with pytest.raises(CheckpointError, match="no 'codec'"):
        Layout.opuslm(_special_names(), {k: v for k, v in bias.items() if k != "codec"}, 3)
    bias["codec"] = [300, 364]
    with pytest.raises(CheckpointError, match="<sos/eos>"):
        Layout.opuslm([n.replace("sos", "bos") for n in _special_names()], bias, 3)


def test_spans():
    span = Span(3, 5)
    assert (span.size, span.holds(2), span.holds(3), span.holds(4), span.holds(5)) == (2, False, True, True, False)
