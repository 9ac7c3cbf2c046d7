"""``report.html``: one static page. Nothing in it asks a network for anything; players name wavs by relative paths."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..io.files import whole_file
from ..io.journal import Record
from .collect import Job, Report
from .plots import histogram, scatter

SAMPLES = 24  # utterances with a player
_FAILURES = 1000  # with their reasons: more make the page slow, and are in report.json
_MOST_POINTS = 4000  # of the scatter plot: more make the page slow and look the same
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2433; background: #fff; max-width: 1180px; margin: 2rem auto }
body { padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0 }
tr { border-bottom: 1px solid #e3e7ee } th { font-weight: 600; white-space: nowrap }
td { overflow-wrap: anywhere } .plots { display: flex; flex-wrap: wrap; gap: 1.5rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
figure { margin: 0; max-width: 560px } figcaption { color: #556; font-size: .85rem }
svg { max-width: 100%; height: auto } svg text { font-size: 11px; fill: #556 } svg line { stroke: #e3e7ee }
svg .mark { fill: #2f6fbb }
audio { width: 260px; height: 34px } .text { white-space: pre-wrap } .bad { color: #a4262c }
"""


def write_report(report: Report, folder: Path) -> Path:
    """Writes ``report.json`` and ``report.html`` into ``folder``, whole or not at all; the path of the page."""
    with whole_file(folder / "report.json") as file:
        json.dump(report.facts(), file, indent=1, ensure_ascii=False)
        file.write("\n")
    page = folder / "report.html"
    with whole_file(page) as file:
        file.write(html(report, folder))
    return page


def html(report: Report, folder: Path) -> str:
    """The page, which will lie in ``folder``."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>',
        escape(report.title),
        '</title><meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head>\n<body>\n<h1>{escape(report.title)}</h1>\n',
        _table([(escape(name), escape(value)) for name, value in report.table()], "summary"),
        _plots(report),
        _failures(report.failures),
        _samples(report, folder),
        _commands(report),
        "</body>\n</html>\n",
    ]
    # What no text file may hold; a browser shows it as the sign for an unknown character.
    return "".join(parts).translate(dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(55296, 57344)), "�"))


def _table(rows: Sequence[tuple[str, ...]], name: str, head: Sequence[str] = ()) -> str:
    """A table of cells in HTML; the first of each row is its heading."""
    top = f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>\n" if head else ""
    lines = [f"<tr><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>\n" for first, *rest in rows]
    return f'<table id="{name}">\n{top}{"".join(lines)}</table>\n'


def _plots(report: Report) -> str:
    records = [record for _, record in report.records if record.rows]
    spoken = [record for record in records if record.audio_seconds]
    figures = []
    if spoken:
        lengths = histogram([record.audio_seconds for record in spoken], "seconds of audio")
        figures.append(("length-histogram", lengths, "Length of the generated audio."))
        shown = spoken if len(spoken) <= _MOST_POINTS else random.Random(0).sample(spoken, _MOST_POINTS)
        points = [(record.audio_seconds, record.seconds / record.audio_seconds, record.key) for record in shown]
        note = (
            "Time from reading an utterance to its results, for one second of its audio. Utterances are decoded together, so the "
            "real time factor of the whole run (table) is lower."
        )
        figures.append(("rtf-plot", scatter(points, "seconds of audio", "seconds a second"), note))
    if records and not spoken:
        figures.append(
            ("length-histogram", histogram([r.rows for r in records], "rows"), "Generated rows of an utterance.")
        )
    if not figures:
        return ""
    made = "".join(
        f'<figure id="{name}">{svg}<figcaption>{escape(note)}</figcaption></figure>\n' for name, svg, note in figures
    )
    return f'<h2>Lengths and speed</h2>\n<div class="plots">\n{made}</div>\n'


def _failures(failures: Sequence[Record]) -> str:
    if not failures:
        return '<h2>Failures</h2>\n<p id="failures">Every utterance has a result.</p>\n'
    shown = failures[:_FAILURES]
    rows = [(escape(r.key), escape(r.outcome), f'<span class="bad">{escape(r.reason)}</span>') for r in shown]
    more = f"<p>The first {_FAILURES}; report.json has all.</p>\n" if len(failures) > _FAILURES else ""
    return f"<h2>Failures ({len(failures)})</h2>\n" + more + _table(rows, "failures", ("key", "outcome", "reason"))


def _samples(report: Report, folder: Path) -> str:
    spoken = [(job, record) for job, record in report.records if record.result and _wavs(record)]
    texts = [(job, record) for job, record in report.records if record.result and not _wavs(record)]
    chosen = spoken or texts
    if not chosen:
        return ""
    if len(chosen) > SAMPLES:
        chosen = random.Random(0).sample(chosen, SAMPLES)
    rows = []
    for job, record in sorted(chosen, key=lambda pair: pair[1].key):
        players = "<br>".join(
            f'<audio controls preload="none" src="{escape(_url(job, file, folder))}"></audio>' for file in _wavs(record)
        )
        text = f'<div class="text">{escape(" / ".join(filter(None, [record.prompt, *_texts(record)])))}</div>'
        reference = (escape(report.references.get(record.key, "-")),) if report.references else ()
        rows.append((escape(record.key), escape(record.outcome), players or "-", text, *reference))
    title = f"<h2>Samples ({len(rows)} of {len(spoken or texts)})</h2>\n"
    head = ("key", "outcome", "audio", "given and generated text", *(["reference"] if report.references else []))
    return title + _table(rows, "samples", head)


def _url(job: Job, file: str, folder: Path) -> str:
    return quote(os.path.relpath(job.directory / file, folder))


def _wavs(record: Record) -> list[str]:
    return [file for file in record.files if file.endswith((".wav", ".flac"))]


def _texts(record: Record) -> list[str]:
    """Texts among the results, in whichever form the family's writer keeps them."""
    found: list[str] = []
    for row in record.result:
        text: Any = row[-2]
        if isinstance(text, str) and text and text not in record.prompt:
            found.append(text)
    return found


def _commands(report: Report) -> str:
    commands = report.facts()["commands"]
    return "".join(f"<h2>Command</h2>\n<pre>{escape(command)}</pre>\n" for command in commands[:1])
