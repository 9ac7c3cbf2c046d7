"""The Bagpiper command line: options, bad input, and going on where a run stopped."""

import json
import logging

import pytest
import soundfile
import torch
from commands import bagpiper, bagpiper_arguments, edited_yaml, help_of, writable
from conftest import golden_models
from trees import result_files

from espnet2_vllm.bin import inference

MODELS = [model for model in golden_models("bagpiper") if not (model / "Qwen").exists()]
TEXTS = {"a": "hello there", "b": "one two three", "c": "good morning", "d": "a", "e": "read this aloud"}
SETTINGS = {
    "dtype": "float32",
    "enforce_modality": ["text", "audio"],
    "text": {"temperature": 0.0, "topk": 20, "max_step": 6},
    "audio": {"temperature": 0.0, "topk": 20, "max_step": 16},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path / "converted"))


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A copy of a recorded model that a test may damage; it is the working directory."""
    copy = writable(MODELS[0], tmp_path / "model")
    monkeypatch.chdir(copy)
    return copy


def settings(model, **changes):
    """An inference yaml; ``audio.topk=0`` is written ``audio__topk=0``."""
    data = json.loads(json.dumps(SETTINGS))
    for name, value in changes.items():
        *path, last = name.split("__")
        block = data
        for part in path:
            block = block[part]
        block[last] = value
    path = model / "inference.yaml"
    path.write_text(json.dumps(data), encoding="utf-8")  # JSON is yaml
    return path


def dataset(model, texts=TEXTS, samples=None, name="set"):
    """The specifier of a set with one text each."""
    folder = model / name
    folder.mkdir(exist_ok=True)
    (folder / "text").write_text("".join(f"{key} {text}\n" for key, text in texts.items()), encoding="utf-8")
    entry = {"name": "text1", "path": str(folder / "text"), "reader": "text"}
    data = {"data_entry": [entry], "samples": list(texts) if samples is None else samples}
    (folder / "dataset.json").write_text(json.dumps(data), encoding="utf-8")
    return f"text_to_audio:{name}:{folder / 'dataset.json'}"


def results(out, rank=0, name="set"):
    path = out / f"text_to_audio_{name}" / f"inference_rank{rank}" / "results.json"
    return json.loads(path.read_text(encoding="utf-8"))


def outcomes(out, rank=0, name="set"):
    path = out / f"text_to_audio_{name}" / f"inference_rank{rank}" / ".journal" / "journal.jsonl"
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()[1:]]
    return {record["key"]: record["outcome"] for record in records}


def contents(out):
    return {path: (out / path).read_bytes().replace(str(out).encode(), b"OUT") for path in result_files(out)}


def run_refused(caplog, code, parts, *arguments, **options):
    """The exit code, and one error line that holds all ``parts``."""
    assert bagpiper(*arguments, **options) == code
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1, errors
    for part in parts:
        assert part in errors[0]


# -- bad input that stops the job -------------------------------------------------------------------------------------
def test_no_such_checkpoint(model, tmp_path, caplog):
    (model / "mp_rank_00_model_states.pt").unlink()
    run_refused(caplog, 1, ["mp_rank_00_model_states.pt"], model, settings(model), dataset(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_family(model, tmp_path, caplog):
    opuslm = golden_models("opuslm")
    arguments = bagpiper_arguments(model, settings(model), dataset(model), tmp_path / "out")
    arguments[1], arguments[3] = str(opuslm[0] / "config.yaml"), str(opuslm[0] / "model.pth")
    assert inference.main(arguments) == 1
    assert "opuslm" in caplog.text and "bagpiper" in caplog.text


def test_the_yaml_of_the_other_family(model, tmp_path, caplog):
    config = model / "decode.yaml"
    config.write_text("codec_ssl: {search_algo: topk_sampling}\n", encoding="utf-8")
    run_refused(caplog, 2, ["codec_ssl", "OpusLM"], model, config, dataset(model), tmp_path / "out")


def test_a_missing_tensor_is_named(model, tmp_path, caplog):
    path = model / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    del state["module"]["model.layers.1.mlp.up_proj.weight"]
    torch.save(state, path)
    parts = ["model.layers.1.mlp.up_proj.weight"]
    run_refused(caplog, 1, parts, model, settings(model), dataset(model), tmp_path / "out")


def test_a_codec_that_does_not_fit(model, tmp_path, caplog):
    def fewer(data):
        data["multimodal_io"]["discrete_audio"]["codec_max_token_per_frame"] = 3

    edited_yaml(model / "train.yaml", model / "train.yaml", fewer)
    run_refused(caplog, 1, ["train.yaml"], model, settings(model), dataset(model), tmp_path / "out")
    assert not list(tmp_path.rglob("*_segment*.wav"))


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("audio__cfg", "3", ["audio.cfg", "'3'"]),
        ("audio__topk", 0, ["audio.topk", "0"]),
        ("text__temperature", -1, ["text.temperature", "-1"]),
        ("audio__max_steps", 3, ["audio.max_steps", "max_step"]),
        ("enforce_modality", ["audo"], ["enforce_modality", "audo"]),
    ],
)
def test_bad_settings_exit_with_2_and_name_the_key(model, tmp_path, caplog, name, value, parts):
    config = settings(model, **{name: value})
    run_refused(caplog, 2, ["inference.yaml", *parts], model, config, dataset(model), tmp_path / "out")


def test_an_empty_dataset_json(model, tmp_path, caplog):
    specifier = dataset(model, samples=[])
    run_refused(caplog, 1, ["dataset.json", "samples"], model, settings(model), specifier, tmp_path / "out")
    caplog.clear()
    (model / "set" / "dataset.json").write_text("", encoding="utf-8")
    run_refused(caplog, 1, ["dataset.json"], model, settings(model), specifier, tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ([], "none is given"),
        (["--test-unregistered-specifier", "", "--test-registered-specifier", ""], "none is given, or it is empty"),
        (
            ["--test-unregistered-specifier", "dialogue:a:x.json", "--test-registered-specifier", "dialogue:a"],
            "both are given",
        ),
    ],
)
def test_exactly_one_specifier(model, tmp_path, caplog, more, found):
    arguments = bagpiper_arguments(model, settings(model), "", tmp_path / "out")
    at = arguments.index("--test-unregistered-specifier")
    del arguments[at : at + 2]
    assert inference.main([*arguments, *more]) == 2
    assert "expected exactly one of" in caplog.text and found in caplog.text


def test_paths_are_taken_as_they_stand(model, tmp_path):
    """Blanks, quotes and backslashes; the other option is empty, as launchers give it. A set of the name can come again."""
    first = dataset(model, {"a": "hello"}, name="one 'set' \\ \"x")
    second = dataset(model, {"a": "good morning"}, name="two")
    more = ["--test-registered-specifier", "", "--test-unregistered-specifier", second]
    assert bagpiper(model, settings(model), first, tmp_path / "out", *more) == 0
    (folder,) = (path for path in (tmp_path / "out").iterdir() if "one" in path.name)
    assert folder.name == "text_to_audio_one 'set' \\ \"x"
    assert list(json.loads((folder / "inference_rank0" / "results.json").read_text(encoding="utf-8"))) == ["a"]
    assert list(results(tmp_path / "out", name="two")) == ["a"]


@pytest.mark.parametrize("words", [["--rank", "0"], ["--world-size", "0"], ["--num-workers", "0"], ["--rank", "x"]])
def test_counts_below_one_are_usage_errors(model, tmp_path, capsys, words):
    with pytest.raises(SystemExit) as caught:
        bagpiper(model, settings(model), dataset(model), tmp_path / "out", *words)
    assert caught.value.code == 2 and words[0] in capsys.readouterr().err


def test_a_rank_beyond_the_world(model, tmp_path, caplog):
    more = ["--rank", 3, "--world-size", 2]
    run_refused(caplog, 2, ["--rank 3"], model, settings(model), dataset(model), tmp_path / "out", *more)


# -- bad input of one utterance: the others are written ---------------------------------------------------------------
def test_a_sample_without_text_loses_nothing_else(model, tmp_path, caplog):
    specifier = dataset(model, {"a": "hello", "b": ""}, samples=["a", "b", "c", "d"])
    with open(model / "set" / "text", "a", encoding="utf-8") as file:
        file.write("d last one\n")
    out = tmp_path / "out"
    assert bagpiper(model, settings(model), specifier, out) == 1
    assert list(results(out)) == ["a", "d"]
    assert [key for key, outcome in outcomes(out).items() if outcome == "refused"] == ["b", "c"]
    for key in "bc":
        assert any(m.startswith(f"no result for {key}: ") and "text" in m for m in caplog.messages)


def test_a_prompt_longer_than_the_context_loses_nothing_else(model, tmp_path, caplog):
    config = model / "backbone" / "config.json"
    facts = json.loads(config.read_text(encoding="utf-8"))
    facts["max_position_embeddings"] = 40
    config.write_text(json.dumps(facts), encoding="utf-8")
    out = tmp_path / "out"
    specifier = dataset(model, {"a": "a", "b": "hello there " * 40, "c": "b"})
    assert bagpiper(model, settings(model), specifier, out) == 1
    assert list(results(out)) == ["a", "c"]
    assert any(m.startswith("no result for b: ") and "context of 40 rows" in m for m in caplog.messages)


def test_a_wav_cut_short_loses_nothing_else(model, tmp_path, caplog):
    folder = model / "set"
    folder.mkdir()
    wav = 0.1 * torch.randn(16000, generator=torch.Generator().manual_seed(3)).numpy()
    for name in ("a", "b"):
        soundfile.write(folder / f"{name}.wav", wav, 16000)
    (folder / "b.wav").write_bytes((folder / "b.wav").read_bytes()[:30])
    (folder / "audio1").write_text(f"a {folder}/a.wav\nb {folder}/b.wav\n", encoding="utf-8")
    entry = {"name": "audio1", "path": str(folder / "audio1"), "reader": "kaldi_audio"}
    data = {"data_entry": [entry], "samples": ["a", "b"]}
    (folder / "dataset.json").write_text(json.dumps(data), encoding="utf-8")
    out = tmp_path / "out"
    specifier = f"audio_to_text:set:{folder / 'dataset.json'}"
    assert bagpiper(model, settings(model, enforce_modality=["text"]), specifier, out) == 1
    path = out / "audio_to_text_set" / "inference_rank0" / "results.json"
    assert list(json.loads(path.read_text("utf-8"))) == ["a"]
    assert any(m.startswith("no result for b: ") and "b.wav" in m for m in caplog.messages)


# -- layout -----------------------------------------------------------------------------------------------------------
def test_ranks_of_several_jobs(model, tmp_path):
    """Two jobs of two workers: together the ranks of ESPnet's world of four."""
    specifier, config, out = dataset(model), settings(model), tmp_path / "out"
    for rank in (1, 2):
        more = ["--rank", rank, "--world-size", 2, "--num-workers", 2]
        assert bagpiper(model, config, specifier, out, *more) == 0
    assert [list(results(out, rank)) for rank in range(4)] == [["a", "e"], ["b"], ["c"], ["d"]]
    whole = tmp_path / "whole"
    assert bagpiper(model, config, specifier, whole) == 0
    texts = {key: messages[0] for rank in range(4) for key, messages in results(out, rank).items()}
    assert texts == {key: messages[0] for key, messages in results(whole).items()}


def test_a_worker_without_samples_leaves_no_results(model, tmp_path):
    out = tmp_path / "out"
    assert bagpiper(model, settings(model), dataset(model, {"a": "b"}), out, "--num-workers", 2) == 0
    assert (out / "text_to_audio_set" / "inference_rank1").is_dir()
    assert not (out / "text_to_audio_set" / "inference_rank1" / "results.json").exists()


def test_results_of_an_earlier_run_with_more_ranks_go_and_come_back(model, tmp_path, caplog):
    specifier, config, out = dataset(model, {"a": "one", "b": "two"}), settings(model), tmp_path / "out"
    assert bagpiper(model, config, specifier, out, "--num-workers", 2) == 0
    assert bagpiper(model, config, specifier, out, "--num-workers", 1) == 0
    assert list(results(out)) == ["a", "b"]
    assert not (out / "text_to_audio_set" / "inference_rank1" / "results.json").exists()
    caplog.set_level(logging.INFO)
    assert bagpiper(model, config, specifier, out, "--num-workers", 2) == 0
    assert "2 of them taken over" in caplog.text and (list(results(out)), list(results(out, 1))) == (["a"], ["b"])


def test_folders_are_named_as_those_of_older_espnet_where_that_is_asked_for(model, tmp_path):
    """After the specifier, whose path becomes folders; they stay below the output directory."""
    dataset(model, {"a": "one"})
    specifier, out = "text_to_audio:set:set/../set/dataset.json:2", tmp_path / "deep" / "out"
    config = settings(model, audio__min_step=12)  # random weights may end a segment before it holds a frame
    assert bagpiper(model, config, specifier, out, "--directory-names", "specifier") == 0
    (written,) = tmp_path.glob("deep/**/results.json")
    assert written == out / "text_to_audio_set_set/%2E%2E/set/dataset.json_2/inference_rank0/results.json"
    assert f'"{written.parent}/a_segment' in written.read_text(encoding="utf-8")


def test_several_sets_with_the_same_ids_and_underscores(model, tmp_path):
    """Every option in the other spelling; each set has a folder of its own."""
    first = dataset(model, {"a": "hello"}, name="one")
    second = dataset(model, {"a": "good morning"}, name="two")
    arguments = bagpiper_arguments(
        model, settings(model), f"{first} {second}:2.0", tmp_path / "out", "--text-format=list"
    )
    spelled = [a if not a.startswith("--") else "--" + a[2:].replace("-", "_") for a in arguments]
    assert inference.main(spelled) == 0
    texts = [results(tmp_path / "out", name=name)["a"][0][2] for name in ("one", "two")]
    assert all(isinstance(text, list) and len(text) == 1 for text in texts) and texts[0] != texts[1]


# -- resume -----------------------------------------------------------------------------------------------------------
def test_a_restarted_run_goes_on_and_ends_with_the_same_files(model, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    specifier, config = dataset(model), settings(model)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert bagpiper(model, config, specifier, whole) == 0
    assert bagpiper(model, config, dataset(model, samples=["a", "c"]), out) == 0
    caplog.clear()
    assert bagpiper(model, config, dataset(model), out) == 0
    assert "2 of them taken over from an earlier run" in caplog.text
    assert contents(out) == contents(whole)


def test_other_settings_start_over(model, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    specifier, out = dataset(model, {"a": "hello"}), tmp_path / "out"
    assert bagpiper(model, settings(model), specifier, out) == 0
    assert bagpiper(model, settings(model, audio__max_step=12), specifier, out) == 0
    assert "taken over" not in caplog.text and "decoding.audio.max_rows: 16, now 12" in caplog.text
    assert bagpiper(model, settings(model, audio__max_step=12), specifier, out, "--seed", 1) == 0
    assert "taken over" not in caplog.text and "seed: 42, now 1" in caplog.text


@pytest.mark.parametrize("more", [["--engine-option", "max_rwos=9"], ["--overwrite", "--engine-option", "max_rwos=9"]])
def test_a_run_that_the_engine_refuses_costs_nothing(model, tmp_path, caplog, more):
    caplog.set_level(logging.INFO)
    arguments = model, settings(model), dataset(model, {"a": "hello"}), tmp_path / "out"
    assert bagpiper(*arguments) == 0
    run_refused(caplog, 2, ["max_rwos", "unknown"], *arguments, *more)
    assert bagpiper(*arguments) == 0
    assert "1 of them taken over" in caplog.text


def test_a_directory_in_use_is_refused(model, tmp_path, caplog):
    from espnet2_vllm.io.journal import Journal

    out = tmp_path / "out"
    journal = Journal(out / "text_to_audio_set" / "inference_rank0", {})
    run_refused(caplog, 2, ["another process"], model, settings(model), dataset(model), out)
    journal.close()


# -- the process ------------------------------------------------------------------------------------------------------
def test_help_is_quick_and_names_espnets_options():
    text, seconds = help_of("espnet2_vllm.bin.inference")
    for name in ("train-config", "test-registered-specifier", "num-workers", "world-size", "text-format", "in-flight"):
        assert f"--{name}" in text
    assert seconds < 0.5, f"--help took {seconds:.2f} s"
