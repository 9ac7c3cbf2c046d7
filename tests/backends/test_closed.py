"""Nobody outside is spoken to unasked, and nobody can speak to an engine: no connection is tried, no port is open to others."""

import json
import os
import subprocess
import sys

import pytest
from conftest import REPO

MODEL = REPO / "egs" / "digits" / "speechlm1" / "models" / "bagpiper"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="in this process"),
        pytest.param(["tensor_parallel_size=2"], id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_an_engine_is_closed(options, tmp_path):
    # Variables that a user may have set would hide what the package does by itself.
    ours = ("VLLM_HOST_IP", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE", "GLOO_SOCKET_IFNAME")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, str(REPO / "tests" / "backends" / "closed_check.py"), str(MODEL), *options]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    seen = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("{")))  # vLLM logs there too
    assert seen["bytes"] > 10_000
    assert seen["attempts"] == []
    assert set(seen["listening"]) <= LOOPBACK, seen["listening"]
