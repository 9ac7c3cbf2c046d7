"""espnet2-vllm compare A B, on recorded trees of ESPnet and changed copies of them."""

import json
import shutil

import kaldiio
import numpy as np
import pytest
import soundfile
from conftest import golden_files

from espnet2_vllm.bin import compare
from espnet2_vllm.reports.trees import read_tree

OPUSLM = {path.parent.name: path.parent for path in golden_files("opuslm/tiny-llama/trees/*/data.json")}
BAGPIPER = {path.parent.name: path.parent for path in golden_files("bagpiper/*/trees/*/details.json")}


def copied(tree, place, monkeypatch):
    """``expected`` of a recorded tree: the original, and a copy. Paths in it count from the model's folder."""
    monkeypatch.chdir(tree.parent.parent)
    shutil.copytree(tree / "expected", place)
    for path in place.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return tree / "expected", place


def run(tmp_path, a, b, *more):
    path = tmp_path / "differences.json"
    code = compare.main([str(a), str(b), "--json", str(path), *map(str, more)])
    return code, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(OPUSLM | BAGPIPER))
def test_a_tree_equals_its_copy(name, tmp_path, monkeypatch, capsys):
    a, b = copied((OPUSLM | BAGPIPER)[name], tmp_path / "b", monkeypatch)
    code, facts = run(tmp_path, a, b)
    assert (code, facts["differing"], facts["differences"]) == (0, 0, [])
    assert facts["keys"] > 0 and sum(kind["equal"] for kind in facts["compared"].values()) > 0
    assert "differ (0.00%)" in capsys.readouterr().out


@pytest.fixture
def asr(tmp_path, monkeypatch):
    return copied(OPUSLM["codec_ssl_asr_nproc2"], tmp_path / "b", monkeypatch)


@pytest.fixture
def tts(tmp_path, monkeypatch):
    return copied(OPUSLM["codec_ssl_tts"], tmp_path / "b", monkeypatch)


def test_a_word_that_differs_is_shown(asr, tmp_path, capsys):
    a, b = asr
    path = b / "text" / "text"
    first, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
    key, words = first.rstrip("\n").split(" ", 1)
    path.write_text(f"{key} another {words}\n" + "".join(rest), encoding="utf-8")
    code, facts = run(tmp_path, a, b)
    (difference,) = facts["differences"]
    assert code == 1 and (difference["key"], difference["kind"]) == (f"text/{key}", "text")
    assert difference["detail"].startswith("{+another+}") and difference["facts"]["a"] == words
    assert f"text/{key}: text: {{+another+}}" in capsys.readouterr().out
    assert run(tmp_path, a, b, "--max-differing", "0.5")[0] == 0


def test_a_missing_key_is_named(asr, tmp_path):
    a, b = asr
    path = b / "text" / "text"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[1:]), encoding="utf-8")
    code, facts = run(tmp_path, a, b)
    assert code == 1 and [d["kind"] for d in facts["differences"]] == ["missing"]
    assert facts["differences"][0]["detail"] == f"only in {a}"


def test_ids_that_differ_say_where_first(asr, tmp_path):
    a, b = asr
    ark, scp = b / "text" / "rank0_text_token.ark", b / "text" / "text_token.scp"
    arrays = dict(kaldiio.load_ark(str(ark)))
    key = next(key for key, ids in arrays.items() if len(ids) > 3)
    arrays[key] = arrays[key].copy()
    arrays[key][2] += 1
    kaldiio.save_ark(str(ark), arrays, scp=str(scp))
    code, facts = run(tmp_path, a, b)
    (difference,) = facts["differences"]
    assert code == 1 and (difference["key"], difference["kind"]) == (f"text/{key}", "ids")
    assert difference["facts"] == {"first": 2, "equal": len(arrays[key]) - 1, "lengths": [len(arrays[key])] * 2}


def test_a_waveform_that_is_gone_is_that_keys_difference(tts, tmp_path):
    a, b = tts
    gone = sorted((b / "wav.scp").glob("*.wav"))[0]
    gone.unlink()
    code, facts = run(tmp_path, a, b)
    (difference,) = facts["differences"]
    assert (code, difference["kind"]) == (1, "wav") and gone.name in difference["detail"]
    wavs = facts["compared"]["wav"]
    assert wavs["equal"] == wavs["compared"] - 1 > 0, "the others are compared all the same"


def test_waveforms_within_the_tolerance_are_equal(tts, tmp_path):
    a, b = tts
    path = next(path for path in sorted((b / "wav.scp").glob("*.wav")) if soundfile.info(path).frames > 1000)
    samples, rate = soundfile.read(path, dtype="int16")

    def write(changed):
        soundfile.write(path, changed, rate, subtype="PCM_16")
        return run(tmp_path, a, b)

    nudged = samples.copy()
    nudged[500] += -2 if nudged[500] > 0 else 2
    assert write(nudged)[0] == 0
    nudged[500] = samples[500] - 900 if samples[500] > 0 else samples[500] + 900
    code, facts = write(nudged)
    (difference,) = facts["differences"]
    assert code == 1 and difference["kind"] == "wav" and path.stem in difference["key"]
    assert difference["facts"]["steps"] == pytest.approx(900) and difference["facts"]["first_second"] == pytest.approx(
        500 / rate
    )
    code, facts = write(samples[:-100])
    assert code == 1 and facts["differences"][0]["facts"]["samples"] == [len(samples), len(samples) - 100]
    soundfile.write(path, samples, rate // 2, subtype="PCM_16")
    assert "Hz and" in run(tmp_path, a, b)[1]["differences"][0]["detail"]
    path.unlink()
    assert compare.main([str(a), str(b)]) == 1, "the original must not stand in for a file that is gone"


def test_a_message_that_differs(tmp_path, monkeypatch):
    a, b = copied(BAGPIPER["tts"], tmp_path / "b", monkeypatch)
    path = next(b.rglob("inference_rank0/results.json"))
    results = json.loads(path.read_text(encoding="utf-8"))
    key = next(iter(results))
    wav = next(b.rglob(results[key][0][2].rpartition("/")[2]))
    samples, rate = soundfile.read(wav, dtype="int16")
    soundfile.write(wav, np.zeros_like(samples), rate, subtype="PCM_16")
    code, facts = run(tmp_path, a, b)
    assert code == 1 and [(d["key"], d["kind"]) for d in facts["differences"]] == [(f"{key}/1", "wav")]


def test_merged_files_come_before_those_of_jobs(asr, tmp_path):
    """As the recipe leaves them: the jobs' trees below ``log``, under whatever name the experiment had then."""
    _, b = asr
    merged = tmp_path / "merged"
    (merged / "log").mkdir(parents=True)
    for entry in ("text", "wav.scp"):
        for name in (entry, f"{entry}_token.scp"):
            path = b / entry / name
            renamed = path.read_text(encoding="utf-8").replace(
                "trees/codec_ssl_asr_nproc2/expected/", "exp/old/log/output.1/"
            )
            path.write_text(renamed, encoding="utf-8")
            (merged / name).write_text(renamed, encoding="utf-8")
    shutil.copytree(b, merged / "log" / "output.1")
    assert read_tree(merged).keys() == read_tree(b).keys()
    assert run(tmp_path, merged, b)[0] == 0
    (merged / "text").write_text("", encoding="utf-8")
    assert run(tmp_path, merged, b)[0] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda path: None, "is no folder with results"), (lambda path: path.mkdir(), "holds no results")],
)
def test_what_is_no_tree_is_refused(make, message, asr, tmp_path, capsys):
    make(tmp_path / "x")
    assert compare.main([str(asr[0]), str(tmp_path / "x")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[]", "[1, 2]", "3", '{"a": 3}', '{"a": [3]}', '{"a": [["assistant", "text"]]}', "{bad"]
)
@pytest.mark.parametrize("name", ["results.json", "dialogue.json"])
def test_results_of_another_shape_are_named(name, text, tmp_path, capsys):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert compare.main([str(tmp_path), str(tmp_path)]) == 1
    assert name in capsys.readouterr().err


def test_ids_that_cannot_be_read_are_that_keys_difference(asr, tmp_path):
    a, b = asr
    scp = b / "text" / "text_token.scp"
    first, second, *rest = scp.read_text(encoding="utf-8").splitlines(keepends=True)
    name = first.split()[1].partition(":")[0].rpartition("/")[2]
    ark = b / "text" / name
    end = ark.stat().st_size
    scp.write_text(f"{first.split()[0]} {name}:{end - 4}\n{second.split()[0]}\n" + "".join(rest), encoding="utf-8")
    code, facts = run(tmp_path, a, b)
    assert code == 1 and [d["kind"] for d in facts["differences"]] == ["ids", "ids"]
    assert run(tmp_path, a, b, "--max-differing", "0.9")[0] == 0


def test_scores_of_other_streams_are_a_difference(tmp_path):
    trees = [tmp_path / name for name in "ab"]
    for streams, tree in enumerate(trees, 3):
        (tree / ".scores").mkdir(parents=True)
        (tree / "results.json").write_text('{"u": [["assistant", "text", ["x"]]]}', encoding="utf-8")
        np.savez(tree / ".scores" / "u.npz", ids=np.zeros((5, streams), np.int32))
    code, facts = run(tmp_path, *trees)
    assert code == 1 and facts["differences"][0]["detail"] == "arrays of [5, 3] and [5, 4]"
    (trees[0] / ".scores" / "u.npz").write_bytes(b"PK\x03\x04 cut")
    assert "no ids can be read" in run(tmp_path, *trees)[1]["differences"][0]["detail"]


def test_two_sets_below_one_folder_are_not_taken_for_one(tmp_path, capsys):
    """Both hold the same ids: the results of one would hide those of the other."""
    for tree, text in (("a", "x"), ("b", "y")):
        for name, said in (("one", text), ("two", "same")):
            folder = tmp_path / tree / f"text_only_{name}"
            folder.mkdir(parents=True)
            (folder / "results.json").write_text(json.dumps({"u": [["assistant", "text", said]]}), encoding="utf-8")
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "hold different results of u/1; compare set by set" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "a" / "text_only_one", tmp_path / "b" / "text_only_one")[0] == 1


def test_a_key_without_messages_that_is_gone_is_missing(tmp_path):
    for tree, results in (
        ("a", {"u": [["assistant", "text", "x"]], "none": []}),
        ("b", {"u": [["assistant", "text", "x"]]}),
    ):
        (tmp_path / tree).mkdir()
        (tmp_path / tree / "results.json").write_text(json.dumps(results), encoding="utf-8")
    code, facts = run(tmp_path, tmp_path / "a", tmp_path / "b")
    assert code == 1 and [(d["key"], d["kind"]) for d in facts["differences"]] == [("none", "missing")]
    assert run(tmp_path, tmp_path / "a", tmp_path / "a")[0] == 0


@pytest.mark.parametrize("content", [[], ["x", "y"], {"x": 1}, 3])
def test_texts_of_another_shape_are_compared_as_they_stand(content, tmp_path):
    for tree, value in (("a", content), ("b", ["words"])):
        (tmp_path / tree).mkdir()
        (tmp_path / tree / "results.json").write_text(
            json.dumps({"u": [["assistant", "text", value]]}), encoding="utf-8"
        )
    code, facts = run(tmp_path, tmp_path / "a", tmp_path / "b")
    assert code == 1 and facts["differences"][0]["facts"] == {"a": json.dumps(content), "b": "words"}
    assert run(tmp_path, tmp_path / "a", tmp_path / "a")[0] == 0


def test_differences_that_cannot_be_written(asr, tmp_path, capsys):
    assert compare.main([*map(str, asr), "--json", str(tmp_path)]) == 1
    assert "espnet2-vllm compare: " in capsys.readouterr().err


def test_a_threshold_is_a_share(asr, capsys):
    with pytest.raises(SystemExit) as stop:
        compare.main([str(asr[0]), str(asr[1]), "--max-differing", "3"])
    assert stop.value.code == 2 and "not from 0 to 1" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        compare.main([str(asr[0]), str(asr[1]), "--wav-tolerance", "-1"])
    assert stop.value.code == 2 and "-1 is below 0" in capsys.readouterr().err
