"""Kernels against their plain twins: natively on a GPU, under Triton's interpreter elsewhere."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.slow
def test_fused_step_equals_plain_step():
    native = torch.cuda.is_available()
    worlds = 200 if native else 6
    env = os.environ | ({} if native else {"TRITON_INTERPRET": "1"})
    command = [sys.executable, str(HERE / "fused_check.py"), "0", str(worlds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and f"{worlds} worlds equal" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


def test_attention_equals_its_definition():
    native = torch.cuda.is_available()
    worlds = 60 if native else 12
    env = os.environ | ({} if native else {"TRITON_INTERPRET": "1"})
    command = [sys.executable, str(HERE / "attention_check.py"), "0", str(worlds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and f"{worlds} worlds equal" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


def test_kernels_compile_for_hopper():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "compile_check.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "of 7 kernels" in done.stdout and "of 3 kernels" in done.stdout, done.stdout
