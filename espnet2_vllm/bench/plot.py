"""Throughput against requests in flight, one line a system. Needs matplotlib (the extra ``bench``)."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .systems import ENGINE, PYTORCH, TITLES

_STYLES = {
    "engine": {"marker": "o"},
    "plain": {"marker": "s", "linestyle": "--", "color": "0.4"},
    "plain-same": {"marker": "^", "linestyle": "-.", "color": "0.6"},
}


def check_matplotlib() -> None:
    """Raises ConfigError if there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'espnet2_vllm[bench]', or write --json here and plot "
            "it elsewhere with --plot-from"
        )


def plot(reports: Iterable[dict[str, Any]], path: Path) -> None:
    """One panel for each model and each pair of prompt and output lengths, written as a picture to ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for report in reports for model in report["models"] for panel in _panels(model)]
    if not panels:
        raise ConfigError("nothing was measured that could be plotted against requests in flight")
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, lines, level) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, title, lines, level)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")


Line = tuple[str, str, list[tuple[int, float]]]


def _panels(model: dict[str, Any]) -> Iterable[tuple[str, list[Line], float | None]]:
    """(title, lines of (system, label, points), rate of the sequential backend) of a model."""
    cells = [cell for cell in model["cells"] if "rows_per_s" in cell]
    sequential = [cell["rows_per_s"] for cell in cells if cell["system"] == PYTORCH]
    concurrent = [cell for cell in cells if cell["system"] != PYTORCH]
    for lengths in dict.fromkeys((cell["prompt"], cell["output"]) for cell in concurrent):
        points: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for cell in concurrent:
            if (cell["prompt"], cell["output"]) == lengths:
                points.setdefault(_label(cell), []).append((cell["in_flight"], cell["rows_per_s"]))
        lines = [(system, label, sorted(xy)) for (system, label), xy in points.items()]
        title = f"{model['name']}, {lengths[0]} prompt and {lengths[1]} output rows"
        yield title, lines, sequential[0] if sequential else None


def _label(cell: dict[str, Any]) -> tuple[str, str]:
    label = TITLES[cell["system"]]
    if cell["system"] == ENGINE:
        label += f", {cell['workload']}" + (f", cfg {cell['guidance']:g}" if cell["guidance"] != 1 else "")
    return cell["system"], label


def _draw(axes: Any, title: str, lines: list[Line], level: float | None) -> None:
    for system, label, points in lines:
        axes.plot(*zip(*points, strict=True), label=label, **_STYLES[system])
    if level is not None:
        axes.axhline(level, label=TITLES[PYTORCH], color="0.6", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({x for _, _, points in lines for x, _ in points})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(title=title, xlabel="requests in flight", ylabel="rows/s")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
