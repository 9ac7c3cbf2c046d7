"""Tables and a figure of what evaluate.py measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TASKS = {"listen": "hears espeak-ng's digits", "speak": "says digits", "answer": "answers spoken questions"}


def write_report(folder: Path) -> None:
    """quality.md, quality.json and, where guidance was measured at several scales, quality.png; from measurements.jsonl."""
    lines = (folder / "measurements.jsonl").read_text(encoding="utf-8").splitlines()
    found = sorted((json.loads(line) for line in lines), key=_order)
    (folder / "quality.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "quality.md").write_text(table(found), encoding="utf-8")
    _plot(found, folder / "quality.png")


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["family"], row["task"], row["search"], row["scale"], row["judge"], row["backend"]


def table(rows: list[dict[str, Any]]) -> str:
    head = "| model | backend | task | search | cfg | judged by | utterances | WER % (95 % interval) |\n"
    lines = [head, "|---|---|---|---|---|---|---|---|\n"]
    for row in rows:
        cells = [
            row["family"],
            row["backend"],
            _TASKS[row["task"]],
            row["search"] or "-",
            f"{row['scale']:g}",
            row["judge"],
            str(row["utterances"]),
            f"{row['wer']:.1f} ({row['low']:.1f} to {row['high']:.1f})",
        ]
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    curves: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["task"] == "speak" and row["family"] == "bagpiper":
            curves.setdefault((row["backend"], row["search"], row["judge"]), []).append(row)
    curves = {key: points for key, points in curves.items() if len(points) > 1}
    if not curves:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for (backend, search, judge), points in sorted(curves.items()):
        points = sorted(points, key=lambda point: point["scale"])
        rates = [point["wer"] for point in points]
        low = [point["wer"] - point["low"] for point in points]
        high = [point["high"] - point["wer"] for point in points]
        scales = [point["scale"] for point in points]
        # The backends may lie on one another.
        style = {"marker": "x", "linestyle": ":", "zorder": 3} if backend == "pytorch" else {"marker": "o"}
        label = f"{backend}, {search}, heard by {judge}"
        axes.errorbar(scales, rates, yerr=[low, high], capsize=3, label=label, **style)
    axes.set(xlabel="scale of guidance (cfg; 1 is none)", ylabel="WER of spoken digits, %", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
