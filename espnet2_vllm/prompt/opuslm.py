"""OpusLM: from the entries of an example to the rows of its sequence, and from these to what is given and what is wanted.

Sources: ESPnet ``SpeechLMPreprocessor`` (espnet2/train/preprocessor.py) and ``parse_sequence``
(espnet2/speechlm/inference_utils.py), branch ``inference``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import CheckpointError, DataError
from ..layout import Layout
from ..plan import Given, Utterance, Wanted
from .tasks import AUDIO_MODALITIES, TEXT_MODALITIES, Entry, Task

ROLES = ("system", "user", "assistant")


class Tokenizer(Protocol):
    """What is needed of ``text.TextTokenizer``."""

    def encode_opuslm(self, text: str) -> list[int]: ...


class Turn(NamedTuple):
    """One turn of a dialogue. ``content`` is a text, or codes as in ``Content``."""

    role: str
    modality: str
    is_target: bool
    content: Any


# A text; codes as an ark holds them (int, flat or [frames, codes a frame], counted from the start of the SSL span, 0 is pad);
# turns; or None for a target that is not known.
Content = str | np.ndarray | Sequence[Turn] | None


@dataclass(frozen=True)
class Facts:
    """What the preprocessor of a checkpoint was set to (its config.yaml).

    Attributes:
        speaker_prompt_length: rows of a speaker prompt.
        pad_speaker_prompt: whether shorter ones are filled up with empty rows.
        n_ctx: a sequence keeps its first ``n_ctx - S`` rows; None keeps all.
        codes_per_frame: ids per frame in arks (``codec_token_per_frame``), of which the first S are used.
        delayed: whether pad rows follow each segment (``corelm: ar_delay``).
    """

    speaker_prompt_length: int = 150
    pad_speaker_prompt: bool = True
    n_ctx: int | None = None
    codes_per_frame: int = 0
    delayed: bool = True

    def __post_init__(self) -> None:
        for name in ("speaker_prompt_length", "codes_per_frame"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise CheckpointError(
                    f"preprocessor: {name} is {value!r}, expected a whole number that is not negative"
                )
        if self.n_ctx is not None and (type(self.n_ctx) is not int or self.n_ctx < 1):
            raise CheckpointError(f"preprocessor: n_ctx is {self.n_ctx!r}, expected a positive whole number")

    @classmethod
    def from_preprocessor(cls, facts: Mapping[str, Any]) -> Facts:
        """From ``Checkpoint.preprocessor``, whose names are those of config.yaml; what is missing has ESPnet's default."""
        known = {
            "speaker_prompt_length": "speaker_prompt_length",
            "pad_speaker_prompt": "pad_speaker_prompt",
            "n_ctx": "n_ctx",
            "codec_token_per_frame": "codes_per_frame",
        }
        values = {field: facts[name] for name, field in known.items() if facts.get(name) is not None}
        return cls(**values, delayed=facts.get("corelm", "ar_delay") == "ar_delay")


# -- the sequence ------------------------------------------------------------------------------------------------------
def opuslm_sequence(
    layout: Layout, tokenizer: Tokenizer, task: Task, entries: Mapping[str, Content], facts: Facts, rng: random.Random
) -> np.ndarray:
    """Rows of an example, reference included: ESPnet's ``dec_seq``.

    ``<sos/eos> <task>``, then per entry ``<modality>``, content, the end token if it is a target, S - 1 pad rows.

    Args:
        entries: content by entry name. A target may be None: then its segment is its first row alone.
        rng: places the window in a speaker prompt that is too long (ESPnet: Python's ``random``, seeded for each example).

    Returns:
        [T, S] int32.

    Raises:
        DataError: if an entry has the wrong kind of content or codes of another layout.
    """
    parts = _Parts(layout, tokenizer, facts, rng)
    segments = [parts.specials("eos"), parts.specials(parts.named("task", task.name, "data.json"))]
    if task.chat:
        (entry,) = task.targets
        segments += [parts.turn(turn, f"turn {i} of {entry.name}") for i, turn in enumerate(entries[entry.name])]
    else:
        segments += [parts.entry(entry, entries[entry.name], entry in task.targets) for entry in task.entries]
    rows = np.concatenate(segments)
    if task.name == "textlm":
        # Nothing announces the text: the model goes on from its very first token.
        rows = rows[3:]
    return rows if facts.n_ctx is None else rows[: max(facts.n_ctx - layout.num_streams, 0)]


@dataclass(frozen=True)
class _Parts:
    """Rows of the parts of one sequence."""

    layout: Layout
    tokenizer: Tokenizer
    facts: Facts
    rng: random.Random

    def named(self, kind: str, name: str, where: str) -> str:
        """Name of a special token of the checkpoint."""
        special = f"{kind}/{name}"
        if special not in self.layout.specials:
            known = sorted(n.removeprefix(f"{kind}/") for n in self.layout.specials if n.startswith(f"{kind}/"))
            raise DataError(f"{where}: the checkpoint has no token for {kind} {name!r}; it has {', '.join(known)}")
        return special

    def empty(self, count: int) -> np.ndarray:
        return np.full((count, self.layout.num_streams), self.layout.pad, dtype=np.int32)

    def primary(self, ids: Sequence[int]) -> np.ndarray:
        rows = self.empty(len(ids))
        rows[:, 0] = ids
        return rows

    def specials(self, *names: str) -> np.ndarray:
        return self.primary([self.layout.specials[name] for name in names])

    def entry(self, entry: Entry, content: Content, target: bool) -> np.ndarray:
        header = self.specials(self.named("modality", entry.modality, entry.name))
        if content is None and target:
            return header
        return np.concatenate([header, self.content(entry.modality, content, entry.name), *self.tail(target)])

    def turn(self, turn: Turn, where: str) -> np.ndarray:
        if turn.role not in ROLES:
            raise DataError(f"{where}: role {turn.role!r} is unknown; expected one of {', '.join(ROLES)}")
        # The voice that a system turn asks for is a speaker prompt to the model.
        modality = "spk" if (turn.role, turn.modality) == ("system", "codec_ssl") else turn.modality
        header = self.specials(turn.role, self.named("modality", modality, where))
        return np.concatenate([header, self.content(modality, turn.content, where), *self.tail(turn.is_target)])

    def tail(self, target: bool) -> list[np.ndarray]:
        pads = self.empty(self.layout.num_streams - 1 if self.facts.delayed else 0)
        return [self.specials("eos"), pads] if target else [pads]

    def content(self, modality: str, content: Content, where: str) -> np.ndarray:
        if modality in TEXT_MODALITIES:
            if not isinstance(content, str):
                raise DataError(f"{where}: expected a text, got {type(content).__name__}")
            return self.primary([self.layout.text.start + i for i in self.tokenizer.encode_opuslm(content)])
        if modality not in AUDIO_MODALITIES:
            raise DataError(f"{where}: content of modality {modality} cannot be read")
        if not isinstance(content, np.ndarray):
            raise DataError(f"{where}: expected codes, got {type(content).__name__}")
        rows = code_rows(self.layout, content, where, self.facts.codes_per_frame)
        return self.speaker(rows) if modality == "spk" else rows

    def speaker(self, rows: np.ndarray) -> np.ndarray:
        length = self.facts.speaker_prompt_length
        if len(rows) > length:
            start = self.rng.randint(0, len(rows) - length - 1)
            return rows[start : start + length]
        fill = self.empty(length - len(rows) if self.facts.pad_speaker_prompt else 0)
        return np.concatenate([rows, fill])


def code_rows(layout: Layout, codes: np.ndarray, where: str, codes_per_frame: int = 0) -> np.ndarray:
    """Rows of codes as arks hold them.

    A 0 stays the pad, also where it means SSL unit 0: the preprocessor cannot tell them apart.

    Args:
        codes: integers, flat or [frames, codes a frame], counted from the start of the SSL span.
        codes_per_frame: ids per frame; 0 is S.

    Returns:
        [frames, S] int32.

    Raises:
        DataError: if the codes do not come out even or lie outside the spans of their streams.
    """
    width = codes_per_frame or layout.num_streams
    if codes.dtype.kind not in "iu":
        raise DataError(f"{where}: codes must be whole numbers, got {codes.dtype}")
    if codes.size % width or (codes.ndim == 2 and codes.shape[1] != width):
        raise DataError(f"{where}: {codes.size} codes of shape {codes.shape} are no whole frames of {width}")
    if width < layout.num_streams:
        raise DataError(f"{where}: {width} codes a frame, but the checkpoint has {layout.num_streams} streams")
    values = codes.reshape(-1, width)[:, : layout.num_streams].astype(np.int64)
    rows = np.where(values == layout.pad, layout.pad, values + layout.streams[0].start)
    start, stop = (np.array([span[i] for span in layout.streams]) for i in (0, 1))
    bad = np.argwhere((rows != layout.pad) & ((rows < start) | (rows >= stop)))
    if len(bad):
        frame, stream = (int(i) for i in bad[0])
        low, high = start[stream] - start[0], stop[stream] - start[0] - 1
        raise DataError(
            f"{where}: code {values[frame, stream]} of stream {stream} at frame {frame} is outside {low}..{high} "
            f"({len(bad)} such codes); were they made with the checkpoint's own codec and SSL model?"
        )
    return rows.astype(np.int32)


# -- given and wanted --------------------------------------------------------------------------------------------------
class Bounds(NamedTuple):
    """A segment: rows [start, stop); ``mark`` is its modality row."""

    start: int
    stop: int
    given: bool
    mark: int


def segment_bounds(layout: Layout, rows: np.ndarray, task: Task, inference_last_segment: bool = False) -> list[Bounds]:
    """Segments of a sequence (ESPnet ``parse_sequence``); none if no modality row is in it, as in textlm.

    Task: targets are generated. Dialogue: turns of the assistant are, but for the first segment, which begins with the
    sequence itself. ``inference_last_segment``: only the last segment is.
    """
    modalities = [token for name, token in layout.specials.items() if name.startswith("modality/")]
    marks = np.flatnonzero(np.isin(rows[:, 0], modalities)).tolist()
    starts = [0, *(mark - 1 if task.chat else mark for mark in marks[1:])] if marks else []
    stops = [*starts[1:], len(rows)]
    bounds = []
    for i, (mark, start, stop) in enumerate(zip(marks, starts, stops, strict=False)):
        if task.chat:
            given = int(rows[start, 0]) != layout.specials["assistant"]
        else:
            given = i < len(task.conditions)
        last = i == len(marks) - 1
        bounds.append(Bounds(start, stop, given or (inference_last_segment and not last), mark))
    return bounds


def opuslm_utterance(
    layout: Layout,
    rows: np.ndarray,
    task: Task,
    *,
    key: str,
    inference_last_segment: bool = False,
    prompt_frames: int = 0,
    info: Mapping[str, Any] | None = None,
) -> Utterance:
    """What is given and what is wanted of a sequence.

    A task without conditions, where ESPnet's own call fails, has one part, whose header is the whole prompt: the text
    (textlm), or ``<sos/eos> <task> <modality>`` and the first ``prompt_frames`` frames (audiolm).

    Args:
        rows: [T, S] from ``opuslm_sequence``.
        prompt_frames: frames to continue from; only for a task without conditions.
        info: for ``Utterance.info``, beside ``task``, ``entries`` (names, a task's only) and ``chat``.

    Raises:
        DataError: if nothing is left to generate, or the prompt is empty.
    """
    facts = {"task": task.name, "chat": task.chat, **(info or {})}
    if not task.chat:
        facts["entries"] = tuple(entry.name for entry in task.entries)
    if task.continues:
        return Utterance(key, (_continuation(layout, rows, task, prompt_frames),), facts)
    if prompt_frames:
        raise DataError(f"task {task.name} has conditions; frames to continue from are for audiolm tasks")
    bounds = segment_bounds(layout, rows, task, inference_last_segment)
    if all(bound.given for bound in bounds) or (not task.chat and len(bounds) < len(task.entries)):
        raise DataError(
            f"nothing is left to generate in {len(rows)} rows of task {task.name}: either no turn is the assistant's, or "
            "the conditions alone fill the n_ctx of the checkpoint's config.yaml; shorten them"
        )
    frames = _imposed_frames(layout, rows, task, bounds)
    return Utterance(key, tuple(_part(layout, rows, task, bound, frames) for bound in bounds), facts)


def _imposed_frames(layout: Layout, rows: np.ndarray, task: Task, bounds: Sequence[Bounds]) -> int | None:
    """Frames of the entry that the task's ``fixed_length_key`` names, without the pad rows behind it."""
    names = [entry.name for entry in task.entries]
    if task.fixed_length_key not in names:
        return None
    bound = bounds[names.index(task.fixed_length_key)]
    taken = np.flatnonzero((rows[bound.mark + 1 : bound.stop] != layout.pad).any(1))
    return int(taken[-1]) + 1 if len(taken) else 0


def _part(layout: Layout, rows: np.ndarray, task: Task, bound: Bounds, frames: int | None) -> Given | Wanted:
    modality = layout.modality_of(int(rows[bound.mark, 0]))
    role = ""
    if task.chat:
        names = {layout.specials[name]: name for name in ROLES}
        role = names[int(rows[bound.mark - 1, 0])]
    content = rows[bound.mark + 1 : bound.stop]
    if bound.given:
        is_target = bool((content[:, 0] == layout.specials["eos"]).any())
        return Given(rows[bound.start : bound.stop], modality, role, is_target)
    return Wanted(rows[bound.start : bound.mark + 1], modality, role, content if len(content) else None, frames)


def _continuation(layout: Layout, rows: np.ndarray, task: Task, prompt_frames: int) -> Wanted:
    (target,) = task.targets
    ends = np.flatnonzero(rows[:, 0] == layout.specials["eos"])
    if task.name == "textlm":
        prompt = int(ends[0]) if len(ends) else len(rows)
        if prompt < 2:
            raise DataError(f"a text of {prompt} tokens; textlm needs at least two to go on from")
    else:
        marks = np.flatnonzero(rows[:, 0] == layout.specials[f"modality/{target.modality}"])
        assert len(marks) == 1, f"{len(marks)} rows announce {target.modality} in a sequence of {task.name}"
        prompt = int(marks[0]) + 1 + prompt_frames
        available = (int(ends[1]) if len(ends) > 1 else len(rows)) - int(marks[0]) - 1
        if not 0 <= prompt_frames <= available:
            raise DataError(f"{prompt_frames} frames to continue from, but there are {available}")
    reference = rows[prompt:]
    return Wanted(rows[:prompt], target.modality, "", reference if len(reference) else None)
