"""Pairs in the scheduler: seats, room, aborts, and what clients see of them. Random schedules of them are in tests/fuzz."""

import numpy as np
import pytest
from conftest import golden_models
from fuzz import draws
from fuzz.draws import DRAWN, replaced
from stage import Stage

from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.protocol import AUDIO, TEXT, BagpiperRules, ModalityRules

SEED = 20261201
SETTINGS = {
    "sync": {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 60},
    "async": {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 60, "asynchronous": True},
}
BOTH = pytest.mark.parametrize("setting", SETTINGS)


@pytest.fixture(scope="module")
def stage():
    (directory,) = (path for path in golden_models("bagpiper") if path.name == "qwen3-s8-cb64")
    made = Stage(ensure_converted(directory), SETTINGS, seed=SEED, requests=4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def guided(stage):
    """Guided audio, guided text and both in turn."""
    block = ModalityRules(DRAWN, 12, 16, 1.5)
    return [
        stage.add(
            f"guided {i}", draws.prompt(stage.layout, stage.rng, 20), BagpiperRules(stage.layout, enforce, block, block)
        )
        for i, enforce in enumerate((("audio",), ("text",), ("text", "audio", "audio")))
    ]


@BOTH
@pytest.mark.parametrize("row", [1, 2, 5])
def test_a_preempted_pair_comes_back_where_there_are_two_seats(stage, guided, setting, row):
    """It was counted twice, once for each member, found no seat, and was given up as if the cache were too small."""
    served = stage.engine(setting)
    served.limit(seats=2)
    for request in guided:
        left = {row}

        def preempt(request=request, left=left):
            if served.rows_of(request.request_id) in left and served.runs(request.request_id):
                left.clear()
                served.preempt(request.request_id)

        stage.check(served.run(request, before_step=preempt))
    assert len(served.preempted) == len(guided)
    served.limit()
    served.assert_empty()


@BOTH
@pytest.mark.parametrize("seats", [2, 3, 5])
def test_pairs_share_odd_seats_with_requests_that_are_not_guided(stage, guided, setting, seats):
    served = stage.engine(setting)
    served.limit(seats=seats)
    copies = [replaced(request, f"{request.request_id}/{i}") for i in range(2) for request in guided]
    most = 0

    def look():
        nonlocal most
        most = max(most, len(served.scheduler.running))

    stage.check(served.run(*copies, *stage.requests, before_step=look))
    assert most <= seats
    served.limit()
    served.assert_empty()


@BOTH
def test_aborted_mains_take_their_companions_along(stage, guided, setting):
    """At every age of the pair, from before its companion is made."""
    served = stage.engine(setting)
    made = served.scheduler.counts["companions"]
    for age in range(24):
        copies = [replaced(request, f"{request.request_id}/{age}") for request in guided]
        served.submit(*copies, replaced(stage.requests[0], f"{stage.requests[0].request_id}/{age}"))
        for _ in range(age):
            assert served.engine.step() == [] or age > 12
        served.engine.abort([request.request_id for request in copies])
        stage.check(served.run())
        served.assert_empty()
    assert served.scheduler.counts["companions"] - made > 24, "no pair was there to be aborted"


def test_a_scale_of_1_creates_nothing(stage):
    served = stage.engine("async")
    made = served.scheduler.counts["companions"]
    stage.check(served.run(*stage.requests))
    assert served.scheduler.counts["companions"] == made
    assert not served.scheduler.mains


def test_hits_of_companions_are_not_told_as_hits_of_requests(stage, guided):
    """Companions share their pads, which are in no client's prompt."""
    served = stage.engine("sync")
    before, pair = served.engine.prefix_cache.hits, guided[0]
    stage.check(served.run(*(replaced(pair, f"{pair.request_id}/{i}") for i in range(3))))
    told = served.engine.prefix_cache.hits - before
    assert told == sum(served.hits.values())
    assert told <= 2 * len(pair.prompt)


@BOTH
def test_a_pair_that_the_cache_cannot_hold_is_cut_and_others_are_not(stage, guided, setting, caplog):
    served, pair = stage.engine(setting), guided[0]
    short = stage.add("short", draws.prompt(stage.layout, stage.rng, 9), stage.fixed("audio", 12))
    served.limit(blocks=4)  # one is vLLM's own; the pair needs two each for its last rows
    found = served.run(pair, *(replaced(short, f"short/{i}") for i in range(3)))
    cut = found.pop(pair.request_id)
    expected = stage.oracle.expected[pair.request_id]
    assert cut.finish == "length" and 0 < len(cut.rows) < len(expected.rows)
    assert np.array_equal(cut.rows, expected.rows[: len(cut.rows)])
    assert "do not fit the" in caplog.text
    stage.check(found)
    served.limit()
    served.assert_empty()


def test_a_pair_is_not_given_up_behind_a_step_that_only_preempted(stage):
    """Such a step admits nobody and may move nothing; it was taken for one that could not go on."""
    block = ModalityRules(DRAWN, 5, 8, 1.5)
    pair = stage.add("chosen", draws.prompt(stage.layout, stage.rng, 12), BagpiperRules(stage.layout, (), block, block))
    other = stage.add("other", draws.prompt(stage.layout, stage.rng, 9), stage.fixed("audio", 30))
    served, steps = stage.engine("sync"), iter(("preempt", "abort"))

    def disturb():
        main, step = served.known["chosen"], None
        if main.next_phase in (TEXT, AUDIO):  # the model has chosen, and the companion is to come
            step = next(steps, None)
        if step == "preempt":
            assert not served.scheduler.companion_of
            served.preempt("other")
        elif step == "abort":
            assert served.preempted == [("other", served.rows_of("other"))]
            served.engine.abort(["other"])

    found = served.run(pair, other, before_step=disturb)
    assert found.keys() == {"chosen"} and next(steps, None) is None
    stage.check(found)
    served.assert_empty()
