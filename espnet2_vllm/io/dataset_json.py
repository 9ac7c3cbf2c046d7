"""``dataset.json`` of ESPnet's new-style SpeechLM: entries with readers, and the ids to decode.

Sources: ESPnet ``SingleDataset``, ``TextReader``, ``LhotseAudioReader`` and the readers of omniio (espnet2/speechlm/dataloader).
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, shown
from ..layout import Layout
from ..plan import Utterance
from ..prompt.bagpiper import Clip, Deaf, EncodeAudio, Tokenizer, bagpiper_utterance, read_recording
from .items import read_item
from .json_lines import distinct_ids, read_json, read_json_lines
from .kaldi import Table, locate, read_table
from .lhotse import LhotseReader
from .omniio import OMNIIO_READERS, OmniioReader, open_table
from .specifiers import DIALOGUE_TASK, PROMPTS, Specifier

if TYPE_CHECKING:
    from ..audio.listening import Listening
    from ..audio.reading import Reading


class Reader(ABC):
    """Content of one entry by example id. DataError, naming the file, for an id that it cannot give."""

    @abstractmethod
    def load(self, uid: str, reading: Reading | None = None) -> Any: ...


@dataclass(frozen=True)
class TextReader(Reader):
    """``id words...``, or for ``.jsonl`` ``{"id": ..., "text": ...}`` a line."""

    table: Table

    @classmethod
    def open(cls, path: Path) -> TextReader:
        if path.suffix != ".jsonl":
            return cls(read_table(path))
        found = read_json_lines(path, "id", "text", str)
        faults = {uid: text for uid, text in found.items() if isinstance(text, DataError)}
        return cls(Table(path, {uid: text for uid, text in found.items() if uid not in faults}, faults))

    def load(self, uid: str, reading: Reading | None = None) -> str:
        return self.table.value(uid)


@dataclass(frozen=True)
class KaldiAudioReader(Reader):
    """``id wav``, ``id ark:offset`` or ``id command |``."""

    table: Table
    base_dir: Path

    def load(self, uid: str, reading: Reading | None = None) -> Clip:
        try:
            return read_recording(self.table.value(uid), self.base_dir, reading)
        except DataError as error:
            raise DataError(f"{uid} of {self.table.path}: {error}") from error


@dataclass(frozen=True)
class DialogueReader(Reader):
    """``{"example_id": ..., "messages": [[role, modality, content], ...]}`` a line."""

    path: Path
    dialogues: Mapping[str, list | DataError]

    @classmethod
    def open(cls, path: Path) -> DialogueReader:
        return cls(path, read_json_lines(path, "example_id", "messages", list))

    def load(self, uid: str, reading: Reading | None = None) -> list:
        if uid not in self.dialogues:
            raise DataError(f"{self.path}: no line has the example_id {uid}")
        if isinstance(found := self.dialogues[uid], DataError):
            raise found
        return found


def _open_reader(
    kind: str, path: Path, base_dir: Path, where: str, allow_url: bool
) -> Reader | LhotseReader | OmniioReader:
    if kind == "text":
        return TextReader.open(path)
    if kind == "kaldi_audio":
        return KaldiAudioReader(read_table(path), base_dir)
    if kind == "dialogue":
        return DialogueReader.open(path)
    if kind == "lhotse_audio":
        return LhotseReader.open(path, base_dir, allow_url=allow_url)
    if kind in OMNIIO_READERS:
        return OMNIIO_READERS[kind](open_table(path, allow_url=allow_url), base_dir)
    known = ("text", "kaldi_audio", "lhotse_audio", "dialogue", *OMNIIO_READERS)
    near = difflib.get_close_matches(kind, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise DataError(f"{where}: reader {kind!r} is not supported{hint}; supported are {', '.join(known)}")


@dataclass(frozen=True)
class Dataset:
    """An opened ``dataset.json``: ``samples`` in its order."""

    specifier: Specifier
    samples: tuple[str, ...]
    readers: Mapping[str, Reader | LhotseReader | OmniioReader]

    @property
    def directory_name(self) -> str:
        """Folder of its results: ``<task>_<name>``."""
        return f"{self.specifier.task}_{self.specifier.name}"

    def share(self, rank: int, world: int) -> tuple[str, ...]:
        """Samples of one of ``world`` workers, counted from 0."""
        assert 0 <= rank < world, f"rank {rank} of {world}"
        return self.samples[rank::world]

    def messages(self, uid: str, reading: Reading | None = None) -> list:
        """The conversation of a sample, up to where the answer begins at least."""
        if self.specifier.task == DIALOGUE_TASK:
            return self.readers[DIALOGUE_TASK].load(uid, reading)
        entries = PROMPTS[self.specifier.task]
        prompt = [[role, kind, self.readers[name].load(uid, reading)] for role, kind, name in entries]
        # A placeholder: what is prompted ends before the assistant's first message.
        return [*prompt, ["assistant", "text", ""]]


def open_dataset(specifier: Specifier, *, allow_url: bool = False) -> Dataset:
    """Reads the ``dataset.json`` and the indexes of the entries that the task's prompt needs.

    Paths are looked up from the working directory, as ESPnet does, then from the folder of the ``dataset.json``.

    Args:
        allow_url: whether what a manifest or an omniio table names by an http(s) address is fetched.

    Raises:
        DataError: naming the file, for one that is missing or damaged, no samples, an entry that the task needs and that is
            not there, or a reader that is not supported.
    """
    path = specifier.path
    data = read_json(path)
    if not isinstance(data.get("data_entry"), list) or not isinstance(data.get("samples"), list):
        raise DataError(f"{path}: expected lists 'data_entry' and 'samples'; is this a dataset.json?")
    samples = distinct_ids(data["samples"], f"{path}: samples")
    named = entries_of(data["data_entry"], path)
    needed = [name for _, _, name in PROMPTS[specifier.task]] + [DIALOGUE_TASK] * (specifier.task == DIALOGUE_TASK)
    missing = [name for name in needed if name not in named]
    if missing:
        has = ", ".join(named) or "none"
        raise DataError(f"{path}: task {specifier.task} needs the entry {', '.join(missing)}; the entries are {has}")
    readers = {}
    for name in needed:
        where, kind = named[name]
        readers[name] = _open_reader(kind, locate(where, path.parent), path.parent, f"{path}: {name}", allow_url)
    return Dataset(specifier, samples, readers)


def entries_of(entries: Any, path: Path) -> dict[str, tuple[str, str]]:
    """Path and reader by name, of the ``data_entry`` of a ``dataset.json``. DataError, naming ``path``, for any other shape."""
    if not isinstance(entries, list):
        raise DataError(f"{path}: expected a list 'data_entry'; is this a dataset.json?")
    named: dict[str, tuple[str, str]] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) for k in ("name", "path", "reader")):
            raise DataError(f"{path}: data_entry has {shown(entry)}, expected name, path and reader")
        if entry["name"] in named:
            raise DataError(f"{path}: data_entry has {entry['name']} twice")
        named[entry["name"]] = entry["path"], entry["reader"]
    return named


def read_utterances(
    dataset: Dataset,
    layout: Layout,
    tokenizer: Tokenizer,
    *,
    samples: Iterable[str] | None = None,
    encode_audio: EncodeAudio | None = None,
    listening: Listening | Deaf | None = None,
    reading: Reading | None = None,
) -> Iterator[Utterance | tuple[str, DataError]]:
    """Utterances one by one; a pair (id, error) stands for one that cannot be read.

    Args:
        samples: those that are wanted, in this order (``dataset.share``); None is all.
        encode_audio, listening, reading: see ``bagpiper_prompt``.
    """
    from ..audio.reading import FIRST, Reading

    reading = replace(reading or Reading(), channel=FIRST)
    heard = reading if listening is None else replace(reading, enough=listening.enough)

    def read(uid: str) -> Utterance:
        messages = dataset.messages(uid, heard)
        texts = _prompt_texts(messages)
        return bagpiper_utterance(
            layout,
            tokenizer,
            messages,
            key=uid,
            info={"task": dataset.specifier.task, "name": dataset.specifier.name, "prompt": texts},
            encode_audio=encode_audio,
            listening=listening,
            base_dir=dataset.specifier.path.parent,
            reading=reading,
        )

    for uid in dataset.samples if samples is None else samples:
        yield read_item(uid, read)


def _prompt_texts(messages: Sequence[Any]) -> str:
    """Texts before the answer, one a line."""
    texts = []
    for message in messages:
        if not (isinstance(message, list | tuple) and len(message) == 3) or message[0] == "assistant":
            break
        if isinstance(message[2], str) and message[1] == "text":
            texts.append(message[2])
    return "\n".join(texts)


def open_datasets(specifiers: Sequence[Specifier], *, allow_url: bool = False) -> list[Dataset]:
    """Every data set, before the first is decoded."""
    return [open_dataset(specifier, allow_url=allow_url) for specifier in specifiers]
