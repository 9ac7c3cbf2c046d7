"""Merge what the jobs of one set wrote, and say whether every utterance is there (stage 9 of ESPnet's recipe)."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from espnet2_vllm.bin.split_data import task_of, utterances_of
from espnet2_vllm.bin.utf8 import insist_on_utf8
from espnet2_vllm.errors import DataError, SpeechLMError, complain
from espnet2_vllm.io.data_json import read_json
from espnet2_vllm.io.files import whole_file
from espnet2_vllm.io.journal import FOLDER as JOURNAL_FOLDER
from espnet2_vllm.io.keyed import sorted_by_key
from espnet2_vllm.reports.collect import Report, collect, text_table
from espnet2_vllm.reports.page import write_report

DIALOGUE = "dialogue"
_RANK_FILE = re.compile(r"rank\d+_")
_SHOWN = 10


def merge_lines(inputs: Iterable[Path], output: Path) -> set[str]:
    """Key files of all jobs -> one with the same lines, sorted as ``LC_ALL=C sort`` does; returns its keys.

    Lines are bytes here: what a model wrote as text stays as it is. Raises DataError for a key that comes twice, in one job or two.
    """
    merged: dict[bytes, bytes] = {}
    for path in inputs:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
        records = {line.split(maxsplit=1)[0]: line for line in lines}
        if len(records) < len(lines):
            key, _ = Counter(line.split(maxsplit=1)[0] for line in lines).most_common(1)[0]
            raise DataError(f"{path}: key {key.decode()!r} comes twice; decode this part anew (--overwrite)")
        if twice := merged.keys() & records.keys():
            raise DataError(
                f"{path}: key {min(twice).decode()!r} is in the output of another job as well; remove stale outputs"
            )
        merged.update(records)
    with whole_file(output, binary=True) as file:
        file.writelines(line + b"\n" for line in sorted(merged.values()))
    return {key.decode() for key in merged}


def merge_json(inputs: Iterable[Path]) -> dict:
    """JSON objects, or lists of one-key objects, of all jobs -> one dict. Raises DataError for a key of two jobs."""
    merged: dict = {}
    for path in inputs:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as JSON: {error}") from error
        for records in content if isinstance(content, list) else [content]:
            if not isinstance(records, dict):
                raise DataError(f"{path}: expected results by key, found {records!r:.80}")
            if twice := merged.keys() & records.keys():
                raise DataError(
                    f"{path}: key {min(twice)!r} is in the output of another job as well; remove stale outputs"
                )
            merged.update(records)
    return merged


def merge_opuslm(jobs: Sequence[Path], output_dir: Path) -> set[str]:
    """``output.<job>/<entry>/{<entry>,<entry>_token.scp}`` -> ``output_dir/``; returns every key written.

    ``dialogue/dialogue.json`` of all jobs becomes one valid list (ESPnet concatenates the lines of several lists).
    """
    keys: set[str] = set()
    for name in sorted({entry.name for job in jobs for entry in job.iterdir() if _is_entry(entry)}):
        folders = [job / name for job in jobs if (job / name).is_dir()]
        for file_name in (name, f"{name}_token.scp", f"token_{name}.scp"):
            inputs = [folder / file_name for folder in folders if (folder / file_name).is_file()]
            if inputs:
                written = merge_lines(inputs, output_dir / file_name)
                keys |= written if file_name == name else set()
        dialogues = [folder / f"{DIALOGUE}.json" for folder in folders if (folder / f"{DIALOGUE}.json").is_file()]
        if dialogues:
            merged = merge_json(dialogues)
            keys |= merged.keys()
            with whole_file(output_dir / f"{DIALOGUE}.json") as file:
                json.dump([{key: value} for key, value in sorted_by_key(merged)], file, indent=4, ensure_ascii=False)
    return keys


def merge_bagpiper(jobs: Sequence[Path], output_dir: Path) -> set[str]:
    """``inference_rank<r>/results.json`` -> ``output_dir/results.json``; returns its keys."""
    results = merge_json(job / "results.json" for job in jobs if (job / "results.json").is_file())
    with whole_file(output_dir / "results.json") as file:
        json.dump(dict(sorted_by_key(results)), file, indent=4, ensure_ascii=False)
    return set(results)


def missing_opuslm(task: str, ids: Sequence[str], nbest: int, keys: set[str]) -> list[str]:
    """Utterances without all their results: ``<task>_<id>_sample<k>``, or ``<task>_<id>`` of a dialogue."""

    def complete(name: str) -> bool:
        return name in keys if DIALOGUE in task else all(f"{name}_sample{k}" in keys for k in range(nbest))

    return [uid for uid in ids if not complete(f"{task}_{uid}")]


def collected(
    jobs: Sequence[Path], title: str, keys: Iterable[str], missing: Collection[str]
) -> tuple[Report, set[str]]:
    """What the journals say of ``keys``, and those of ``missing`` that are finished all the same.

    ESPnet's own decoder leaves no journals: the report is empty then.
    """
    jobs = [job for job in jobs if (job / JOURNAL_FOLDER / "journal.jsonl").is_file()]
    found = collect(jobs, title, keys) if jobs else Report(title, ())
    made = found.each_once(missing)
    failed = {record.key for record in made.failures}
    return made, {record.key for _, record in found.records if record.key in missing} - failed


def report(where: Path, names: Mapping[str, str], missing: Sequence[str], made: Report, unwritten: set[str]) -> None:
    """``summary.json`` beside the merged files, one line for the set, one for every utterance that is missing (the first few).

    Args:
        names: keys of the results by id. missing: ids.
        unwritten: keys of utterances that are finished, but not among the results.
    """
    records = {record.key: record for _, record in made.records}
    counts = Counter(record.outcome for record in records.values())
    summary = {
        "utterances": len(names),
        "with_results": len(names) - len(missing),
        "outcomes": dict(sorted(counts.items())),
        "audio_seconds": round(sum(record.audio_seconds for record in records.values()), 2),
        "missing": list(missing),
    }
    with whole_file(where / "summary.json") as file:
        json.dump(summary, file, indent=4, ensure_ascii=False)
    how = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    print(
        f"{where}: {len(names) - len(missing)} of {len(names)} utterances have results" + (f" ({how})" if how else "")
    )
    for uid in missing[:_SHOWN]:
        key = names[uid]
        why = (
            f"{records[key].outcome}: {records[key].reason}"
            if key in records
            else "no job has written an outcome of it"
        )
        if key in unwritten:
            why = "is finished, but its job ended before it wrote its results; start the job again"
        print(f"merge_outputs: {uid}: {why}", file=sys.stderr)
    if len(missing) > _SHOWN:
        print(f"merge_outputs: and {len(missing) - _SHOWN} more, see {where / 'summary.json'}", file=sys.stderr)


def _is_entry(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and not _RANK_FILE.match(path.name)


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="merge_outputs", description=__doc__)
    parser.add_argument("--family", choices=["opuslm", "bagpiper"], required=True)
    parser.add_argument(
        "--data-json", type=Path, required=True, metavar="FILE", help="data.json or dataset.json of the set"
    )
    parser.add_argument("--nbest", type=int, default=1, help="hypotheses an utterance (opuslm)")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the merged files go")
    parser.add_argument("jobs", type=Path, nargs="+", metavar="JOB_DIR", help="output directory of a job")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if every utterance has its results, 1 if not."""
    args = get_parser().parse_args(argv)
    try:
        description = read_json(args.data_json)
        ids = utterances_of(args.data_json, description)
        jobs = [job for job in args.jobs if job.is_dir()]
        names = {uid: uid for uid in ids}
        if args.family == "opuslm":
            task = task_of(args.data_json, description)
            names = {uid: f"{task}_{uid}" for uid in ids}
            missing = missing_opuslm(task, ids, args.nbest, merge_opuslm(jobs, args.output_dir))
        else:
            keys = merge_bagpiper(jobs, args.output_dir)
            missing = [key for key in ids if key not in keys]
        title, lost = args.output_dir.absolute().name, {names[uid] for uid in missing}
        made, unwritten = collected(jobs, title, names.values(), lost)
        report(args.output_dir, names, missing, made, unwritten)
        if made.jobs:
            print(f"{text_table(made.table())}\nreport: {write_report(made, args.output_dir)}")
    except (SpeechLMError, OSError) as error:
        return complain("merge_outputs", error)
    return 1 if missing else 0


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
