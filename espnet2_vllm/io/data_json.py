"""``data.json`` of ESPnet's first SpeechLM generation: a task, its files, and the ids to decode.

Sources: ESPnet ``ESPnetSpeechLMDataset`` and ``ESPnetMultiTaskDataset`` (espnet2/train/dataset.py), and the reader of
``dialogue_json`` of branch ``speechlm3``. Ids are taken as they stand; ESPnet takes the task's name off a key with ``lstrip``,
which eats letters of some ids.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import DataError, shown
from ..layout import Layout
from ..plan import Utterance
from ..prompt.opuslm import Content, Facts, Tokenizer, Turn, opuslm_sequence, opuslm_utterance
from ..prompt.tasks import AUDIO_MODALITIES, TEXT_MODALITIES, Entry, Task, find_task
from .items import read_item
from .json_lines import distinct_ids, read_json
from .kaldi import Table, load_codes, locate, locate_data, read_table

# In a part that ``split_data`` wrote: the folder from which relative paths count, which is that of the whole set.
SPLIT_FROM = "split_from"


class Source(ABC):
    """Where the content of one entry comes from."""

    table: Table

    def __contains__(self, uid: str) -> bool:
        return uid in self.table

    @abstractmethod
    def load(self, uid: str, rng: random.Random) -> Content:
        """Content of ``uid``; DataError, naming the file, if it cannot be had."""


@dataclass(frozen=True)
class TextSource(Source):
    """``id words...``"""

    table: Table

    def load(self, uid: str, rng: random.Random) -> Content:
        return self.table.value(uid)


@dataclass(frozen=True)
class CodesSource(Source):
    """``id ark:offset``"""

    table: Table
    base_dir: Path

    def load(self, uid: str, rng: random.Random) -> Content:
        return load_codes(self.table.value(uid), self.base_dir)


@dataclass(frozen=True)
class SpeakerSource(Source):
    """``id speaker``: the codes of another utterance of the speaker, or of the same one if it is the only one."""

    table: Table
    codes: CodesSource
    utterances: Mapping[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for uid, speaker in self.table.items():
            self.utterances.setdefault(speaker, []).append(uid)

    def load(self, uid: str, rng: random.Random) -> Content:
        speaker = self.table.value(uid)
        candidates = self.utterances[speaker]
        chosen = candidates[0]
        if len(candidates) > 1:
            # Drawn as ESPnet draws, so that the same seed gives the same utterance.
            chosen = rng.sample(candidates, 1)[0]
            while chosen == uid:
                chosen = rng.sample(candidates, 1)[0]
        try:
            return self.codes.load(chosen, rng)
        except DataError as error:
            raise DataError(f"prompt of speaker {speaker}: {error}") from error


@dataclass(frozen=True)
class DialogueSource(Source):
    """``id pack.json``; the pack is ``{id: [[role, modality, is_target, text or ark:offset], ...]}``."""

    table: Table
    base_dir: Path
    packs: dict[str, Mapping[str, Any] | DataError] = field(default_factory=dict)

    def load(self, uid: str, rng: random.Random) -> Content:
        name = self.table.value(uid)
        if name not in self.packs:
            try:
                self.packs[name] = read_json(locate_data(name, self.base_dir))
            except DataError as error:
                self.packs[name] = error
        pack = self.packs[name]
        if isinstance(pack, DataError):
            raise DataError(str(pack)) from pack
        if uid not in pack:
            raise DataError(f"{name}: has no dialogue {uid}")
        turns = pack[uid]
        if not isinstance(turns, list) or not turns:
            raise DataError(f"{name}: dialogue {uid} is {shown(turns)}, expected a list of turns")
        return [self._turn(turn, f"{name}: turn {i} of {uid}") for i, turn in enumerate(turns)]

    def _turn(self, turn: Any, where: str) -> Turn:
        if not (isinstance(turn, list) and len(turn) == 4 and isinstance(turn[2], bool) and isinstance(turn[3], str)):
            raise DataError(f"{where} is {shown(turn)}, expected [role, modality, is_target, text or ark:offset]")
        role, modality, is_target, content = turn
        if modality in TEXT_MODALITIES:
            return Turn(role, modality, is_target, content)
        if modality not in AUDIO_MODALITIES:
            supported = ", ".join((*TEXT_MODALITIES, *AUDIO_MODALITIES))
            raise DataError(f"{where}: modality {modality!r} cannot be decoded; supported are {supported}")
        try:
            return Turn(role, modality, is_target, load_codes(content, self.base_dir))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error


@dataclass(frozen=True)
class DataJson:
    """An opened ``data.json``: ``examples`` in its order; sources by entry name, targets possibly missing."""

    path: Path
    task: Task
    examples: tuple[str, ...]
    sources: Mapping[str, Source]
    vocabularies: tuple[Path, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Ids of the results, in the order of ``examples``."""
        return tuple(f"{self.task.name}_{uid}" for uid in self.examples)

    def load(self, uid: str, rng: random.Random) -> dict[str, Content]:
        """Content of every entry of the task; None for a target that is not there. DataError if a condition is missing."""
        entries: dict[str, Content] = {}
        for entry in self.task.entries:
            source = self.sources.get(entry.name)
            needed = entry in self.task.conditions or self.task.chat or self.task.name == "textlm"
            if source is None or not (needed or source.table.get(uid)):
                entries[entry.name] = None
            else:
                entries[entry.name] = source.load(uid, rng)
        return entries


def open_data_json(path: Path, *, base_dir: Path | None = None) -> DataJson:
    """Reads ``path`` and the files it names, but no ark and no dialogue yet.

    Files are looked up from the working directory, as ESPnet does, then from ``base_dir`` (``folder_of`` the set). Entries are
    known by the names of their files. The files of targets may be missing.

    Raises:
        DataError: naming the file, for one that is missing or damaged, without examples, of an unknown task, or without a
            file that the task needs.
    """
    data = read_json(path)
    for key, kind in (("task", str), ("data_files", list), ("examples", list)):
        if not isinstance(data.get(key), kind):
            raise DataError(
                f"{path}: {key!r} is missing or no {'string' if kind is str else 'list'}; is this a data.json?"
            )
    examples = distinct_ids(data["examples"], f"{path}: examples")
    task = find_task(data["task"], str(path))
    base_dir = base_dir or folder_of(path, data)
    sources = _sources(path, task, data["data_files"], base_dir)
    listed = data.get("vocabularies") or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise DataError(f"{path}: 'vocabularies' is {listed!r:.80}, expected a list of files")
    listed = [Path(name) for name in listed]
    vocabularies = tuple(name if name.exists() else base_dir / name for name in listed)
    return DataJson(path, task, examples, sources, vocabularies)


def restricted(data: DataJson, key_file: Path) -> DataJson:
    """``data`` with those of its examples that ``key_file`` names, in the order of ``data`` (ESPnet ``ESPnetMultiTaskDataset``).

    Args:
        key_file: a key a line, ``<task>_<id>``, as ESPnet's ``make_example_list_speechlm.py`` writes them.

    Raises:
        DataError: naming the file, if it cannot be read, is empty, or has a key that is none of ``data``.
    """
    wanted = read_table(key_file)
    if not wanted:
        raise DataError(f"{key_file}: holds no key, there is nothing to decode")
    if foreign := sorted(wanted.keys() - set(data.keys)):
        raise DataError(
            f"{key_file}: {len(foreign)} of its keys are none of {data.path}, such as {foreign[0]}; expected <task>_<id>, as in "
            f"{data.keys[0]}"
        )
    return replace(data, examples=tuple(u for u, key in zip(data.examples, data.keys, strict=True) if key in wanted))


def folder_of(path: Path, data: Mapping[str, Any]) -> Path:
    """The folder from which the relative paths of a ``data.json`` count: its own, or of a part of a set that of the whole set."""
    where = data.get(SPLIT_FROM)
    return Path(where) if isinstance(where, str) else path.parent


def _sources(path: Path, task: Task, triplets: Iterable[Any], base_dir: Path) -> dict[str, Source]:
    files: dict[str, tuple[Table, str]] = {}
    wanted = {entry.name for entry in task.entries} | {"wav.scp"}
    for triplet in triplets:
        parts = triplet.strip().rsplit(",", 2) if isinstance(triplet, str) else []
        if len(parts) != 3:
            raise DataError(f"{path}: data_files has {triplet!r}, expected 'path,modality,type'")
        name = parts[0].rsplit("/", 1)[-1]
        if name in files:
            raise DataError(f"{path}: data_files has two files named {name}, by which entries are known")
        if name in wanted:
            files[name] = read_table(locate(parts[0], base_dir)), parts[2]
    missing = [entry.name for entry in task.conditions if entry.name not in files]
    if task.chat or task.name == "textlm":
        missing = [entry.name for entry in task.targets if entry.name not in files]
    if missing:
        raise DataError(
            f"{path}: task {task.name} needs {', '.join(missing)} among its data_files; it has {', '.join(files) or 'none'}"
        )
    return {entry.name: _source(path, entry, files, base_dir) for entry in task.entries if entry.name in files}


def _source(path: Path, entry: Entry, files: Mapping[str, tuple[Table, str]], base_dir: Path) -> Source:
    table, kind = files[entry.name]
    if entry.modality == "spk" and kind == "text":
        if "wav.scp" not in files or files["wav.scp"][1] != "kaldi_ark":
            raise DataError(
                f"{path}: {entry.name} names speakers, so a wav.scp of type kaldi_ark is needed to take their prompts from; "
                f"or give {entry.name} itself as kaldi_ark"
            )
        return SpeakerSource(table, CodesSource(files["wav.scp"][0], base_dir))
    expected = "kaldi_ark" if entry.modality == "spk" else entry.kind
    if kind != expected:
        raise DataError(f"{path}: {entry.name} is of type {kind}, expected {expected}")
    if kind == "text":
        return TextSource(table)
    return (CodesSource if kind == "kaldi_ark" else DialogueSource)(table, base_dir)


def read_utterances(
    data: DataJson,
    layout: Layout,
    tokenizer: Tokenizer,
    facts: Facts,
    *,
    seed: int = 0,
    keys: Iterable[str] | None = None,
    inference_last_segment: bool = False,
    prompt_frames: int = 0,
) -> Iterator[Utterance | tuple[str, DataError]]:
    """Utterances one by one; a pair (key, error) stands for one that cannot be read.

    Args:
        seed: of the choice of speaker prompts. Each example begins with it anew, as ESPnet's do from the second one on.
        keys: those of ``data.keys`` that are wanted, in this order; None is all.
        prompt_frames: see ``opuslm_utterance``.
    """

    def read(key: str) -> Utterance:
        uid = key.removeprefix(f"{data.task.name}_")
        rng = random.Random(seed)
        entries = data.load(uid, rng)
        rows = opuslm_sequence(layout, tokenizer, data.task, entries, facts, rng)
        info = {"uid": uid, "texts": {name: value for name, value in entries.items() if isinstance(value, str)}}
        return opuslm_utterance(
            layout,
            rows,
            data.task,
            key=key,
            inference_last_segment=inference_last_segment,
            prompt_frames=prompt_frames,
            info=info,
        )

    for key in data.keys if keys is None else keys:
        yield read_item(key, read)
