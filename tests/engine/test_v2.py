"""vLLM's V2 runner, without a GPU: its kernels run as Python under Triton's interpreter, in a process of its own."""

import pathlib
import subprocess
import sys

import pytest
from conftest import REPO, golden_models

sys.path.append(str(REPO / "tests" / "interpreter"))

from environment import interpreted  # noqa: E402

CHECK = REPO / "tests" / "served_check.py"


def model(family: str, name: str) -> pathlib.Path:
    (directory,) = (path for path in golden_models(family) if path.name == name)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "settings"),
    [("bagpiper", "qwen3-s8-cb64", ("async", "roomy")), ("opuslm", "tiny-llama", ("sync", "roomy", "fused"))],
    ids=["bagpiper", "opuslm"],
)
def test_v2_runner_equals_the_pytorch_backend(tmp_path, family, name, settings):
    """Under preemption at every row, lack of blocks, aborts, chunked prompts, prefix hits, teacher forcing, beside top-p."""
    command = [sys.executable, str(CHECK), str(model(family, name)), *settings]
    done = subprocess.run(command, env=interpreted(tmp_path), capture_output=True, text=True, timeout=1200)
    report = done.stdout[-3000:] + done.stderr[-4000:]
    assert done.returncode == 0 and "all equal" in done.stdout, report
    assert done.stdout.count("equal on v2") >= 8, report


@pytest.mark.slow
def test_v2_runner_on_two_ranks(tmp_path):
    """Tensor parallelism: two processes, in which the kernels choose."""
    command = [sys.executable, str(CHECK), str(model("bagpiper", "qwen3-s8-cb64")), "fused ranks"]
    done = subprocess.run(command, env=interpreted(tmp_path), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and "all equal" in done.stdout, done.stdout[-3000:] + done.stderr[-4000:]
    assert "fused ranks: alone equal on v2" in done.stdout
