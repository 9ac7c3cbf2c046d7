"""Split one ``data.json`` into a part for every job (ESPnet: ``pyscripts/utils/split_data_jsons.py``)."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from espnet2_vllm.bin.utf8 import insist_on_utf8
from espnet2_vllm.errors import ConfigError, DataError, SpeechLMError, complain
from espnet2_vllm.io.data_json import SPLIT_FROM, folder_of, read_json
from espnet2_vllm.io.files import whole_file
from espnet2_vllm.io.kaldi import locate
from espnet2_vllm.io.keyed import read_keyed, write_keyed
from espnet2_vllm.io.specifiers import parse_specifiers

SPEAKER_ENTRY = "utt2spk"


@dataclass(frozen=True)
class Entry:
    """One ``path,modality,type`` of ``data_files``."""

    path: Path
    modality: str
    kind: str

    @property
    def name(self) -> str:
        return self.path.name


def entries_of(path: Path, description: Mapping) -> list[Entry]:
    """The ``data_files`` of a ``data.json``. Raises DataError for any that is not ``path,modality,type``."""
    entries: dict[str, Entry] = {}
    for listed in _list_of_strings(path, description, "data_files"):
        parts = listed.rsplit(",", 2)
        if len(parts) != 3:
            raise DataError(f"{path}: data_files: expected 'path,modality,type', got {listed!r}")
        entry = Entry(Path(parts[0]), parts[1], parts[2])
        if entry.name in entries:
            raise DataError(f"{path}: data_files: two entries are named {entry.name!r}; results are named after them")
        entries[entry.name] = entry
    if not entries:
        raise DataError(f"{path}: data_files is empty; expected at least one 'path,modality,type'")
    return list(entries.values())


def task_of(path: Path, description: Mapping) -> str:
    """The task of a ``data.json``. Raises DataError."""
    task = description.get("task")
    if not isinstance(task, str) or not task or "/" in task:
        raise DataError(f"{path}: task is {task!r}; expected the name of a task, such as codec_ssl_plain_tts")
    return task


def utterances_of(path: Path, description: Mapping) -> list[str]:
    """Ids of a ``data.json`` (``examples``) or a ``dataset.json`` (``samples``), at least one. Raises DataError."""
    ids = _list_of_strings(path, description, "samples" if "samples" in description else "examples")
    if not ids:
        raise DataError(f"{path}: 0 utterances; expected at least one (is the text it was made from empty?)")
    if len(set(ids)) < len(ids):
        twice = next(key for key, count in Counter(ids).items() if count > 1)
        raise DataError(f"{path}: utterance {twice!r} is listed twice; ids must be unique")
    return ids


def assign(ids: Sequence[str], speakers: Mapping[str, str] | None, jobs: int) -> list[list[str]]:
    """Ids of each job: consecutive and even, or whole speakers, each to the job that has least. At most ``jobs`` parts."""
    if speakers is None:
        jobs = min(jobs, len(ids))
        return [list(ids[len(ids) * job // jobs : len(ids) * (job + 1) // jobs]) for job in range(jobs)]
    groups: dict[str, list[str]] = {}
    for key in ids:
        # without a speaker of its own an utterance is a group by itself
        groups.setdefault(speakers.get(key) or f"{key} alone", []).append(key)
    parts: list[list[str]] = [[] for _ in range(min(jobs, len(groups)))]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(parts, key=len).extend(group)
    order = {key: index for index, key in enumerate(ids)}
    return [sorted(part, key=order.__getitem__) for part in parts]


def split(path: Path, jobs: int, output_dir: Path) -> int:
    """Write ``output_dir/split<N>/<job>/`` with ``data.json`` and its files; return N, at most ``jobs``.

    The utterances of a speaker stay together where an entry is named ``utt2spk``: its loader draws speaker prompts from
    the other utterances of the part. Raises DataError.
    """
    description = read_json(path)
    task_of(path, description)
    entries = entries_of(path, description)
    ids = utterances_of(path, description)
    base_dir = folder_of(path, description)
    records = {entry.name: read_keyed(locate(str(entry.path), base_dir)) for entry in entries}
    speakers = records.get(SPEAKER_ENTRY)
    parts = assign(ids, speakers, jobs)
    if len(parts) < jobs:
        what = "speakers" if len(parts) < len(ids) else "utterances"
        print(
            f"split_data: {path}: {jobs} jobs asked for, {len(parts)} {what} to share: {len(parts)} jobs",
            file=sys.stderr,
        )
    whole = {**description, SPLIT_FROM: str(base_dir.absolute())}
    for job, part in enumerate(parts, 1):
        folder = output_dir / f"split{len(parts)}" / str(job)
        _write_part(folder, whole, entries, records, part, _spoken(part, speakers))
    return len(parts)


def _spoken(ids: Sequence[str], speakers: Mapping[str, str] | None) -> set[str]:
    """``ids``, and whatever else their speakers say: prompts are drawn from that, also where it is not to be decoded."""
    if speakers is None:
        return set(ids)
    here = {speakers[key] for key in ids if speakers.get(key)}
    return {*ids, *(key for key, speaker in speakers.items() if speaker in here)}


def _write_part(
    folder: Path,
    description: Mapping,
    entries: Sequence[Entry],
    records: Mapping[str, Mapping[str, str]],
    ids: Sequence[str],
    spoken: set[str],
) -> None:
    wanted = set(ids)
    for entry in entries:
        # Prompts need both of these. In the order of the file, on which the choice of a prompt depends.
        keys = spoken if entry.name in (SPEAKER_ENTRY, "wav.scp") else wanted
        lines = {key: value for key, value in records[entry.name].items() if key in keys}
        write_keyed(folder / entry.name, lines, in_order=True)
    part = dict(description)
    part["data_files"] = [f"{folder / entry.name},{entry.modality},{entry.kind}" for entry in entries]
    part["num_examples"] = len(ids)
    part["examples"] = list(ids)
    with whole_file(folder / "data.json") as file:
        json.dump(part, file, indent=4, ensure_ascii=False)


def _list_of_strings(path: Path, description: Mapping, key: str) -> list[str]:
    values = description.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise DataError(f"{path}: {key} is missing or no list of strings")
    return values


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="split_data", description=__doc__)
    parser.add_argument("--data-json", "--json_files", type=Path, metavar="FILE", dest="data_json")
    sets = "print task, name and path of the sets that these specifiers name, a line each with tabs between, and write nothing"
    parser.add_argument(
        "--registered", metavar="SPECIFIERS", action="append", help=f"{sets}; of ESPNET_DATASET_REGISTRY"
    )
    parser.add_argument("--unregistered", metavar="SPECIFIERS", action="append", help=sets)
    parser.add_argument("--nj", type=int, default=1, help="parts wanted; fewer are made if there is less to share")
    parser.add_argument("--output-dir", "--output_dir", type=Path, help="where split<N>/<job>/ is made")
    parser.add_argument(
        "--show", choices=["task", "size"], help="print the task or the number of utterances, and write nothing"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the number of parts that were made. Exit code 1 for data, 2 for options that cannot be used."""
    args = get_parser().parse_args(argv)
    try:
        for texts, registered in ((args.registered, True), (args.unregistered, False)):
            if texts is not None:
                for found in parse_specifiers(texts, registered=registered):
                    print(found.task, found.name, found.path, sep="\t")
                return 0
        if args.data_json is None:
            raise ConfigError("--data-json is needed")
        if args.show:
            description = read_json(args.data_json)
            show = task_of if args.show == "task" else lambda *given: len(utterances_of(*given))
            print(show(args.data_json, description))
            return 0
        if args.output_dir is None or args.nj < 1:
            raise ConfigError(f"--output-dir is needed, and --nj must be at least 1 (is {args.nj})")
        print(split(args.data_json, args.nj, args.output_dir))
    except (SpeechLMError, OSError) as error:
        return complain("split_data", error)
    return 0


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
