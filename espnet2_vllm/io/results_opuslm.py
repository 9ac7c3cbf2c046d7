"""The result trees of ESPnet's ``speechlm_inference_chat``: an entry a folder (tasks), or one folder ``dialogue``.

Sources: ``TaskOrientedWriter`` and ``ChatOrientedWriter`` of ``espnet2/speechlm/inference_utils.py``, merging in ``main`` of
``espnet2/bin/speechlm_inference_chat.py``. Different on purpose: the merged ``dialogue.json`` is valid JSON for every nproc
(ESPnet puts several lists one after the other), merged files have the ranks in order, line breaks in a text become escapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..layout import Layout
from ..plan import Result, Segment
from .content import Content, legacy_content, opuslm_content
from .files import whole_file
from .journal import Journal, Record
from .names import one_line, safe_file_name
from .results import BREAKS, OUTSIDE, Clip, Draft, ResultWriter, Speech

DecodeText = Callable[[np.ndarray], str]
DIALOGUE = "dialogue"


class OpusLMWriter(ResultWriter):
    """What tasks and dialogues share. Example i, counted from 1, belongs to rank i % ``nproc``.

    Args:
        decode_text: ids of the text tokenizer to text (``TextTokenizer.decode_opuslm``).
    """

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        journal: Journal,
        speech: Speech | None,
        decode_text: DecodeText,
        nproc: int = 1,
        **options: bool,
    ) -> None:
        super().__init__(directory, layout, journal, speech, **options)
        self.decode_text, self.nproc = decode_text, nproc

    def _content(self, segment: Segment) -> Content:
        content = opuslm_content(self.layout, segment)
        self.notes[OUTSIDE] += content.outside
        return content

    def _ranks(self, keys: Sequence[str]) -> list[list[Record]]:
        """Records of each rank."""
        shares: list[list[str]] = [[] for _ in range(self.nproc)]
        for number, key in enumerate(keys, 1):
            shares[number % self.nproc].append(key)
        return [self.written(share) for share in shares]

    def _write_tokens(self, entry: str, rank: int, tokens: Sequence[tuple[str, tuple[int, int]]]) -> str:
        """Token ark and scp of one rank; returns the text of the scp. ``tokens``: (id, place in the journal)."""
        import kaldiio

        ark, scp = (f"{entry}/rank{rank}_{self.token_name(entry)}.{kind}" for kind in ("ark", "scp"))
        lines = []
        with whole_file(self.directory / ark, binary=True) as file:
            for name, place in tokens:
                lines.append(f"{name} {self.name(ark)}:{file.tell() + len(name.encode()) + 1}\n")
                kaldiio.save_ark(file, {name: self.journal.load_tokens(place)})
        return self._write_text(scp, "".join(lines))

    def token_name(self, entry: str) -> str:
        """Name of an entry's token ark and scp, without rank and ending."""
        return f"{entry}_token"

    def _remove_stale_ranks(self, entry: str) -> None:
        """Rank files of an earlier run with more ranks, which the journal holds anyway, would be read as this run's."""
        for path in (self.directory / entry).glob("rank*_*"):
            number = path.name.partition("_")[0].removeprefix("rank")
            if number.isdecimal() and int(number) >= self.nproc:
                path.unlink()

    def _files_of(self, entry: str, name: str) -> list[Path]:
        """Files of an entry whose merged one is called ``name``."""
        folder = self.directory / entry
        return [folder / name, folder / f"{self.token_name(entry)}.scp", *folder.glob("rank*_*")]

    def _write_text(self, name: str, text: str) -> str:
        with whole_file(self.directory / name) as file:
            file.write(text)
        return text


class TaskWriter(OpusLMWriter):
    """Entries of a task: conditions under the bare utterance id, generated ones under ``<task>_<utt>_sample<k>``.

    Args:
        entries: names in the order of the task's template, one for each part of an utterance.
    """

    def __init__(self, *args: Any, task: str, entries: Sequence[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.task, self.entries = task, tuple(entries)

    def _draft(self, result: Result, record: Record) -> Draft:
        rows, clips, tokens = [], [], []
        for place, entry in enumerate(self.entries):
            for sample, hypothesis in enumerate(result.hypotheses):
                segment = hypothesis.segments[place]
                if sample and not segment.generated:
                    continue
                name = f"{result.key}_sample{sample}" if segment.generated else result.key.removeprefix(f"{self.task}_")
                content = self._content(segment)
                text = file = None
                if content.codes is None:
                    text = self.decode_text(content.text)
                    self.notes[BREAKS] += one_line(text)[1]
                else:
                    file = f"{entry}/{safe_file_name(name, self.suffix)}"
                    clips.append(Clip(file, content.codes, segment.generated))
                rows.append([entry, name, text, file])
                tokens.append(content.tokens)
        return Draft(replace(record, result=rows), tuple(clips), tuple(tokens))

    def result_files(self) -> list[Path]:
        return [path for entry in self.entries for path in self._files_of(entry, entry)]

    def finish(self, keys: Sequence[str]) -> None:
        ranks = self._ranks(keys)
        for entry in self.entries:
            values, scps = [], []
            for rank, records in enumerate(ranks):
                found = [
                    (name, self.name(file) if text is None else one_line(text)[0], place)
                    for record in records
                    for (of, name, text, file), place in zip(record.result, record.tokens, strict=True)
                    if of == entry
                ]
                lines = "".join(f"{name} {value}\n" for name, value, _ in found)
                values.append(self._write_text(f"{entry}/rank{rank}_{entry}", lines))
                scps.append(self._write_tokens(entry, rank, [(name, place) for name, _, place in found]))
            self._write_text(f"{entry}/{entry}", "".join(values))
            self._write_text(f"{entry}/{self.token_name(entry)}.scp", "".join(scps))
            self._remove_stale_ranks(entry)


class LegacyWriter(TaskWriter):
    """The tree of the older ``espnet2.bin.speechlm_inference``: token files are called ``token_<entry>``, with its tokens."""

    def token_name(self, entry: str) -> str:
        return f"token_{entry}"

    def _content(self, segment: Segment) -> Content:
        content = legacy_content(self.layout, segment)
        self.notes[OUTSIDE] += content.outside
        return content


class ChatWriter(OpusLMWriter):
    """Dialogues: every turn, given or generated, as ``[role, modality, is_prefill, text or wav path]``."""

    def _draft(self, result: Result, record: Record) -> Draft:
        turns, clips, tokens = [], [], []
        for place, segment in enumerate(result.hypotheses[0].segments):
            name = f"{result.key}_segment{place}"
            content = self._content(segment)
            text = file = None
            if content.codes is None:
                text, modality = self.decode_text(content.text), segment.name
            else:
                # A system turn of audio is a speaker prompt to the model, but ESPnet's writer calls it by its codec.
                modality = "codec_ssl" if segment.name == "spk" else segment.name
                file = f"{DIALOGUE}/{safe_file_name(name, self.suffix)}"
                clips.append(Clip(file, content.codes, segment.generated))
            turns.append([name, segment.role, modality, not segment.generated, text, file])
            tokens.append(content.tokens)
        return Draft(replace(record, result=turns), tuple(clips), tuple(tokens))

    def result_files(self) -> list[Path]:
        return self._files_of(DIALOGUE, f"{DIALOGUE}.json")

    def finish(self, keys: Sequence[str]) -> None:
        dialogues, scps = [], []
        for rank, records in enumerate(self._ranks(keys)):
            share = [{record.key: [self._turn(*turn) for turn in record.result]} for record in records]
            tokens = [
                (turn[0], place) for record in records for turn, place in zip(record.result, record.tokens, strict=True)
            ]
            if share:  # ESPnet's file appears with the first example
                self._write_json(f"{DIALOGUE}/rank{rank}_{DIALOGUE}.json", share)
            scps.append(self._write_tokens(DIALOGUE, rank, tokens))
            dialogues += share
        self._write_json(f"{DIALOGUE}/{DIALOGUE}.json", dialogues)
        self._write_text(f"{DIALOGUE}/{self.token_name(DIALOGUE)}.scp", "".join(scps))
        self._remove_stale_ranks(DIALOGUE)

    def _turn(self, _: str, role: str, modality: str, prefill: bool, text: str | None, file: str | None) -> list[Any]:
        return [role, modality, prefill, self.name(file) if text is None else text]

    def _write_json(self, name: str, value: Any) -> None:
        self._write_text(name, json.dumps(value, indent=4, ensure_ascii=False))
