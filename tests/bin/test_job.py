"""A job with a scripted engine: what is written when something fails in the middle, and what is reported."""

import json
import logging
import re
import sys
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from decoding_samples import CHAT, FLAT

from espnet2_vllm import backends
from espnet2_vllm.audio_format import AudioFormat
from espnet2_vllm.bin import job
from espnet2_vllm.bin.job import Progress, Store, Tally, journal_settings, report, run_job
from espnet2_vllm.decoding import load_decoding
from espnet2_vllm.errors import DataError, EngineError
from espnet2_vllm.io.files import whole_file
from espnet2_vllm.io.journal import Journal, Record
from espnet2_vllm.io.results import Clip, Draft, ResultWriter
from espnet2_vllm.layout import Layout
from espnet2_vllm.plan import NO_AUDIO, REFUSED, Given, Result, Utterance

LAYOUT = Layout.bagpiper(50, [5, 5])


class Writer(ResultWriter):
    """One clip of 8 frames an utterance; fails where it is told to."""

    def __init__(self, directory, fail=""):
        super().__init__(directory, LAYOUT, Journal(directory, {}), Speaker())
        self.fail, self.finished = fail, None

    def _draft(self, result, record):
        if self.fail == f"draft {record.key}":
            raise DataError("no such modality")
        return Draft(record, (Clip(f"{record.key}.wav", np.zeros((8, 2), int), True),), (np.arange(3),))

    def commit(self, draft, wavs):
        assert threading.current_thread() is not threading.main_thread()
        if self.fail == f"disk {draft.record.key}":
            raise OSError(28, "No space left on device")
        if self.fail == f"sound {draft.record.key}":
            wavs = [wav * np.nan for wav in wavs]
        return super().commit(draft, wavs)

    def finish(self, keys):
        self.finished = [record.key for record in self.written(keys)]


class Speaker:
    sample_rate = 16000

    form = AudioFormat()

    def submit(self, codes):
        future = Future()
        future.set_result(np.full(len(codes) * 1000, 0.5, np.float32))
        return future


def utterance(key):
    return Utterance(key, (Given(np.full((3, 2), len(key), np.int32)),))


def scripted(monkeypatch, *outcomes):
    """``decode`` gives these outcomes to what it is fed, in the reverse order, and raises those that are exceptions."""

    def decode(engine, items, config, **options):
        for item, outcome in reversed(list(zip(items, outcomes, strict=True))):
            if isinstance(outcome, Exception):
                raise outcome
            key = item[0] if isinstance(item, tuple) else item.key
            yield Result(key, (), outcome, outcome, None if isinstance(item, tuple) else item)

    monkeypatch.setattr(backends, "decode", decode)


def run(writer, keys, unreadable=()):
    items = [(writer, (key, DataError("cannot be read")) if key in unreadable else utterance(key)) for key in keys]
    return run_job(None, None, [writer], items, speech=writer.speech, seed=0, total=len(keys))


def keys_of(writer):
    return [json.loads(line)["key"] for line in writer.journal.path.read_text("utf-8").splitlines()[1:]]


def test_every_key_has_an_outcome_and_files_keep_the_order(tmp_path, monkeypatch):
    scripted(monkeypatch, "ok", NO_AUDIO, REFUSED, "ok")
    writer = Writer(tmp_path)
    tally = run(writer, "abcd", unreadable="c")
    assert writer.finished == ["a", "b", "d"]
    assert dict(tally.outcomes) == {"ok": 2, NO_AUDIO: 1, REFUSED: 1}
    assert sorted(keys_of(writer)) == list("abcd")
    assert tally.audio_seconds == pytest.approx(3 * 0.5)
    assert sorted(path.name for path in tmp_path.glob("*.wav")) == ["a.wav", "b.wav", "d.wav"]


@pytest.mark.parametrize("where", ["draft", "sound"])
def test_what_cannot_be_written_is_refused_alone(tmp_path, monkeypatch, where):
    scripted(monkeypatch, "ok", "ok", "ok")
    writer = Writer(tmp_path, fail=f"{where} b")
    tally = run(writer, "abc")
    assert writer.finished == ["a", "c"] and list(tally.failed) == ["b"]
    assert not (tmp_path / "b.wav").exists()
    again = Writer(tmp_path / "again")
    assert run(again, "abc").failed == {}


def test_a_failing_disk_ends_the_job_and_keeps_what_was_written(tmp_path, monkeypatch):
    scripted(monkeypatch, "ok", "ok", "ok")
    writer = Writer(tmp_path, fail="disk a")
    with pytest.raises(OSError, match="No space left"):
        run(writer, "abc")
    assert writer.finished is None and set(keys_of(writer)) <= {"b", "c"}
    writer.journal.close()


def test_a_failing_engine_ends_the_job_and_a_restart_goes_on(tmp_path, monkeypatch):
    scripted(monkeypatch, EngineError("the engine died"), "ok", "ok")
    writer = Writer(tmp_path)
    with pytest.raises(EngineError):
        run(writer, "abc")
    assert sorted(keys_of(writer)) == ["b", "c"] and writer.finished is None
    writer.journal.close()
    scripted(monkeypatch, "ok")
    again = Writer(tmp_path)
    tally = run(again, "abc")
    assert again.finished == ["a", "b", "c"] and tally.taken_over == 2 and tally.total == 3
    assert tally.audio_seconds == pytest.approx(0.5)


def test_many_results_pass_through_a_short_queue(tmp_path, monkeypatch):
    keys = [f"k{i}" for i in range(300)]
    scripted(monkeypatch, *["ok"] * len(keys))
    writer = Writer(tmp_path)
    assert run(writer, keys).total == len(keys) and writer.finished == keys
    places = [writer.journal.records[key].tokens[0] for key in keys]
    assert all(writer.journal.load_tokens(place).tolist() == [0, 1, 2] for place in places)
    assert len(set(places)) == len(keys)


def test_a_slow_codec_does_not_hold_the_engine(tmp_path, monkeypatch):
    """The first clip is not decoded before the engine has given its last result."""
    given, done = [], threading.Event()

    class Slow(Speaker):
        def submit(self, codes):
            future = Future()
            threading.Thread(target=self.work, args=(codes, future)).start()
            return future

        def work(self, codes, future):
            if done.wait(60):
                future.set_result(super().submit(codes).result())
            else:
                future.set_exception(AssertionError(f"the engine waits for the codec after {len(given)} results"))

    def decode(engine, items, config, **options):
        for item in items:
            given.append(item.key)
            yield Result(item.key, (), "ok", "", item)
        done.set()

    monkeypatch.setattr(backends, "decode", decode)
    writer = Writer(tmp_path)
    writer.speech = Slow()
    keys = [f"k{i}" for i in range(40)]
    assert run(writer, keys).outcomes["ok"] == len(keys) and writer.finished == keys


def test_store_reports_a_failure_at_the_latest_when_it_is_left(tmp_path):
    writer = Writer(tmp_path, fail="disk a")
    with pytest.raises(OSError, match="No space"), Store(writer.speech, Tally()) as store:
        store.put(writer, Draft(Record("a", "ok")))


# -- what is said -----------------------------------------------------------------------------------------------------
def tally_of(*records, **options):
    tally = Tally(**options)
    for record in records:
        tally.add(record)
    return tally


def test_summary():
    tally = tally_of(
        Record("a", "ok", rows=60, audio_seconds=1.5),
        Record("b", "length", rows=40, audio_seconds=0.5),
        Record("c", REFUSED),
    )
    tally.add(Record("d", "ok", rows=1000, audio_seconds=99.0), taken_over=True)
    assert tally.summary(4.0) == (
        "4 utterances: 2 ok, 1 length, 1 refused; 1 of them taken over from an earlier run; "
        "100 rows in 4.0 s (25.0 rows/s); 2.0 s of audio, real time factor 2.000"
    )
    assert "real time" not in tally_of(Record("a", "ok", rows=1)).summary(1.0)


def test_report_names_failures_and_gives_the_exit_code(caplog):
    caplog.set_level(logging.INFO)
    assert report(tally_of(Record("a", "ok"), Record("b", NO_AUDIO)), 1.0, "out") == 0
    refused = [Record(f"k{i}", REFUSED, f"reason {i}") for i in range(25)]
    assert report(tally_of(*refused), 1.0, "out") == 1
    named = [m for m in caplog.messages if m.startswith("no result for k")]
    assert named[0] == "no result for k0: reason 0" and len(named) == 20
    assert "no result for 5 more" in caplog.text and caplog.messages[-1].endswith("results in out")


def test_progress_in_a_log_is_lines_now_and_then(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    clock = iter(range(0, 1000, 12))
    monkeypatch.setattr(job.time, "monotonic", lambda: next(clock))
    with Progress(50, Tally(taken_over=3)) as progress:
        for done in range(1, 11):
            progress.update(done, done * 7)
    assert 1 < len(caplog.messages) < 10
    assert re.fullmatch(r"\d+ of 50 utterances, \d+ rows, [\d.]+ rows/s", caplog.messages[0])


def test_progress_on_a_terminal_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(4, Tally(taken_over=1)) as progress:
        progress.update(2, 70)
        progress.update(3, 90)
    text = capsys.readouterr().err
    assert "4/4" in text and "90 rows" in text


# -- files ------------------------------------------------------------------------------------------------------------
def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file"
    with whole_file(path) as file:
        file.write("one\r\n\ud800")
    assert path.read_bytes() == b"one\r\n\\ud800"
    with pytest.raises(ZeroDivisionError), whole_file(path, binary=True) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"one\r\n\\ud800"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_settings_that_change_nothing_do_not_begin_a_run_anew():
    """A journal of a run that could not have them yet is taken over."""

    def decoding(base, **changes):
        config = load_decoding({**base, **changes}, "opuslm")
        return journal_settings(config, checkpoint={}, backend="pytorch", seed=0, nbest=1, options={})["decoding"]

    for base in (CHAT, FLAT):
        found = decoding(base)
        assert "fixed_length" not in found and not any("top_p" in found[name] for name in ("text", "audio"))
    found = decoding(FLAT, fixed_length=True, search_algo="topp_sampling")
    assert found["fixed_length"] and found["text"]["top_p"] == found["audio"]["top_p"] == 0.8
