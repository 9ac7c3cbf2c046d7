"""Guidance under pressure: preemption, chunked prompts, odd seats, aborts, mixes; every id as the sequential backend has it."""

import conftest
import guided_worlds
import pytest

from espnet2_vllm.backends.pytorch import PyTorchEngine

SEEDS = range(3)


@pytest.fixture(scope="module")
def checkpoint():
    return guided_worlds.checkpoint_of(conftest.golden_models("bagpiper")[0])


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_guided_worlds_equal_the_sequential_backend(checkpoint, asynchronous):
    engine = guided_worlds.start(checkpoint, asynchronous)
    oracle = PyTorchEngine(checkpoint, max_rows=guided_worlds.TIGHT["max_model_len"])
    for seed in SEEDS:
        print(f"world {seed}")
        scheduler = guided_worlds.compare(engine, oracle, seed)
    engine.close()
    assert scheduler.counts["companions"] > 0
    assert scheduler.counts["preempted"] > 0, "the worlds are not tight enough to preempt a pair"
