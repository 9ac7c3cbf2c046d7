"""Turns an utterance into engine requests and their results into segments; the same for every backend.

A driver is a generator: it yields a ``RowRequest``, is sent the ``RowResult``, and returns a ``Hypothesis``.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import secrets
from collections.abc import Generator
from dataclasses import replace

import numpy as np

from . import delay
from .decoding import DecodingConfig, SegmentConfig
from .errors import ConfigError, DataError
from .layout import Layout
from .plan import Continuous, Given, Hypothesis, RowRequest, RowResult, Segment, Utterance, Wanted
from .protocol import BagpiperRules, ModalityRules, OpusLMRules, Sampling, replay

log = logging.getLogger(__name__)

Driver = Generator[RowRequest, RowResult, Hypothesis]


def seed_of(seed: int, key: str, hypothesis: int) -> int:
    """Seed of one hypothesis of one utterance: does not depend on the order or number of utterances."""
    digest = hashlib.blake2b(f"{seed}/{hypothesis}/{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw_seed() -> int:
    """A seed from the operating system, for a run that was given none; logged, so that the run can be had again."""
    seed = secrets.randbits(31)
    log.info("no seed was given: drew seed %d", seed)
    return seed


def checked_seed(seed: int | None) -> int:
    """``seed``, or one that is drawn. ConfigError for what is no whole number."""
    if seed is None:
        return draw_seed()
    try:
        return operator.index(seed)
    except TypeError:
        raise ConfigError(f"seed: expected a whole number, or None to draw one, got {seed!r}") from None


def modality_of_name(name: str) -> str:
    """``text`` or ``audio`` for a modality name of OpusLM (``text_bpe``, ``codec_ssl``, ``spk``, ...)."""
    return "audio" if name in ("codec_ssl", "codec", "ssl", "spk", "wav") else "text"


def sampling_of(config: SegmentConfig) -> Sampling:
    if config.greedy or config.search == "teacher_force":
        return Sampling()
    return Sampling(config.temperature, config.topk, config.top_p)


def drive(
    layout: Layout,
    utterance: Utterance,
    config: DecodingConfig,
    *,
    seed: int = 0,
    hypothesis: int = 0,
    context: int | None = None,
) -> Driver:
    """Driver of one hypothesis of ``utterance``; ``context`` is the model's rows, needed by length ratios of 0.

    Raises:
        DataError: (from the generator) naming the utterance, when it cannot be decoded under ``config``.
    """
    seed = seed_of(seed, utterance.key, hypothesis)
    if layout.family == "opuslm":
        return _drive_opuslm(layout, utterance, config, seed, hypothesis, context)
    return _drive_bagpiper(layout, utterance, config, seed, hypothesis)


# -- OpusLM ------------------------------------------------------------------------------------------------------------
def _drive_opuslm(
    layout: Layout, utterance: Utterance, config: DecodingConfig, seed: int, hypothesis: int, context: int | None
) -> Driver:
    history: list[np.ndarray] = []  # rows as fed, all earlier turns
    pending: list[np.ndarray] = []  # given rows since the last generated segment, before the delay
    segments, requests = [], []
    for index, part in enumerate(utterance.parts):
        if isinstance(part, Given):
            pending.append(part.rows)
            segments.append(_given_segment(part))
            continue
        prefill = delay.shift(np.concatenate([*pending, part.header]))
        if len(prefill) < 2:
            # ESPnet raises here too: its prefill without the last row would be empty.
            raise DataError(
                f"{utterance.key}: nothing stands before segment {index}, at least two prompt rows are needed"
            )
        rules, reference = _opuslm_rules(layout, utterance, part, config, len(prefill), context)
        name = f"{utterance.key}/{hypothesis}/{index}"
        request = RowRequest(name, np.concatenate([*history, prefill]), rules, seed, reference)
        result = yield request
        requests.append((request, result))
        segments.append(_opuslm_segment(rules, part, result, reference, config.fixed_length))
        history += [prefill, result.rows if reference is None else reference]
        pending = []
    return Hypothesis(tuple(segments), tuple(requests))


def _given_segment(part: Given) -> Segment:
    empty = part.rows[:0]
    return Segment(
        modality_of_name(part.modality),
        part.modality,
        False,
        part.rows,
        empty,
        "given",
        part.role,
        is_target=part.is_target,
    )


def _opuslm_rules(
    layout: Layout, utterance: Utterance, part: Wanted, config: DecodingConfig, prompt_rows: int, context: int | None
) -> tuple[OpusLMRules, np.ndarray | None]:
    modality = modality_of_name(part.modality)
    block = config.segment(modality)
    sampling = sampling_of(block)
    if block.search != "teacher_force":
        if config.fixed_length:
            low, high = _fixed_limits(layout, utterance, part, config)
        else:
            low, high = block.rows_limits(prompt_rows, num_streams=layout.num_streams, context=context)
        if high < layout.num_streams:
            raise DataError(
                f"{utterance.key}: at most {high} rows for {prompt_rows} prompt rows, but the drain of {layout.num_streams} "
                f"streams alone needs {layout.num_streams}; raise maxlen or maxlenratio in {config.source}"
            )
        return OpusLMRules(layout, modality, sampling, low, high), None
    if part.reference is None or not len(part.reference):
        raise DataError(
            f"{utterance.key}: search_algo teacher_force in {config.source} needs a reference for {part.modality}"
        )
    reference = delay.shift(part.reference)
    length = max(len(reference), layout.num_streams)
    return OpusLMRules(layout, modality, sampling, length + 1, length), reference


def _fixed_limits(layout: Layout, utterance: Utterance, part: Wanted, config: DecodingConfig) -> tuple[int, int]:
    """(min_rows, max_rows) of a segment of exactly ``part.frames`` frames.

    ESPnet's ``minlen`` and ``maxlen`` are the length and S - 1 (``ARDelayLM.inference``, branch speechlm3). Here: the end may
    come behind the last frame at the earliest, and is forced one row later, where a forced end drops the row before it.
    """
    if not part.frames:
        missing = "nothing says" if part.frames is None else "an entry without frames says"
        raise DataError(
            f"{utterance.key}: {missing} how long the segment {part.modality} has to be, which fixed_length in {config.source} "
            "asks for; leave it out"
        )
    return part.frames, part.frames + layout.num_streams


def _opuslm_segment(
    rules: OpusLMRules, part: Wanted, result: RowResult, reference: np.ndarray | None, fixed: bool = False
) -> Segment:
    if reference is None:
        state, _ = replay(rules, [tuple(map(int, row)) for row in result.rows])
        finish = state.finish
        own = finish >= 1 and result.rows[finish - 1, 0] == rules.layout.specials["eos"]
        cut = "fixed" if fixed else "forced"
        end = "context" if finish < 0 or result.finish == "length" else "eos" if own else cut
        rows = result.rows
    else:
        rows, finish = _teacher_rows(rules.layout, result.rows, reference)
        end = "teacher"
    frames = delay.undo(rows)
    content = frames if finish < 0 else frames[: max(finish - 1, 0)]
    return Segment(
        rules.modality, part.modality, True, content, part.header, end, part.role,
        emitted=rows, logprobs=result.logprobs, forced=result.forced,
    )  # fmt: skip


def _teacher_rows(layout: Layout, chosen: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, int]:
    """Rows 6 and 7 of ESPnet's loop over teacher-forced choices, with the end where the reference has it."""
    ends = np.flatnonzero(reference[:, 0] == layout.specials["eos"])
    finish = int(ends[0]) + 1 if len(ends) else len(reference)
    rows = chosen.copy()
    step, stream = np.arange(len(rows))[:, None], np.arange(layout.num_streams)[None, :]
    rows[(stream > step) | ((step > finish) & (stream < step - finish + 1))] = layout.pad
    return rows, finish


# -- Bagpiper ----------------------------------------------------------------------------------------------------------
def _drive_bagpiper(layout: Layout, utterance: Utterance, config: DecodingConfig, seed: int, hypothesis: int) -> Driver:
    """Hypothesis 0 generates the whole answer; the others only its last segment, whose number they make up."""
    prompt = np.concatenate([part.rows if isinstance(part, Given) else part.header for part in utterance.parts])
    rules = bagpiper_rules(layout, config)
    request = RowRequest(f"{utterance.key}/{hypothesis}", prompt, rules, seed, continuous=_continuous_rows(utterance))
    result = yield request
    return Hypothesis(tuple(bagpiper_segments(rules, result)), ((request, result),))


def _continuous_rows(utterance: Utterance) -> tuple[Continuous, ...]:
    """Those of all parts, counted from the first row of the prompt."""
    found, start = [], 0
    for part in utterance.parts:
        if isinstance(part, Given):
            found += [replace(rows, start=start + rows.start, wav=None) for rows in part.continuous]
            start += len(part.rows)
        else:
            start += len(part.header)
    for rows in found:
        assert rows.vectors is not None, f"{utterance.key}: continuous rows at {rows.start} were not encoded"
    return tuple(found)


def bagpiper_rules(layout: Layout, config: DecodingConfig) -> BagpiperRules:
    return BagpiperRules(layout, config.enforce_modality, _modality_rules(config.text), _modality_rules(config.audio))


def _modality_rules(block: SegmentConfig | None) -> ModalityRules | None:
    if block is None:
        return None
    return ModalityRules(sampling_of(block), block.min_rows, block.max_rows, max(block.cfg, 1.0), block.num_hypo > 1)


def bagpiper_segments(rules: BagpiperRules, result: RowResult) -> list[Segment]:
    """Splits the rows of an answer into its segments: [modality row] content [stop row] per segment."""
    _, steps = replay(rules, [tuple(map(int, row)) for row in result.rows])
    state, segments, start = rules.start(), [], None
    for i, step in enumerate(steps):
        before, (state, _) = state, rules.advance(state, step.emitted)
        if before.phase == 0:
            start = i
        if step.ends_segment or (i == len(steps) - 1 and start is not None):
            segments.append(_bagpiper_segment(rules, result, start, i, step.ends_segment))
            start = None
    return segments


def _bagpiper_segment(rules: BagpiperRules, result: RowResult, start: int, last: int, ended: bool) -> Segment:
    layout = rules.layout
    header, emitted = result.rows[start : start + 1], result.rows[start + 1 : last + 1]
    modality = layout.modality_of(int(header[0, 0])) or "unknown"
    known = {"text": rules.text, "audio": rules.audio}.get(modality)
    final = int(emitted[-1, 0]) if len(emitted) else -1
    if known is None:
        end = "refused"
    elif not ended:
        end = "context"
    elif final in layout.end_tokens:
        end = "eos" if final == layout.specials["eos"] else "eot"
    else:
        end = "max_rows"
    content = emitted[:-1] if end in ("eos", "eot") else emitted
    span = slice(start + 1, last + 1)
    return Segment(
        modality, modality, True, content, header, end, "assistant",
        emitted=emitted, logprobs=result.logprobs[span], forced=result.forced[span], first=start + 1,
    )  # fmt: skip


def more_hypotheses(config: DecodingConfig, first: Hypothesis) -> int:
    """How many further hypotheses of the last segment a Bagpiper answer needs (ESPnet ``num_hypo``)."""
    block = getattr(config, first.segments[-1].modality, None) if first.segments else None
    return block.num_hypo - 1 if isinstance(block, SegmentConfig) else 0


def drive_again(
    layout: Layout, utterance: Utterance, config: DecodingConfig, first: Hypothesis, *, seed: int, hypothesis: int
) -> Driver:
    """Another hypothesis of the last segment of ``first``: the answer up to there is prompt."""
    segment = first.segments[-1]
    request, result = first.requests[-1]
    rules = request.rules
    _, steps = replay(rules, [tuple(map(int, row)) for row in result.rows[: segment.first - 1]])
    fed = np.array([step.fed for step in steps], dtype=np.int32).reshape(-1, layout.num_streams)
    again = BagpiperRules(layout, (segment.modality,), rules.text, rules.audio)
    name = f"{utterance.key}/{hypothesis}"
    prompt = np.concatenate([request.prompt, fed])
    more = RowRequest(name, prompt, again, seed_of(seed, utterance.key, hypothesis), continuous=request.continuous)
    outcome = yield more
    return Hypothesis((*first.segments[:-1], *bagpiper_segments(again, outcome)), ((more, outcome),))
