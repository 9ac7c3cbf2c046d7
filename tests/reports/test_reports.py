"""Reports: the table, the same as JSON, and the page, in a browser and as text."""

import json
import math
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest
import soundfile
from browser import page_of

from espnet2_vllm.bin import report as command
from espnet2_vllm.errors import DataError
from espnet2_vllm.io.journal import FOLDER, Journal, Record
from espnet2_vllm.reports.collect import collect, text_table, write_run
from espnet2_vllm.reports.page import SAMPLES, write_report
from espnet2_vllm.reports.plots import histogram, nice_step, scatter

SETTINGS = {"seed": 7, "backend": "pytorch", "checkpoint_path": "exp/model"}
NASTY = "<script>alert('x')</script> & \"quoted\" \u97f3 \x01 end"


def spoken(directory, key, seconds, text="words"):
    """A finished utterance with a wav."""
    name = f"wav.scp/{key.replace('/', '%2F')}.wav"
    (directory / "wav.scp").mkdir(parents=True, exist_ok=True)
    soundfile.write(directory / name, np.sin(np.arange(int(16000 * seconds)) / 9) / 3, 16000)
    rows = [["text", key, text, None], ["wav.scp", f"{key}_sample0", None, name]]
    return Record(
        key, "ok", rows=int(50 * seconds), seconds=1.5, audio_seconds=seconds, files=(name,), ends=("eos",), result=rows
    )


def job(directory, *records, seconds=4.0, **settings):
    journal = Journal(directory, SETTINGS | settings)
    for record in records:
        journal.append(record)
    journal.close()
    rows, audio = sum(r.rows for r in records), sum(r.audio_seconds for r in records)
    write_run(
        directory,
        seconds=seconds,
        rows=rows,
        audio_seconds=audio,
        taken_over=0,
        command=f"decode --x 'a b' {'long/' * 300}",
    )
    return directory


@pytest.fixture
def jobs(tmp_path):
    """Two jobs: audio of several lengths, one cut by length, two without a result."""
    one = tmp_path / "output.1"
    two = tmp_path / "output.2"
    failed = Record("u <9>", "refused", reason=NASTY)
    again = Record("u2", "refused", reason="first try")
    length = Record("u4", "length", "cut", rows=30, seconds=2.0, audio_seconds=0.5)
    return [
        job(one, again, spoken(one, "u1", 1.0), spoken(one, "u2", 2.0, NASTY), failed),
        job(two, spoken(two, "a/b#?", 0.25), length, Record("u5", "abort", reason="gave up"), seconds=8.0),
    ]


def test_the_table_and_its_json(jobs, tmp_path):
    report = collect(jobs, "set")
    facts = report.facts()
    assert (facts["utterances"], facts["outcomes"]) == (6, {"ok": 3, "length": 1, "abort": 1, "refused": 1})
    assert facts["audio_seconds"] == 3.75 and facts["seconds"] == 8.0 and facts["jobs"] == 2
    assert facts["rows_per_second"] == pytest.approx((50 + 100 + 12 + 30) / 8.0, abs=0.01)
    assert facts["real_time_factor"] == pytest.approx(8.0 / 3.75, abs=1e-4)
    assert (facts["seeds"], facts["backends"], facts["checkpoints"]) == ([7], ["pytorch"], ["exp/model"])
    assert facts["versions"]["espnet2_vllm"] and facts["failures"]["u5"] == "abort: gave up"
    assert "u2" not in facts["failures"], "the last line of a key counts"
    shown = text_table(report.table())
    for part in (
        "utterances",
        "3 ok, 1 length, 1 abort, 1 refused",
        "3.8 s",
        "8.0 s, 2 jobs",
        "2.1333",
        "24.0",
        "espnet2_vllm",
    ):
        assert part in shown
    write_report(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == json.loads(json.dumps(facts))


def test_only_the_keys_of_this_run_count(jobs):
    assert collect(jobs, "set", ["u1", "u4"]).facts()["outcomes"] == {"ok": 1, "length": 1}


def test_a_job_that_still_runs_or_was_killed(tmp_path):
    journal = Journal(tmp_path / "out", SETTINGS)
    journal.append(Record("u1", "ok", rows=5))
    with open(journal.path, "ab") as file:
        file.write(b'{"key": "u2", "outco')
    facts = collect([tmp_path], "set").facts()
    journal.close()
    assert facts["utterances"] == 1 and facts["rows_per_second"] is None and facts["real_time_factor"] is None
    write_report(collect([tmp_path], "set"), tmp_path)


def test_what_is_no_result_is_refused(tmp_path, capsys):
    with pytest.raises(DataError, match="no journal"):
        collect([tmp_path], "set")
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "journal.jsonl").write_text('{"journal": 1, "settings": {}}\n{"x": 1}\n', encoding="utf-8")
    with pytest.raises(DataError, match="journal.jsonl:2: is no line"):
        collect([tmp_path], "set")
    assert command.main([str(tmp_path / "gone")]) == 1
    assert "no journal" in capsys.readouterr().err


class Structure(HTMLParser):
    """Every tag that is opened is closed, in order; text and attributes by tag."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.seen, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text += data

    def all(self, tag):
        return [attrs for name, attrs in self.seen if name == tag]


def test_of_very_many_failures_the_page_shows_some(tmp_path):
    refused = [Record(f"u{number:04}", "refused", reason="no words") for number in range(1200)]
    report = collect([job(tmp_path / "output", *refused)], "set")
    text = write_report(report, tmp_path).read_text(encoding="utf-8")
    assert "Failures (1200)" in text and "The first 1000; report.json has all." in text
    assert "u0999" in text and "u1000" not in text
    assert len(json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["failures"]) == 1200


def test_the_page_is_whole_and_asks_no_network(jobs, tmp_path):
    page = write_report(collect(jobs, f"set {NASTY}"), tmp_path)
    text = page.read_text(encoding="utf-8")
    structure = Structure(text)
    assert not structure.all("script") and not structure.all("iframe") and "@import" not in text and "http" not in text
    assert {a["id"] for _, a in structure.seen if "id" in a} == {
        "summary",
        "length-histogram",
        "rtf-plot",
        "failures",
        "samples",
    }
    players = [unquote(audio["src"]) for audio in structure.all("audio")]
    assert len(players) == 3 and all((tmp_path / src).is_file() for src in players), players
    shown = NASTY.replace("\x01", "\ufffd")
    assert structure.text.count(shown) == 4  # title, heading, reason, text of a sample
    for figure in text.split("<svg")[1:]:
        svg = ElementTree.fromstring("<svg" + figure.split("</svg>")[0] + "</svg>")
        for node in svg.iter():
            for name in ("x", "y", "width", "height", "cx", "cy", "x1", "x2", "y1", "y2"):
                assert float(node.get(name, 0)) >= 0 and math.isfinite(float(node.get(name, 0)))


def test_the_page_in_a_browser(jobs, tmp_path):
    """Sound is found and has its length, plots are drawn, and what a model wrote stays text."""
    page_file = write_report(collect(jobs, "set"), tmp_path / "elsewhere")
    with page_of(page_file) as page:
        assert page.title() == "set" and page.locator("#summary tr").count() == 11
        lengths = page.evaluate(
            """() => Promise.all([...document.querySelectorAll('audio')].map(audio => new Promise((done, failed) => {
                audio.onloadedmetadata = () => done(audio.duration); audio.onerror = () => failed(audio.src);
                audio.preload = 'metadata' })))"""
        )
        assert sorted(lengths) == pytest.approx([0.25, 1.0, 2.0])
        assert page.locator("#length-histogram rect").count() >= 3 and page.locator("#rtf-plot circle").count() == 4
        boxes = [page.locator(f"#{name} svg").bounding_box() for name in ("length-histogram", "rtf-plot")]
        assert all(box["width"] > 300 and box["height"] > 100 for box in boxes)
        assert page.locator("#failures tr").count() == 3 and "alert('x')" in page.locator("#failures").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "wider than the window"


def test_a_large_set_shows_a_sample(tmp_path):
    directory = tmp_path / "out"
    first = spoken(directory, "u0", 0.1)
    journal = Journal(directory, SETTINGS)
    for number in range(6000):
        journal.append(Record(**{**first.__dict__, "key": f"u{number}", "audio_seconds": 0.1 + number % 97 / 10}))
    journal.close()
    page = write_report(collect([directory], "large"), directory)
    text = page.read_text(encoding="utf-8")
    assert text.count("<audio") == SAMPLES and text.count("<circle") == 4000 and len(text) < 1_500_000
    assert f"Samples ({SAMPLES} of 6000)" in text


def test_nothing_decoded_still_makes_a_page(tmp_path):
    structure = Structure(write_report(collect([job(tmp_path / "out")], "empty"), tmp_path).read_text(encoding="utf-8"))
    assert "Every utterance has a result." in structure.text and not structure.all("svg")


def test_texts_alone_have_a_histogram_of_rows(tmp_path):
    texts = [
        Record(f"u{i}", "ok", rows=i, result=[["assistant", "text", f"said {i}", None]], prompt="asked") for i in (3, 9)
    ]
    structure = Structure(write_report(collect([job(tmp_path / "out", *texts)], "texts"), tmp_path).read_text("utf-8"))
    assert "asked / said 9" in structure.text and len(structure.all("svg")) == 1 and not structure.all("audio")


def test_the_command(jobs, tmp_path, capsys):
    assert command.main([*map(str, jobs), "--output-dir", str(tmp_path / "report"), "--title", "mine"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("mine\n") and "3 ok" in shown and (tmp_path / "report" / "report.html").is_file()
    good = str(job(tmp_path / "good", Record("u", "ok", rows=1)))
    assert command.main([good]) == 0
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert command.main([good, "--output-dir", str(tmp_path / "file")]) == 1
    assert "espnet2-vllm report: " in capsys.readouterr().err
    assert command.main([good, str(tmp_path / "gone")]) == 1
    assert "gone: no journal" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("least", "step"), [(0.9, 1), (1, 1), (1.1, 2), (0.021, 0.05), (7, 10), (51, 100), (1e-6, 1e-6)]
)
def test_steps_are_round(least, step):
    assert nice_step(least) == pytest.approx(step)


@pytest.mark.parametrize("values", [[], [0.0], [1e-9], [3.0, 3.0, 3.0], [float(i) for i in range(1000)]])
def test_every_value_is_in_a_bar(values):
    svg = ElementTree.fromstring(histogram(values, "x"))
    titles = [node.text for node in svg.iter("title")]
    assert sum(int(title.rpartition(": ")[2]) for title in titles) == len(values)
    ElementTree.fromstring(scatter([(value, value, "<&>") for value in values], "x", "y"))
