"""ESPnet itself on the same command line, so that a recipe changes one word to compare.

ESPnet says little about how it ended: a child that fails may leave exit code 0, and what it lost is nowhere counted. So the results
are looked at afterwards, and every key without one is named.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError

log = logging.getLogger(__name__)

PYTHON_VARIABLE = "ESPNET_PYTHON"
BAGPIPER = "espnet2.speechlm.bin.inference"
_NAMED = 20  # keys without a result that the log names


def espnet_command(
    module: str, parser: argparse.ArgumentParser, args: argparse.Namespace, given: frozenset[str]
) -> list[str]:
    """ESPnet's command line: what was given of the options that are its own (those of the parser's group ``ESPnet``).

    Raises:
        ConfigError: for options that ESPnet does not have, and where there is no ESPnet, or none that has the module.
    """
    groups = {group.title: {action.dest for action in group._group_actions} for group in parser._action_groups}
    own, known = groups["ESPnet"], {action.dest: action for action in parser._actions}
    neutral = {"backend", "espnet_python", "log_level"} | {name for name in given if getattr(args, name) == []}
    foreign = sorted(given - own - neutral)
    if foreign:
        raise ConfigError(
            f"--backend espnet: ESPnet has no option {', '.join(f'--{name}' for name in foreign)}; leave it out"
        )
    if getattr(args, "seed", 0) == "random":
        raise ConfigError("--backend espnet: --seed random is not for ESPnet; give a number")
    words = _start(args.espnet_python or os.environ.get(PYTHON_VARIABLE) or sys.executable, module)
    for name, action in known.items():
        if name in given & own:
            for value in _values(getattr(args, name)):
                words += [action.option_strings[0], str(value)]
    return words


# What a Python says of a module without importing it: its ESPnet, and whether the module is there as a command.
_LOOK = """
import importlib.metadata, importlib.util, json, sys
try:
    found = importlib.util.find_spec(sys.argv[1])
except ImportError:
    found = None
try:
    version = importlib.metadata.version("espnet")
except importlib.metadata.PackageNotFoundError:
    version = None
command = found is not None and "__main__" in open(found.origin, encoding="utf-8").read()
print(json.dumps([version, command]))
"""


def _start(python: str, module: str) -> list[str]:
    """The words that start ``module``, by the program that stands in for its GPU where there is none."""
    look = [python, "-c", _LOOK, module]
    try:
        done = subprocess.run(look, capture_output=True, text=True, check=True)
        version, there = json.loads(done.stdout.splitlines()[-1])
    except OSError as error:
        raise ConfigError(f"--backend espnet: cannot start {python}: {error.strerror}") from error
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise ConfigError(
            f"--backend espnet: {python} is no Python that can be asked for its ESPnet: {error}"
        ) from error
    if not there:
        raise ConfigError(f"--backend espnet: {python} has {_lacking(version, module)}")
    if module != BAGPIPER or _has_gpu():
        return [python, "-m", module]
    return [python, str(Path(__file__).with_name("espnet_process.py"))]


def _lacking(version: str | None, module: str) -> str:
    remedy = f"--espnet_python or the variable {PYTHON_VARIABLE} names another Python"
    if module == BAGPIPER:
        return f"{f'ESPnet {version}' if version else 'no ESPnet'} without {module}: pip install espnet==202611 there; {remedy}"
    has = f"ESPnet {version}, which has no" if version else "no"
    return (
        f"{has} command {module}. ESPnet decodes OpusLM models in the trees of its SpeechLM branches only, no longer in its "
        f"package: {remedy}, that of such a tree (with PYTHONPATH set to it)"
    )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _values(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [f"{key}={inner}" for key, inner in value.items()]
    if isinstance(value, bool):
        return [str(value).lower()]
    return list(value) if isinstance(value, list) else [value]


def run_espnet(command: Sequence[str], expected: Iterable[str], found: Any) -> int:
    """Runs ESPnet and looks at what it wrote.

    Args:
        expected: keys of the results.
        found: called afterwards, returns the keys that have one.

    Returns:
        0 if ESPnet ended well and every key has its result, else 1.
    """
    log.info("ESPnet: %s", shlex.join(command))
    code = subprocess.run(command, check=False).returncode
    present = set(found())
    missing = [key for key in expected if key not in present]
    if code:
        log.error("ESPnet ended with exit code %d", code)
    for key in missing[:_NAMED]:
        log.error("no result for %s: ESPnet wrote none", key)
    if len(missing) > _NAMED:
        log.error("and no result for %d more", len(missing) - _NAMED)
    log.info("ESPnet wrote results of %d utterances; %d have none", len(present), len(missing))
    return int(bool(code or missing))


def keys_of_entry(path: Path) -> set[str]:
    """Keys of a Kaldi file; none where it is not there. ESPnet's own lines may be broken: only the first field of each counts."""
    if not path.is_file():
        return set()
    return {
        line.split(maxsplit=1)[0].decode("utf-8", "replace") for line in path.read_bytes().split(b"\n") if line.strip()
    }
