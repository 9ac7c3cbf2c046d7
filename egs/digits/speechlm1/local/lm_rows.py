"""Training rows of both families, made by the package's own layout, prompt and delay code: what is trained is what is decoded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from espnet2_vllm import delay
from espnet2_vllm.codes import audio_rows
from espnet2_vllm.layout import Layout
from espnet2_vllm.prompt.bagpiper import bagpiper_prompt
from espnet2_vllm.prompt.opuslm import Facts, opuslm_sequence, segment_bounds
from espnet2_vllm.prompt.tasks import Task
from espnet2_vllm.protocol import AUDIO, MODALITY, TEXT

NOTHING = -1  # the phase of a row that nobody has to predict


@dataclass(frozen=True, eq=False)
class Spoken:
    """One utterance: its codes [T, books] and, for OpusLM, its units [T] from 1. ``uid`` is SPEAKER-KIND-NUMBER.

    ``ends``: for each token of its text the row of its speech by which it has been heard, if that is known (lm_align.py).
    """

    uid: str
    text: str
    codes: np.ndarray
    units: np.ndarray | None = None
    ends: tuple[int, ...] | None = None

    @property
    def speaker(self) -> str:
        return self.uid.split("-")[0]

    @property
    def kind(self) -> str:
        return self.uid.split("-")[1]

    @property
    def is_target(self) -> bool:
        """Whether its voice is one that the models are to speak with."""
        return self.speaker.startswith("tts")


@dataclass(frozen=True, eq=False)
class Example:
    """One sequence to learn from.

    Attributes:
        task: what it teaches, for the figures.
        rows: [N, S] int32 ids as the model is fed.
        targets: [N, S] bool, the ids that have to be predicted, each from the row before it.
        phases: [N] int8, MODALITY, TEXT or AUDIO of ``espnet2_vllm.protocol``, or NOTHING: which mask decodes the row.
        spoken: first row, its modality's, of the last spoken segment of an answer; 0 if there is none.
        said: of each stretch of speech its first row, the row behind it and what is said, ids of the tokenizer.
        coming: [N] of rows of an answer's speech the token of the text that is said next, one more than any when all has been said;
            NOTHING where it is not known.
    """

    task: str
    rows: np.ndarray
    targets: np.ndarray
    phases: np.ndarray
    spoken: int = 0
    said: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    coming: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)


# -- Bagpiper ----------------------------------------------------------------------------------------------------------
def bagpiper_example(layout: Layout, tokenizer: Any, messages: Sequence[Sequence[Any]], task: str) -> Example:
    """``messages`` are [role, modality, content]; the content of audio is ``Spoken``. The assistant's are learnt."""
    spoken = [content for _, modality, content in messages if modality == "audio"]
    clips = [
        [role, modality, (content.codes, 0) if modality == "audio" else content] for role, modality, content in messages
    ]

    def encode(found: Sequence[tuple[np.ndarray, int]]) -> list[np.ndarray]:
        return [audio_rows(layout, codes) for codes, _ in found]

    rows = bagpiper_prompt(layout, tokenizer, clips, encode_audio=encode, upto_assistant=False).rows
    ends = np.flatnonzero(np.isin(rows[:, 0], layout.end_tokens))
    targets = np.zeros(rows.shape, dtype=bool)
    phases = np.full(len(rows), NOTHING, dtype=np.int8)
    coming = np.full(len(rows), NOTHING, dtype=np.int64)
    said, last = [], 0
    for start in np.flatnonzero(np.isin(rows[:, 0], [layout.specials[name] for name in ("audio", "text")])).tolist():
        end = int(ends[ends > start][0])
        speech = rows[start, 0] == layout.specials["audio"]
        if speech:
            words = tokenizer.encode_bagpiper(spoken[len(said)].text)
            said.append((start + 1, end, tuple(words)))
        if rows[start - 1, 0] != layout.specials["assistant"]:
            continue
        phases[start], targets[start, 0] = MODALITY, True
        phases[start + 1 : end + 1] = AUDIO if speech else TEXT
        targets[start + 1 : end + 1, 0] = True
        if speech:
            targets[start + 1 : end, 1:] = True
            last = start
            mark_coming(coming, start + 1, end, spoken[len(said) - 1], said[-1][2], layout)
    assert len(said) == len(spoken), f"{len(spoken)} stretches of speech, but {len(said)} found in the rows"
    return Example(task, rows, targets, phases, last, tuple(said), coming)


def mark_coming(
    coming: np.ndarray, start: int, stop: int, spoken: Spoken, words: Sequence[int], layout: Layout
) -> None:
    """Fills in what is said next in rows start - 1 (before the first sound) to stop - 1 of ``spoken``."""
    if spoken.ends is not None:
        heard = np.searchsorted(spoken.ends, np.arange(-1, stop - start), side="right")
        coming[start - 1 : stop] = np.array([*words, layout.text.size])[heard]


def without_condition(example: Example, layout: Layout) -> Example:
    """What the unconditional branch of guidance sees: empty rows in place of all that stands before the spoken segment.

    Only the rows of that segment are learnt, its modality excepted, which is never guided.
    """
    assert example.spoken, "an example without a spoken answer has no unconditional form"
    rows, targets, phases = example.rows.copy(), example.targets.copy(), example.phases.copy()
    rows[: example.spoken] = layout.pad
    targets[: example.spoken + 1] = False
    phases[: example.spoken + 1] = NOTHING
    return replace(example, rows=rows, targets=targets, phases=phases, said=example.said[-1:], coming=None)


# -- OpusLM ------------------------------------------------------------------------------------------------------------
def spliced(layout: Layout, spoken: Spoken) -> np.ndarray:
    """Codes as arks hold them, [T, S] int32: unit, then each book counted on from the units."""
    codes, units = spoken.codes, spoken.units
    assert units is not None, f"{spoken.uid} has no units"
    frames = min(len(codes), len(units))
    assert units[:frames].min(initial=1) >= 1, "unit 0 would be read as a pad"
    starts = np.array([span.start - layout.streams[0].start for span in layout.streams[1:]])
    return np.concatenate([units[:frames, None], codes[:frames] + starts], axis=1).astype(np.int32)


def opuslm_example(
    layout: Layout, tokenizer: Any, task: Task, entries: Mapping[str, Any], facts: Facts, rng: random.Random
) -> Example:
    """``entries`` as ``opuslm_sequence`` takes them, ``Spoken`` in place of codes. The targets are learnt (of a dialogue, the
    assistant's turns)."""
    spoken = list(_speech(entries.values()))
    rows = opuslm_sequence(layout, tokenizer, task, _as_codes(layout, entries), facts, rng)
    targets = np.zeros(rows.shape, dtype=bool)
    phases = np.full(len(rows), NOTHING, dtype=np.int8)
    coming = np.full(len(rows), NOTHING, dtype=np.int64)
    said = []
    for bound in segment_bounds(layout, rows, task):
        start, content = bound.mark + 1, rows[bound.mark + 1 : bound.stop, 0]
        stops = np.flatnonzero((content == layout.specials["eos"]) | (content == layout.pad))
        end = start + int(stops[0])
        modality = layout.modality_of(int(rows[bound.mark, 0]))
        speech = modality == "codec_ssl"
        if speech or modality == "spk":
            one = spoken.pop(0)
            words = tokenizer.encode_opuslm(one.text)
            said += [(start, end + layout.num_streams - 1, tuple(words))] if speech else []
        if bound.given:
            continue
        targets[start : end + 1, 0] = True
        if speech:
            targets[start:end, 1:] = True
            mark_coming(coming, start, end + layout.num_streams - 1, one, words, layout)
        phases[start : bound.stop] = AUDIO if speech else TEXT
    # Pad rows stand behind every segment, so no stream of one segment is moved into the next.
    return Example(task.name, delay.shift(rows), delay.shift(targets), phases, 0, tuple(said), coming)


def _speech(contents: Iterable[Any]) -> Iterator[Spoken]:
    for content in contents:
        if isinstance(content, Spoken):
            yield content
        elif isinstance(content, list):
            yield from _speech(turn.content for turn in content)


def _as_codes(layout: Layout, entries: Mapping[str, Any]) -> dict[str, Any]:
    def plain(content: Any) -> Any:
        if isinstance(content, list):
            return [turn._replace(content=plain(turn.content)) for turn in content]
        return spliced(layout, content) if isinstance(content, Spoken) else content

    return {name: plain(content) for name, content in entries.items()}
