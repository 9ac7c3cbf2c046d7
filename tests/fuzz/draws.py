"""Random layouts, rules, prompts and requests; everything comes from the generator that is passed in."""

import dataclasses
import random

import numpy as np
import torch

from espnet2_vllm.layout import Layout
from espnet2_vllm.plan import Continuous, RowRequest
from espnet2_vllm.protocol import EVERY, BagpiperRules, ModalityRules, OpusLMRules, Rules, Sampling

DRAWN = Sampling(0.8, 20)


# -- layouts -----------------------------------------------------------------------------------------------------------
def bagpiper_layout(rng: random.Random) -> Layout:
    return Layout.bagpiper(rng.randint(20, 60), [rng.randint(4, 9)] * rng.randint(2, 9))


def opuslm_layout(rng: random.Random) -> Layout:
    books, size, ssl, text = rng.randint(1, 8), rng.randint(3, 8), rng.randint(5, 12), rng.randint(20, 40)
    names = [f"<unused_token_{i}>" for i in range(256)]
    fixed = {0: "<pad>", 1: "<unk>", 5: "<sos/eos>", 8: "<system_prompt>", 9: "<user_input>", 10: "<assistant_output>"}
    fixed |= {32: "<codec_start/end>", 34: "<codec_ssl_start/end>", 35: "<text_bpe_start/end>", 37: "<spk_start/end>"}
    for i, name in fixed.items():
        names[i] = name
    bounds = [256, 256 + ssl, 256 + ssl + books * size, 256 + ssl + books * size + text]
    bias = {"special_token": [0, 256], "ssl": bounds[0:2], "codec": bounds[1:3], "text_bpe": bounds[2:4]}
    return Layout.opuslm(names, bias, books + 1)


def layout_and_rules(rng: random.Random):
    """A layout and a maker of rules for it."""
    layout = (bagpiper_layout if rng.random() < 0.5 else opuslm_layout)(rng)
    longest = 14 if layout.family == "bagpiper" else 20
    return layout, lambda: rules(layout, rng, rng.choice(["text", "audio"]), longest, guided=True)


# -- rules -------------------------------------------------------------------------------------------------------------
def sampling(rng: random.Random) -> Sampling:
    """Half of it greedy."""
    if rng.random() < 0.5:
        return Sampling(rng.choice([0.8, 1.0]), 1)
    return rng.choice([DRAWN, Sampling(1.2, 3), Sampling(0.5, 50), Sampling(1.0, 2)])


def with_top_p(request: RowRequest, rng: random.Random) -> RowRequest:
    """``request`` whose rows are cut by top-p, behind a top-k or not; of Bagpiper's two modalities perhaps one."""

    def cut() -> Sampling:
        return rng.choice([Sampling(1.0, EVERY, 0.8), Sampling(0.7, 20, 0.9), Sampling(1.3, EVERY, 0.3)])

    made = request.rules
    if isinstance(made, OpusLMRules):
        return dataclasses.replace(request, rules=dataclasses.replace(made, sampling=cut()))
    blocks = {
        name: dataclasses.replace(block, sampling=cut())
        for name, block in (("text", made.text), ("audio", made.audio))
        if block is not None and rng.random() < 0.7
    }
    return dataclasses.replace(request, rules=dataclasses.replace(made, **blocks))


def rules(
    layout: Layout, rng: random.Random, modality: str = "audio", longest: int = 40, guided: bool = False
) -> Rules:
    """Segments of at most ``longest`` rows (OpusLM: beside the drain).

    Args:
        modality: of an OpusLM segment.
        guided: some of Bagpiper's segments have a guidance above 1.
    """
    if layout.family == "opuslm":
        high = rng.randint(layout.num_streams, layout.num_streams + longest)
        return OpusLMRules(layout, modality, sampling(rng), rng.randint(0, high), high)

    def block() -> ModalityRules:
        high = rng.randint(1, longest)
        scale = rng.choice([1.0, 1.5, 3.0]) if guided else 1.0
        return ModalityRules(sampling(rng), rng.randint(0, high), high, scale, rng.random() < 0.1)

    enforce = [rng.choice(["text", "audio", "audio", "image"]) for _ in range(rng.randint(0, 3))]
    text, audio = (block() if rng.random() < 0.95 else None for _ in range(2))
    return BagpiperRules(layout, tuple(enforce), text, audio)


def shortened(made: Rules, rows: int) -> Rules:
    """The same, with segments of at most ``rows`` rows (OpusLM: beside the drain)."""
    if isinstance(made, OpusLMRules):
        high = min(made.max_rows, made.layout.num_streams + rows - 1)
        return dataclasses.replace(made, min_rows=min(made.min_rows, high), max_rows=high)

    def cut(block: ModalityRules | None) -> ModalityRules | None:
        if block is None:
            return None
        return dataclasses.replace(block, min_rows=min(block.min_rows, rows), max_rows=min(block.max_rows, rows))

    return dataclasses.replace(made, text=cut(made.text), audio=cut(made.audio))


def is_guided(made: Rules) -> bool:
    blocks = (made.text, made.audio) if isinstance(made, BagpiperRules) else ()
    return any(block is not None and block.guidance > 1 for block in blocks)


# -- prompts -----------------------------------------------------------------------------------------------------------
def text_rows(layout: Layout, rng: random.Random, count: int) -> np.ndarray:
    rows = np.full((count, layout.num_streams), layout.pad, dtype=np.int32)
    rows[:, 0] = [rng.randrange(*layout.text) for _ in range(count)]
    return rows


def audio_rows(layout: Layout, rng: random.Random, count: int) -> np.ndarray:
    columns = [range(*layout.streams[0]), *layout.auxiliary_candidates()]
    return np.array([[rng.choice(ids) for ids in columns] for _ in range(count)], dtype=np.int32).reshape(count, -1)


def header(layout: Layout, modality: str) -> np.ndarray:
    """The last row of a prompt."""
    rows = np.full((1, layout.num_streams), layout.pad, dtype=np.int32)
    rows[0, 0] = layout.specials["assistant"] if layout.family == "bagpiper" else layout.modality_token(modality)
    return rows


def prompt(layout: Layout, rng: random.Random, rows: int, modality: str = "audio") -> np.ndarray:
    """[rows, S]: runs of text and of audio, then the row that announces what is generated."""
    parts, left = [], rows - 1
    while left > 0:
        count = min(left, rng.randint(1, 30))
        parts.append(rng.choice((text_rows, audio_rows))(layout, rng, count))
        left -= count
    return np.concatenate([*parts, header(layout, modality)])


def altered(layout: Layout, rng: random.Random, rows: np.ndarray, row: int, stream: int) -> np.ndarray:
    """``rows`` with another auxiliary id at one place."""
    changed = rows.copy()
    choices = [i for i in layout.auxiliary_candidates()[stream - 1] if i != rows[row, stream]]
    changed[row, stream] = rng.choice(choices)
    return changed


# -- continuous rows ---------------------------------------------------------------------------------------------------
def sound(rng: random.Random, start: int, count: int, hidden: int) -> Continuous:
    """Continuous rows as an encoder might give them."""
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    return Continuous(start, count, vectors=torch.randn(count, hidden, generator=generator))


def with_sound(request: RowRequest, *parts: Continuous) -> RowRequest:
    """``request`` with continuous rows in its prompt."""
    rows = request.prompt.copy()
    for part in parts:
        rows[part.start : part.start + part.count] = request.rules.layout.pad
    return dataclasses.replace(request, prompt=rows, continuous=parts)


def cropped(continuous: tuple[Continuous, ...], start: int, stop: int) -> tuple[Continuous, ...]:
    """What lies within rows [start, stop), counted from there."""
    kept = []
    for part in continuous:
        low, high = max(part.start, start), min(part.start + part.count, stop)
        if low < high:
            vectors = part.vectors[low - part.start : high - part.start]
            kept.append(Continuous(low - start, high - low, vectors=vectors))
    return tuple(kept)


# -- requests ----------------------------------------------------------------------------------------------------------
def replaced(request: RowRequest, name: str, **changes) -> RowRequest:
    return dataclasses.replace(request, request_id=name, **changes)


def random_request(
    layout: Layout, rng: random.Random, name: str, rows: tuple[int, int] = (2, 70), hidden: int = 0, **options
) -> RowRequest:
    """A request of any kind but teacher forcing.

    Args:
        rows: of the prompt, from and to.
        hidden: width of the model; if given, some of Bagpiper's prompts have continuous rows.
        options: of ``rules``.
    """
    modality = rng.choice(["text", "audio", "audio"])
    made = prompt(layout, rng, rng.randint(*rows), modality)
    request = RowRequest(name, made, rules(layout, rng, modality, **options), rng.getrandbits(63))
    if not hidden or layout.family == "opuslm" or rng.random() < 0.6 or len(made) < 6:
        return request
    marks = sorted(rng.sample(range(len(made)), rng.choice([2, 4])))
    parts = [sound(rng, a, b - a, hidden) for a, b in zip(marks[::2], marks[1::2], strict=True)]
    return with_sound(request, *parts)


def behind(request: RowRequest, rows: np.ndarray, continuous: tuple[Continuous, ...], limit: int) -> RowRequest:
    """``request`` with ``rows`` in front of its prompt; the last ``limit`` of them all."""
    heard = [*continuous, *(dataclasses.replace(part, start=part.start + len(rows)) for part in request.continuous)]
    rows = np.concatenate([rows, request.prompt])
    first = max(len(rows) - limit, 0)
    return dataclasses.replace(request, prompt=rows[first:], continuous=cropped(tuple(heard), first, len(rows)))


def begun_as(request: RowRequest, rng: random.Random, other: RowRequest, limit: int) -> RowRequest:
    """``request`` behind the beginning of another's prompt, but for one auxiliary id or the sound of a clip perhaps."""
    layout, rows = request.rules.layout, other.prompt[: rng.randint(1, len(other.prompt))]
    heard = list(cropped(other.continuous, 0, len(rows)))
    if heard and rng.random() < 0.5:
        place = rng.randrange(len(heard))
        part = heard[place]
        heard[place] = sound(rng, part.start, part.count, part.vectors.shape[1])
    elif rng.random() < 0.5:
        rows = altered(layout, rng, rows, rng.randrange(len(rows)), rng.randint(1, layout.num_streams - 1))
    return behind(request, rows, tuple(heard), limit)


def forced_request(layout: Layout, rng: random.Random, name: str, rows: tuple[int, int] = (2, 70), longest: int = 90):
    """Teacher forcing (OpusLM)."""
    modality = rng.choice(["text", "audio"])
    count = rng.randint(layout.num_streams, max(longest, layout.num_streams))
    reference = (audio_rows if modality == "audio" else text_rows)(layout, rng, count)
    made = OpusLMRules(layout, modality, Sampling(), count + 1, count)
    return RowRequest(name, prompt(layout, rng, rng.randint(*rows), modality), made, reference=reference)
