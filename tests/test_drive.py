"""The drivers, with ESPnet's recorded choices in place of an engine: prompts, histories, segments and ends."""

import functools
import json

import numpy as np
import pytest
from conftest import golden_files, golden_models
from golden_layouts import bagpiper_model_layout, opuslm_config, opuslm_layout

from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.drive import drive, drive_again, more_hypotheses
from espnet2_vllm.errors import DataError
from espnet2_vllm.io.data_json import open_data_json, read_utterances
from espnet2_vllm.plan import Given, RowResult, Utterance, Wanted
from espnet2_vllm.prompt.opuslm import Facts
from espnet2_vllm.text import TextTokenizer


def cases(family: str) -> list:
    return [
        pytest.param(model, path, id=f"{model.name}-{path.stem}")
        for model in golden_models(family)
        for path in golden_files(f"{family}/{model.name}/cases/*.json")
        if not path.stem.startswith("sampling_")
    ]


def play(rules, choices) -> RowResult:
    """What an engine gives back when the model chooses ``choices``."""
    state, steps = rules.start(), []
    for chosen in choices:
        state, step = rules.advance(state, tuple(int(i) for i in chosen))
        steps.append(step)
        if step.done:
            break
    assert steps[-1].done, "the choices end before the rules do"
    rows = np.array([s.emitted for s in steps], dtype=np.int32)
    return RowResult(rows, np.zeros(rows.shape, dtype=np.float32), np.array([s.forced for s in steps]))


def run(driver, answer):
    """Drives to the end; ``answer(k, request)`` gives the result of the k-th request."""
    request, count = next(driver), 0
    while True:
        result = answer(count, request)
        count += 1
        try:
            request = driver.send(result)
        except StopIteration as stop:
            return stop.value


# -- OpusLM ------------------------------------------------------------------------------------------------------------
@functools.cache
def tokenizer_of(model):
    return TextTokenizer(model / "hf_backbone")


@pytest.mark.parametrize(("model", "path"), cases("opuslm"))
def test_opuslm_cases(model, path, monkeypatch):
    monkeypatch.chdir(model)
    case, layout, config = json.loads(path.read_text(encoding="utf-8")), opuslm_layout(model), opuslm_config(model)
    facts = Facts.from_preprocessor({**config, "n_ctx": config["transformer_conf"]["n_ctx"]})
    generated = [s for s in case["segments"] if not s["is_prefill"]]
    frames = generated[0]["prefill_rows"] - 3 if case["task"] == "codec_ssl_audiolm" else 0
    (utterance,) = read_utterances(
        open_data_json(model / case["data_json"]),
        layout,
        tokenizer_of(model),
        facts,
        seed=case["seed"],
        keys=[case["key"]],
        inference_last_segment=case["inference_last_segment"],
        prompt_frames=frames,
    )
    assert isinstance(utterance, Utterance), utterance
    decoding = load_decoding(case["inference_config"], "opuslm")
    with np.load(path.with_suffix(".npz")) as arrays:
        for h in range(case["nbest"]):
            many = case["nbest"] > 1

            def get(index, name, h=h, many=many):
                if many and f"seg{index}.{name}.hyp{h}" in arrays:
                    return arrays[f"seg{index}.{name}.hyp{h}"]
                array = arrays[f"seg{index}.{name}"]
                return array[h] if many else array

            history = []

            def answer(k, request, get=get, history=history):
                info = generated[k]
                expected = [*history, get(info["index"], "prefill_delay")]
                np.testing.assert_array_equal(request.prompt, np.concatenate(expected))
                raw, kept = get(info["index"], "raw_tokens_delay"), get(info["index"], "tokens_delay")
                if info["search_algo"] == "teacher_force":
                    np.testing.assert_array_equal(request.reference, get(info["index"], "reference_delay"))
                    history.append(get(info["index"], "fed_rows"))
                    return RowResult(raw, np.zeros(raw.shape, dtype=np.float32), np.zeros(raw.shape, dtype=bool))
                assert request.reference is None
                result = play(request.rules, raw)
                np.testing.assert_array_equal(result.rows, kept[: len(result.rows)])
                history.append(get(info["index"], "fed_rows"))
                return result

            hypothesis = run(drive(layout, utterance, decoding, hypothesis=h), answer)
            assert len(hypothesis.requests) == len(generated)
            assert len(hypothesis.segments) == len(case["segments"])
            for segment, info in zip(hypothesis.segments, case["segments"], strict=True):
                assert segment.generated != info["is_prefill"]
                if info["is_prefill"]:
                    np.testing.assert_array_equal(segment.rows, arrays[f"seg{info['index']}.rows"])
                    assert segment.end == "given"
                    continue
                check_generated(segment, info, h, get)


def test_a_fixed_length_is_kept_whatever_the_model_chooses():
    """The end is open behind the last frame at the earliest; where it does not come it is forced, and the row before it goes."""
    seed = 20261129
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    model = golden_models("opuslm")[0]
    layout = opuslm_layout(model)
    eos, streams = layout.specials["eos"], layout.num_streams
    config = load_decoding({"search_algo": "greedy_search", "maxlenratio": 0.1, "fixed_length": True}, "opuslm")
    header = np.zeros((1, streams), dtype=np.int32)
    header[0, 0] = layout.modality_token("audio")
    ends = set()
    for case in range(60):
        frames = int(rng.integers(1, 40))
        parts = (Given(np.zeros((3, streams), dtype=np.int32), "codec_ssl"), Wanted(header, "codec_ssl", frames=frames))
        chosen = np.stack([rng.integers(*span, frames + streams) for span in layout.code_spans], 1)
        chosen[frames:, 0] = np.where(rng.random(streams) < 0.5, eos, chosen[frames:, 0])

        def answer(k, request, chosen=chosen, frames=frames):
            state = request.rules.start()
            for row in chosen[: frames + 1]:
                end = any(eos in range(*span) for span in request.rules.constraint(state).primary)
                assert end == (state.step >= frames)
                state, _ = request.rules.advance(state, tuple(map(int, row)))
            return play(request.rules, chosen)

        (_, segment) = run(drive(layout, Utterance(f"u{case}", parts), config), answer).segments
        assert len(segment.rows) == frames
        assert segment.end == ("eos" if chosen[frames, 0] == eos else "fixed")
        np.testing.assert_array_equal(segment.rows, [[chosen[f + s, s] for s in range(streams)] for f in range(frames)])
        ends.add(segment.end)
    assert ends == {"eos", "fixed"}
    for length, said in ((None, "nothing says how long"), (0, "an entry without frames says how long")):
        parts = (parts[0], Wanted(header, "codec_ssl", frames=length))
        with pytest.raises(
            DataError, match=f"u: {said} the segment codec_ssl has to be, which fixed_length in .* asks for"
        ):
            run(drive(layout, Utterance("u", parts), config), None)
    forced = config.replace(audio=load_decoding({"search_algo": "teacher_force"}, "opuslm").audio)
    reference = np.concatenate([chosen[:7], np.zeros((streams, streams), dtype=np.int64)]).astype(np.int32)
    parts = (parts[0], Wanted(header, "codec_ssl", reference=reference, frames=3))
    request = next(drive(layout, Utterance("u", parts), forced))
    assert len(request.reference) == len(reference), "teacher_force follows its reference"


def check_generated(segment, info, h, get):
    np.testing.assert_array_equal(segment.rows, get(info["index"], "segment"))
    assert segment.name == info["modality"]
    assert len(segment.rows) == info["segment_lengths"][h]
    np.testing.assert_array_equal(segment.emitted, get(info["index"], "tokens_delay")[: len(segment.emitted)])
    if info["search_algo"] == "teacher_force":
        assert segment.end == "teacher"
    else:
        own = info["ends"][h]["eos_was_models_choice"] and info["finish_idx"][h] != info["maxlen"] - 8
        assert segment.end == ("eos" if own else "forced")


# -- Bagpiper ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("model", "path"), cases("bagpiper"))
def test_bagpiper_cases(model, path):
    case, layout = json.loads(path.read_text(encoding="utf-8")), bagpiper_model_layout(model)
    decoding = load_decoding(case["inference_config"], "bagpiper")
    with np.load(path.with_suffix(".npz")) as arrays:
        prompt, fed = arrays["prefill_ids"].astype(np.int32), arrays["fed_ids"]
        header = np.zeros((1, layout.num_streams), dtype=np.int32)
        header[0, 0] = layout.specials["assistant"]
        utterance = Utterance(path.stem, (Given(prompt), Wanted(header)))
        choices = []
        for k, info in enumerate(case["segments"]):
            tokens = arrays[f"seg{k}_tokens"]
            modality = np.zeros((1, layout.num_streams), dtype=np.int64)
            modality[0, 0] = info["modality_token_id"]
            choices += [*([header] if k else []), modality, tokens[0] if tokens.ndim == 3 else tokens]

        def answer(k, request):
            assert k == 0
            np.testing.assert_array_equal(request.prompt, fed[: len(prompt) + 1])
            return play(request.rules, np.concatenate(choices))

        hypothesis = run(drive(layout, utterance, decoding), answer)
        assert [s.modality for s in hypothesis.segments] == [s["modality"] for s in case["segments"]]
        for k, (segment, info) in enumerate(zip(hypothesis.segments, case["segments"], strict=True)):
            tokens = arrays[f"seg{k}_tokens"]
            tokens = tokens[0] if tokens.ndim == 3 else tokens
            np.testing.assert_array_equal(segment.emitted, tokens)
            np.testing.assert_array_equal(segment.rows, tokens if info["stop"] == "max_step" else tokens[:-1])
            assert segment.end == info["stop"].replace("max_step", "max_rows")
            if info["modality"] == "text":
                assert (segment.rows[:, 0] - layout.text.start).tolist() == info["text_token_ids"]
        more = more_hypotheses(decoding, hypothesis)
        assert more == case["segments"][-1].get("num_hypo", 1) - 1
        if more:
            check_another_hypothesis(layout, utterance, decoding, hypothesis, fed)


def check_another_hypothesis(layout, utterance, decoding, first, fed):
    """A further hypothesis begins where the last segment of the first began."""
    segment = first.segments[-1]

    def answer(k, request):
        assert k == 0
        before = first.requests[0][0].prompt
        np.testing.assert_array_equal(request.prompt, fed[: len(before) + segment.first - 1])
        return play(request.rules, np.concatenate([segment.header, segment.emitted]))

    again = run(drive_again(layout, utterance, decoding, first, seed=0, hypothesis=1), answer)
    assert again.requests[0][0].seed != first.requests[0][0].seed
    np.testing.assert_array_equal(again.segments[-1].rows, segment.rows)
