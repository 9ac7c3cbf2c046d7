"""Sequences and segments against ESPnet's preprocessor and parser."""

import functools
import json
import random

import numpy as np
import pytest
from conftest import golden_files, golden_models
from golden_layouts import opuslm_config, opuslm_layout

from espnet2_vllm.errors import CheckpointError, DataError
from espnet2_vllm.io.data_json import open_data_json, read_utterances
from espnet2_vllm.plan import Given, Wanted
from espnet2_vllm.prompt.opuslm import Facts, Turn, code_rows, opuslm_sequence, opuslm_utterance, segment_bounds
from espnet2_vllm.prompt.tasks import TASKS, find_task
from espnet2_vllm.text import TextTokenizer

MODELS = golden_models("opuslm")
SETS = [
    pytest.param(m, s.parent.name, id=f"{m.name}-{s.parent.name}") for m in MODELS for s in m.glob("data/*/data.json")
]


@functools.cache
def tokenizer_of(model):
    return TextTokenizer(model / "hf_backbone")


def facts_of(model, **changes) -> Facts:
    config = opuslm_config(model)
    facts = {**config, "n_ctx": config["transformer_conf"]["n_ctx"], **changes}
    return Facts.from_preprocessor(facts)


@functools.cache
def recorded(model) -> dict[str, np.ndarray]:
    (path,) = golden_files(f"opuslm/functions/preprocess_{model.name}.npz")
    with np.load(path) as arrays:
        return {key.removesuffix(".dec_seq"): arrays[key] for key in arrays if key.endswith(".dec_seq")}


@pytest.mark.parametrize(("model", "name"), SETS)
def test_sequences_are_espnets(model, name, monkeypatch):
    monkeypatch.chdir(model)
    layout, data = opuslm_layout(model), open_data_json(model / "data" / name / "data.json")
    checked = 0
    for key, expected in recorded(model).items():
        variant, _, rest = key.rpartition(":")
        of, uid = rest.split("/")
        if of != name:
            continue
        changes = {}
        if variant and not variant.startswith("loss_region"):  # the region of the loss does not touch the rows
            option, value = variant.split("=")
            changes[option] = json.loads(value) if option != "corelm" else value
        rng = random.Random(0)
        rows = opuslm_sequence(
            layout, tokenizer_of(model), data.task, data.load(uid, rng), facts_of(model, **changes), rng
        )
        assert rows.dtype == np.int32
        np.testing.assert_array_equal(rows, expected, err_msg=key)
        checked += 1
    assert checked >= len(data.examples)


@pytest.mark.parametrize("model", MODELS, ids=lambda p: p.name)
def test_segments_are_espnets(model):
    (path,) = golden_files("opuslm/functions/parse_sequence.json")
    layout, sequences = opuslm_layout(model), recorded(model)
    for name, expected in json.loads(path.read_text(encoding="utf-8"))[model.name].items():
        where, mode, last = name.split(".")
        task = TASKS[where.split("/")[0].removesuffix("_arkspk")]
        assert task.chat == (mode == "mode=chat")
        bounds = segment_bounds(layout, sequences[where], task, last == "last=True")
        if isinstance(expected, str):
            # ESPnet fails where no row announces a modality.
            assert task.name == "textlm" and "IndexError" in expected and bounds == []
            continue
        assert [[b.start, b.stop, b.given] for b in bounds] == expected, name


def case_files(*, continuing: bool) -> list:
    found = []
    for model in MODELS:
        for path in golden_files(f"opuslm/{model.name}/cases/*.json"):
            if path.stem.startswith(("textlm", "audiolm")) == continuing:
                found.append(pytest.param(model, path, id=f"{model.name}-{path.stem}"))
    return found


@pytest.mark.parametrize(("model", "path"), case_files(continuing=False))
def test_given_and_wanted_of_the_cases(model, path, monkeypatch):
    monkeypatch.chdir(model)
    case = json.loads(path.read_text(encoding="utf-8"))
    layout, data = opuslm_layout(model), open_data_json(model / case["data_json"])
    (utterance,) = read_utterances(
        data,
        layout,
        tokenizer_of(model),
        facts_of(model),
        seed=case["seed"],
        keys=[case["key"]],
        inference_last_segment=case["inference_last_segment"],
    )
    assert utterance.key == case["key"] and utterance.info["uid"] == case["uid"]
    assert len(utterance.parts) == len(case["segments"])
    with np.load(path.with_suffix(".npz")) as arrays:
        expected = arrays["dec_seq"]
        joined = [p.rows if isinstance(p, Given) else np.concatenate([p.header, p.reference]) for p in utterance.parts]
        np.testing.assert_array_equal(np.concatenate(joined), expected)
        pending = []
        for part, info in zip(utterance.parts, case["segments"], strict=True):
            prefix = f"seg{info['index']}."
            if info["is_prefill"]:
                np.testing.assert_array_equal(part.rows, arrays[prefix + "rows"])
                pending.append(part.rows)
                continue
            assert isinstance(part, Wanted) and part.modality == info["modality"]
            prefill = arrays[prefix + "prefill"]
            np.testing.assert_array_equal(
                np.concatenate([*pending, part.header]), prefill[0] if prefill.ndim == 3 else prefill
            )
            if prefix + "reference" in arrays:
                np.testing.assert_array_equal(part.reference, arrays[prefix + "reference"])
            pending = []
    if case["mode"] == "chat":
        turns = case["input"]["dialogue"]
        assert [p.role for p in utterance.parts] == [t["role"] for t in turns]
        assert [p.modality.replace("spk", "codec_ssl") for p in utterance.parts] == [t["modality"] for t in turns]
        assert all(
            p.is_target == t["target"] for p, t in zip(utterance.parts, turns, strict=True) if isinstance(p, Given)
        )
    else:
        assert utterance.info["entries"] == tuple(entry.name for entry in data.task.entries)


@pytest.mark.parametrize(("model", "path"), case_files(continuing=True))
def test_tasks_without_conditions(model, path, monkeypatch):
    """ESPnet's own call fails here; the prompts are those of the directly driven model."""
    monkeypatch.chdir(model)
    case = json.loads(path.read_text(encoding="utf-8"))
    data = open_data_json(model / case["data_json"])
    with np.load(path.with_suffix(".npz")) as arrays:
        prefill = arrays["seg0.prefill"]
    prefill = prefill[0] if prefill.ndim == 3 else prefill
    frames = len(prefill) - 3 if data.task.name == "codec_ssl_audiolm" else 0
    (utterance,) = read_utterances(
        data, opuslm_layout(model), tokenizer_of(model), facts_of(model), keys=[case["key"]], prompt_frames=frames
    )
    (part,) = utterance.parts
    np.testing.assert_array_equal(part.header, prefill)
    assert part.modality == case["segments"][0]["modality"]
    with pytest.raises(DataError, match="continue from") if data.task.name != "textlm" else np.errstate():
        rows = np.concatenate([part.header, part.reference])
        opuslm_utterance(opuslm_layout(model), rows, data.task, key="x", prompt_frames=10_000)


# -- errors and corners, on the first model ----------------------------------------------------------------------------
@pytest.fixture
def parts():
    return opuslm_layout(MODELS[0]), tokenizer_of(MODELS[0]), facts_of(MODELS[0])


def test_a_missing_target_leaves_its_announcement(parts):
    layout, tokenizer, facts = parts
    task = TASKS["codec_ssl_plain_tts"]
    entries = {"text": "hello world", "wav.scp": None}
    rows = opuslm_sequence(layout, tokenizer, task, entries, facts, random.Random(0))
    assert rows[-1, 0] == layout.modality_token("audio")
    utterance = opuslm_utterance(layout, rows, task, key="k")
    assert [type(p) for p in utterance.parts] == [Given, Wanted]
    assert utterance.parts[1].reference is None and len(utterance.parts[1].header) == 1
    with pytest.raises(DataError, match="text: expected a text, got NoneType"):
        opuslm_sequence(layout, tokenizer, task, {"text": None, "wav.scp": None}, facts, random.Random(0))


@pytest.mark.parametrize(("name", "known"), [("codec_ssl_se", True), ("codec_ssl_tse", True), ("codec_ssl_tts", False)])
def test_a_task_says_how_long_its_answer_is(parts, name, known):
    layout, tokenizer, facts = parts
    rng = np.random.default_rng(20261130)
    for frames in (1, 2, 31):
        first = layout.streams[0].start
        codes = np.array([[rng.integers(*span) - first for span in layout.streams] for _ in range(frames)])
        codes[-1, 0] = 0  # SSL unit 0 becomes a pad
        entries = {"mix.scp": codes, "text": "hello", "utt2spk": codes, "wav.scp": None}
        rows = opuslm_sequence(layout, tokenizer, TASKS[name], entries, facts, random.Random(0))
        *given, wanted = opuslm_utterance(layout, rows, TASKS[name], key="k").parts
        assert wanted.frames == (frames if known else None)
        assert all(isinstance(part, Given) for part in given)


def test_conditions_that_fill_the_context_are_refused(parts):
    layout, tokenizer, facts = parts
    task, short = TASKS["codec_ssl_plain_tts"], Facts(n_ctx=20)
    rows = opuslm_sequence(
        layout, tokenizer, task, {"text": "a b c d e f g h", "wav.scp": None}, short, random.Random(0)
    )
    assert len(rows) == 11
    with pytest.raises(DataError, match="nothing is left to generate in 11 rows.*n_ctx"):
        opuslm_utterance(layout, rows, task, key="k")


def test_a_dialogue_without_an_answer_is_refused(parts):
    layout, tokenizer, facts = parts
    task = TASKS["text_dialogue"]
    turns = [Turn("user", "text_bpe", False, "hello")]
    rows = opuslm_sequence(layout, tokenizer, task, {"dialogue": turns}, facts, random.Random(0))
    with pytest.raises(DataError, match="no turn is the assistant's"):
        opuslm_utterance(layout, rows, task, key="k")
    for turn, message in [
        (Turn("narrator", "text_bpe", False, "hello"), "turn 0 of dialogue: role 'narrator'"),
        (Turn("user", "smell", False, "hello"), "no token for modality 'smell'"),
        (Turn("user", "text_bpe", False, np.zeros(9, dtype=np.int32)), "expected a text, got ndarray"),
        (Turn("user", "codec_ssl", False, "hello"), "expected codes, got str"),
        (Turn("user", "image", False, np.zeros(9, dtype=np.int32)), "modality image cannot be read"),
    ]:
        with pytest.raises(DataError, match=message):
            opuslm_sequence(layout, tokenizer, task, {"dialogue": [turn]}, facts, random.Random(0))


def test_a_text_too_short_to_go_on_from_is_refused(parts):
    layout, tokenizer, facts = parts
    task = TASKS["textlm"]
    for text in ("", "o"):
        rows = opuslm_sequence(layout, tokenizer, task, {"text": text}, facts, random.Random(0))
        with pytest.raises(DataError, match="at least two"):
            opuslm_utterance(layout, rows, task, key="k")


def test_codes_of_another_layout_are_refused(parts):
    layout, _, _ = parts
    good = np.array([span.start for span in layout.code_spans]) - layout.streams[0].start
    frames = np.stack([good, good + 1])
    rows = code_rows(layout, frames.astype(np.int32), "x")
    assert rows[0].tolist() == [0, *(span.start for span in layout.code_spans[1:])]  # SSL unit 0 becomes the pad
    assert rows[1].tolist() == [span.start + 1 for span in layout.code_spans]
    np.testing.assert_array_equal(code_rows(layout, frames.reshape(-1), "x"), rows)
    wide = np.concatenate([frames, np.full((2, 2), 7)], axis=1)
    np.testing.assert_array_equal(code_rows(layout, wide, "x", codes_per_frame=layout.num_streams + 2), rows)
    moved = frames.copy()
    moved[1, 3] = good[4]
    with pytest.raises(DataError, match=f"x: code {good[4]} of stream 3 at frame 1 is outside"):
        code_rows(layout, moved, "x")
    with pytest.raises(DataError, match="no whole frames of 9"):
        code_rows(layout, frames.reshape(-1)[:-1], "x")
    with pytest.raises(DataError, match="whole numbers"):
        code_rows(layout, frames.astype(np.float32), "x")
    with pytest.raises(DataError, match="4 codes a frame"):
        code_rows(layout, frames.reshape(-1)[:16], "x", codes_per_frame=4)


def test_speaker_prompts_have_one_length(parts):
    layout, tokenizer, _ = parts
    task = TASKS["codec_ssl_tts"]
    good = np.array([span.start for span in layout.code_spans]) - layout.streams[0].start + 1

    def prompt(frames, rng, **facts):
        entries = {"text": "hello", "utt2spk": np.tile(good, (frames, 1)), "wav.scp": None}
        entries["utt2spk"][:, 0] += np.arange(frames) % layout.streams[0].size // 2
        rows = opuslm_sequence(layout, tokenizer, task, entries, Facts(speaker_prompt_length=5, **facts), rng)
        marks = np.flatnonzero(rows[:, 0] == layout.specials["modality/spk"])
        return rows[int(marks[0]) + 1 : -layout.num_streams]

    assert len(prompt(3, random.Random(0))) == 5 and (prompt(3, random.Random(0))[3:] == 0).all()
    assert len(prompt(3, random.Random(0), pad_speaker_prompt=False)) == 3
    assert len(prompt(5, random.Random(0))) == 5
    starts = {int(prompt(9, random.Random(seed))[0, 0]) for seed in range(50)}
    assert len(starts) > 1
    assert len(prompt(9, random.Random(1), pad_speaker_prompt=False)) == 5


def test_tasks_are_found_by_name():
    assert find_task("codec_ssl_tts", "x").conditions[1].modality == "spk"
    with pytest.raises(DataError, match="data.json: unknown task 'codec_ssl_ts'; did you mean 'codec_ssl_tts'?"):
        find_task("codec_ssl_ts", "data.json")
    with pytest.raises(DataError, match="entry text of modality g2p"):
        find_task("tts", "data.json")
    assert not TASKS["text_dialogue"].continues and TASKS["codec_ssl_audiolm"].continues


def test_facts_are_checked():
    assert Facts.from_preprocessor({}) == Facts()
    with pytest.raises(CheckpointError, match="speaker_prompt_length is -1"):
        Facts(speaker_prompt_length=-1)
    with pytest.raises(CheckpointError, match="n_ctx is '2048'"):
        Facts.from_preprocessor({"n_ctx": "2048"})
