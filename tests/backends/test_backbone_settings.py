"""Every setting of a backbone that the table lets through means the same to transformers and to both backends."""

import pathlib
import subprocess
import sys

import pytest
from backbone_check import OWN, ROPES

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN)
def test_settings_that_are_let_through_mean_the_same_everywhere(kind, tmp_path):
    pytest.importorskip("vllm")
    command = [sys.executable, str(HERE / "backbone_check.py"), str(tmp_path), kind]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count(": the same") == len(ROPES) + len(OWN[kind])
