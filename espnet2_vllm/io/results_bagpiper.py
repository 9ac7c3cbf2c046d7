"""The result tree of ESPnet's ``espnet2.speechlm.bin.inference``: ``results.json`` and wavs, a folder a rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..layout import Layout
from ..plan import Result, Segment
from .content import bagpiper_content
from .files import whole_file
from .journal import Journal, Record
from .names import safe_file_name
from .results import OUTSIDE, Clip, Draft, ResultWriter, Speech

TEXT_FORMATS = ("string", "list")


class BagpiperWriter(ResultWriter):
    """One ``inference_rank<r>`` folder.

    A message is ``[role, modality, content]``: a text, or the path of ``<id>_segment<k>.wav`` (k counts all messages from 1),
    or null where audio holds no frame. Several hypotheses of the last segment are several messages, as in ESPnet.

    Args:
        decode_text: ids of the text tokenizer to text (``TextTokenizer.decode_bagpiper``).
        text_format: ``string`` writes a text as a string, ``list`` as a list of one string (ESPnet before 202609).
    """

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        journal: Journal,
        speech: Speech | None,
        decode_text: Callable[[np.ndarray], str],
        text_format: str = "string",
        **options: bool,
    ) -> None:
        super().__init__(directory, layout, journal, speech, **options)
        if text_format not in TEXT_FORMATS:
            raise ConfigError(f"text_format {text_format!r} is unknown; expected one of {', '.join(TEXT_FORMATS)}")
        self.decode_text, self.text_format = decode_text, text_format

    def _draft(self, result: Result, record: Record) -> Draft:
        messages, clips = [], []
        for number, segment in enumerate(_messages(result), 1):
            content = bagpiper_content(self.layout, segment)
            self.notes[OUTSIDE] += content.outside
            text = file = None
            if content.text is not None:
                text = self.decode_text(content.text)
            elif content.codes is not None and len(content.codes):
                file = safe_file_name(result.key, f"_segment{number}{self.suffix}")
                clips.append(Clip(file, content.codes, True))
            messages.append([segment.role, segment.modality, text, file])
        return Draft(replace(record, result=messages), tuple(clips))

    def result_files(self) -> list[Path]:
        return [self.directory / "results.json"]

    def finish(self, keys: Sequence[str]) -> None:
        results = {record.key: [self._message(*message) for message in record.result] for record in self.written(keys)}
        if not keys:  # ESPnet's file appears with the first sample; what is there is of a larger set
            (self.directory / "results.json").unlink(missing_ok=True)
            return
        with whole_file(self.directory / "results.json") as file:
            file.write(json.dumps(results, indent=4, ensure_ascii=False))

    def _message(self, role: str, modality: str, text: str | None, file: str | None) -> list[Any]:
        if text is not None:
            return [role, modality, [text] if self.text_format == "list" else text]
        return [role, modality, None if file is None else self.name(file)]


def _messages(result: Result) -> list[Segment]:
    """Segments of the first hypothesis, then the last one of each other hypothesis."""
    first, *others = result.hypotheses
    return [*first.segments, *(other.segments[-1] for other in others)]
