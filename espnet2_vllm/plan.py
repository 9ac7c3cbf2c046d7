"""What is decoded and what comes back: utterances of given and wanted parts, requests of rows, results of segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .layout import Layout
from .protocol import Rules

# What to do with a recording above 30 s: hear all of it, as ESPnet does; only its beginning, as older ESPnet; or an error.
LONG_AUDIO = ("whole", "cut", "refuse")

# In place of an utterance, where the next one is not ready yet (``audio.ahead``).
LATER = "later"


@dataclass(frozen=True, eq=False)
class Continuous:
    """Rows that stand for sound that the model hears through a continuous encoder. Their ids are pads; vectors take their place.

    Attributes:
        start: first of them among the rows of its part, or of the prompt of a request.
        count: how many.
        wav: [n] float32 mono at the encoder's rate; None where the vectors are known and the sound is no longer needed.
        vectors: [count, H] tensor on the CPU in the dtype of the model: what the backbone takes in place of the sum of
            embeddings. None until the encoder has run (``audio.tower``).
    """

    start: int
    count: int
    wav: np.ndarray | None = None
    vectors: Any = None


@dataclass(frozen=True)
class Given:
    """Rows that are known: conditions, user turns, earlier answers.

    Attributes:
        rows: [R, S] int32. OpusLM: before the delay, as ESPnet's ``dec_seq`` has them. Bagpiper: as the model sees them.
        modality: name in the checkpoint's own words (``text_bpe``, ``codec_ssl``, ``spk``, ...); empty for a Bagpiper prompt.
        role: dialogue role, or empty.
        is_target: a reference that is fed instead of generated (``inference_last_segment``).
        continuous: which of the rows are continuous, in their order (Bagpiper).
    """

    rows: np.ndarray
    modality: str = ""
    role: str = ""
    is_target: bool = False
    continuous: tuple[Continuous, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """A part to generate. OpusLM: one segment. Bagpiper: the whole answer.

    Attributes:
        header: [h, S] rows that announce the segment (OpusLM: modality, or role and modality; Bagpiper: ``<|assistant|>``).
        modality: as in ``Given``; empty for Bagpiper, whose answer announces its own segments.
        role: dialogue role, or empty.
        reference: [R, S] the reference behind the header, before the delay (content, end, pads), for teacher forcing.
        frames: that the segment must have where ``DecodingConfig.fixed_length`` is on; None if nothing says.
    """

    header: np.ndarray
    modality: str = ""
    role: str = ""
    reference: np.ndarray | None = None
    frames: int | None = None


@dataclass(frozen=True)
class Utterance:
    """One thing to decode.

    Attributes:
        key: the id under which results are written.
        parts: in the order of the sequence.
        info: what writers need to know besides (task, entry names, texts as read); never looked at by engines.
    """

    key: str
    parts: tuple[Given | Wanted, ...]
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RowRequest:
    """What an engine executes: rows in, rows out.

    Attributes:
        request_id: unique among the requests in flight.
        prompt: [P, S] int32 rows as fed (delayed), P >= 1.
        rules: the family's protocol for the rows that follow.
        seed: of the sampling noise; 0 <= seed < 2**63.
        reference: [R, S] rows as fed behind the prompt (teacher forcing): the engine returns the R masked argmax rows
            under this history and applies no other rule.
        stream: hand out rows before the end (``Engine.take_rows``): first when an audio segment has ``stream[0]`` rows, then
            after every ``stream[1]``, and where a segment ends. None: all rows come at the end, and nothing is spent on it.
        continuous: which rows of the prompt are continuous, with their vectors.
    """

    request_id: str
    prompt: np.ndarray
    rules: Rules
    seed: int = 0
    reference: np.ndarray | None = None
    stream: tuple[int, int] | None = None
    continuous: tuple[Continuous, ...] = ()


@dataclass(frozen=True)
class RowResult:
    """What came out.

    Attributes:
        rows: [N, S] int32 ids as emitted.
        logprobs: [N, S] float32, log-probability of each id after mask, top-k, temperature and top-p; 0 where the id was forced.
        forced: [N, S] bool, ids that were imposed.
        finish: ``stop`` (the protocol ended), ``length`` (the context is full) or ``abort``.
        logits: per row (stream 0 [V], streams 1.. [S-1, W]) raw float32 logits, if the engine was asked to keep them. The
            columns of the second are ``Layout.auxiliary_candidates``. The companion's two may stand behind those of a guided row.
    """

    rows: np.ndarray
    logprobs: np.ndarray
    forced: np.ndarray
    finish: str = "stop"
    logits: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Segment:
    """One segment of a result.

    Attributes:
        modality: ``text`` or ``audio`` (or the undecodable modality that the model chose).
        name: the checkpoint's own name (``text_bpe``, ``codec_ssl``, ``spk``; Bagpiper: as ``modality``).
        generated: False for given parts.
        rows: [n, S] content. OpusLM: frames before the delay, end excluded. Bagpiper: rows as emitted (delayed), stop row
            excluded.
        header: [h, S] rows in front of the content.
        end: ``given``, ``eos``, ``eot``, ``max_rows``, ``forced`` (OpusLM's forced end), ``fixed`` (the same, where the length was
            fixed), ``teacher``, ``context`` or ``refused``.
        emitted: [m, S] every row as emitted, stop row and drain included (empty for given parts).
        logprobs, forced: as ``emitted``.
        first: index of ``emitted[0]`` among the rows of the request's result.
    """

    modality: str
    name: str
    generated: bool
    rows: np.ndarray
    header: np.ndarray
    end: str
    role: str = ""
    emitted: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    forced: np.ndarray | None = None
    first: int = 0
    is_target: bool = True


@dataclass(frozen=True)
class Hypothesis:
    """Segments in the order of the sequence, given ones included (Bagpiper: generated ones only).

    ``requests`` are the engine's requests and results behind it, in order.
    """

    segments: tuple[Segment, ...]
    requests: tuple[tuple[RowRequest, RowResult], ...] = ()


OK, LENGTH, NO_AUDIO, ABORT, REFUSED = OUTCOMES = "ok", "length", "no_audio", "abort", "refused"
FAILED = (ABORT, REFUSED)  # outcomes that leave no result


@dataclass(frozen=True, repr=False)
class Result:
    """Outcome of one utterance: exactly one for each key.

    Attributes:
        outcome: ``ok`` (everything ended by itself), ``length`` (cut by the most rows allowed or by the context; what was there
            is in the result), ``no_audio`` (audio was asked for and none came), ``abort`` (the engine gave a request up after it
            had begun) or ``refused`` (it could not be decoded at all).
        reason: why, when it is not ``ok``.
    """

    key: str
    hypotheses: tuple[Hypothesis, ...]
    outcome: str = OK
    reason: str = ""
    utterance: Utterance | None = None

    def __repr__(self) -> str:
        found = [f"{len(s.rows)} rows of {s.modality}" for h in self.hypotheses[:1] for s in h.segments if s.generated]
        more = f", and {len(self.hypotheses) - 1} more hypotheses" if len(self.hypotheses) > 1 else ""
        why = f": {self.reason}" if self.reason else ""
        return f"<Result {self.key!r} {self.outcome}{why}: {', '.join(found) or 'nothing'}{more}>"


def text_ids(layout: Layout, segment: Segment) -> np.ndarray:
    """Tokenizer ids of a text segment: stream 0 minus the start of the text span. May be negative for non-text ids. [n]"""
    return segment.rows[:, 0].astype(np.int64) - layout.text.start
