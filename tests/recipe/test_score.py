"""Error rates of decoded text."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from espnet2_vllm.bin import prepare_data, score_speech, score_text
from espnet2_vllm.errors import ConfigError

pytest.importorskip("jiwer")


@pytest.fixture
def dialogue_set(tmp_path):
    """Two utterances whose answer is their transcript: 5 words in all."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "text").write_text("a one two three\nb four five\n", encoding="utf-8")

    def make(family, task):
        output = tmp_path / "dump" / "test"
        words = ["--family", family, "--task", task, "--data-dir", str(data), "--output-dir", str(output)]
        assert prepare_data.main(words) == 0
        results = tmp_path / "exp" / f"{task}_test"
        results.mkdir(parents=True)
        return output / ("data.json" if family == "opuslm" else "dataset.json"), results

    return make


def run(path, results, *more):
    return score_text.main(["--data-json", str(path), "--results-root", str(results.parent), *more])


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def test_opuslm_dialogue(dialogue_set, capsys):
    path, results = dialogue_set("opuslm", "text_dialogue")
    turns = {"a": "one two", "b": "four five"}
    write(
        results / "dialogue.json",
        [{f"text_dialogue_{key}": [["assistant", "text_bpe", False, turns[key]]]} for key in turns],
    )
    assert run(path, results, "--family", "opuslm") == 0
    scores = json.loads((results / "score.json").read_text(encoding="utf-8"))
    assert scores["wer"] == pytest.approx(1 / 5)
    assert scores["words"] == {"hits": 4, "substitutions": 0, "deletions": 1, "insertions": 0}
    assert "WER 20.00 %" in capsys.readouterr().out


def test_an_utterance_without_a_result_counts_in_full(dialogue_set, capsys):
    path, results = dialogue_set("bagpiper", "dialogue")
    write(results / "results.json", {"a": [["assistant", "text", ["one two three"]]]})
    assert run(path, results, "--family", "bagpiper", "--task", "dialogue") == 1
    scores = json.loads((results / "score.json").read_text(encoding="utf-8"))
    assert scores["wer"] == pytest.approx(2 / 5)
    assert scores["without_result"] == ["b"]


def test_audio_has_nothing_to_score(dialogue_set, capsys):
    path, results = dialogue_set("opuslm", "codec_ssl_plain_tts")
    assert run(path, results, "--family", "opuslm") == 0
    assert "nothing to score" in capsys.readouterr().out


def test_errors(dialogue_set, capsys):
    path, results = dialogue_set("bagpiper", "dialogue")
    assert run(path, results, "--family", "bagpiper") == 2
    assert "--task is needed" in capsys.readouterr().err
    assert run(path, results, "--family", "bagpiper", "--task", "dialogue") == 1
    assert "has stage inference run?" in capsys.readouterr().err


def test_references_are_read_as_the_decoder_reads_them(dialogue_set, tmp_path, monkeypatch):
    """Paths from the folder of the set, ``.jsonl``, a byte-order mark, empty lines, separators of Unicode, no dialogue."""
    path, results = dialogue_set("bagpiper", "dialogue")
    monkeypatch.chdir(tmp_path)
    answers = {"a": [["user", "text", "x"], ["assistant", "text", "one \u2028 two"]], "b": ["assistant"], "c": 3}
    lines = [json.dumps({"example_id": key, "messages": turns}, ensure_ascii=False) for key, turns in answers.items()]
    (path.parent / "dialogue.jsonl").write_text("\ufeff" + "\r\n\n".join(lines), encoding="utf-8")
    entry = {"name": "dialogue", "path": "dialogue.jsonl", "reader": "dialogue"}
    write(path, {"data_entry": [entry], "samples": ["a", "b", "c", "d"]})
    write(
        results / "results.json", {"a": [["assistant", "text", ["one \u2028 two"]]], "b": [["assistant", "text", []]]}
    )
    assert run(path, results, "--family", "bagpiper", "--task", "dialogue") == 0
    assert json.loads((results / "score.json").read_text(encoding="utf-8"))["utterances"] == 1
    entry = {"name": "text1", "path": "text.jsonl", "reader": "text"}
    (path.parent / "text.jsonl").write_text('{"id": "a", "text": "one"}\n{"id": "b"}\n', encoding="utf-8")
    write(path, {"data_entry": [entry], "samples": ["a", "b"]})
    write(tmp_path / "exp" / "dialogue_test" / "results.json", {"a": [["assistant", "text", ["one"]]]})
    assert run(path, results, "--family", "bagpiper", "--task", "dialogue") == 0


@pytest.mark.parametrize("content", ["{}", '{"samples": ["a"]}', '{"samples": ["a"], "data_entry": [3]}', "[]"])
def test_a_set_of_another_shape_is_no_traceback(dialogue_set, content, capsys):
    path, results = dialogue_set("bagpiper", "dialogue")
    path.write_text(content, encoding="utf-8")
    assert run(path, results, "--family", "bagpiper", "--task", "dialogue") == 1
    assert "score_text: " in capsys.readouterr().err


def test_dialogues_that_espnet_merged_and_packs_beside_the_set(dialogue_set, tmp_path, monkeypatch):
    """Its merged file is several lists; a pack is named from the folder of the ``data.json``, and one dialogue is not in it."""
    path, results = dialogue_set("opuslm", "text_dialogue")
    monkeypatch.chdir(tmp_path)
    (path.parent / "index").mkdir()
    (path.parent / "index" / "dialogue").write_text(
        "a dialogue.json\nb dialogue.json\nc dialogue.json\n", encoding="utf-8"
    )
    data = {
        "task": "text_dialogue",
        "data_files": ["index/dialogue,dialogue,dialogue_json"],
        "examples": ["a", "b", "c"],
    }
    write(path, data)
    turns = {"a": "one two three", "b": "four five"}
    lists = [json.dumps([{f"text_dialogue_{key}": [["assistant", "text_bpe", False, turns[key]]]}]) for key in turns]
    (results / "dialogue.json").write_text("\n".join(lists), encoding="utf-8")
    assert run(path, results, "--family", "opuslm") == 0
    scores = json.loads((results / "score.json").read_text(encoding="utf-8"))
    assert (scores["wer"], scores["utterances"]) == (0, 2)


# -- two files, and speech ---------------------------------------------------------------------------------------------
SCORE = pathlib.Path(__file__).resolve().parents[2] / "tools" / "score.sh"


def score_sh(*words):
    command = [str(SCORE), "--python", sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_files_of_espnets_recipe(tmp_path):
    (tmp_path / "ref").write_text("a one two three\nb four five\nc six\n", encoding="utf-8")
    (tmp_path / "hyp").write_text(
        "codec_ssl_asr_a_sample0 one too three\ncodec_ssl_asr_a_sample1 x\ncodec_ssl_asr_b_sample0 four five\n"
        "codec_ssl_asr_z_sample0 lost\n",
        encoding="utf-8",
    )
    done = score_sh("--ref", tmp_path / "ref", "--hyp", tmp_path / "hyp", "--task", "codec_ssl_asr")
    assert done.returncode == 1
    assert "WER 33.33 %" in done.stdout and "over 3 utterances, 1 of them without a result" in done.stdout
    assert "1 without result: c" in done.stderr and "1 without reference: z" in done.stderr


@pytest.mark.parametrize("name", ["results.json", "dialogue.json"])
def test_json_results(tmp_path, name):
    (tmp_path / "ref").write_text("a one two\nb three\n", encoding="utf-8")
    turns = {
        "a": [["assistant", "text", ["<x>"]], ["assistant", "text", ["one two"]]],
        "b": [["assistant", "text", "three"]],
    }
    write(tmp_path / name, turns if name == "results.json" else [{key: value} for key, value in turns.items()])
    done = score_sh("--ref", tmp_path / "ref", "--hyp", tmp_path / name)
    assert done.returncode == 0 and "WER 0.00 %, CER 0.00 %" in done.stdout, done.stderr


def test_results_of_another_shape_are_named(tmp_path):
    (tmp_path / "ref").write_text("a one two\n", encoding="utf-8")
    write(tmp_path / "results.json", [1, 2])
    done = score_sh("--ref", tmp_path / "ref", "--hyp", tmp_path / "results.json")
    assert done.returncode == 1 and "results.json: expected messages by key, found int" in done.stderr


def test_options_that_do_not_go_together(tmp_path):
    assert score_sh().returncode == 2
    assert score_sh("--hyp", "x").returncode == 2
    assert score_sh("--what").returncode == 2
    assert score_sh("--ref").returncode == 2


def test_speech(tmp_path, monkeypatch, capsys):
    soundfile.write(tmp_path / "a.wav", np.full(800, 0.25), 8000)
    soundfile.write(tmp_path / "b.wav", np.full((1600, 2), 0.5), 16000)
    (tmp_path / "c.wav").write_bytes(b"no sound")
    (tmp_path / "keys").write_text("a x\nd x\n", encoding="utf-8")
    monkeypatch.setattr(score_speech, "load_utmos", lambda: lambda wav: float(len(wav)))
    output = tmp_path / "scores.json"
    words = ["--wavs", str(tmp_path), "--keys", str(tmp_path / "keys"), "--output", str(output)]
    assert score_speech.main(words) == 1
    found = capsys.readouterr()
    assert "UTMOS 1600.000 over 2 recordings, 2 without a score" in found.out
    assert "c: " in found.err and "d: no recording" in found.err
    assert set(json.loads(output.read_text(encoding="utf-8"))["utmos"]) == {"a", "b"}


def test_utmos_that_is_not_there_is_said(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(800), 16000)
    if importlib.util.find_spec("versa") is None:
        done = score_sh("--wav", tmp_path)
        assert done.returncode == 2 and "UTMOS needs the VERSA toolkit" in done.stderr


def test_an_empty_reference_is_a_reference(tmp_path, capsys):
    """What is said where nothing should be counts as inserted, and a result that was lost is noticed."""
    (tmp_path / "ref").write_text("a one two three\nb\nc\nd four\n", encoding="utf-8")
    (tmp_path / "hyp").write_text("a one two three\nb five six\nd four\n", encoding="utf-8")
    assert score_text.main(["--ref", str(tmp_path / "ref"), "--hyp", str(tmp_path / "hyp")]) == 1
    scores = json.loads((tmp_path / "score.json").read_text(encoding="utf-8"))
    assert scores["wer"] == pytest.approx(2 / 4) and scores["cer"] == pytest.approx(8 / 17)
    assert scores["words"] == {"hits": 4, "substitutions": 0, "deletions": 0, "insertions": 2}
    assert scores["utterances"] == 4 and scores["without_result"] == ["c"] and scores["without_reference"] == []
    assert "1 without result: c" in capsys.readouterr().err
    (tmp_path / "ref").write_text("b\n", encoding="utf-8")
    assert score_text.main(["--ref", str(tmp_path / "ref"), "--hyp", str(tmp_path / "hyp")]) == 1


def test_the_report_of_all_jobs_says_error_rates_and_references(dialogue_set, capsys):
    from espnet2_vllm.io.journal import Journal, Record
    from espnet2_vllm.reports.collect import Report
    from espnet2_vllm.reports.page import write_report

    path, results = dialogue_set("bagpiper", "dialogue")
    answers = {"a": "one two", "b": "four five"}
    write(results / "results.json", {key: [["assistant", "text", text]] for key, text in answers.items()})
    for rank, (key, text) in enumerate(answers.items()):
        journal = Journal(results / f"inference_rank{rank}", {})
        journal.append(Record(key, "ok", rows=2, result=[["text", text, ""]], prompt="what was asked"))
        journal.close()
    write_report(Report("test", ()), results)
    assert run(path, results, "--family", "bagpiper", "--task", "dialogue") == 0
    assert f"report: {results}/report.html" in capsys.readouterr().out
    facts = json.loads((results / "report.json").read_text(encoding="utf-8"))
    assert facts["jobs"] == 2 and facts["utterances"] == 2 and facts["wer"] == pytest.approx(1 / 5)
    page = (results / "report.html").read_text(encoding="utf-8")
    assert "word error rate" in page and "20.00 % over 2 references" in page
    assert "<th>reference</th>" in page and "one two three" in page


def test_speech_is_scored_by_a_recogniser_of_transformers(tmp_path, capsys, monkeypatch):
    heard = {100: "one two", 200: "three"}
    monkeypatch.setattr(score_speech, "load_recogniser", lambda model: lambda wav: heard[len(wav) // 100 * 100])
    (tmp_path / "wavs").mkdir()
    for name, length in (("codec_ssl_plain_tts_a_sample0", 100), ("b_segment1", 200)):
        soundfile.write(tmp_path / "wavs" / f"{name}.wav", np.full(length, 0.1), 16000)
    (tmp_path / "ref").write_text("a one two\nb three four\n", encoding="utf-8")
    words = ["--wavs", str(tmp_path / "wavs"), "--asr", "m", "--output", str(tmp_path / "o.json")]
    assert score_speech.main(words) == 2
    assert score_speech.main([*words, "--ref", str(tmp_path / "ref")]) == 0
    scores = json.loads((tmp_path / "o.json").read_text(encoding="utf-8"))
    assert scores["wer"] == pytest.approx(1 / 4) and scores["texts"] == {"a": "one two", "b": "three"}
    assert "WER 25.00 %" in capsys.readouterr().out


def test_a_recogniser_is_a_model_of_transformers(tmp_path):
    """A wav2vec 2.0 of one layer, with random weights: what it hears is of no interest."""
    from transformers import Wav2Vec2Config, Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

    letters = {letter: place for place, letter in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", "a"])}
    write(tmp_path / "vocab.json", letters)
    sizes = {"conv_dim": (8, 8), "conv_kernel": (10, 8), "conv_stride": (5, 4), "num_feat_extract_layers": 2}
    config = Wav2Vec2Config(
        vocab_size=len(letters), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, pad_token_id=0, **sizes,
    )  # fmt: skip
    for part in (
        Wav2Vec2ForCTC(config),
        Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json")),
        Wav2Vec2FeatureExtractor(sampling_rate=16000),
    ):
        part.save_pretrained(tmp_path / "model")
    text = score_speech.load_recogniser(str(tmp_path / "model"))(np.zeros(16000, np.float32))
    assert isinstance(text, str)
    with pytest.raises(ConfigError, match="has no recogniser there"):
        score_speech.load_recogniser(str(tmp_path / "nothing"))
