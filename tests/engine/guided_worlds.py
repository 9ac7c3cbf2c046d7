"""Guided and unguided requests on one engine, compared with the sequential backend. Used by test_guidance.py and by hand:

python tests/engine/guided_worlds.py MODEL_DIR FIRST_SEED LAST_SEED [async]
"""

import pathlib
import random
import sys

import numpy as np

from espnet2_vllm.backends.pytorch import PyTorchEngine
from espnet2_vllm.backends.vllm import VllmEngine
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.plan import RowRequest
from espnet2_vllm.protocol import BagpiperRules, ModalityRules, Sampling

# Room for little more than one pair, odd seats, prompts in several chunks.
TIGHT = {
    "max_model_len": 160,
    "num_gpu_blocks_override": 24,
    "max_num_seqs": 7,
    "max_num_batched_tokens": 32,
    "block_size": 16,
}


def random_rules(layout, rng):
    def block():
        sampling = Sampling() if rng.random() < 0.5 else Sampling(rng.choice([0.8, 1.2]), rng.choice([3, 20]))
        high = rng.randint(3, 30)
        return ModalityRules(sampling, rng.randint(0, high), high, rng.choice([1.0, 1.5, 3.0]), rng.random() < 0.1)

    enforce = [rng.choice(["text", "audio", "audio", "image"]) for _ in range(rng.randint(0, 3))]
    return BagpiperRules(layout, tuple(enforce), block(), block())


def random_request(layout, rng, name):
    length = rng.randint(2, 60)
    prompt = np.zeros((length, layout.num_streams), dtype=np.int32)
    prompt[:, 0] = [rng.randrange(layout.text.start, layout.text.stop) for _ in range(length)]
    if rng.random() < 0.3:  # an audio clip in the prompt
        start, stop = sorted(rng.sample(range(length), 2))
        for s, span in enumerate(layout.code_spans):
            prompt[start:stop, s] = [rng.randrange(*span) for _ in range(stop - start)]
    prompt[-1] = 0
    prompt[-1, 0] = layout.specials["assistant"]
    return RowRequest(name, prompt, random_rules(layout, rng), rng.getrandbits(62))


def guided_requests(layout, seed, count):
    rng = random.Random(seed)
    return [random_request(layout, rng, f"{seed}.{i}") for i in range(count)]


def run_oracle(oracle, requests):
    for request in requests:
        oracle.submit(request)
    results = {}
    while oracle.unfinished:
        results.update(oracle.step())
    return results


def run_world(engine, requests, seed):
    """Submits in random order at random times and aborts some; gives results and the aborted ids."""
    rng = random.Random(seed)
    pending, aborted, results = requests[:], set(), {}
    rng.shuffle(pending)
    for _ in range(5000):
        while pending and rng.random() < 0.4:
            engine.submit(pending.pop())
        results.update(engine.step())
        flying = {r.request_id for r in requests} - {r.request_id for r in pending} - set(results) - aborted
        if flying and rng.random() < 0.02:
            victim = rng.choice(sorted(flying))
            engine.abort([victim])
            aborted.add(victim)
        if not pending and not engine.unfinished:
            return results, aborted
    raise AssertionError(f"world {seed} does not end: {engine.unfinished} unfinished")


def leftovers(scheduler):
    """Everything that must be empty once all requests are gone."""
    tables = (
        scheduler.requests, scheduler.running, scheduler.mains, scheduler.companion_of, scheduler._text, scheduler._prompts,
        list(scheduler.history), list(scheduler.waiting),
    )  # fmt: skip
    return [table for table in tables if table]


def compare(engine, oracle, seed, count=10):
    """Rows of one world on both engines.

    Raises:
        AssertionError: naming the seed and the first difference.
    """
    requests = guided_requests(engine.layout, seed, count)
    expected = run_oracle(oracle, requests)
    results, aborted = run_world(engine, requests, seed)
    assert set(results) == {r.request_id for r in requests} - aborted
    for name, result in results.items():
        assert not isinstance(result, Exception), f"{name}: {result}"
        want = expected[name]
        same = result.rows.shape == want.rows.shape and np.array_equal(result.rows, want.rows)
        where = "" if result.rows.shape != want.rows.shape else np.argwhere(result.rows != want.rows)[:3].tolist()
        assert same, (
            f"seed {seed}, request {name}: {result.rows.shape} rows against {want.rows.shape}, first at {where}"
        )
        assert result.finish == want.finish
        np.testing.assert_allclose(result.logprobs, want.logprobs, atol=2e-3, err_msg=f"seed {seed}, request {name}")
    scheduler = engine._engine.engine_core.engine_core.scheduler
    assert not leftovers(scheduler), f"seed {seed} leaves {leftovers(scheduler)}"
    return scheduler


def checkpoint_of(model):
    return ensure_converted(model / "train.yaml", model / "mp_rank_00_model_states.pt")


def start(checkpoint, asynchronous=False, **options):
    return VllmEngine(checkpoint, asynchronous=asynchronous, **{**TIGHT, **options})


if __name__ == "__main__":
    opened = checkpoint_of(pathlib.Path(sys.argv[1]))
    first, last = map(int, sys.argv[2:4])
    engine, oracle = start(opened, "async" in sys.argv[4:]), PyTorchEngine(opened, max_rows=TIGHT["max_model_len"])
    for seed in range(first, last):
        scheduler = compare(engine, oracle, seed)
        print(f"world {seed} equal", scheduler.counts, flush=True)
