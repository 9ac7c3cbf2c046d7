"""Frames as rows arrive against the whole matrix at once: random requests of both families, in pieces of every size."""

import random

import numpy as np
import pytest
from fuzz.draws import audio_rows

from espnet2_vllm import delay
from espnet2_vllm.arriving import ArrivingFrames, rows_until
from espnet2_vllm.bench.geometry import opuslm_layout
from espnet2_vllm.drive import _opuslm_segment, bagpiper_segments
from espnet2_vllm.layout import Layout
from espnet2_vllm.plan import RowResult, Wanted
from espnet2_vllm.protocol import BagpiperRules, ModalityRules, OpusLMRules, Sampling

SEED = 4242


def layout_of(family, streams):
    if family == "bagpiper":
        return Layout.bagpiper(10, [6] * streams)
    return opuslm_layout(12, ssl_units=6, codes=5, codebooks=streams - 1)


def rules_of(layout, rng):
    if layout.family == "opuslm":
        high = rng.randint(layout.num_streams, layout.num_streams + 12)
        return OpusLMRules(layout, rng.choice(["audio", "audio", "text"]), Sampling(), rng.randint(0, high), high)
    blocks = [ModalityRules(Sampling(), rng.randint(0, 3), rng.randint(1, 14)) for _ in range(2)]
    enforce = tuple(rng.choice(["text", "audio", "audio", "image"]) for _ in range(rng.randint(0, 3)))
    return BagpiperRules(layout, enforce, blocks[0], blocks[1] if rng.random() < 0.9 else None)


def draw(rules, rng, most):
    """Rows of a request whose choices are random, ends more often than not; ``most``: of the context."""
    state, steps, ending = rules.start(), [], rng.random() * 0.4
    while not (steps and steps[-1].done) and len(steps) < most:
        constraint = rules.constraint(state)
        ids = [i for span in constraint.primary for i in range(*span)] or [constraint.forced]
        ends = [i for i in ids if i in rules.layout.end_tokens]
        first = rng.choice(ends) if ends and rng.random() < ending else rng.choice(ids)
        columns = rules.layout.auxiliary_candidates()
        rest = [rng.choice(column) if constraint.audio else rules.layout.pad for column in columns]
        state, step = rules.advance(state, (first, *rest))
        steps.append(step)
    rows = np.array([step.emitted for step in steps], dtype=np.int32).reshape(-1, rules.layout.num_streams)
    finish = "stop" if steps[-1].done else "length"
    return RowResult(rows, np.zeros(rows.shape, np.float32), np.zeros(rows.shape, bool), finish)


def whole(rules, result):
    """Frames of each audio segment, by its place: the form that needs all rows."""
    if rules.layout.family == "opuslm":
        segment = _opuslm_segment(rules, Wanted(result.rows[:0]), result, None)
        return {0: segment.rows} if rules.modality == "audio" else {}
    segments = enumerate(bagpiper_segments(rules, result))
    return {i: delay.undo(one.rows) for i, one in segments if one.modality == "audio" and one.end != "refused"}


def in_pieces(rules, rows, sizes):
    arriving, pieces, ended, known = ArrivingFrames(rules), {}, set(), []
    for size in sizes:
        part, rows = rows[:size], rows[size:]
        for one in arriving.push(part):
            assert one.segment not in ended, "frames behind the last ones"
            pieces.setdefault(one.segment, []).append(one.frames)
            ended |= {one.segment} if one.last else set()
        known.append(sum(len(frames) for of in pieces.values() for frames in of))
    assert not len(rows)
    for one in arriving.finish():
        assert one.segment not in ended
        assert one.last
        pieces.setdefault(one.segment, []).append(one.frames)
        ended.add(one.segment)
    assert ended == set(pieces)
    assert arriving.finish() == []
    return {segment: np.concatenate(of) for segment, of in pieces.items()}, known


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
@pytest.mark.parametrize("streams", [2, 3, 5, 8])
def test_pieces_are_the_whole(family, streams):
    print(f"seed {SEED}")
    rng, layout, seen = random.Random(SEED + streams), layout_of(family, streams), set()
    for number in range(150):
        rules = rules_of(layout, rng)
        result = draw(rules, rng, rng.choice([1000, rng.randint(1, 30)]))
        expected = whole(rules, result)
        seen |= {result.finish, *("empty" if not len(frames) else "frames" for frames in expected.values())}
        count = len(result.rows)
        for sizes in ([1] * count, [count], [3] * -(-count // 3), _random_sizes(rng, count)):
            found, _ = in_pieces(rules, result.rows, sizes)
            assert found.keys() == expected.keys(), number
            for segment, frames in found.items():
                np.testing.assert_array_equal(frames, expected[segment], err_msg=f"request {number}, pieces {sizes}")
    assert seen == {"stop", "length", "empty", "frames"}


def _random_sizes(rng, count):
    sizes = []
    while sum(sizes) < count:
        sizes.append(rng.randint(0, 6))
    return sizes


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
def test_a_frame_is_out_when_its_last_row_is(family):
    layout = layout_of(family, 4)
    rng, count = random.Random(SEED), 20
    rows = audio_rows(layout, rng, count)
    if family == "bagpiper":
        block = ModalityRules(Sampling(), 100, 100)
        rules, before = BagpiperRules(layout, ("audio",), None, block), 1
        rows = np.concatenate([np.full((1, 4), layout.pad), rows])
        rows[0, 0] = layout.modality_token("audio")
    else:
        rules, before = OpusLMRules(layout, "audio", Sampling(), 100, 100), 0
        rows[np.arange(4)[None] > np.arange(count)[:, None]] = layout.pad
    _, known = in_pieces(rules, rows, [1] * len(rows))
    for frames in range(1, count - 3):
        row = before + rows_until(layout, frames)
        assert (known[row - 2], known[row - 1]) == (frames - 1, frames)


def test_the_end_is_known_before_the_drain_is_over():
    layout = layout_of("opuslm", 5)
    rules, rng = OpusLMRules(layout, "audio", Sampling(), 0, 100), random.Random(SEED)
    state, rows = rules.start(), []
    for number, row in enumerate(audio_rows(layout, rng, 12).tolist()):
        chosen = (layout.specials["eos"], *row[1:]) if number == 6 else tuple(row)
        state, step = rules.advance(state, chosen)
        rows.append(step.emitted)
    assert step.done
    arriving, last = ArrivingFrames(rules), None
    for number, row in enumerate(rows):
        for one in arriving.push(np.array([row])):
            last = number if one.last else last
    # Frame 5 is the last one: its stream 4 stands in row 9, and the drain goes on to row 11.
    assert last == 9
