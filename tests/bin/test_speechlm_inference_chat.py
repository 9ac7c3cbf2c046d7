"""The OpusLM command line: options, bad input, and going on where a run stopped."""

import json
import logging
import shutil
import subprocess
import sys

import kaldiio
import numpy as np
import pytest
import soundfile
import torch
from commands import chat, chat_arguments, edited_yaml, environment, help_of, writable
from conftest import golden_models
from trees import result_files

from espnet2_vllm.bin import speechlm_inference_chat

MODELS = golden_models("opuslm")
ASR, TTS, DIALOGUE = "codec_ssl_asr", "codec_ssl_tts", "audio_dialogue"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path / "converted"))


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A copy of a recorded model that a test may damage; it is the working directory."""
    copy = writable(MODELS[0], tmp_path / "model")
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture
def decode(model):
    """A short decoding yaml."""

    def shorten(data):
        for name in ("nproc", "nbest"):  # they would win over the command line
            data.pop(name, None)
        for name in ("codec_ssl", "text_bpe"):
            data[name].update(maxlen=20, search_algo="topk_sampling", topk=1)

    return edited_yaml(model / "decode_default.yaml", model / "decode.yaml", shorten)


def data_json(model, task, examples):
    """A data.json of some examples."""
    data = json.loads((model / "data" / task / "data.json").read_text(encoding="utf-8"))
    path = model / f"{task}.json"
    path.write_text(json.dumps({**data, "examples": list(examples)}), encoding="utf-8")
    return path


def lines(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def ids(path):
    return [line.split(" ", 1)[0] for line in lines(path)]


def outcomes(out):
    found = [json.loads(line) for line in lines(out / ".journal" / "journal.jsonl")[1:]]
    return {record["key"]: record["outcome"] for record in found}


# -- bad input that stops the job -------------------------------------------------------------------------------------
def refused(caplog, code, *parts):
    """The exit code and one error line with all ``parts``."""
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1, errors
    for part in parts:
        assert part in errors[0]
    return code


def run_refused(caplog, expected, parts, *arguments, **options):
    assert chat(*arguments, **options) == expected
    refused(caplog, expected, *parts)


def test_no_such_checkpoint(model, decode, tmp_path, caplog):
    (model / "model.pth").unlink()
    run_refused(caplog, 1, ["model.pth"], model, decode, data_json(model, ASR, ["u00"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_such_training_yaml(model, decode, tmp_path, caplog):
    (model / "config.yaml").unlink()
    run_refused(caplog, 1, ["config.yaml"], model, decode, data_json(model, ASR, ["u00"]), tmp_path / "out")


def test_wrong_family(model, decode, tmp_path, caplog):
    bagpiper = golden_models("bagpiper")
    arguments = chat_arguments(model, decode, data_json(model, ASR, ["u00"]), tmp_path / "out")
    arguments[1], arguments[3] = str(bagpiper[0] / "train.yaml"), str(bagpiper[0] / "mp_rank_00_model_states.pt")
    assert speechlm_inference_chat.main(arguments) == 1
    refused(caplog, 1, "bagpiper", "opuslm")


def test_a_missing_tensor_is_named(model, decode, tmp_path, caplog):
    state = torch.load(model / "model.pth", weights_only=True)
    del state["corelm.decoders.model.layers.1.mlp.up_proj.weight"]
    torch.save(state, model / "model.pth")
    parts = ["layers.1.mlp.up_proj.weight"]
    run_refused(caplog, 1, parts, model, decode, data_json(model, ASR, ["u00"]), tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("maxlne", 20, ["codec_ssl.maxlne", "maxlen"]),
        ("topk", 0, ["codec_ssl.topk", "0"]),
        ("topk", "5", ["codec_ssl.topk", "'5'"]),
        ("sampling_temperature", -0.5, ["codec_ssl.sampling_temperature", "-0.5"]),
        ("maxlen", 5, ["maxlen", "5 rows"]),
    ],
)
def test_bad_settings_exit_with_2_and_name_the_key(model, decode, tmp_path, caplog, key, value, parts):
    edited_yaml(decode, decode, lambda data: data["codec_ssl"].update({key: value}))
    run_refused(caplog, 2, ["decode.yaml", *parts], model, decode, data_json(model, ASR, ["u00"]), tmp_path / "out")


def test_an_empty_data_json(model, decode, tmp_path, caplog):
    path = data_json(model, ASR, [])
    run_refused(caplog, 1, [str(path), "empty"], model, decode, path, tmp_path / "out")
    caplog.clear()
    path.write_text("", encoding="utf-8")
    run_refused(caplog, 1, [str(path)], model, decode, path, tmp_path / "out")


def test_a_codec_that_does_not_fit_is_refused_before_anything_is_decoded(model, decode, tmp_path, caplog):
    def fewer(data):
        data["codec_ssl"]["tokenizer"]["codec_config"]["max_token_per_frame"] = 4

    edited_yaml(decode, decode, fewer)
    parts = ["4 codebooks of 32", "8 codebooks of 32"]
    run_refused(caplog, 1, parts, model, decode, data_json(model, ASR, ["u00"]), tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.wav"))


def test_wavs_without_a_codec_are_refused_before_anything_is_decoded(model, decode, tmp_path, caplog):
    edited_yaml(decode, decode, lambda data: data["codec_ssl"].pop("tokenizer"))
    (model / "decode_default.yaml").unlink()  # where the conversion would find it
    parts = ["decode.yaml", "names a codec", "codec_ssl.tokenizer"]
    run_refused(caplog, 2, parts, model, decode, data_json(model, ASR, ["u00"]), tmp_path / "out")


def test_a_text_task_needs_no_codec(model, decode, tmp_path):
    edited_yaml(decode, decode, lambda data: data["codec_ssl"].pop("tokenizer"))
    (model / "decode_default.yaml").unlink()
    out = tmp_path / "out"
    assert chat(model, decode, data_json(model, "text_dialogue", ["td0"]), out) == 0
    assert list(outcomes(out).values()) == ["ok"]


def test_nbest_in_a_dialogue_is_refused(model, decode, tmp_path, caplog):
    data = data_json(model, DIALOGUE, ["ad0"])
    run_refused(caplog, 2, ["nbest 3", str(data)], model, decode, data, tmp_path / "out", "--nbest", 3)


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (
            ["--data_path_and_name_and_type", "other/data.json,_,dataset_json"],
            ["given 2 times; expected one data.json"],
        ),
        (["--engine_option", "eager"], ["NAME=VALUE"]),
        (["--engine_option", "max_num_seqs=2", "--max_num_seqs", 3], ["max_num_seqs", "twice"]),
        (["--max_num_seqs", 3], ["max_num_seqs", "pytorch"]),
        (["--device", "cuda:77"], ["--device cuda:77"]),
        (["--ngpu", 2], ["--ngpu 2: engine and codec would take 1", "--data_parallel_size 2", "split-data"]),
        (
            ["--ngpu", 3, "--tensor_parallel_size", 2, "--data-parallel-size", 2],
            ["--ngpu 3: engine and codec would take 4"],
        ),
        (["--ngpu", 4, "--data_parallel_size", 2, "--device", "cuda:2"], ["--ngpu 4: engine and codec would take 3"]),
        (["--engine_option", "tensor_parallel_size=two"], ["tensor_parallel_size=two: expected a whole number"]),
        (["--ngpu", 2, "--data_parallel_size", 2], ["option of the pytorch backend 'data_parallel_size' is unknown"]),
    ],
)
def test_options_that_do_not_fit(model, decode, tmp_path, caplog, more, parts):
    run_refused(caplog, 2, parts, model, decode, data_json(model, ASR, ["u00"]), tmp_path / "out", *more)


@pytest.mark.parametrize("option", ["--nbest=0", "--seed=x", "--dtype=float8", "--backend=tensorrt", "--unheard_of=1"])
def test_usage_errors_exit_with_2(model, decode, tmp_path, option, capsys):
    with pytest.raises(SystemExit) as stop:
        chat(model, decode, data_json(model, ASR, ["u00"]), tmp_path / "out", option)
    assert stop.value.code == 2
    assert option.strip("-").split("=")[0] in capsys.readouterr().err


# -- bad input of one utterance: the others are written ---------------------------------------------------------------
def test_an_utterance_without_text_loses_nothing_else(model, decode, tmp_path, caplog):
    text = model / "data" / TTS / "index_files" / "text"
    kept = [line for line in lines(text) if not line.startswith("u01 ")]
    kept = ["u02" if line.startswith("u02 ") else line for line in kept]
    text.write_text("\n".join(kept) + "\n", encoding="utf-8")
    out = tmp_path / "out"
    assert chat(model, decode, data_json(model, TTS, ["u00", "u01", "u02", "u03"]), out) == 1
    assert ids(out / "text" / "text") == ["u00", "u03"]
    assert ids(out / "wav.scp" / "wav.scp") == [f"{TTS}_u00_sample0", f"{TTS}_u03_sample0"]
    assert {key for key, outcome in outcomes(out).items() if outcome == "refused"} == {f"{TTS}_u01", f"{TTS}_u02"}
    for key in ("u01", "u02"):
        assert any(f"{TTS}_{key}" in message and "text" in message for message in caplog.messages)
    assert "4 utterances: 1 ok, 1 length, 2 refused" in caplog.text


def test_an_ark_cut_short_loses_nothing_else(model, decode, tmp_path, caplog):
    scp = model / "data" / ASR / "index_files" / "wav.scp"
    tables = dict(line.split(" ", 1) for line in lines(scp))
    whole = kaldiio.load_mat(tables["u01"])
    kaldiio.save_ark(str(model / "cut.ark"), {"u01": whole})
    data = (model / "cut.ark").read_bytes()
    (model / "cut.ark").write_bytes(data[:-7])
    tables["u01"] = "cut.ark:4"
    scp.write_text("".join(f"{key} {value}\n" for key, value in tables.items()), encoding="utf-8")
    out = tmp_path / "out"
    assert chat(model, decode, data_json(model, ASR, ["u00", "u01", "u02"]), out) == 1
    assert ids(out / "text" / "text") == [f"{ASR}_u00_sample0", f"{ASR}_u02_sample0"]
    assert ids(out / "wav.scp" / "wav.scp") == ["u00", "u02"]
    (reason,) = [m for m in caplog.messages if m.startswith("no result for")]
    assert f"{ASR}_u01" in reason and "cut.ark" in reason


@pytest.mark.parametrize("backend", ["pytorch", "vllm"])
def test_a_prompt_longer_than_the_context_loses_nothing_else(backend, model, decode, tmp_path, caplog):
    if backend == "vllm":
        pytest.importorskip("vllm")
    config = model / "hf_backbone" / "config.json"
    facts = json.loads(config.read_text(encoding="utf-8"))
    data = data_json(model, ASR, ["u00", "u01", "u02"])
    out = tmp_path / "whole"
    assert chat(model, decode, data, out) == 0
    rows = {}
    for key, value in kaldiio.load_scp(str(out / "wav.scp" / "wav.scp_token.scp")).items():
        rows[key] = len(value) // 9 + 12  # sos, task, modality, 8 pads, modality
    assert len(set(rows.values())) > 1, "prompts of one length cannot show that only some are refused"
    facts["max_position_embeddings"] = max(rows.values())
    config.write_text(json.dumps(facts), encoding="utf-8")
    short = tmp_path / "short"
    assert chat(model, decode, data, short, backend=backend) == 1
    longest = {key for key, count in rows.items() if count == max(rows.values())}
    assert {key.removeprefix(f"{ASR}_") for key, o in outcomes(short).items() if o == "refused"} == longest
    assert set(ids(short / "wav.scp" / "wav.scp")) == set(rows) - longest
    assert all(f"context of {max(rows.values())} rows" in m for m in caplog.messages if m.startswith("no result for"))


# -- what stands in the yaml wins over the command line ---------------------------------------------------------------
def test_keys_of_the_yaml_win_over_the_command_line(model, decode, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    edited_yaml(decode, decode, lambda data: data.update(nproc=3, nbest=2, seed=5))
    out = tmp_path / "out"
    more = ["--nproc", 1, "--nbest", 1]
    assert chat(model, decode, data_json(model, ASR, ["u00", "u01", "u02", "u03"]), out, *more) == 0
    assert "nproc: 3 wins over --nproc 1" in caplog.text and "nbest: 2 wins over --nbest 1" in caplog.text
    assert "seed" not in [m.split(" wins")[0].split(": ")[-2:][0] for m in caplog.messages if " wins over " in m]
    assert ids(out / "text" / "rank0_text") == [f"{ASR}_u02_sample{k}" for k in (0, 1)]
    assert ids(out / "text" / "rank1_text") == [f"{ASR}_{u}_sample{k}" for u in ("u00", "u03") for k in (0, 1)]
    assert ids(out / "wav.scp" / "wav.scp") == ["u02", "u00", "u03", "u01"]


def test_more_ranks_than_examples_leave_empty_files(model, decode, tmp_path):
    out = tmp_path / "out"
    assert chat(model, decode, data_json(model, ASR, ["u00"]), out, "--nproc", 3) == 0
    assert [lines(out / "text" / f"rank{r}_text") != [] for r in range(3)] == [False, True, False]
    assert (out / "text" / "rank2_text_token.ark").read_bytes() == b""
    assert ids(out / "text" / "text") == [f"{ASR}_u00_sample0"]


def test_a_relative_output_directory_is_named_as_given(model, decode):
    assert chat(model, decode, data_json(model, ASR, ["u00"]), "exp/./out") == 0
    assert lines(model / "exp/out/wav.scp/wav.scp") == ["u00 exp/out/wav.scp/u00.wav"]
    (line,) = lines(model / "exp/out/text/text_token.scp")
    assert line.split()[1].startswith("exp/out/text/rank0_text_token.ark:")


# -- resume -----------------------------------------------------------------------------------------------------------
def contents(out):
    return {path: (out / path).read_bytes() for path in result_files(out)}


def test_a_restarted_run_goes_on_and_ends_with_the_same_files(model, decode, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    examples = ["u00", "u01", "u02", "u03"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    data = data_json(model, TTS, examples)
    assert chat(model, decode, data, whole) == 0
    # A run that was killed in the middle: a journal of the first two, the files of the third, half a line.
    shutil.copytree(whole, out)
    journal = out / ".journal" / "journal.jsonl"
    head, *records = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(head + b"".join(records[:2]) + records[2][:40])
    for path in result_files(out):
        if path.suffix != ".wav":
            (out / path).unlink()
    caplog.clear()
    assert chat(model, decode, data, out) == 0
    assert "2 of them taken over from an earlier run" in caplog.text
    renamed = {path: data.replace(str(out).encode(), str(whole).encode()) for path, data in contents(out).items()}
    assert renamed == contents(whole)
    assert len(lines(journal)) == 1 + len(examples)


def test_a_finished_run_decodes_nothing_again_and_other_settings_everything(model, decode, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    data, out = data_json(model, ASR, ["u00", "u01"]), tmp_path / "out"
    assert chat(model, decode, data, out) == 0
    before = contents(out)
    assert chat(model, decode, data, out) == 0
    assert "2 of them taken over" in caplog.text and contents(out) == before
    caplog.clear()
    assert chat(model, decode, data, out, "--no_resume") == 0
    assert "taken over" not in caplog.text and contents(out) == before
    caplog.clear()
    edited_yaml(decode, decode, lambda data: data["text_bpe"].update(maxlen=18))
    assert chat(model, decode, data, out, "--resume", "true") == 0
    assert "taken over" not in caplog.text and "decoding.text.max_rows: 20, now 18" in caplog.text


def test_only_what_changed_is_decoded_again(model, decode, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    out = tmp_path / "out"
    assert chat(model, decode, data_json(model, TTS, ["u00", "u01"]), out) == 0
    text = model / "data" / TTS / "index_files" / "text"
    text.write_text(text.read_text("utf-8").replace("hello world", "world hello"), encoding="utf-8")
    assert chat(model, decode, data_json(model, TTS, ["u01", "u00", "u02"]), out) == 0
    assert "3 utterances: 2 ok, 1 length; 1 of them taken over" in caplog.text
    assert ids(out / "text" / "text") == ["u01", "u00", "u02"]
    assert "u00 world hello" in lines(out / "text" / "text")


def test_a_refused_utterance_is_tried_again(model, decode, tmp_path):
    text = model / "data" / TTS / "index_files" / "text"
    good = text.read_text("utf-8")
    text.write_text(good.replace("u01 good morning everyone\n", ""), encoding="utf-8")
    data, out = data_json(model, TTS, ["u00", "u01"]), tmp_path / "out"
    assert chat(model, decode, data, out) == 1
    text.write_text(good, encoding="utf-8")
    assert chat(model, decode, data, out) == 0
    assert ids(out / "text" / "text") == ["u00", "u01"]


# -- the process ------------------------------------------------------------------------------------------------------
def test_help_is_quick_and_names_espnets_options():
    text, seconds = help_of("espnet2_vllm.bin.speechlm_inference_chat")
    for name in ("nproc", "inference_last_segment", "data_path_and_name_and_type", "nbest", "backend", "in_flight"):
        assert f"--{name}" in text
    assert seconds < 0.5, f"--help took {seconds:.2f} s"


def test_the_log_goes_to_stderr_and_ends_with_a_summary(model, decode, tmp_path):
    """As the recipe runs it: in the C locale, whose encoding is ASCII."""
    out = tmp_path / "out"
    arguments = chat_arguments(model, decode, data_json(model, DIALOGUE, ["ad1"]), out)
    command = [sys.executable, "-m", "espnet2_vllm.bin.speechlm_inference_chat", *arguments]
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment() | c_locale)
    assert done.returncode == 0, done.stderr
    first, *_, last = [line for line in done.stderr.splitlines() if ") INFO: " in line]
    assert "command: " in first and str(model / "model.pth") in first
    assert "1 utterances: 1 length" in last and "rows/s" in last and str(out) in last
    text = (out / "dialogue" / "dialogue.json").read_text(encoding="utf-8")
    assert not text.isascii() and json.loads(text)


def test_nbest_writes_samples_side_by_side(model, decode, tmp_path):
    edited_yaml(decode, decode, lambda data: data["codec_ssl"].update(topk=20))
    out = tmp_path / "out"
    assert chat(model, decode, data_json(model, TTS, ["u00"]), out, "--nbest", 3, "--seed", 1) == 0
    names = [f"{TTS}_u00_sample{k}" for k in range(3)]
    assert ids(out / "wav.scp" / "wav.scp") == names
    assert ids(out / "text" / "text") == ["u00"]
    tokens = kaldiio.load_scp(str(out / "wav.scp" / "wav.scp_token.scp"))
    assert not all(np.array_equal(tokens[names[0]], tokens[name]) for name in names[1:])
    for line in lines(out / "wav.scp" / "wav.scp"):
        name, path = line.split(" ", 1)
        assert soundfile.info(path).frames == tokens[name].size // 9 * 320
