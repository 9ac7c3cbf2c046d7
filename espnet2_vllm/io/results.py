"""What the writers of both families share: from a result to waveforms, tokens and one line of the journal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CodecError, DataError, SpeechLMError
from ..layout import Layout
from ..plan import FAILED, REFUSED, Hypothesis, Result
from .journal import Journal, Record, digest
from .scores import Scores, scores_file, scores_of, write_scores

if TYPE_CHECKING:
    from ..codec import Codec

# What is counted on the way (``ResultWriter.notes``).
BREAKS = "line breaks in texts were written as escapes (\\n)"
OUTSIDE = "audio ids were no code of their stream and became the nearest one"
CLIPPED = "samples were beyond full scale and were clipped"

# Frames decoded by one call of the codec at most: bounds its memory (about 160 s at 50 frames a second).
_CODEC_FRAMES = 8192


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
    """

    def __init__(self, codec: Codec, *, silent_frames: int = 0) -> None:
        self.codec, self.silent_frames = codec, silent_frames

    @property
    def sample_rate(self) -> int:
        return self.codec.sample_rate

    def decode(self, clips: Sequence[np.ndarray]) -> list[np.ndarray | CodecError]:
        """Codes [T, C] of each clip to float32 samples [T * hop], or what went wrong with it."""
        wavs: list[np.ndarray | CodecError] = [
            np.zeros(len(codes) * self.codec.hop, dtype=np.float32) for codes in clips
        ]
        batch: list[int] = []
        frames = 0
        for index, codes in enumerate(clips):
            if len(codes) <= self.silent_frames:
                continue
            if batch and frames + len(codes) > _CODEC_FRAMES:
                self._decode_batch(clips, batch, wavs)
                batch, frames = [], 0
            batch.append(index)
            frames += len(codes)
        self._decode_batch(clips, batch, wavs)
        return wavs

    def _decode_batch(
        self, clips: Sequence[np.ndarray], batch: Sequence[int], wavs: list[np.ndarray | CodecError]
    ) -> None:
        try:
            decoded = self.codec.decode_batch([clips[i] for i in batch])
        except (SpeechLMError, RuntimeError, ValueError, IndexError) as error:
            if len(batch) > 1:  # whichever it is, the others are not to blame
                for index in batch:
                    self._decode_batch(clips, [index], wavs)
                return
            decoded = [CodecError(f"the codec could not decode the clip: {type(error).__name__}: {error}")]
        for index, wav in zip(batch, decoded, strict=True):
            wavs[index] = wav


class ResultWriter(ABC):
    """Writes the results of one directory.

    ``draft`` and ``finish`` belong to the thread that decodes; ``commit`` may run in another one, one call at a time.

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
        record = draft.record
        try:
            for clip, wav in zip(draft.clips, wavs, strict=True):
                if isinstance(wav, SpeechLMError):
                    raise wav
                self._write_wav(clip, wav)
        except SpeechLMError as error:
            record = replace(record, outcome=REFUSED, reason=str(error), result=None)
            self.journal.append(record)
            return record
        files = [clip.file for clip in draft.clips]
        if draft.scores is not None:
            files.append(scores_file(record.key))
            write_scores(self.directory / files[-1], draft.scores)
        audio = sum(len(wav) for clip, wav in zip(draft.clips, wavs, strict=True) if clip.generated)
        record = replace(
            record,
            files=tuple(files),
            audio_seconds=round(audio / self.speech.sample_rate, 4) if audio else 0.0,
            tokens=tuple(self.journal.save_tokens(tokens) for tokens in draft.tokens),
        )
        self.journal.append(record)
        return record

    def _write_wav(self, clip: Clip, wav: np.ndarray) -> None:
        from ..audio.writing import write_wav

        self.notes[CLIPPED] += write_wav(self.directory / clip.file, wav, self.speech.sample_rate)

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


def generated_rows(hypotheses: Sequence[Hypothesis]) -> int:
    """Rows that the engine made for ``hypotheses``."""
    return sum(len(result.rows) for h in hypotheses for _, result in h.requests)
