"""Processes that were started for a parent end with it, also where it was killed and could not tell them to."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO, golden_models


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))}


def children_of(pid):
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    found = [int(word) for word in done.stdout.split()]
    return found + [grandchild for child in found for grandchild in children_of(child)]


def alive(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


def killed_with_its_children(program, **variables):
    """Starts a program, waits until it says something, kills it, and waits until its children are gone."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment() | variables
    )
    try:
        while "ready" not in (line := process.stdout.readline()):
            assert line, "it ended before it was ready"
        children = children_of(process.pid)
        assert children
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    try:
        for _ in range(600):
            if not any(map(alive, children)):
                return
            time.sleep(0.1)
        pytest.fail(f"{list(filter(alive, children))} are still there")
    finally:
        for child in children:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)


CHILD = "import os, time; from espnet2_vllm.orphans import end_with; end_with(os.getppid()); print(1, flush=True); time.sleep(99)"
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
time.sleep(600)
"""
NO_DESCRIPTORS = "import os\ndel os.pidfd_open\n"


@pytest.mark.parametrize("kernel", ["of today", "older"])
def test_a_child_ends_with_its_parent(kernel):
    program = PARENT if kernel == "of today" else PARENT.replace(repr(CHILD), repr(NO_DESCRIPTORS + CHILD))
    killed_with_its_children(program)


ENGINE = """
from espnet2_vllm import SpeechLM
if __name__ == "__main__":
    settings = {"enforce_modality": ["text"], "text": {"temperature": 0, "topk": 1, "max_step": 5}}
    settings["audio"] = settings["text"]
    lm = SpeechLM.from_pretrained(MODEL, decoding=settings, OPTIONS)
    lm.generate([["user", "text", "one"]], seed=1)
    print("ready", flush=True)
    import time
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["max_num_seqs=2", "data_parallel_size=2"])
def test_engines_in_processes_of_their_own_end_with_the_program(options):
    program = ENGINE.replace("MODEL", repr(str(golden_models("bagpiper")[0]))).replace("OPTIONS", options)
    killed_with_its_children(program, VLLM_ENABLE_V1_MULTIPROCESSING="1")
