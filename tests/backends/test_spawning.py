"""Processes that vLLM starts do not run the user's script again."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import golden_models

from espnet2_vllm.backends.spawning import METHOD, choose_spawn

SPAWNING = """
from contextlib import nullcontext
from multiprocessing import get_context
from espnet2_vllm.backends.spawning import main_left_out
print("script")
with {around}():
    child = get_context("spawn").Process(target=print, args=("child",))
    child.start()
child.join()
print("over", child.exitcode)
"""
HANDING_OVER = """
from multiprocessing import get_context
from espnet2_vllm.backends.spawning import main_left_out
def work():
    print("child")
if __name__ == "__main__":
    with main_left_out(3, work):
        child = get_context("spawn").Process(target=work)
        child.start()
    child.join()
    print("over", child.exitcode)
"""
IN_ANOTHER_THREAD = """
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import spawn
from espnet2_vllm.backends.spawning import main_left_out
whole = spawn.get_preparation_data
with main_left_out(), ThreadPoolExecutor(1) as pool:
    other = pool.submit(lambda: spawn.get_preparation_data("child")).result()
    own = spawn.get_preparation_data("child")
print(*(other.keys() - own.keys()), own.keys() - other.keys(), spawn.get_preparation_data is whole)
"""
DECODING = """
from espnet2_vllm import Decoding, SpeechLM
print("script")
model = SpeechLM.from_pretrained({model!r}, dtype="float32", tensor_parallel_size=2, max_num_seqs=4)
answer = model.generate([["user", "text", "hello"]], Decoding(max_step=12), seed=1)
print("answer", answer.outcome)
model.close()
"""


def run(folder, text: str, **variables: str) -> subprocess.CompletedProcess:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    env = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
    return subprocess.run([sys.executable, str(path)], env=env, capture_output=True, encoding="utf-8", timeout=300)


def test_a_script_without_a_guard_runs_once(tmp_path):
    done = run(tmp_path, SPAWNING.format(around="main_left_out"))
    assert done.stdout.split() == ["script", "child", "over", "0"], done.stderr


def test_it_would_run_twice(tmp_path):
    """What the context manager is for."""
    done = run(tmp_path, SPAWNING.format(around="nullcontext"))
    assert done.stdout.split() == ["script", "script", "over", "1"] and "bootstrapping phase" in done.stderr


def test_what_the_script_hands_over_is_found_there(tmp_path):
    """As a callable among the engine's options; the script then needs its guard."""
    done = run(tmp_path, HANDING_OVER)
    assert done.stdout.split() == ["child", "over", "0"], done.stderr


def test_an_actor_of_ray_is_left_to_vllm(monkeypatch):
    monkeypatch.setenv(METHOD, "as it was")  # so that it is put back
    monkeypatch.delenv(METHOD)
    actor = SimpleNamespace(get_actor_id=lambda: "a1")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: actor)
    monkeypatch.setitem(sys.modules, "ray", ray)
    choose_spawn()
    assert METHOD not in os.environ
    actor.get_actor_id = lambda: None
    choose_spawn()
    assert os.environ[METHOD] == "spawn"


def test_other_threads_spawn_as_ever(tmp_path):
    done = run(tmp_path, IN_ANOTHER_THREAD)
    assert done.stdout.split() == ["init_main_from_path", "set()", "True"], done.stderr


@pytest.mark.slow
def test_ranks_of_a_script_without_a_guard(tmp_path):
    model = next(path for path in golden_models("bagpiper") if path.name == "qwen3-s8-cb64")
    done = run(tmp_path, DECODING.format(model=str(model)))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n")[0] == "script" and done.stdout.count("script") == 1 and "answer" in done.stdout
