"""Runs the decoding command lines in this process, on recorded models."""

import os
import pathlib
import resource
import shutil
import subprocess
import sys

import yaml
from conftest import REPO

from espnet2_vllm.bin import inference, speechlm_inference_chat


def chat_arguments(model: pathlib.Path, decode, data, output_dir, *more, backend="pytorch") -> list[str]:
    """As stage 9 of ESPnet's recipe gives them."""
    return [
        *("--train_config", str(model / "config.yaml"), "--model_file", str(model / "model.pth")),
        *("--inference_config_file", str(decode), "--output_dir", str(output_dir)),
        *("--data_path_and_name_and_type", f"{data},_,dataset_json", "--backend", backend, *map(str, more)),
    ]


def chat(*arguments, **options) -> int:
    return speechlm_inference_chat.main(chat_arguments(*arguments, **options))


def bagpiper_arguments(model: pathlib.Path, config, specifier, output_dir, *more, backend="pytorch") -> list[str]:
    """As ESPnet's launchers give them, with a data set that is not registered."""
    return [
        *("--train-config", str(model / "train.yaml")),
        *("--model-checkpoint", str(model / "mp_rank_00_model_states.pt")),
        *("--inference-config", str(config), "--output-dir", str(output_dir)),
        *("--test-unregistered-specifier", specifier, "--backend", backend, *map(str, more)),
    ]


def bagpiper(*arguments, **options) -> int:
    return inference.main(bagpiper_arguments(*arguments, **options))


def writable(model: pathlib.Path, place: pathlib.Path) -> pathlib.Path:
    """A copy of a recorded model without its recordings, to be changed."""
    shutil.copytree(model, place, ignore=shutil.ignore_patterns("cases", "trees"))
    for path in [place, *place.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return place


def edited_yaml(source: pathlib.Path, target: pathlib.Path, change) -> pathlib.Path:
    """``source`` with ``change`` applied to its data, written to ``target``."""
    data = yaml.safe_load(source.read_text(encoding="utf-8"))
    change(data)
    target.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return target


def environment() -> dict[str, str]:
    """Of a program that is to use the package beside the tests, also where another one is installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))}


def help_of(module: str) -> tuple[str, float]:
    """What ``--help`` prints, and the processor time that it takes (the wall clock also counts who else is at work)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
