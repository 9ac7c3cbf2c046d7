"""The plain engine: exact on every recorded case, and what it does at its edges."""

import dataclasses
import functools
import types

import numpy as np
import pytest
import sampling_cases
import torch
from conftest import golden_files
from golden_cases import EXACT, Model, replay
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from espnet2_vllm.backends import Engine
from espnet2_vllm.backends.pytorch import PyTorchEngine
from espnet2_vllm.errors import CheckpointError, ConfigError, DataError
from espnet2_vllm.layout import NUM_SPECIALS, Layout
from espnet2_vllm.plan import RowRequest
from espnet2_vllm.protocol import BagpiperRules, ModalityRules, OpusLMRules, Sampling

SEED = 20260815
ENGINE_DRAWS = 400


# -- the recorded cases ------------------------------------------------------------------------------------------------
CASES = [path for family in ("bagpiper", "opuslm") for path in golden_files(f"{family}/*/cases/*.json")]


@functools.lru_cache(maxsize=1)  # the cases of a model follow each other
def recorded_model(directory):
    return Model(directory, "pytorch", compare_logits=True)


@pytest.mark.parametrize("path", CASES, ids=[f"{path.parent.parent.name}-{path.stem}" for path in CASES])
def test_recorded_case(path):
    verdict = replay(recorded_model(path.parent.parent), path)
    assert verdict.verdict == EXACT, str(verdict)
    assert verdict.logits is not None, "no logits were compared"


@pytest.mark.parametrize(
    ("pattern", "make"),
    [
        ("bagpiper/*/cases/sampling_0_audio_cfg1_top20.json", sampling_cases.bagpiper_requests),
        ("opuslm/*/cases/tts_nbest3_topk.json", sampling_cases.opuslm_requests),
    ],
    ids=["bagpiper", "opuslm"],
)
def test_draws_through_the_whole_engine_follow_a_recorded_distribution(pattern, make):
    path = golden_files(pattern)[0]
    model = recorded_model(path.parent.parent)
    values = sampling_cases.engine_p_values(model.engine, *make(model.layout, path, ENGINE_DRAWS))
    sampling_cases.check(values, tests=2 * model.layout.num_streams)


# -- a tiny model of random weights ------------------------------------------------------------------------------------
def bagpiper_layout():
    """Streams of different sizes, as no recorded model has them."""
    return Layout.bagpiper(text_size=20, stream_sizes=[9, 5, 7])


def opuslm_layout():
    names = [f"<unused_{i}>" for i in range(NUM_SPECIALS)]
    names[0], names[1], names[5] = "<pad>", "<unk>", "<sos/eos>"
    names[8], names[9], names[10] = "<system_prompt>", "<user_input>", "<assistant_output>"
    names[34], names[35], names[37] = "<codec_ssl_start/end>", "<text_bpe_start/end>", "<spk_start/end>"
    return Layout.opuslm(names, {"ssl": [256, 266], "codec": [266, 282], "text_bpe": [282, 302]}, 3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By family: what an engine needs of a converted checkpoint, with random weights."""
    return {
        layout.family: random_checkpoint(layout, tmp_path_factory.mktemp(layout.family))
        for layout in (bagpiper_layout(), opuslm_layout())
    }


def random_checkpoint(layout, folder, max_rows=64):
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=layout.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_rows,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["stream_emb.weight"] = torch.randn(layout.num_streams, config.hidden_size)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return types.SimpleNamespace(path=folder, layout=layout, max_rows=max_rows)


def bagpiper_rules(layout, sampling=None, enforce=("audio",), guidance=1.0, max_rows=8):
    block = ModalityRules(sampling or Sampling(), 2, max_rows, guidance)
    return BagpiperRules(layout, enforce, block, block)


def request(layout, name="r", rows=5, seed=1, **rules):
    prompt = np.random.default_rng(SEED).integers(0, layout.vocab_size, (rows, layout.num_streams)).astype(np.int32)
    if layout.family == "bagpiper":
        return RowRequest(name, prompt, bagpiper_rules(layout, **rules), seed)
    rules = {"modality": "audio", "sampling": Sampling(), "min_rows": 1, "max_rows": 12, **rules}
    return RowRequest(name, prompt, OpusLMRules(layout, **rules), seed)


def run(engine, *requests):
    """Results by id."""
    for one in requests:
        engine.submit(one)
    results = {}
    while engine.unfinished:
        results.update(engine.step())
    return results


def run_one(engine, one):
    return run(engine, one)[one.request_id]


DRAWN = Sampling(1.0, 8)


def test_it_is_an_engine(checkpoints):
    engine = PyTorchEngine(checkpoints["bagpiper"])
    assert isinstance(engine, Engine)
    assert engine.step() == []
    engine.close()


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
def test_a_request_does_not_depend_on_its_neighbours(checkpoints, family):
    engine, layout = PyTorchEngine(checkpoints[family]), checkpoints[family].layout
    requests = [request(layout, f"r{i}", rows=3 + i, seed=i, sampling=DRAWN) for i in range(4)]
    alone = {one.request_id: run_one(engine, one).rows.tolist() for one in requests}
    together = run(engine, *reversed(requests))
    assert {name: result.rows.tolist() for name, result in together.items()} == alone
    again = run_one(engine, request(layout, "again", rows=3, seed=99, sampling=DRAWN))
    assert again.rows.tolist() != alone["r0"], "another seed draws otherwise"


def test_aborted_requests_never_come_back(checkpoints):
    engine, layout = PyTorchEngine(checkpoints["opuslm"]), checkpoints["opuslm"].layout
    for i in range(3):
        engine.submit(request(layout, f"r{i}"))
    engine.abort(["r1", "unknown"])
    assert engine.unfinished == 2
    assert [name for _ in range(3) for name, _ in engine.step()] == ["r0", "r2"]


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
def test_a_streaming_request_hands_out_its_rows_one_by_one(checkpoints, family):
    engine, layout = PyTorchEngine(checkpoints[family]), checkpoints[family].layout
    whole = run_one(engine, request(layout, sampling=DRAWN))
    assert engine.take_rows() == []
    engine.submit(dataclasses.replace(request(layout, sampling=DRAWN), stream=(1, 1)))
    rows, outcomes = [], []
    while engine.unfinished:
        outcomes += engine.step()
        rows += engine.take_rows()
    assert [name for name, _ in rows] == ["r"] * len(whole.rows)
    np.testing.assert_array_equal(np.concatenate([row for _, row in rows]), whole.rows)
    ((_, result),) = outcomes
    np.testing.assert_array_equal(result.rows, whole.rows)
    np.testing.assert_array_equal(result.logprobs, whole.logprobs)
    for name in ("left", "stays"):
        engine.submit(dataclasses.replace(request(layout), request_id=name, stream=(1, 1)))
    engine.step()
    engine.abort(["left"])
    assert (engine.take_rows(), engine.unfinished) == ([], 1)
    assert list(run(engine)) == ["stays"]


def test_the_context_cuts(checkpoints):
    engine = PyTorchEngine(checkpoints["bagpiper"], max_rows=20)
    layout = checkpoints["bagpiper"].layout
    rules = BagpiperRules(layout, ("text",), ModalityRules(Sampling(), 100, 100), None)
    prompt = request(layout, rows=7).prompt
    result = run_one(engine, RowRequest("cut", prompt, rules))
    assert (result.finish, len(result.rows)) == ("length", 13)
    last = BagpiperRules(layout, ("text",), ModalityRules(Sampling(), 100, 12), None)
    result = run_one(engine, RowRequest("fits", prompt, last))
    assert (result.finish, len(result.rows)) == ("stop", 13)


def test_what_does_not_fit_is_refused(checkpoints):
    engine = PyTorchEngine(checkpoints["opuslm"], max_rows=20)
    layout = checkpoints["opuslm"].layout
    assert len(run_one(engine, request(layout, rows=19)).rows) == 1
    with pytest.raises(DataError, match="r: 20 prompt rows leave no room in the context of 20 rows"):
        engine.submit(request(layout, rows=20))
    one = request(layout, rows=15)
    with pytest.raises(DataError, match="15 prompt rows and 5 reference rows leave no room"):
        engine.submit(RowRequest("r", one.prompt, one.rules, reference=one.prompt[:5]))
    assert engine.unfinished == 0


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
def test_log_probabilities_are_those_of_the_draw(checkpoints, family):
    """Of each id that was drawn: after mask, top-k and temperature, recomputed here from the raw logits."""
    layout = checkpoints[family].layout
    engine = PyTorchEngine(checkpoints[family], keep_logits=True)
    one = request(layout, sampling=Sampling(0.7, 3))
    result = run_one(engine, one)
    candidates, state, compared = layout.auxiliary_candidates(), one.rules.start(), 0
    for row, logprobs, forced, (primary, auxiliary) in zip(
        result.rows, result.logprobs, result.forced, result.logits, strict=True
    ):
        constraint = one.rules.constraint(state)
        state, _ = one.rules.advance(state, tuple(row.tolist()))
        for s in range(layout.num_streams):
            if forced[s]:
                assert logprobs[s] == 0
                continue
            ids = (
                np.array(candidates[s - 1]) if s else np.concatenate([np.arange(*span) for span in constraint.primary])
            )
            values = (auxiliary[s - 1, : len(ids)] if s else primary[ids]).astype(np.float64)
            kept = np.sort(values)[-constraint.sampling.topk :] / constraint.sampling.temperature
            value = values[ids.tolist().index(row[s])] / constraint.sampling.temperature
            assert value >= kept[0], "not among the best"
            assert logprobs[s] == pytest.approx(value - np.log(np.exp(kept).sum()), abs=1e-4)
            compared += 1
    assert compared > layout.num_streams


def test_guidance_of_scale_one_is_none_and_others_change_the_logits_merged(checkpoints):
    layout = checkpoints["bagpiper"].layout
    engine = PyTorchEngine(checkpoints["bagpiper"], keep_logits=True)
    plain = run_one(engine, request(layout, sampling=DRAWN))
    assert {len(row) for row in plain.logits} == {2}
    guided = run_one(engine, request(layout, sampling=DRAWN, guidance=3.0))
    assert [len(row) for row in guided.logits[:3]] == [2, 4, 4], "modality row unguided, then with the companion's"
    assert np.allclose(guided.logits[1][0], plain.logits[1][0]), "what is kept of the main branch is not merged"
    assert not np.allclose(guided.logits[1][0], guided.logits[1][2])


def test_teacher_forcing_gives_a_row_for_each_of_the_reference(checkpoints):
    layout = checkpoints["opuslm"].layout
    engine = PyTorchEngine(checkpoints["opuslm"])
    for modality in ("audio", "text"):
        one = request(layout, modality=modality, min_rows=11, max_rows=10)
        reference = request(layout, rows=10).prompt[::-1].copy()
        result = run_one(engine, RowRequest("r", one.prompt, one.rules, reference=reference))
        assert result.rows.shape == reference.shape
        assert result.forced[:, 0].sum() == 0
        assert result.forced[:, 1:].all() == (modality == "text")
        assert layout.specials["eos"] not in result.rows[:, 0]
        assert result.logits is None
        changed = reference.copy()
        changed[6:] = 0
        other = run_one(engine, RowRequest("r", one.prompt, one.rules, reference=changed))
        assert np.array_equal(result.rows[:7], other.rows[:7]), "row t sees the reference before t only"


@pytest.mark.parametrize("options", [{"attention": "eager"}, {"device": "cpu"}, {"dtype": "float64"}])
def test_the_way_of_computing_does_not_change_the_ids(checkpoints, options):
    for checkpoint in checkpoints.values():
        one = request(checkpoint.layout)
        expected = run_one(PyTorchEngine(checkpoint, device="cpu"), one).rows
        assert np.array_equal(run_one(PyTorchEngine(checkpoint, **options), one).rows, expected)


def test_bfloat16_runs(checkpoints):
    for checkpoint in checkpoints.values():
        result = run_one(PyTorchEngine(checkpoint, dtype="bfloat16", keep_logits=True), request(checkpoint.layout))
        assert result.finish == "stop"
        assert result.logits[0][0].dtype == np.float32


# -- errors ------------------------------------------------------------------------------------------------------------
def test_options_that_cannot_be_used(checkpoints):
    checkpoint = checkpoints["bagpiper"]
    for max_rows in (1, 65):
        with pytest.raises(ConfigError, match=f"max_rows {max_rows}: expected 2 to 64"):
            PyTorchEngine(checkpoint, max_rows=max_rows)
    with pytest.raises(ConfigError, match="attention 'sdp' is unknown; expected one of sdpa, eager"):
        PyTorchEngine(checkpoint, attention="sdp")
    with pytest.raises(ConfigError, match="device 'gpu' is unknown"):
        PyTorchEngine(checkpoint, device="gpu")
    with pytest.raises(ConfigError, match="device cuda:99: this machine has"):
        PyTorchEngine(checkpoint, device="cuda:99")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("stream_emb.weight", None, "tensors missing: stream_emb.weight"),
        ("stream_emb.weight", (2, 32), r"tensors different: stream_emb.weight is \[2, 32\], expected \[3, 32\]"),
        ("model.layers.1.mlp.up_proj.weight", None, "tensors missing: model.layers.1.mlp.up_proj.weight"),
        ("model.layers.2.mlp.up_proj.weight", (48, 32), "tensors unknown: model.layers.2.mlp.up_proj.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, name, shape, message):
    checkpoint = random_checkpoint(bagpiper_layout(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        PyTorchEngine(checkpoint)
