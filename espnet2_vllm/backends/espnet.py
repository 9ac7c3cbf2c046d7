"""The user's own ESPnet on the same command line, so that a recipe changes one word to compare.

ESPnet says little about how it ended: a child that fails may leave exit code 0, and what it lost is nowhere counted. So the results
are looked at afterwards, and every key without one is named.
"""

from __future__ import annotations

import argparse
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
_NAMED = 20  # keys without a result that the log names


def espnet_command(
    module: str, parser: argparse.ArgumentParser, args: argparse.Namespace, given: frozenset[str]
) -> list[str]:
    """ESPnet's command line: what was given of the options that are its own (those of the parser's group ``ESPnet``).

    Raises:
        ConfigError: for options that ESPnet does not have.
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
    words = [args.espnet_python or os.environ.get(PYTHON_VARIABLE) or sys.executable, "-m", module]
    for name, action in known.items():
        if name in given & own:
            for value in _values(getattr(args, name)):
                words += [action.option_strings[0], str(value)]
    return words


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
