"""Rates and latencies of a scripted run; memory by owner."""

import types

import numpy as np
import pytest
import torch

from espnet2_vllm.bench import timing
from espnet2_vllm.bench.systems import FirstRows
from espnet2_vllm.engine.memory import described, memory_by_owner
from espnet2_vllm.plan import RowResult


def result(rows: int) -> RowResult:
    return RowResult(np.zeros((rows, 1), np.int32), np.zeros((rows, 1), np.float32), np.zeros((rows, 1), bool))


@pytest.fixture
def trace(monkeypatch):
    """Two requests: a has rows at steps 0..4, b at steps 1..3; the steps end at 1, 2, 4, 5 and 15 seconds."""
    clock = iter([101.0, 102.0, 104.0, 105.0, 115.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    firsts = iter([["a"], ["b"], [], [], []])
    run = timing.Trace(lambda: next(firsts), begun=100.0)
    for finished in ([], [], [], [("b", result(3))], [("a", result(5))]):
        run.step(finished)
    return run


def test_rates_count_all_rows_over_the_whole_run(trace):
    summary = trace.summary(output=5, first_codes=2)
    assert summary["rows"] == 8 and summary["seconds"] == 15.0 and summary["steps"] == 5
    assert summary["rows_per_s"] == 8 / 15 and summary["ms_per_step"] == 3000.0


def test_first_rows_and_codes_are_when_their_step_ended(trace):
    summary = trace.summary(output=5, first_codes=2)
    assert summary["first_row_s"] == 1.5  # a after 1 s, b after 2 s
    assert summary["first_codes_s"] == 4.5  # row 2 of a at step 2, of b at step 3
    assert trace.summary(output=5, first_codes=None)["first_codes_s"] is None


def test_percentiles_weigh_each_row(trace):
    # The seconds before each row but the first: a 1, 2, 1, 10; b 2, 1.
    rows = sorted([1, 2, 1, 10, 2, 1])
    for q in (1, 50, 83, 84, 99, 100):
        expected = rows[int(np.ceil(q / 100 * len(rows))) - 1]
        assert trace.row_latencies([q]) == [expected], q


def test_what_cannot_be_seen_is_none():
    run = timing.Trace(None)
    run.step([("a", result(4))])
    summary = run.summary(output=4, first_codes=1)
    assert summary["rows"] == 4
    assert {summary[name] for name in ("first_row_s", "first_codes_s", "row_p50_s", "row_p99_s")} == {None}


def test_first_rows_are_seen_once_and_by_the_callers_name():
    seen = []
    names = {"0-x": types.SimpleNamespace(external_req_id="0"), "1-y": types.SimpleNamespace(external_req_id="1")}
    processor = types.SimpleNamespace(request_states=names, process_outputs=lambda outputs, **more: seen.append(more))
    watch = FirstRows(types.SimpleNamespace(output_processor=processor))

    def output(name, tokens):
        return types.SimpleNamespace(request_id=name, new_token_ids=tokens)

    processor.process_outputs([output("0-x", []), output("1-y", [5])], engine_core_timestamp=1.0)
    assert watch.take() == ["1"] and watch.take() == []
    processor.process_outputs([output("0-x", [3]), output("1-y", [6]), output("gone", [1])])
    assert watch.take() == ["0"]
    assert seen == [{"engine_core_timestamp": 1.0}, {}]  # what vLLM does with its outputs goes on


def test_memory_counts_each_storage_once():
    model = torch.nn.Linear(10, 6, bias=True)
    heads = types.SimpleNamespace(weight=torch.zeros(3, 4), ids=torch.zeros(2, dtype=torch.int64), layout="a layout")
    # Of one rank the core's embedding is the model's; of several it is whole and the core's own.
    core = types.SimpleNamespace(history=torch.zeros(5, 7, dtype=torch.int32), heads=heads, embedding=model.weight[:3])
    fused = types.SimpleNamespace(weight=torch.zeros(8), view=model.weight[:2], core=core)
    whole = torch.zeros(64)
    caches = [whole[:32], [whole[32:]], torch.zeros(4)]
    state = types.SimpleNamespace(core=core, fused=fused)
    on_v2 = memory_by_owner(types.SimpleNamespace(model=model, kv_caches=caches, model_state=state))
    expected = {"weights": 4 * 66, "kv_cache": 4 * 68, "history_table": 4 * 35, "auxiliary_heads": 4 * 20 + 16}
    assert {name: on_v2[name] for name in expected} == expected
    core.embedding = torch.zeros(9, 2)
    sharded = memory_by_owner(types.SimpleNamespace(model=model, kv_caches=caches, model_state=state))
    assert sharded["weights"] == 4 * (66 + 18)
    on_v1 = memory_by_owner(types.SimpleNamespace(model=model, kv_caches=caches, core=core))
    assert on_v1["auxiliary_heads"] == 4 * 12 + 16
    plain = memory_by_owner(types.SimpleNamespace(model=model, kv_caches=caches))
    assert plain["history_table"] == plain["auxiliary_heads"] == 0
    owners = {"weights": 3 * 2**30, "kv_cache": 2**29, "other": None}
    assert described(owners) == "weights 3,072 MiB, kv cache 512 MiB; 3,584 MiB in all"
