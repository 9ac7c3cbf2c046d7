"""The journal: what is finished stays finished, whatever happens to the process."""

import json
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest

from espnet2_vllm.errors import ConfigError
from espnet2_vllm.io.journal import Journal, Record, digest
from espnet2_vllm.io.sealing import part_of, sealed
from espnet2_vllm.plan import Given, Utterance, Wanted

SETTINGS = {"seed": 0, "decoding": {"topk": 5, "enforce": ("audio",)}}
RECORD = Record("a", "ok", "", "d1", 7, 0.5, 1.25, ("wav/a.wav",), ("eos",), (), [["text", "a", "\u97f3\n", None]])


def utterance(key="a", content=3, role="", reference=None):
    rows = np.full((4, 3), content, np.int32)
    return Utterance(key, (Given(rows, "text_bpe", role), Wanted(rows[:1], "codec_ssl", role, reference)))


def write_file(journal, name="wav/a.wav"):
    (journal.directory / name).parent.mkdir(parents=True, exist_ok=True)
    (journal.directory / name).write_bytes(b"x")


def filed(journal, record=RECORD):
    """The record with what its files must be."""
    return replace(record, parts=tuple(part_of(journal.directory / name) for name in record.files))


def opened(directory, **options):
    return Journal(directory, SETTINGS, **options)


def test_what_was_written_is_read_back(tmp_path):
    journal = opened(tmp_path)
    write_file(journal)
    arrays = [np.arange(5), np.array([-557, 2**31 - 1]), np.zeros(0, int)]
    places = tuple(journal.save_tokens(array) for array in arrays)
    record = replace(filed(journal), tokens=places)
    journal.append(record)
    journal.close()
    again = opened(tmp_path)
    assert again.records == {"a": record}
    for place, array in zip(places, arrays, strict=True):
        assert again.load_tokens(place).dtype == np.int32
        np.testing.assert_array_equal(again.load_tokens(place), array)
    assert again.finished("a", "d1")
    later = again.save_tokens(np.arange(2))
    assert again.load_tokens(later).tolist() == [0, 1] and again.load_tokens(places[0]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("change", ["input", "file", "tokens", "refused", "key"])
def test_not_finished(tmp_path, change):
    journal = opened(tmp_path)
    write_file(journal)
    record = filed(journal)
    assert change != "none"
    if change == "refused":
        record = replace(record, outcome="refused")
    if change == "tokens":
        record = replace(record, tokens=((0, 1, "0" * 16),))
    journal.append(record)
    if change == "file":
        (tmp_path / "wav" / "a.wav").unlink()
    assert not journal.finished("b" if change == "key" else "a", "d2" if change == "input" else "d1")


def test_the_last_line_of_a_key_counts(tmp_path):
    journal = opened(tmp_path)
    write_file(journal)
    journal.append(replace(RECORD, outcome="refused", files=()))
    journal.append(filed(journal))
    journal.close()
    assert opened(tmp_path).finished("a", "d1")


def test_a_line_cut_short_is_dropped_and_the_next_one_is_whole(tmp_path, caplog):
    journal = opened(tmp_path)
    for key in "ab":
        journal.append(replace(RECORD, key=key, files=()))
    journal.close()
    data = journal.path.read_bytes()
    for cut in range(1, len(data.splitlines(keepends=True)[-1])):
        journal.path.write_bytes(data[:-cut])
        journal = opened(tmp_path)
        assert list(journal.records) == ["a"], cut
        journal.append(replace(RECORD, key="c", files=()))
        journal.close()
        again = opened(tmp_path)
        assert list(again.records) == ["a", "c"]
        again.close()
    assert "cut short" in caplog.text


def test_a_damaged_line_costs_its_utterance_and_is_said(tmp_path, caplog):
    journal = opened(tmp_path)
    for key in "abc":
        journal.append(replace(RECORD, key=key, files=()))
    journal.close()
    head, first, second, third = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(head + first[:-9] + b"\n" + second.replace(b'"rows": 7', b'"rows": 8') + third)
    journal = opened(tmp_path)
    assert list(journal.records) == ["c"]
    journal.close()
    assert "journal.jsonl:2: is damaged (it has no digest): its utterance is decoded again" in caplog.text
    assert "journal.jsonl:3: is damaged (its digest does not fit): its utterance is decoded again" in caplog.text
    assert journal.path.read_bytes() == head + third


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", 3),
        ("outcome", "fine"),
        ("rows", "7"),
        ("files", [1]),
        ("tokens", [["a", 2, "x"]]),
        ("parts", [[None, -1, "x"]]),
    ],
)
def test_a_line_of_wrong_types_costs_its_utterance(tmp_path, caplog, name, value):
    journal = opened(tmp_path)
    journal.append(replace(RECORD, files=()))
    journal.close()
    values = json.loads(journal.path.read_bytes().splitlines()[1])
    del values["digest"]
    with open(journal.path, "ab") as file:
        file.write(sealed(values | {name: value}))
    again = opened(tmp_path)
    assert list(again.records) == ["a"]
    assert f"journal.jsonl:3: is damaged ({name} cannot be so)" in caplog.text


@pytest.mark.parametrize("older", [b'{"journal": 1, "settings": {}}', None])
def test_a_journal_without_digests_is_begun_anew_and_that_is_said(tmp_path, caplog, older):
    journal = opened(tmp_path)
    journal.append(replace(RECORD, files=()))
    journal.close()
    head, line = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes((older + b"\n" if older else sealed({"journal": 7, "settings": SETTINGS})) + line)
    again = opened(tmp_path)
    assert not again.records and again.begin()
    again.close()
    assert "cannot be gone on with" in caplog.text and "starting over; the earlier journal is now" in caplog.text


def test_a_file_of_something_else_is_set_aside(tmp_path):
    opened(tmp_path).close()
    path = tmp_path / ".journal" / "journal.jsonl"
    path.write_text("{}\n", encoding="utf-8")
    journal = opened(tmp_path)
    assert not journal.records and path.read_text(encoding="utf-8") == "{}\n"
    journal.begin()
    assert path.with_name("journal.old.jsonl").read_text(encoding="utf-8") == "{}\n"


def test_other_settings_start_over_and_are_named(tmp_path, caplog):
    journal = opened(tmp_path)
    journal.append(replace(RECORD, files=()))
    journal.close()
    other = Journal(tmp_path, {"seed": 1, "decoding": {"topk": 5, "enforce": ["text"]}})
    assert not other.records
    other.begin()
    assert "seed: 0, now 1" in caplog.text and "decoding.enforce: ['audio'], now ['text']" in caplog.text
    assert "topk" not in caplog.text
    old = json.loads((tmp_path / ".journal" / "journal.old.jsonl").read_text("utf-8").splitlines()[1])
    assert old["key"] == "a"


@pytest.mark.parametrize(("settings", "options"), [({"seed": 1}, {}), (SETTINGS, {"resume": False})])
def test_a_run_that_never_begins_costs_nothing(tmp_path, settings, options):
    journal = opened(tmp_path)
    place = journal.save_tokens(np.arange(3))
    journal.append(replace(RECORD, files=()))
    journal.close()
    Journal(tmp_path, settings, **options).close()
    again = opened(tmp_path)
    assert list(again.records) == ["a"]
    np.testing.assert_array_equal(again.load_tokens(place), np.arange(3))


def test_no_resume_starts_over(tmp_path):
    journal = opened(tmp_path)
    scores = tmp_path / ".scores" / "a.npz"
    scores.parent.mkdir()
    scores.write_bytes(b"of the earlier tokens")
    journal.append(replace(RECORD, files=()))
    journal.save_tokens(np.arange(3))
    journal.close()
    fresh = opened(tmp_path, resume=False)
    assert not fresh.records and scores.is_file()
    assert fresh.save_tokens(np.arange(1))[:2] == (0, 1) and not scores.exists()


def _open_elsewhere(directory, queue):
    try:
        opened(directory)
    except ConfigError as error:
        queue.put(str(error))
    else:
        queue.put("opened")


def test_two_processes_do_not_write_to_one_directory(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    journal = opened(tmp_path)
    for expected in (f"{tmp_path}: another process is writing", "opened"):
        process = context.Process(target=_open_elsewhere, args=(tmp_path, queue))
        process.start()
        assert queue.get(timeout=60).startswith(expected)
        process.join()
        journal.close()


def test_digest_sees_everything_that_the_model_sees():
    reference = np.ones((2, 3), np.int32)
    versions = [utterance(), utterance(content=4), utterance(role="user"), utterance(reference=reference)]
    versions.append(utterance(reference=reference.reshape(3, 2)))
    assert len({digest(one) for one in versions}) == len(versions)
    assert digest(utterance()) == digest(utterance(key="b"))
