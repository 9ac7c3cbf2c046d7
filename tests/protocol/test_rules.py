"""The step functions at their edges, and the choice of ids under their masks."""

import json

import numpy as np
import pytest
from conftest import golden_files, golden_models
from golden_layouts import opuslm_layout

from espnet2_vllm import delay
from espnet2_vllm.layout import Layout
from espnet2_vllm.protocol import (
    AUDIO,
    BRIDGE,
    DONE,
    MODALITY,
    TEXT,
    BagpiperRules,
    ModalityRules,
    OpusLMRules,
    Sampling,
    replay,
)

# A small OpusLM-like vocabulary: 3 streams, 8 SSL units, 2 books of 4.
NAMES = [f"<unused_{i}>" for i in range(256)]
for _place, _name in {
    0: "<pad>",
    1: "<unk>",
    5: "<sos/eos>",
    8: "<system_prompt>",
    9: "<user_input>",
    10: "<assistant_output>",
    34: "<codec_ssl_start/end>",
    35: "<text_bpe_start/end>",
    37: "<spk_start/end>",
}.items():
    NAMES[_place] = _name
OPUSLM = Layout.opuslm(NAMES, {"text_bpe": [272, 300], "ssl": [256, 264], "codec": [264, 272]}, 3)
BAGPIPER = Layout.bagpiper(20, [5] * 3)
EOS = OPUSLM.specials["eos"]


# -- choices under the masks -------------------------------------------------------------------------------------------
def masked(layout: Layout, rules, state, logits: np.ndarray) -> np.ndarray:
    """[S, V] logits with -inf where the constraint of ``state`` closes an id."""
    constraint = rules.constraint(state)
    result = np.full_like(logits, -np.inf)
    for span in constraint.primary:
        result[0, span.start : span.stop] = logits[0, span.start : span.stop]
    for s, ids in enumerate(layout.auxiliary_candidates(), start=1):
        ids = ids if constraint.audio else [layout.pad]
        result[s, ids] = logits[s, ids]
    return result


def _choice_cases():
    for path in golden_files("opuslm/functions/logits_to_tokens.json"):
        for case in json.loads(path.read_text(encoding="utf-8")):
            yield pytest.param(path.with_suffix(".npz"), case, id=f"case{case['case']}")


@pytest.mark.parametrize(("path", "case"), _choice_cases())
def test_choices_are_espnets(path, case):
    name, modality = case["mask"].split(".")
    (model,) = [m for m in golden_models("opuslm") if m.name == name]
    layout = opuslm_layout(model)
    assert case["eos"] == layout.specials["eos"]
    rules = OpusLMRules(layout, "audio" if modality == "codec_ssl" else "text", Sampling(), 1, 100)
    state = rules.start()._replace(step=1 if case["allow_eos"] else 0)
    prefix = f"case{case['case']}."
    with np.load(path) as arrays:
        logits, tokens = arrays[prefix + "logits"], arrays[prefix + "token"]
        ids, probabilities = (
            (arrays[prefix + "topk_ids"], arrays[prefix + "topk_probs"]) if case["topk"] else (None, None)
        )
    assert len(logits) == case["batch"]
    for b in range(len(logits)):
        scores = masked(layout, rules, state, logits[b, 0])
        for s, row in enumerate(scores):
            if ids is None or case["topk"] == 1:
                assert int(row.argmax()) == tokens[b, 0, s]
                continue
            check_distribution(row, case, ids[b, 0, s], probabilities[b, 0, s], int(tokens[b, 0, s]))


def check_distribution(row, case, ids, probabilities, drawn):
    """The recorded distribution over the top-k of a stream; ids of probability 0 are masked ones that filled up the k."""
    best = np.argsort(-row, kind="stable")[: case["topk"]]
    scaled = row[best].astype(np.float64) / case["temperature"]
    mine = np.exp(scaled - scaled.max())
    mine /= mine.sum()
    mine = {int(i): p for i, p in zip(best, mine, strict=True) if p > 0}
    theirs = {int(i): float(p) for i, p in zip(ids, probabilities, strict=True) if p > 0}
    assert mine.keys() == theirs.keys()
    assert drawn in mine
    for token, probability in theirs.items():
        assert mine[token] == pytest.approx(probability, abs=1e-6)


# -- OpusLM ends -------------------------------------------------------------------------------------------------------
def run_opuslm(max_rows: int, eos_at: int | None, modality: str = "audio", min_rows: int = 0):
    """Steps of a segment whose model wants to end at row ``eos_at`` and otherwise counts through its codes."""
    rules = OpusLMRules(OPUSLM, modality, Sampling(), min_rows, max_rows)
    state, steps = rules.start(), []
    while not steps or not steps[-1].done:
        primary = EOS if state.step == eos_at else 256 + state.step % 8
        state, step = rules.advance(state, (primary, 264 + state.step % 4, 268 + state.step % 4))
        steps.append(step)
        assert len(steps) <= max_rows
    return state.finish, [step.emitted for step in steps], steps


@pytest.mark.parametrize("max_rows", range(3, 16))
def test_rows_of_a_natural_and_of_a_forced_end(max_rows):
    drain = OPUSLM.num_streams - 1
    for eos_at in [None, *range(max_rows)]:
        finish, rows, _ = run_opuslm(max_rows, eos_at)
        forced_at = max_rows - drain
        if eos_at is not None and eos_at < forced_at:
            # One more row than the drain needs, unless max_rows bites.
            assert finish == eos_at + 1
            assert len(rows) == min(eos_at + drain + 2, max_rows)
            ends = [r for r, row in enumerate(rows) if row[0] == EOS]
            assert ends == [eos_at]
            content = eos_at
        else:
            assert (finish, len(rows)) == (forced_at, max_rows)
            assert rows[forced_at][0] == EOS
            content = forced_at - 1
        frames = delay.undo(np.array(rows))[: finish - 1]
        assert len(frames) == max(content, 0)
        for t, frame in enumerate(frames):
            # No code is lost or moved between the rows and the frames.
            assert frame.tolist() == [256 + t % 8, 264 + (t + 1) % 4, 268 + (t + 2) % 4]


def test_streams_start_one_after_the_other_and_run_out_one_after_the_other():
    finish, rows, steps = run_opuslm(20, 4)
    assert finish == 5
    for r, (row, step) in enumerate(zip(rows, steps, strict=True)):
        for s in range(3):
            empty = s > r or (r > finish and s < r - finish + 1)
            assert (row[s] == 0) == empty, (r, s)
            assert step.forced[s] == empty
    assert rows[5][0] != 0 and rows[6][0] == 0  # the row behind the end is the model's own


def test_text_has_empty_auxiliary_streams():
    _, rows, steps = run_opuslm(20, 6, modality="text")
    assert all(row[1:] == (0, 0) for row in rows)
    assert all(step.forced[1:] == (True, True) for step in steps)


def test_the_end_opens_at_min_rows():
    rules = OpusLMRules(OPUSLM, "audio", Sampling(), 3, 20)
    for step in range(6):
        primary = rules.constraint(rules.start()._replace(step=step)).primary
        assert any(span.holds(EOS) for span in primary) == (step >= 3)


def test_no_room_for_the_drain_is_an_assertion():
    with pytest.raises(AssertionError, match="no room for the drain"):
        OpusLMRules(OPUSLM, "audio", Sampling(), 0, 2)


# -- Bagpiper chains ---------------------------------------------------------------------------------------------------
TEXT_RULES = ModalityRules(Sampling(), 1, 4)
AUDIO_RULES = ModalityRules(Sampling(), 1, 6, guidance=3.0)
A, T, EOT = (BAGPIPER.specials[name] for name in ("audio", "text", "eot"))
END = BAGPIPER.specials["eos"]


def run_bagpiper(enforce, choices, text=TEXT_RULES, audio=AUDIO_RULES):
    """Primary ids of the emitted rows until done; ``choices`` are the model's."""
    rules = BagpiperRules(BAGPIPER, tuple(enforce), text, audio)
    state, rows, phases = rules.start(), [], []
    for choice in choices:
        phases.append(state.phase)
        state, step = rules.advance(state, (choice, BAGPIPER.streams[1].start, BAGPIPER.streams[2].start))
        rows.append(step)
        if step.done:
            assert state.phase == DONE
            break
    return rows, phases


def test_a_segment_that_ends_with_eos_ends_the_answer_unless_more_is_enforced():
    rows, phases = run_bagpiper([], [T, 260, END])
    assert rows[-1].done and phases == [MODALITY, TEXT, TEXT]
    rows, phases = run_bagpiper(["text", "audio"], [A, 260, END, 0, T, 280, END])
    assert phases == [MODALITY, TEXT, TEXT, BRIDGE, MODALITY, AUDIO, AUDIO] and rows[-1].done
    assert [r.emitted[0] for r in rows] == [T, 260, END, BAGPIPER.specials["assistant"], A, 280, END]


def test_after_eot_the_model_chooses_once_nothing_is_enforced_any_more():
    rows, phases = run_bagpiper(["text"], [T, EOT, 0, A, 280, EOT, 0, T, 260, END])
    assert phases[3] == MODALITY and rows[3].emitted[0] == A and not rows[3].forced[0]
    assert phases[-1] == TEXT and rows[-1].done


def test_a_segment_cut_by_max_rows_keeps_its_last_row():
    rows, _ = run_bagpiper(["audio", "text"], [A] + [280] * 6 + [0, T, 260, END])
    cut = rows[6]
    assert cut.ends_segment and not cut.done
    assert cut.emitted == (280, BAGPIPER.streams[1].start, BAGPIPER.streams[2].start)
    assert cut.fed == (280, 0, 0)
    rows, _ = run_bagpiper([], [T, 260, 260, 260, 260])
    assert rows[-1].done and len(rows) == 5


@pytest.mark.parametrize("name", ["image", "video", "toolcall"])
def test_a_modality_that_cannot_be_decoded_ends_the_answer(name):
    rows, _ = run_bagpiper([], [BAGPIPER.specials[name], 260])
    assert len(rows) == 1 and rows[0].done and rows[0].ends_segment
    # Enforced by name it is the model's own choice, as in ESPnet.
    rows, _ = run_bagpiper([name], [T, 260, END])
    assert rows[0].emitted[0] == T and not rows[0].forced[0] and rows[-1].done


def test_a_modality_without_a_block_ends_the_answer():
    rows, _ = run_bagpiper([], [A, 280], audio=None)
    assert len(rows) == 1 and rows[0].done


def test_more_hypotheses_end_the_answer_after_their_segment():
    last = ModalityRules(Sampling(), 1, 4, last=True)
    rows, _ = run_bagpiper(["text", "audio"], [T, EOT, 0], text=last)
    assert len(rows) == 2 and rows[-1].done


def test_guidance_holds_inside_its_segments_only():
    rules = BagpiperRules(BAGPIPER, (), TEXT_RULES, AUDIO_RULES)
    state = rules.start()
    assert rules.constraint(state).guidance == 1
    state, _ = rules.advance(state, (A, 0, 0))
    assert rules.constraint(state).guidance == 3
    state, _ = rules.advance(state, (EOT, 0, 0))
    assert state.phase == BRIDGE and rules.constraint(state).guidance == 1
    low = BagpiperRules(BAGPIPER, (), TEXT_RULES, ModalityRules(Sampling(), 1, 6, guidance=0.5))
    assert low.constraint(low.advance(low.start(), (A, 0, 0))[0]).guidance == 1


# -- both --------------------------------------------------------------------------------------------------------------
def test_rules_survive_json():
    sampling = Sampling(0.8, 20)
    opuslm = OpusLMRules(OPUSLM, "audio", sampling, 3, 30)
    assert OpusLMRules.from_dict(OPUSLM, json.loads(json.dumps(opuslm.to_dict()))) == opuslm
    audio = ModalityRules(sampling, 2, 9, 3.0, True)
    for text in (None, TEXT_RULES):
        bagpiper = BagpiperRules(BAGPIPER, ("text", "image"), text, audio)
        assert BagpiperRules.from_dict(BAGPIPER, json.loads(json.dumps(bagpiper.to_dict()))) == bagpiper


def test_replay_refuses_rows_that_the_rules_would_not_emit():
    rules = OpusLMRules(OPUSLM, "audio", Sampling(), 0, 20)
    with pytest.raises(AssertionError, match="row 0"):
        replay(rules, [(256, 264, 268)])  # streams 1 and 2 have not started yet
