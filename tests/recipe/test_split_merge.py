"""Splitting a set for jobs and merging what they wrote."""

import json

import pytest

from espnet2_vllm.bin import merge_outputs, split_data
from espnet2_vllm.errors import DataError
from espnet2_vllm.io.journal import Journal, Record
from espnet2_vllm.io.keyed import read_keyed
from espnet2_vllm.reports.collect import write_run


def write_set(folder, ids, *, speakers=None, task="codec_ssl_plain_tts"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text").write_text("".join(f"{key} words of {key}\n" for key in ids), encoding="utf-8")
    files = [f"{folder}/text,text_bpe,text"]
    if speakers is not None:
        (folder / "utt2spk").write_text("".join(f"{key} {speakers[key]}\n" for key in ids), encoding="utf-8")
        files.append(f"{folder}/utt2spk,spk,text")
    path = folder / "data.json"
    path.write_text(
        json.dumps({"task": task, "vocabularies": [], "data_files": files, "examples": list(ids)}), encoding="utf-8"
    )
    return path


def parts_of(folder):
    parts = [json.loads((part / "data.json").read_text(encoding="utf-8")) for part in sorted(folder.iterdir())]
    return [part["examples"] for part in parts]


@pytest.mark.parametrize("jobs", [1, 2, 6, 7, 8, 70])
def test_split_is_even_complete_and_in_order(tmp_path, jobs, capsys):
    ids = [f"utt{index}" for index in range(7)]
    path = write_set(tmp_path / "set", ids)
    made = split_data.split(path, jobs, tmp_path / "log")
    parts = parts_of(tmp_path / "log" / f"split{made}")
    assert made == min(jobs, 7)
    assert [key for part in parts for key in part] == ids
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert ("7 utterances to share" in capsys.readouterr().err) == (jobs > 7)


def test_a_part_holds_the_lines_of_its_utterances_alone(tmp_path):
    path = write_set(tmp_path / "set", ["b", "a", "c"])
    split_data.split(path, 3, tmp_path / "log")
    part = tmp_path / "log" / "split3" / "2"
    description = json.loads((part / "data.json").read_text(encoding="utf-8"))
    assert description["task"] == "codec_ssl_plain_tts"
    assert description["data_files"] == [f"{part}/text,text_bpe,text"]
    assert (description["num_examples"], description["examples"]) == (1, ["a"])
    assert read_keyed(part / "text") == {"a": "words of a"}


@pytest.mark.parametrize("jobs", [1, 2, 3, 9])
def test_speakers_stay_together(tmp_path, jobs, capsys):
    speakers = {
        f"{speaker}-{index}": speaker for speaker, count in (("s1", 5), ("s2", 2), ("s3", 1)) for index in range(count)
    }
    path = write_set(tmp_path / "set", speakers, speakers=speakers)
    made = split_data.split(path, jobs, tmp_path / "log")
    parts = parts_of(tmp_path / "log" / f"split{made}")
    assert made == min(jobs, 3)
    assert sorted(key for part in parts for key in part) == sorted(speakers)
    homes = [{speakers[key] for key in part} for part in parts]
    assert sum(map(len, homes)) == 3, f"a speaker is in two parts: {homes}"
    assert ("3 speakers to share" in capsys.readouterr().err) == (jobs > 3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"examples": []}, "0 utterances"),
        ({"examples": ["a", "a"]}, "'a' is listed twice"),
        ({"examples": None}, "examples is missing"),
        ({"task": ""}, "task is ''"),
        ({"data_files": ["x,text"]}, "expected 'path,modality,type'"),
        ({"data_files": []}, "data_files is empty"),
        ({"data_files": ["a/text,text_bpe,text", "b/text,text_bpe,text"]}, "two entries are named 'text'"),
        ({"data_files": ["gone/text,text_bpe,text"]}, "gone/text"),
    ],
)
def test_a_set_that_cannot_be_split_says_why(tmp_path, change, message, capsys):
    path = write_set(tmp_path / "set", ["a", "b"])
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    code = split_data.main(["--data-json", str(path), "--nj", "2", "--output-dir", str(tmp_path / "log")])
    stderr = capsys.readouterr().err
    assert code == 1
    assert message in stderr


def test_no_json_at_all(tmp_path, capsys):
    assert split_data.main(["--data-json", str(tmp_path / "none.json"), "--show", "task"]) == 1
    assert "none.json" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    assert split_data.main(["--data-json", str(tmp_path / "bad.json"), "--show", "size"]) == 1
    assert "bad.json:1" in capsys.readouterr().err


def test_lines_of_kaldi_files_are_read_whatever_wrote_them(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffa  one two \r\nb\tthree\r\n\nc\nd x\u2028y 漢字\n".encode())
    assert read_keyed(path) == {"a": "one two", "b": "three", "c": "", "d": "x\u2028y 漢字"}


@pytest.mark.parametrize(
    "content, message",
    [(b"a 1\nb 2\na 3\n", "text:3: key 'a' was already in line 1"), (b"a \xff\n", "text:1: not UTF-8")],
)
def test_lines_that_cannot_be_used_are_named(tmp_path, content, message):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_keyed(tmp_path / "text")


def write_job(folder, entry, lines):
    (folder / entry).mkdir(parents=True)
    for name in (entry, f"{entry}_token.scp"):
        (folder / entry / name).write_bytes(b"".join(line + b"\n" for line in lines))
    (folder / entry / f"rank0_{entry}").write_bytes(b"not merged\n")


def merge(tmp_path, data_json, *jobs, family="opuslm", nbest="1"):
    words = ["--family", family, "--data-json", str(data_json), "--nbest", nbest, "--output-dir", str(tmp_path / "out")]
    return merge_outputs.main([*words, *map(str, jobs)])


def test_merged_lines_are_sorted_bytes(tmp_path, capsys):
    path = write_set(tmp_path / "set", ["a", "B", "c"])
    task = b"codec_ssl_plain_tts"
    write_job(tmp_path / "output.1", "wav.scp", [task + b"_c_sample0 x.wav"])
    write_job(tmp_path / "output.2", "wav.scp", [task + b"_a_sample0  kept\x0b\xc2\x85 ", task + b"_B_sample0 y.wav"])
    assert merge(tmp_path, path, tmp_path / "output.1", tmp_path / "output.2") == 0
    expected = [task + b"_B_sample0 y.wav\n", task + b"_a_sample0  kept\x0b\xc2\x85 \n", task + b"_c_sample0 x.wav\n"]
    assert (tmp_path / "out" / "wav.scp").read_bytes() == b"".join(expected)
    assert (tmp_path / "out" / "wav.scp_token.scp").read_bytes() == b"".join(expected)
    assert "3 of 3 utterances have results" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["missing"] == []


def test_every_hypothesis_is_needed(tmp_path, capsys):
    path = write_set(tmp_path / "set", ["a", "b"])
    lines = [b"codec_ssl_plain_tts_%s_sample%d x" % (key, k) for key, k in ((b"a", 0), (b"a", 1), (b"b", 0))]
    write_job(tmp_path / "output.1", "wav.scp", lines)
    assert merge(tmp_path, path, tmp_path / "output.1", nbest="2") == 1
    captured = capsys.readouterr()
    assert "1 of 2 utterances" in captured.out
    assert "merge_outputs: b: no job has written an outcome of it" in captured.err


def test_a_missing_utterance_is_named_with_the_reason_of_its_journal(tmp_path, capsys):
    path = write_set(tmp_path / "set", ["a", "b"])
    write_job(tmp_path / "output.1", "wav.scp", [b"codec_ssl_plain_tts_a_sample0 x"])
    (tmp_path / "output.1" / ".journal").mkdir()
    records = [
        {"journal": 1, "settings": {}},
        {"key": "codec_ssl_plain_tts_a", "outcome": "ok", "reason": "", "audio_seconds": 1.5},
        {"key": "codec_ssl_plain_tts_b", "outcome": "refused", "reason": "no words"},
    ]
    records[1:] = [{"files": [], "ends": [], "tokens": [], **record} for record in records[1:]]
    journal = tmp_path / "output.1" / ".journal" / "journal.jsonl"
    journal.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    assert merge(tmp_path, path, tmp_path / "output.1") == 1
    captured = capsys.readouterr()
    assert "1 of 2 utterances have results (1 ok, 1 refused)" in captured.out
    assert "merge_outputs: b: refused: no words" in captured.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["with_results"], summary["missing"], summary["audio_seconds"]) == (1, ["b"], 1.5)


def test_a_set_ends_with_a_report_of_all_its_jobs(tmp_path, capsys):
    path = write_set(tmp_path / "set", ["a", "b"])
    for job, key in (("output.1", "a"), ("output.2", "b")):
        write_job(tmp_path / job, "wav.scp", [f"codec_ssl_plain_tts_{key}_sample0 x".encode()])
        journal = Journal(tmp_path / job, {"seed": 3, "backend": "vllm"})
        journal.append(Record(f"codec_ssl_plain_tts_{key}", "ok", rows=100, seconds=2.0, audio_seconds=1.5))
        journal.close()
        write_run(tmp_path / job, seconds=4.0, rows=100, audio_seconds=1.5, taken_over=0, command="decode")
    assert merge(tmp_path, path, tmp_path / "output.1", tmp_path / "output.2") == 0
    facts = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert (facts["utterances"], facts["jobs"], facts["rows_per_second"], facts["seeds"]) == (2, 2, 50.0, [3])
    assert (tmp_path / "out" / "report.html").is_file()
    assert "real time factor" in capsys.readouterr().out


def journal_of(folder, *records, cut=0):
    """The journal of a job; the last ``cut`` bytes did not get to the disk."""
    journal = Journal(folder, {"seed": 3})
    for record in records:
        journal.append(record)
    journal.close()
    journal.path.write_bytes(journal.path.read_bytes()[: -cut or None])


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        pytest.param(9, "no job has written an outcome of it", id="within a line of its journal"),
        pytest.param(0, "is finished, but its job ended before it wrote its results", id="before its results"),
    ],
)
def test_what_a_killed_job_left_is_no_success_and_does_not_keep_the_others_from_being_merged(
    tmp_path, capsys, cut, why
):
    path = write_set(tmp_path / "set", ["a", "b"])
    write_job(tmp_path / "output.1", "wav.scp", [b"codec_ssl_plain_tts_a_sample0 x"])
    journal_of(tmp_path / "output.1", Record("codec_ssl_plain_tts_a", "ok"))
    journal_of(tmp_path / "output.2", Record("codec_ssl_plain_tts_b", "ok"), cut=cut)
    assert merge(tmp_path, path, tmp_path / "output.1", tmp_path / "output.2") == 1
    captured = capsys.readouterr()
    assert "1 of 2 utterances have results (1 ok)" in captured.out
    assert f"merge_outputs: b: {why}" in captured.err


def test_after_another_split_every_utterance_counts_once_and_with_its_own_reason(tmp_path, capsys):
    """One job had them all before there were two; the set has shrunk since; one id is the end of another."""
    path = write_set(tmp_path / "set", ["a", "b", "a_b"])
    write_job(tmp_path / "output.1", "wav.scp", [b"codec_ssl_plain_tts_a_sample0 x"])
    write_job(tmp_path / "output.2", "wav.scp", [b"codec_ssl_plain_tts_a_b_sample0 x"])
    earlier = [Record(f"codec_ssl_plain_tts_{uid}", "ok", audio_seconds=1.0) for uid in ("a", "b", "a_b", "gone")]
    journal_of(tmp_path / "output.1", *earlier)
    refused = Record("codec_ssl_plain_tts_b", "refused", "no words")
    journal_of(tmp_path / "output.2", refused, Record("codec_ssl_plain_tts_a_b", "length", "cut", audio_seconds=1.0))
    assert merge(tmp_path, path, tmp_path / "output.1", tmp_path / "output.2") == 1
    captured = capsys.readouterr()
    assert "2 of 3 utterances have results (1 length, 1 ok, 1 refused)" in captured.out
    assert captured.err == "merge_outputs: b: refused: no words\n"
    facts = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert (facts["utterances"], facts["audio_seconds"]) == (3, 2.0)
    assert facts["failures"] == {"codec_ssl_plain_tts_b": "refused: no words"}


def test_an_id_that_begins_with_the_name_of_the_task_is_found(tmp_path):
    path = write_set(tmp_path / "set", ["codec_ssl_plain_tts_1"])
    write_job(tmp_path / "output.1", "wav.scp", [b"codec_ssl_plain_tts_codec_ssl_plain_tts_1_sample0 x"])
    assert merge(tmp_path, path, tmp_path / "output.1") == 0


def test_a_key_of_two_jobs_is_refused(tmp_path, capsys):
    path = write_set(tmp_path / "set", ["a"])
    for job in ("output.1", "output.2"):
        write_job(tmp_path / job, "wav.scp", [b"codec_ssl_plain_tts_a_sample0 x"])
    assert merge(tmp_path, path, tmp_path / "output.1", tmp_path / "output.2") == 1
    assert "is in the output of another job" in capsys.readouterr().err


def test_a_key_twice_in_one_job_is_refused(tmp_path, capsys):
    path = write_set(tmp_path / "set", ["a"])
    lines = [b"codec_ssl_plain_tts_a_sample0 one", b"codec_ssl_plain_tts_a_sample0 two"]
    write_job(tmp_path / "output.1", "text", lines)
    assert merge(tmp_path, path, tmp_path / "output.1") == 1
    assert "text: key 'codec_ssl_plain_tts_a_sample0' comes twice" in capsys.readouterr().err


def test_dialogues_become_one_valid_list(tmp_path):
    path = write_set(tmp_path / "set", ["d2", "d1"], task="text_dialogue")
    for job, key in (("output.1", "d2"), ("output.2", "d1")):
        (tmp_path / job / "dialogue").mkdir(parents=True)
        record = [{f"text_dialogue_{key}": [["assistant", "text_bpe", False, "é"]]}]
        (tmp_path / job / "dialogue" / "dialogue.json").write_text(json.dumps(record), encoding="utf-8")
    assert merge(tmp_path, path, tmp_path / "output.1", tmp_path / "output.2") == 0
    merged = json.loads((tmp_path / "out" / "dialogue.json").read_text(encoding="utf-8"))
    assert [list(record) for record in merged] == [["text_dialogue_d1"], ["text_dialogue_d2"]]


def test_bagpiper_ranks_are_merged(tmp_path, capsys):
    dataset = tmp_path / "dataset.json"
    dataset.write_text(json.dumps({"data_entry": [], "samples": ["b", "a", "lost"]}), encoding="utf-8")
    for rank, key in enumerate("ba"):
        folder = tmp_path / f"inference_rank{rank}"
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps({key: [["assistant", "text", key]]}), encoding="utf-8")
    code = merge(tmp_path, dataset, *(tmp_path / f"inference_rank{rank}" for rank in range(3)), family="bagpiper")
    assert code == 1
    assert list(json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))) == ["a", "b"]
    captured = capsys.readouterr()
    assert "2 of 3" in captured.out and "lost: no job has written" in captured.err
