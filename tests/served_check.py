"""Scenarios on one model in a process of its own: python tests/served_check.py MODEL_DIR SETTING...

Used where vLLM changes the process for good, or must start in another way (the V2 runner under Triton's interpreter).
"""

import os
import pathlib
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # vLLM compiles its own sampler, which these models do not use

import scenarios
from fuzz import draws
from fuzz.draws import replaced
from fuzz.served import Served
from stage import BLOCK, TIGHT, Stage

from espnet2_vllm.backends.vllm import VllmEngine
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.plan import RowRequest

SEED = 20261004
SETTINGS = {
    "sync": {"max_num_batched_tokens": 64},
    "async": {"asynchronous": True, "max_num_batched_tokens": 13},
    "roomy": {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 200},
    "ranks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 32},
    "fused": {"max_num_batched_tokens": 64, "fused": True},
    "fused ranks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 32, "fused": True},
}


def guided_among_others(stage: Stage, served: Served) -> None:
    """More than the cache holds."""
    layout, rng = stage.layout, stage.rng

    def draw(name: str) -> RowRequest:
        rules = next(filter(draws.is_guided, (draws.rules(layout, rng, longest=16, guided=True) for _ in range(100))))
        return RowRequest(name, draws.prompt(layout, rng, rng.randint(3, 40)), rules, rng.getrandbits(63))

    made = [stage.oracle.clear(lambda: draw(f"guided {i}")) for i in range(4)]  # noqa: B023
    stage.check(served.run(*made, *stage.requests))
    assert served.preempted
    served.assert_empty()


def apart(stage: Stage) -> None:
    """The engine in another process (VLLM_ENABLE_V1_MULTIPROCESSING=1), which cannot be watched."""
    engine = VllmEngine(stage.checkpoint, asynchronous=True, max_num_batched_tokens=32, **TIGHT)
    assert not hasattr(engine._engine.engine_core, "engine_core"), "the engine is in this process"
    requests = [*stage.requests, *stage.forced(3)]
    for request in requests:
        engine.submit(request)
    engine.submit(replaced(requests[0], "gone"))
    engine.abort(["gone"])
    found = {}
    while engine.unfinished:
        found.update(engine.step())
    engine.close()
    assert found.keys() == {request.request_id for request in requests}
    stage.check(found)


def main(directory: str, *settings: str) -> None:
    requests = 8 if "ranks" in settings[0] else 14
    stage = Stage(ensure_converted(pathlib.Path(directory)), SETTINGS, seed=SEED, requests=requests)
    if settings == ("apart",):
        apart(stage)
        print("all equal")
        return
    pressed = [
        (scenarios.preempted_at_every_row,),
        (scenarios.preempted_for_want_of_blocks,),
        (scenarios.aborts,),
        (scenarios.context_cuts,),
    ]
    cached = [(scenarios.same_prompt_again,), (scenarios.equal_primary_ids, (BLOCK + 1,)), (scenarios.second_turn,)]
    if stage.layout.family == "bagpiper":
        cached.append((scenarios.same_sound,))
        pressed.insert(1, (guided_among_others,))
    if stage.layout.family == "opuslm":
        forced = stage.forced(4)
        pressed[:0] = [(scenarios.teacher_forcing, forced), (scenarios.teacher_forcing_preempted, forced)]
    cached.append((scenarios.top_p_beside_top_k, 3))
    scenarios_of = {
        "roomy": cached,
        "ranks": pressed[1:2],
        "fused": [(scenarios.top_p_beside_top_k, 2)],
        "fused ranks": [(scenarios.alone, 3)],
    }
    for setting in settings:
        for scenario, *args in scenarios_of.get(setting, pressed):
            served = stage.engine(setting)
            scenario(stage, served, *args)
            print(f"{setting}: {scenario.__name__} equal on {served.runner}", flush=True)
    print("all equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
