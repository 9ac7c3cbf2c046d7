"""``--write_scores``: log-probabilities of all streams through both command lines, and the seeds that they were drawn with."""

import json
import logging
import math
import re

import kaldiio
import numpy as np
import pytest
from commands import bagpiper, bagpiper_arguments, chat, edited_yaml, writable
from conftest import golden_models
from sampling_cases import ERROR, p_value

from espnet2_vllm import delay
from espnet2_vllm.bin import inference
from espnet2_vllm.checkpoint import ensure_converted

BAGPIPER = next(model for model in golden_models("bagpiper") if not (model / "Qwen").exists())
OPUSLM = next(model for model in golden_models("opuslm") if "olmo2" not in model.name)
TTS, DIALOGUE = "codec_ssl_tts", "audio_dialogue"
ARRAYS = {"hypothesis", "segment", "ids", "logprobs", "forced"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path_factory.getbasetemp() / "converted"))


def load(folder, key):
    with np.load(folder / ".scores" / f"{key}.npz") as file:
        return dict(file)


def check_arrays(scores, streams):
    """What holds of every file."""
    assert scores.keys() == ARRAYS
    rows = len(scores["ids"])
    assert scores["ids"].shape == scores["logprobs"].shape == scores["forced"].shape == (rows, streams)
    assert scores["segment"].shape == scores["hypothesis"].shape == (rows,)
    assert (scores["logprobs"] <= 0).all() and not scores["logprobs"][scores["forced"]].any()
    assert (np.diff(scores["hypothesis"]) >= 0).all()


# -- Bagpiper ----------------------------------------------------------------------------------------------------------
def layout_of(model):
    return ensure_converted(model / "train.yaml", model / "mp_rank_00_model_states.pt").layout


def written(folder, name, value):
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")  # JSON is yaml
    return path


def dataset(folder, texts):
    text = written(folder, "text", "".join(f"{key} {text}\n" for key, text in texts.items()))
    entry = {"name": "text1", "path": str(text), "reader": "text"}
    return f"text_to_audio:set:{written(folder, 'dataset.json', {'data_entry': [entry], 'samples': list(texts)})}"


def settings(folder, enforce, **blocks):
    block = {"temperature": 0.8, "topk": 5, "cfg": 1, "max_step": 12}
    data = {"dtype": "float32", "enforce_modality": enforce}
    return written(folder, "inference.yaml", data | {name: block | blocks.get(name, {}) for name in ("text", "audio")})


RANK = "text_to_audio_set/inference_rank0"


@pytest.mark.parametrize("backend", ["pytorch", "vllm"])
def test_frequencies_over_many_seeds_are_those_that_are_written(tmp_path, backend):
    """One prompt under many keys, so under many seeds: the first audio row, every stream."""
    pytest.importorskip("vllm" if backend == "vllm" else "torch")
    layout, draws = layout_of(BAGPIPER), 400
    config = settings(tmp_path, ["audio"], audio={"max_step": layout.num_streams})
    specifier = dataset(tmp_path, {f"k{i}": "hello" for i in range(draws)})
    more = ["--max-num-seqs", 64] if backend == "vllm" else []
    arguments = (BAGPIPER, config, specifier, tmp_path / "out", "--write-scores", *more)
    assert bagpiper(*arguments, backend=backend) == 0
    files = [load(tmp_path / "out" / RANK, f"k{i}") for i in range(draws)]
    for scores in files:
        check_arrays(scores, layout.num_streams)
    first = np.stack([scores["ids"][1] for scores in files])
    logprobs = np.stack([scores["logprobs"][1] for scores in files])
    for stream in range(layout.num_streams):
        ids, place, counts = np.unique(first[:, stream], return_index=True, return_counts=True)
        values = logprobs[place, stream]
        for value, one in zip(values, ids, strict=True):
            same = logprobs[first[:, stream] == one, stream]
            assert np.abs(same - value).max() < 1e-4, "one id, one context, two log-probabilities"
        probabilities = np.exp(values.astype(np.float64))
        left = 1 - probabilities.sum()
        # Top-k is 5: of the few ids, those that never came have what is left.
        assert len(ids) <= 5 and left > -1e-4 and (left < 1e-4) == (len(ids) == 5), (stream, left, counts)
        p = p_value(first[:, stream], np.append(ids, ids.max() + 1), np.append(probabilities, max(left, 0)))
        assert p >= ERROR / layout.num_streams / 2, f"stream {stream}: {counts} of {probabilities}, p {p:.2e}"


def test_rows_segments_and_forced_ids_of_an_answer(tmp_path):
    """Two segments, the second in three hypotheses."""
    layout, out = layout_of(BAGPIPER), tmp_path / "out"
    config = settings(
        tmp_path, ["text", "audio"], text={"max_step": 3, "min_step": 3}, audio={"num_hypo": 3, "min_step": 12}
    )
    assert bagpiper(BAGPIPER, config, dataset(tmp_path, {"a": "hello"}), out, "--write-scores") == 0
    scores = load(out / RANK, "a")
    check_arrays(scores, layout.num_streams)
    special, of = layout.specials, lambda name, h: scores[name][scores["hypothesis"] == h]
    # <text> 3 rows, <assistant> <audio> 12 rows; each further hypothesis <audio> 12 rows.
    assert of("segment", 0).tolist() == [0] * 4 + [1] * 14
    assert of("segment", 1).tolist() == of("segment", 2).tolist() == [1] * 13
    assert of("ids", 0)[[0, 4, 5], 0].tolist() == [special["text"], special["assistant"], special["audio"]]
    forced = of("forced", 0)
    assert forced[[0, 4, 5]].all() and forced[1:4, 1:].all() and not forced[1:4, 0].any() and not forced[6:].any()
    drawn = of("logprobs", 0)[6:]
    assert (drawn < 0).mean() > 0.5 and (np.exp(drawn) <= 1).all()
    samples = [of("ids", h)[-12:] for h in range(3)]
    assert all((a != b).any() for i, a in enumerate(samples) for b in samples[:i]), "two samples are the same"


def test_greedy_ids_are_certain_and_no_file_is_written_unasked(tmp_path):
    config = settings(tmp_path, ["text"], text={"topk": 1}, audio={"topk": 1})
    specifier = dataset(tmp_path, {"a": "hello", "b/c": "there"})
    assert bagpiper(BAGPIPER, config, specifier, tmp_path / "out", "--write-scores") == 0
    for key in ("a", "b%2Fc"):
        assert not load(tmp_path / "out" / RANK, key)["logprobs"].any()
    assert bagpiper(BAGPIPER, config, specifier, tmp_path / "none") == 0
    assert not list((tmp_path / "none").rglob(".scores"))


def test_a_restarted_run_writes_the_scores_that_are_missing(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config, out = settings(tmp_path, ["text"]), tmp_path / "out"
    arguments = (BAGPIPER, config, dataset(tmp_path, {"a": "hello", "b": "there"}), out, "--write-scores")
    assert bagpiper(*arguments) == 0
    before = load(out / RANK, "b")
    (out / RANK / ".scores" / "b.npz").unlink()
    caplog.clear()
    assert bagpiper(*arguments) == 0
    assert "1 of them taken over" in caplog.text
    assert all(np.array_equal(before[name], value) for name, value in load(out / RANK, "b").items())
    assert bagpiper(*arguments[:-1]) == 0, "a run without scores"


# -- OpusLM ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def chat_model(tmp_path, monkeypatch):
    copy = writable(OPUSLM, tmp_path / "model")
    monkeypatch.chdir(copy)

    def change(data):
        for name in ("nproc", "nbest"):
            data.pop(name, None)
        for name in ("codec_ssl", "text_bpe"):
            data[name].update(maxlen=20, minlen=4, search_algo="topk_sampling", topk=10, sampling_temperature=1.0)

    edited_yaml(copy / "decode_default.yaml", copy / "decode.yaml", change)
    return copy


def examples(model, task, keys):
    data = json.loads((model / "data" / task / "data.json").read_text(encoding="utf-8"))
    return written(model, f"{task}.json", {**data, "examples": keys})


def test_scores_of_samples_belong_to_their_tokens(chat_model, tmp_path):
    out = tmp_path / "out"
    data = examples(chat_model, TTS, ["u00"])
    assert chat(chat_model, chat_model / "decode.yaml", data, out, "--write_scores", "--nbest", 3) == 0
    scores = load(out, f"{TTS}_u00")
    layout = ensure_converted(chat_model / "config.yaml", chat_model / "model.pth").layout
    check_arrays(scores, layout.num_streams)
    tokens = kaldiio.load_scp(str(out / "wav.scp" / "wav.scp_token.scp"))
    samples = []
    for sample in range(3):
        mine = scores["hypothesis"] == sample
        (place,) = set(scores["segment"][mine])
        assert place == 2, "text, speaker, and then what was generated"
        ids = scores["ids"][mine]
        frames = delay.undo(ids) - layout.streams[0].start
        written_tokens = tokens[f"{TTS}_u00_sample{sample}"].reshape(-1, layout.num_streams)
        assert len(written_tokens) and np.array_equal(frames[: len(written_tokens)], written_tokens)
        samples.append(ids)
        # Streams that have not begun, and those that have run out.
        late = np.arange(layout.num_streams)[None] > np.arange(len(ids))[:, None]
        assert scores["forced"][mine][late].all()
        assert not scores["forced"][mine][len(late) // 2].any() or len(ids) < 2 * layout.num_streams
    shortest = min(map(len, samples))
    assert all((a[:shortest] != b[:shortest]).any() for i, a in enumerate(samples) for b in samples[:i])


def test_scores_of_a_dialogue_name_the_turns(chat_model, tmp_path):
    out = tmp_path / "out"
    assert (
        chat(chat_model, chat_model / "decode.yaml", examples(chat_model, DIALOGUE, ["ad1"]), out, "--write_scores")
        == 0
    )
    (key,) = (path.stem for path in (out / ".scores").glob("*.npz"))
    ((_, turns),) = json.loads((out / "dialogue" / "dialogue.json").read_text("utf-8"))[0].items()
    scores = load(out, key)
    generated = [place for place, (*_, prefill, _) in enumerate(turns) if not prefill]
    assert sorted(set(scores["segment"])) == generated and not scores["hypothesis"].any()


# -- seeds -------------------------------------------------------------------------------------------------------------
def drawn_seed(caplog):
    (seed,) = {int(found) for found in re.findall(r"drew seed (\d+)", caplog.text)}
    return seed


def test_without_a_seed_runs_differ_and_the_seed_drawn_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = settings(tmp_path, ["text"], text={"max_step": 20, "min_step": 20, "topk": 50, "temperature": 2.0})
    specifier = dataset(tmp_path, {"a": "hello"})

    def run(name, *more):
        caplog.clear()
        assert bagpiper(BAGPIPER, config, specifier, tmp_path / name, "--write-scores", *more) == 0
        return load(tmp_path / name / RANK, "a")["ids"]

    first = run("one", "--seed", "random")
    seed = drawn_seed(caplog)
    assert np.array_equal(run("two", "--seed", seed), first), "the seed that was logged gives the run again"
    assert not np.array_equal(run("three", "--seed", "random"), first) and drawn_seed(caplog) != seed
    assert np.array_equal(run("one", "--seed", "random"), first)
    assert f"going on with seed {seed}" in caplog.text and "1 of them taken over" in caplog.text
    assert not np.array_equal(run("one", "--seed", "random", "--no-resume"), first)


def test_a_chat_run_without_a_seed(chat_model, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    data, ids = examples(chat_model, TTS, ["u00"]), []
    for name in ("one", "two"):
        more = ["--write_scores", "--seed", "random"]
        assert chat(chat_model, chat_model / "decode.yaml", data, tmp_path / name, *more) == 0
        ids.append(load(tmp_path / name, f"{TTS}_u00")["ids"])
    assert not np.array_equal(*ids)
    assert len(set(re.findall(r"drew seed (\d+)", caplog.text))) == 2


@pytest.mark.parametrize("value", ["-1", "often", "1.5"])
def test_a_seed_is_a_number_or_random(tmp_path, capsys, value):
    with pytest.raises(SystemExit) as exit_:
        inference.main(bagpiper_arguments(BAGPIPER, "x", "y", tmp_path, f"--seed={value}"))
    assert exit_.value.code == 2 and "--seed" in capsys.readouterr().err


def test_logarithms_are_natural():
    """One id of two equal ones has probability 1/2: ln 0.5."""
    import torch

    from espnet2_vllm.backends.pytorch import choose
    from espnet2_vllm.protocol import Sampling

    _, logprob = choose(torch.zeros(2), torch.arange(2), Sampling(1.0, 2), 1, 1, 0)
    assert float(logprob) == pytest.approx(math.log(0.5))
