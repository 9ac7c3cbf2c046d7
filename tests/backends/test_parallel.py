"""Several engines at once: ``data_parallel_size`` of the vllm backend, on CPUs."""

import os
import pathlib
import signal
import subprocess
import sys
from multiprocessing import Pipe

import pytest
import torch
from conftest import golden_models
from fuzz.draws import replaced
from stage import BLOCK, CONTEXT, Stage

from espnet2_vllm.backends import Engine, make_engine, parallel
from espnet2_vllm.backends.parallel import (
    DEVICES,
    DataParallelEngine,
    EngineProcess,
    Results,
    device_shares,
    module_path,
    send,
)
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.errors import ConfigError, EngineError

OPTIONS = {"max_model_len": CONTEXT, "block_size": BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 32}
SEED = 20261129


@pytest.fixture(scope="module")
def checkpoint():
    return ensure_converted(next(path for path in golden_models("bagpiper") if path.name == "qwen3-s8-cb64"))


# -- who gets which GPU -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("visible", "engines", "each", "shares"),
    [
        (None, 4, 1, ["0", "1", "2", "3"]),
        (None, 2, 2, ["0,1", "2,3"]),
        ("", 2, 1, ["0", "1"]),
        ("3,1,2", 2, 1, ["3", "1"]),
        ("GPU-a,GPU-b", 1, 2, ["GPU-a,GPU-b"]),
    ],
)
def test_each_engine_has_gpus_of_its_own(monkeypatch, visible, engines, each, shares):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv(DEVICES, raising=False)
    if visible is not None:
        monkeypatch.setenv(DEVICES, visible)
    assert device_shares(engines, each) == shares


def test_too_few_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(DEVICES, "0,1,2")
    with pytest.raises(ConfigError, match="data_parallel_size 2 with 2 GPUs an engine needs 4 GPUs, 3 are visible"):
        device_shares(2, 2)


def test_without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_shares(2, 1) == [None, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size 0: expected a whole number of at least 1"),
        ({"data_parallel_size": "two"}, "data_parallel_size 'two': expected a whole number"),
        ({"data_parallel_size": 2, "keep_logits": True}, "logits are kept by an engine in this process only"),
        ({"data_parallel_size": 2, "distributed_executor_backend": "ray"}, "with Ray leave data_parallel_size at 1"),
    ],
)
def test_options_that_cannot_be_used(checkpoint, options, message):
    with pytest.raises(ConfigError, match=message):
        make_engine("vllm", checkpoint, "float32", **options)


def test_installed_packages_do_not_come_before_the_standard_library(monkeypatch):
    """A backport there, ``dataclasses`` say, would be taken for the real one."""
    root = str(pathlib.Path(parallel.__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    monkeypatch.setattr(parallel.site, "getsitepackages", lambda: ["/elsewhere"])
    assert module_path() == os.pathsep.join([root, "/of/the/user"])
    monkeypatch.setattr(parallel.site, "getsitepackages", lambda: ["/elsewhere", root])
    assert module_path() == "/of/the/user"


def test_what_others_finished_is_given_out_before_an_engine_that_died_is_told_of():
    """In the same step, whichever of them is heard first."""
    engine = object.__new__(DataParallelEngine)
    engine._failure, engine._fresh, engine._names, engine._places = None, [], {}, {}
    ends, engine._engines = [], []
    for number, name in enumerate(("alive", "dead")):
        mine, its = Pipe()
        process = subprocess.Popen([sys.executable, "-c", ""])
        engine._engines.append(EngineProcess(name, process, mine, {number}))
        engine._names[number] = name
        engine._places[name] = number, engine._engines[-1]
        ends.append(its)
    ends[1].close()
    send(ends[0], Results([(0, "outcome")], []))
    assert engine.step() == [("alive", "outcome")]
    for _ in range(2):
        with pytest.raises(EngineError, match="dead ended with exit code 0 and 1 requests under way"):
            engine.step()
    ends[0].close()
    engine.close()


def test_an_engine_that_waits_to_be_heard_is_not_waited_for():
    """It says more than a pipe holds, and nobody listens any more."""
    mine, its = Pipe()
    script = f"from multiprocessing.connection import Connection as C; C({its.fileno()}).send_bytes(bytes(10**7))"
    process = subprocess.Popen([sys.executable, "-c", script], pass_fds=[its.fileno()])
    its.close()
    engine = EngineProcess("engine", process, mine)
    engine.order("close")
    engine.end(grace=60)
    assert process.returncode == 0, "it was killed"


# -- engines ------------------------------------------------------------------------------------------------------------
def finished(engine, *, rows: dict | None = None) -> dict:
    found = {}
    while engine.unfinished:
        found.update(engine.step())
        for name, fresh in engine.take_rows():
            rows[name] = rows.get(name, 0) + len(fresh)
    return found


@pytest.mark.slow
def test_two_engines(checkpoint):
    """Each request is served as by one engine, wherever; one that dies is told of, with its own name."""
    stage = Stage(checkpoint, {}, seed=SEED, requests=12)
    engine = make_engine("vllm", checkpoint, "float32", data_parallel_size=2, **OPTIONS)
    try:
        assert isinstance(engine, Engine) and engine.max_rows == CONTEXT
        streamed = replaced(stage.requests[0], "r0/streamed", stream=(4, 4))
        for request in (*stage.requests, streamed):
            engine.submit(request)
        assert [len(one.requests) for one in engine._engines] == [7, 6]
        engine.submit(replaced(stage.requests[0], "gone"))
        engine.abort(["gone", "never there"])
        engine.submit(replaced(stage.requests[1], "r1/gone"))
        engine.abort(["r1/gone"])
        engine.submit(replaced(stage.requests[1], "r1/gone"))  # the same name again
        rows: dict = {}
        found = finished(engine, rows=rows)
        assert found.keys() == {*(one.request_id for one in stage.requests), "r0/streamed", "r1/gone"}
        stage.check(found)
        assert rows.keys() == {"r0/streamed"} and 0 < rows["r0/streamed"] <= len(found["r0/streamed"].rows)
        for request in stage.requests:
            engine.submit(request)
        os.kill(engine._engines[1].process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"engine 2 of 2 ended with exit code -9 and \d+ requests under way"):
            finished(engine)
    finally:
        engine.close()
    assert engine.unfinished == 0


@pytest.mark.slow
def test_what_vllm_refuses_is_said_by_the_engine(checkpoint):
    with pytest.raises(ConfigError, match="engine 1 of 1: vLLM refused the engine options .*max_num_seq"):
        DataParallelEngine(checkpoint, data_parallel_size=1, max_num_seq=3)
