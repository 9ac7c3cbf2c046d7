"""Steady rows against their plain twin, vLLM's own loop: the same books after every step."""

import random
import re

import numpy as np
import pytest
from conftest import golden_models
from vllm.v1.core.sched.scheduler import Scheduler

from espnet2_vllm.backends.vllm import VllmEngine
from espnet2_vllm.checkpoint import ensure_converted, open_checkpoint
from espnet2_vllm.engine.compat import engine_version, steady_rows_known
from espnet2_vllm.engine.scheduler import SpeechScheduler
from espnet2_vllm.plan import RowRequest
from espnet2_vllm.protocol import BagpiperRules, ModalityRules, OpusLMRules, Sampling

pytestmark = pytest.mark.skipif(
    not steady_rows_known(), reason=f"vLLM {engine_version()} is left to its own loop: there is nothing to compare"
)
SEED = 20261129
MODELS = {"bagpiper": "qwen3-s8-cb64", "opuslm": "tiny-llama"}
# Blocks for half of what is in flight, prompts in chunks.
OPTIONS = {
    "max_model_len": 160, "block_size": 32, "max_num_seqs": 7, "num_gpu_blocks_override": 16, "max_num_batched_tokens": 48,
}  # fmt: skip


def requests(layout, rng):
    """Requests that end by length, by an end token, or at the end of the context; guided and text ones among them."""
    made = []
    for number in range(16):
        rows = np.zeros((rng.randint(2, 70), layout.num_streams), dtype=np.int32)
        rows[:, 0] = [rng.randrange(*layout.text) for _ in rows]
        modality, most = rng.choice(["audio", "audio", "text"]), rng.choice([20, 40, 300])
        sampling = Sampling(1.0, rng.choice([1, 5, 20]))
        if layout.family == "opuslm":
            rows[-1, 0] = layout.modality_token(modality)
            rules = OpusLMRules(layout, modality, sampling, 12, most)
        else:
            rows[-1, 0] = layout.specials["assistant"]
            audio = ModalityRules(sampling, 10, most, rng.choice([1.0, 3.0]))
            enforce = rng.choice([("audio",), ("text", "audio"), ()])
            rules = BagpiperRules(layout, enforce, ModalityRules(sampling, 5, most), audio)
        made.append(RowRequest(f"r{number}", rows, rules, number))
    return made


def books(scheduler) -> dict:
    """Everything by which two runs could come apart."""
    return {
        re.sub("-[0-9a-f]{8}", "", name): (  # vLLM adds something random
            request.num_computed_tokens, request.num_in_flight_tokens, request.num_output_placeholders,
            request.is_prefill_chunk, request.status.name, request.num_preemptions, list(request.all_token_ids),
            list(request.block_hashes), len(scheduler.kv_cache_manager.get_block_ids(name)[0]),
        )
        for name, request in scheduler.requests.items()
    }  # fmt: skip


def played(engine, made, steady):
    """Books after every step, and what came out; ``steady``: None for vLLM's own loop."""
    scheduler = engine._engine.engine_core.engine_core.scheduler
    assert not scheduler.requests and not scheduler._ordinary
    scheduler._steady = steady
    scheduler.reset_prefix_cache()
    results, states = {}, []
    for request in made[:10]:
        engine.submit(request)
    while engine.unfinished:
        results |= dict(engine.step())
        states.append(books(scheduler))
        if len(states) == 15:
            engine.abort([made[3].request_id])
            for request in made[10:]:
                engine.submit(request)
    return results, states


def checks_what_the_v2_runner_is_told(scheduler, monkeypatch):
    """Both ways to describe a step's requests to that runner, at every step that is scheduled for the V1 runner."""
    compared = []

    def both(*args):
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "use_v2_model_runner", True)
            plain = Scheduler._make_cached_request_data(scheduler, *args)
            assert SpeechScheduler._make_cached_request_data(scheduler, *args) == plain
        compared.append(len(plain.req_ids) - plain.new_block_ids.count(None))
        return Scheduler._make_cached_request_data(scheduler, *args)

    monkeypatch.setattr(scheduler, "_make_cached_request_data", both)
    return compared


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_books_are_those_of_vllms_own_loop_after_every_step(family, asynchronous, monkeypatch):
    print(f"seed {SEED}")
    (directory,) = (path for path in golden_models(family) if path.name == MODELS[family])
    checkpoint = open_checkpoint(ensure_converted(directory).path)
    engine = VllmEngine(checkpoint, asynchronous=asynchronous, **OPTIONS)
    try:
        scheduler = engine._engine.engine_core.engine_core.scheduler
        steady, taken = scheduler._steady, []
        assert steady is not None
        made = requests(checkpoint.layout, random.Random(SEED))
        expected, states = played(engine, made, None)
        inner = steady.is_steady
        monkeypatch.setattr(
            steady, "is_steady", lambda *args: inner(*args) and (taken.append(args[0].request_id) or True)
        )
        # Names that the engine and the scheduler give go on counting.
        engine._count = 0
        scheduler.counts = dict.fromkeys(getattr(scheduler, "counts", {}), 0)
        described = checks_what_the_v2_runner_is_told(scheduler, monkeypatch)
        found, found_states = played(engine, made, steady)
    finally:
        engine.close()
    assert max(state[5] for books in states for state in books.values()) > 0, "nothing was preempted"
    assert len(taken) > 200 and (family == "opuslm" or any("companion" in name for name in taken))
    assert len(described) >= len(states) == len(found_states) and sum(described) > 20
    for step, (plain, fast) in enumerate(zip(states, found_states, strict=True)):
        assert plain == fast, f"step {step}"
    assert {result.finish for result in expected.values()} >= {"stop", "length"}
    for name, result in expected.items():
        assert found[name].finish == result.finish and np.array_equal(found[name].rows, result.rows), name
        assert np.array_equal(found[name].logprobs, result.logprobs), name
