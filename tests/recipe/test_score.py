"""Error rates of decoded text."""

import json

import pytest

from espnet2_vllm.bin import prepare_data, score_text

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
