"""The step functions against every row that ESPnet generated."""

import json

import numpy as np
import pytest
from conftest import golden_files, golden_models
from golden_layouts import bagpiper_model_layout, opuslm_layout

from espnet2_vllm import delay
from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.drive import bagpiper_rules
from espnet2_vllm.protocol import AUDIO, BRIDGE, MODALITY, TEXT, OpusLMRules, Sampling, replay


def cases(family: str) -> list:
    return [
        pytest.param(model, path, id=f"{model.name}-{path.stem}")
        for model in golden_models(family)
        for path in golden_files(f"{family}/{model.name}/cases/*.json")
        if not path.stem.startswith("sampling_")
    ]


def row(values) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def allowed_primary(constraint) -> set[int]:
    return {i for span in constraint.primary for i in range(*span)}


# -- OpusLM ------------------------------------------------------------------------------------------------------------
def check_opuslm(layout, info, raw, expected, segment, fed, prefill, allow_eos, finish):
    """One hypothesis of one generated segment."""
    modality = "audio" if info["modality"] == "codec_ssl" else "text"
    rules = OpusLMRules(layout, modality, Sampling(), info["minlen"], info["maxlen"])
    state, steps = rules.start(), []
    for step, chosen in enumerate(raw):
        constraint = rules.constraint(state)
        assert constraint.phase == (AUDIO if modality == "audio" else TEXT)
        assert constraint.audio == (modality == "audio")
        assert (layout.specials["eos"] in allowed_primary(constraint)) == bool(allow_eos[step]), f"step {step}"
        state, advance = rules.advance(state, row(chosen))
        steps.append(advance)
        assert advance.emitted == advance.fed == row(expected[step]), f"step {step}"
        for s in range(layout.num_streams):
            assert advance.forced[s] or advance.emitted[s] == chosen[s], f"step {step}, stream {s}"
        if advance.done:
            break
    assert advance.done and not any(s.done for s in steps[:-1])
    assert state.finish == finish
    rows = np.array([s.fed for s in steps], dtype=np.int32)
    np.testing.assert_array_equal(np.concatenate([prefill, rows]), fed[: len(prefill) + len(rows)])
    np.testing.assert_array_equal(delay.undo(rows)[: finish - 1], segment)
    assert replay(rules, [s.emitted for s in steps]) == (state, steps)
    return len(rows)


@pytest.mark.parametrize(("model", "path"), cases("opuslm"))
def test_opuslm_rows_ends_and_history(model, path):
    layout, case = opuslm_layout(model), json.loads(path.read_text(encoding="utf-8"))
    generated = [s for s in case["segments"] if not s["is_prefill"]]
    assert generated
    with np.load(path.with_suffix(".npz")) as arrays:
        for info in generated:
            if info["search_algo"] == "teacher_force":
                continue  # one pass over the reference, tested with the driver
            get = lambda name, i=info["index"]: arrays[f"seg{i}.{name}"]  # noqa: E731
            raw, expected, fed, prefill = map(get, ("raw_tokens_delay", "tokens_delay", "fed_rows", "prefill_delay"))
            many = case["nbest"] > 1
            lengths = []
            for h in range(case["nbest"]):
                pick = (lambda a, h=h: a[h]) if many else (lambda a: a)
                segment = get(f"segment.hyp{h}") if many else get("segment")
                lengths.append(
                    check_opuslm(
                        layout, info, pick(raw), pick(expected), segment, pick(fed), pick(prefill),
                        get("allow_eos"), info["finish_idx"][h],
                    )
                )  # fmt: skip
            # A batch runs until its last hypothesis has drained.
            assert max(lengths) == info["steps"] == len(raw[0] if many else raw)


# -- Bagpiper ----------------------------------------------------------------------------------------------------------
def kinds_of(case) -> list[str]:
    return [kind for kind, count in case["fed_row_kinds"] for _ in range(count)]


@pytest.mark.parametrize(("model", "path"), cases("bagpiper"))
def test_bagpiper_rows_ends_and_history(model, path):
    layout, case = bagpiper_model_layout(model), json.loads(path.read_text(encoding="utf-8"))
    rules = bagpiper_rules(layout, load_decoding(case["inference_config"], "bagpiper"))
    with np.load(path.with_suffix(".npz")) as arrays:
        fed, kinds = arrays["fed_ids"], kinds_of(case)
        assert len(fed) == len(kinds) == case["fed_len"]
        position = kinds.index("assistant") + 1
        state, advance = rules.start(), None
        for k, info in enumerate(case["segments"]):
            assert state.phase == (MODALITY if k == 0 else BRIDGE)
            if k:
                state, advance = rules.advance(state, row(fed[position]))
                assert advance.fed == row(fed[position]) and kinds[position] == "assistant" and all(advance.forced)
                position += 1
            constraint = rules.constraint(state)
            assert (constraint.forced is not None) == info["enforced"]
            # What the model itself would have chosen must not matter where the modality is imposed.
            logits = arrays[f"seg{k}_modality_logits"]
            candidates = np.arange(*layout.modality_span)
            own = int(candidates[logits[candidates].argmax()])
            state, advance = rules.advance(state, (own, *row(fed[position])[1:]))
            assert advance.fed == row(fed[position]) and kinds[position] == "modality"
            assert advance.fed[0] == info["modality_token_id"]
            position += 1
            tokens = arrays[f"seg{k}_tokens"]
            tokens = tokens[0] if tokens.ndim == 3 else tokens
            for step, chosen in enumerate(tokens):
                constraint = rules.constraint(state)
                assert constraint.phase == {"text": TEXT, "audio": AUDIO}[info["modality"]]
                opened = set(layout.end_tokens) <= allowed_primary(constraint)
                assert opened == (step >= info["config"].get("min_step", 1))
                guidance = info["config"]["cfg"]
                assert constraint.guidance == (guidance if guidance > 1 else 1.0)
                assert int(chosen[0]) in allowed_primary(constraint)
                before, (state, advance) = state, rules.advance(state, row(chosen))
                assert before.step == step
                assert advance.emitted == row(chosen)
                last = step + 1 == len(tokens)
                assert advance.ends_segment == last
                assert advance.fed == row(arrays[f"seg{k}_after_fed_ids"] if last else fed[position]), f"step {step}"
                assert advance.fed == row(fed[position])
                assert kinds[position] == ("segment_end" if last else f"seg{k}")
                position += 1
            assert len(tokens) == info["num_steps"]
            final = {layout.specials["eos"]: "eos", layout.specials["eot"]: "eot"}
            assert final.get(int(tokens[-1, 0]), "max_step") == info["stop"]
            assert advance.done == (k + 1 == len(case["segments"]))
        assert position == len(fed)
