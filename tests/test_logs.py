"""What a user sees of a run: this package's lines; what libraries say is in a file."""

import json
import logging
import os
import subprocess
import sys

import pytest
from conftest import REPO

MODEL = REPO / "egs" / "digits" / "speechlm1" / "models" / "bagpiper"
CHOICES = ("VLLM_LOGGING_CONFIG_PATH", "VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_STREAM")
OURS = " INFO: ", " WARNING: "


def decode(tmp_path, *more, **variables):
    (tmp_path / "text").write_text("a three one four\n", encoding="utf-8")
    entry = {"name": "text1", "path": str(tmp_path / "text"), "reader": "text"}
    (tmp_path / "dataset.json").write_text(json.dumps({"data_entry": [entry], "samples": ["a"]}), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES} | variables
    command = [
        *(sys.executable, "-m", "espnet2_vllm.bin.inference", "--train-config", str(MODEL / "train.yaml")),
        *("--model-checkpoint", str(MODEL / "mp_rank_00_model_states.pt"), "--output-dir", str(tmp_path / "out")),
        *("--inference-config", str(REPO / "egs/digits/speechlm1/conf/inference_speak.yaml"), *more),
        *("--test-unregistered-specifier", f"text_to_audio:set:{tmp_path / 'dataset.json'}"),
    ]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=REPO)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout, ended.stderr.splitlines()


def test_a_log_is_this_packages(tmp_path):
    printed, lines = decode(tmp_path)
    assert printed == ""
    assert all(any(mark in line for mark in OURS) for line in lines), lines
    assert len(lines) < 40, lines
    assert any("starting the engine" in line for line in lines)
    assert any("the engine is ready after" in line for line in lines)
    (named,) = [line.rpartition(" ")[2] for line in lines if "what libraries have to say goes to" in line]
    assert named == str(tmp_path / "out" / ".journal" / "libraries.log")
    assert "Initializing a V1 LLM engine" in (tmp_path / "out" / ".journal" / "libraries.log").read_text()


def test_who_says_how_vllm_logs_sees_it(tmp_path):
    printed, lines = decode(tmp_path, VLLM_LOGGING_LEVEL="INFO")
    assert "Initializing a V1 LLM engine" in printed + "\n".join(lines)
    assert not (tmp_path / "out" / ".journal" / "libraries.log").exists()


def test_logging_of_the_caller_stays(tmp_path):
    """In a program that has set up its own logging nothing is moved."""
    from espnet2_vllm.logs import libraries_to_file

    before = list(logging.getLogger().handlers)
    assert before, "pytest listens"
    libraries_to_file(tmp_path / "libraries.log")
    assert logging.getLogger().handlers == before and not (tmp_path / "libraries.log").exists()


@pytest.mark.parametrize("listening", [True, False])
def test_waiting_is_said_once(listening):
    code = "import logging; from espnet2_vllm.logs import say, set_up_logging; LISTEN; say('starting')"
    code = code.replace("LISTEN", "set_up_logging()" if listening else "pass")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert ended.stdout == "" and ended.stderr.count("starting") == 1
    assert ended.stderr.endswith("INFO: starting\n" if listening else "starting\n")
