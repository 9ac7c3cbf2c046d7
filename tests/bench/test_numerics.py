"""What is said of two engines' ids and logits, on scripted results; random weights with preferences."""

import numpy as np
import pytest
from bench_models import FAMILIES, tiny_bagpiper

from espnet2_vllm.backends.pytorch import PyTorchEngine
from espnet2_vllm.bench.numerics import compare
from espnet2_vllm.bench.weights import LOGIT_STD, PEAK, write_weights
from espnet2_vllm.bench.workload import Workload, random_prompt, run_units, speech_unit
from espnet2_vllm.plan import RowRequest, RowResult
from espnet2_vllm.protocol import Sampling

LAYOUT = tiny_bagpiper(3).layout


def audio_rows(rng, count):
    return np.stack([rng.integers(span.start, span.stop, count) for span in LAYOUT.streams], 1).astype(np.int32)


def scripted(name, rows, rng, offset=0.0, width=9):
    """A request and its result; logits are zero with ``offset`` added, a filled-up column of another engine may be -inf."""
    prompt = np.zeros((2, LAYOUT.num_streams), np.int32)
    logits = tuple(
        (np.full(LAYOUT.vocab_size, offset, np.float32), np.full((2, width), offset, np.float32)) for _ in rows
    )
    shape = rows.shape
    return RowRequest(name, prompt, None), RowResult(
        rows, np.zeros(shape, np.float32), np.zeros(shape, bool), logits=logits
    )


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def test_equal_results_are_equal(rng):
    rows = audio_rows(rng, 6)
    comparison = compare(LAYOUT, [scripted("x", rows, rng)], [scripted("x", rows.copy(), rng)])
    facts = comparison.to_dict()
    assert comparison.equal and facts["first_difference"] is None
    assert facts["ids_equal"] == facts["ids"] == 18 and facts["rows_same_history"] == 6
    assert facts["rmse"]["all_streams"] == {"mean": 0.0, "max": 0.0}


def test_the_first_difference_ends_the_rows_with_one_history(rng):
    rows = audio_rows(rng, 6)
    other = rows.copy()
    other[3, 2] = LAYOUT.streams[2].start + (rows[3, 2] - LAYOUT.streams[2].start + 1) % 9
    other[5] = audio_rows(rng, 1)
    a, b = scripted("x", rows, rng), scripted("x", other, rng, offset=0.5)
    # What comes behind the first difference must not be looked at.
    b[1].logits[4][0][:] = 1e6
    a[1].logits[3][1][1, rows[3, 2] - LAYOUT.streams[2].start] = 2.0
    facts = compare(LAYOUT, [a], [b]).to_dict()
    first = facts["first_difference"]
    assert (first["first"], first["stream"], first["margin"]) == (3, 2, 2.0)
    assert facts["rows_same_history"] == 4 and facts["requests_equal"] == 0
    assert facts["rmse"]["primary"] == {"mean": 0.5, "max": 0.5}
    # One of 18 auxiliary logits of row 3 is 1.5 away, the rest 0.5.
    assert facts["rmse"]["auxiliary"]["max"] == pytest.approx(np.sqrt((17 * 0.25 + 2.25) / 18))
    total = LAYOUT.vocab_size + 18
    assert facts["rmse"]["all_streams"]["max"] == pytest.approx(np.sqrt(((total - 1) * 0.25 + 2.25) / total))
    assert facts["margin_smallest"] == 0.0 and facts["ids_equal"] == 18 - (rows != other).sum()


def test_columns_without_an_id_do_not_count(rng):
    rows = audio_rows(rng, 2)
    a, b = scripted("x", rows, rng), scripted("x", rows, rng)
    layout = tiny_bagpiper(3).layout
    uneven = type(layout)(
        layout.family, 3, layout.vocab_size, layout.text,
        (layout.streams[0], layout.streams[1], (layout.streams[2].start, layout.streams[2].start + 4)), layout.specials,
    )  # fmt: skip
    for _, auxiliary in b[1].logits:
        auxiliary[1, 4:] = -np.inf
    assert compare(uneven, [a], [b]).to_dict()["rmse"]["auxiliary"] == {"mean": 0.0, "max": 0.0}


def test_forced_ids_are_no_agreement_and_results_that_end_early_differ(rng):
    rows = audio_rows(rng, 4)
    a, b = scripted("x", rows, rng), scripted("x", rows[:3], rng)
    a[1].forced[0] = True
    facts = compare(LAYOUT, [a], [b]).to_dict()
    assert facts["ids"] == 6 and facts["ids_equal"] == 6
    assert (facts["first_difference"]["first"], facts["first_difference"]["stream"]) == (3, -1)
    assert facts["rows_same_history"] == 3


def test_requests_on_other_prompts_are_apart(rng):
    rows = audio_rows(rng, 2)
    a, b = scripted("x", rows, rng), scripted("x", rows, rng)
    b[0].prompt[0, 0] = 7
    comparison = compare(LAYOUT, [a, scripted("y", rows, rng)], [b])
    assert comparison.apart == ["x", "y"] and not comparison.equal


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_random_weights_with_preferences_decide_clearly(family, tmp_path):
    geometry = FAMILIES[family]()
    wide = type(geometry)(
        geometry.name, geometry.layout, {**geometry.backbone, "hidden_size": 1024, "intermediate_size": 256}
    )
    engine = PyTorchEngine(write_weights(wide, tmp_path, seed=3), device="cpu", keep_logits=True)
    rng = np.random.default_rng(1)
    prompt = random_prompt(geometry.layout, rng, 8, "audio")
    finished = run_units(engine, [speech_unit(geometry.layout, Workload("audio"), "u", prompt, 30, Sampling())])
    engine.close()
    margins = np.array(compare(geometry.layout, finished, finished).margins)
    assert np.median(margins) > 0.4 * PEAK * LOGIT_STD
    assert (margins > 0.5).mean() > 0.98
    # Logits of ids that nothing prefers have the standard deviation that is said.
    text = np.concatenate([logits[0][slice(*geometry.layout.text)] for logits in finished[0][1].logits[5:]])
    assert np.std(text) == pytest.approx(LOGIT_STD, rel=0.5)


def test_weights_depend_on_the_seed_alone_and_are_read_back_exactly(tmp_path):
    from safetensors import safe_open

    geometry = tiny_bagpiper()
    first, again, other = (write_weights(geometry, tmp_path / f"{n}", seed=seed) for n, seed in enumerate((1, 1, 2)))

    def tensors(checkpoint):
        found = {}
        for file in sorted(checkpoint.path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as content:
                found |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        return found

    a, b, c = map(tensors, (first, again, other))
    assert all((a[name] == b[name]).all() for name in a)
    assert not (a["lm_head.weight"] == c["lm_head.weight"]).all()
    assert not a["model.embed_tokens.weight"][geometry.layout.pad].any()
    assert str(a["lm_head.weight"].dtype) == "torch.bfloat16"
