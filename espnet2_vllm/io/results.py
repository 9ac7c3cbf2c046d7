"""What the writers of both families share: from a result to waveforms, tokens and one line of the journal."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..audio_format import AudioFormat
from ..errors import DataError, SpeechLMError
from ..layout import Layout
from ..plan import FAILED, REFUSED, Hypothesis, Result
from .journal import Journal, Record, digest
from .scores import Scores, scores_file, scores_of, write_scores
from .sealing import Part, part_of

if TYPE_CHECKING:
    from ..codec import Codec
    from ..codec.service import CodecService
    from ..codec.share import Share

# What is counted on the way (``ResultWriter.notes``).
BREAKS = "line breaks in texts were written as escapes (\\n)"
OUTSIDE = "audio ids were no code of their stream and became the nearest one"
CLIPPED = "samples were beyond full scale and were clipped"


@dataclass(frozen=True)
class Clip:
    """A waveform to write. ``file`` is relative to the writer's directory; ``codes`` [T, C]."""

    file: str
    codes: np.ndarray
    generated: bool


@dataclass(frozen=True)
class Draft:
    """An outcome whose waveforms do not exist yet. ``tokens`` are arrays for the journal, in the order of ``record.result``."""

    record: Record
    clips: tuple[Clip, ...] = ()
    tokens: tuple[np.ndarray, ...] = ()
    scores: Scores | None = None


class Speech:
    """The codec, as the writers use it.

    Args:
        silent_frames: clips of so many frames or fewer are zeros (ESPnet's ``CodecTokenizer.decode``; OpusLM only).
        share: of the device; None is all of it.
        tf32: as ``CodecService``'s.
        files: that the codec was read from.

    Attributes:
        beside: whether an engine is at work that leaves the codec no more than its share.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        silent_frames: int = 0,
        form: AudioFormat | None = None,
        share: Share | None = None,
        tf32: bool = False,
        files: Sequence[Path] = (),
    ) -> None:
        self.files = tuple(files)
        self.codec, self.silent_frames, self.form = codec, silent_frames, form or AudioFormat()
        self.share, self.tf32 = share, tf32
        self.beside: Callable[[], bool] = lambda: True
        self._lock = threading.Lock()
        self._service: CodecService | None = None

    @property
    def sample_rate(self) -> int:
        return self.codec.sample_rate

    @property
    def service(self) -> CodecService:
        """The codec at work in a thread of its own, started when it is first needed."""
        from ..codec.service import CodecService

        with self._lock:
            if self._service is None:
                self._service = CodecService(
                    self.codec, silent_frames=self.silent_frames, share=self.share, tf32=self.tf32
                )
                self._service.beside = lambda: self.beside()
            return self._service

    def prepare(self) -> int:
        """Starts the codec; bytes of the device that it takes. To be called before the engine starts."""
        return self.service.prepare()

    def submit(self, codes: np.ndarray) -> Future:
        """Codes [T, C] of a clip; the future gives float32 samples [T * hop], or raises what went wrong with it."""
        return self.service.submit(codes)

    def decode(self, clips: Sequence[np.ndarray]) -> list[np.ndarray | SpeechLMError]:
        """Codes [T, C] of each clip to float32 samples [T * hop], or what went wrong with it."""
        return [outcome(future) for future in [self.submit(codes) for codes in clips]]

    def close(self) -> None:
        """Ends the thread when all clips are decoded."""
        with self._lock:
            if self._service is not None:
                self._service.close()
            self._service = None


def outcome(future: Future) -> np.ndarray | SpeechLMError:
    """Waits for the samples of a clip, or for what went wrong with it."""
    try:
        return future.result()
    except SpeechLMError as error:
        return error


class ResultWriter(ABC):
    """Writes the results of one directory.

    ``draft`` and ``finish`` belong to the thread that decodes; ``commit`` may run in any number of others.

    Attributes:
        directory: as given on the command line; what files say about paths begins with it.
        with_scores: whether to write log-probabilities too (``scores.scores_of``).
        notes: counts of what was changed on the way (line breaks, codes out of range, clipped samples).
    """

    def __init__(
        self, directory: Path, layout: Layout, journal: Journal, speech: Speech | None, *, with_scores: bool = False
    ) -> None:
        self.directory, self.layout, self.journal, self.speech = directory, layout, journal, speech
        self.with_scores = with_scores
        self.notes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._fresh = not journal.records
        self._arks: set[str] = set()

    def draft(self, result: Result, seconds: float = 0.0) -> Draft:
        """The draft of a result. What cannot be written is refused, with the reason."""
        generated = [s for h in result.hypotheses for s in h.segments if s.generated]
        record = Record(
            result.key,
            result.outcome,
            result.reason,
            input="" if result.utterance is None else digest(result.utterance),
            rows=generated_rows(result.hypotheses),
            seconds=round(seconds, 3),
            prompt="" if result.utterance is None else result.utterance.info.get("prompt", ""),
            ends=tuple(segment.end for segment in generated),
        )
        if result.outcome in FAILED:
            return Draft(record)
        outside = self.notes[OUTSIDE]
        try:
            draft = self._draft(result, record)
        except DataError as error:
            return Draft(replace(record, outcome=REFUSED, reason=str(error)))
        draft = replace(draft, record=replace(draft.record, outside=self.notes[OUTSIDE] - outside))
        return replace(draft, scores=scores_of(self.layout, result.hypotheses)) if self.with_scores else draft

    @abstractmethod
    def _draft(self, result: Result, record: Record) -> Draft:
        """Fills in the results of an utterance that was not refused."""

    def commit(self, draft: Draft, wavs: Sequence[np.ndarray | SpeechLMError]) -> Record:
        """Writes the files of a draft (a waveform for each clip), then its tokens and its line. A failed file refuses the key."""
        record, clipped = draft.record, 0
        places: dict[str, str] = {}
        parts: list[tuple[str, Part]] = []
        try:
            for clip, wav in zip(draft.clips, wavs, strict=True):
                if isinstance(wav, SpeechLMError):
                    raise wav
                places[clip.file], file, part, more = self._write_sound(clip, wav)
                parts.append((file, part))
                clipped += more
        except SpeechLMError as error:
            record = replace(record, outcome=REFUSED, reason=str(error), result=None)
            with self._lock:
                self.journal.append(record)
            return record
        if draft.scores is not None:
            file = scores_file(record.key)
            write_scores(self.directory / file, draft.scores)
            parts.append((file, part_of(self.directory / file)))
        audio = sum(len(wav) for clip, wav in zip(draft.clips, wavs, strict=True) if clip.generated)
        record = replace(
            record,
            files=tuple(file for file, _ in parts),
            parts=tuple(part for _, part in parts),
            audio_seconds=round(audio / self.speech.sample_rate, 4) if audio else 0.0,
            result=_renamed(record.result, places) if self._in_arks else record.result,
        )
        with self._lock:
            self.notes[CLIPPED] += clipped
            record = replace(record, tokens=tuple(self.journal.save_tokens(tokens) for tokens in draft.tokens))
            self.journal.append(record)
        return record

    @property
    def suffix(self) -> str:
        """Of the names of recordings."""
        return ".wav" if self.speech is None else self.speech.form.suffix

    @property
    def _in_arks(self) -> bool:
        return self.speech is not None and self.speech.form.in_arks

    def _write_sound(self, clip: Clip, wav: np.ndarray) -> tuple[str, str, Part, int]:
        """Where the samples are now below the directory (``file`` or ``ark:byte``), file and part, and how many were clipped."""
        from ..audio.writing import append_to_ark, write_wav

        form, rate = self.speech.form, self.speech.sample_rate
        if not form.in_arks:
            clipped = write_wav(self.directory / clip.file, wav, rate, form)
            return clip.file, clip.file, part_of(self.directory / clip.file), clipped
        folder, _, name = clip.file.rpartition("/")
        ark = f"{folder}/data_{form.container}.ark".removeprefix("/")
        with self._lock:
            if ark not in self._arks and self._fresh:
                (self.directory / ark).unlink(missing_ok=True)  # of a run that is not gone on with
            self._arks.add(ark)
            start, clipped = append_to_ark(self.directory / ark, name.removesuffix(form.suffix), wav, rate, form)
            part = part_of(self.directory / ark, start)
        return f"{ark}:{start}", ark, part, clipped

    def begin(self) -> None:
        """Opens the journal for this run, before the first draft.

        The result files of an earlier run that is not gone on with are removed: until this one writes its own they would name
        recordings that it has replaced, and look like its results if it was killed.
        """
        if self.journal.begin():
            for path in self.result_files():
                path.unlink(missing_ok=True)

    def result_files(self) -> Iterable[Path]:
        """What ``finish`` has written, of any number of ranks."""
        return ()

    @abstractmethod
    def finish(self, keys: Sequence[str]) -> None:
        """Writes the result files with ``keys`` in their order, each once, leaving out those that failed."""

    def written(self, keys: Sequence[str]) -> list[Record]:
        """Records of the keys that have results, in the order of ``keys``."""
        found = [self.journal.records.get(key) for key in keys]
        return [record for record in found if record is not None and record.outcome not in FAILED]

    def name(self, file: str) -> str:
        """How result files name ``file``."""
        return str(self.directory / file)


def _renamed(value: Any, places: Mapping[str, str]) -> Any:
    """JSON with the names of files as ``places`` has them."""
    if isinstance(value, list | tuple):
        return [_renamed(one, places) for one in value]
    return places.get(value, value) if isinstance(value, str) else value


def generated_rows(hypotheses: Sequence[Hypothesis]) -> int:
    """Rows that the engine made for ``hypotheses``."""
    return sum(len(result.rows) for h in hypotheses for _, result in h.requests)
