"""Two plots as inline SVG, without a library and without a script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 40


def histogram(values: Sequence[float], label: str, bins: int = 24) -> str:
    """How many values lie where. ``label``: of the horizontal axis. An empty figure without values."""
    top = max(values, default=0.0) or 1.0
    step = nice_step(top / bins)
    count = max(1, math.ceil(top / step + 1e-9))
    heights = [0] * count
    for value in values:
        heights[min(int(value / step), count - 1)] += 1
    frame = _Frame(count * step, max(heights))
    bars = []
    for index, height in enumerate(heights):
        if height:
            x, y = frame.x(index * step), frame.y(height)
            width, tall = frame.x((index + 1) * step) - x - 1, frame.y(0) - y
            title = f"{index * step:g} to {(index + 1) * step:g}: {height}"
            bars.append(
                f'<rect class="mark" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{tall:.1f}"><title>{title}</title></rect>'
            )
    return frame.svg(bars, label, "utterances")


def scatter(points: Sequence[tuple[float, float, str]], x_label: str, y_label: str) -> str:
    """Points (x, y, name), from 0 on."""
    frame = _Frame(max((x for x, _, _ in points), default=0.0), max((y for _, y, _ in points), default=0.0))
    dots = [
        f'<circle class="mark" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.5"><title>{escape(name)}: {x:g}, {y:.4g}</title>'
        "</circle>"
        for x, y, name in points
    ]
    return frame.svg(dots, x_label, y_label)


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below ``least`` (> 0)."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


class _Frame:
    """Axes from 0 to what fits the largest values."""

    def __init__(self, x_most: float, y_most: float) -> None:
        self.x_step, self.y_step = (nice_step((most or 1.0) / 5) for most in (x_most, y_most))
        self.x_end = math.ceil((x_most or 1.0) / self.x_step - 1e-9) * self.x_step
        self.y_end = math.ceil((y_most or 1.0) / self.y_step - 1e-9) * self.y_step

    def x(self, value: float) -> float:
        return _LEFT + value / self.x_end * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - value / self.y_end * (HEIGHT - _TOP - _BOTTOM)

    def svg(self, marks: Sequence[str], x_label: str, y_label: str) -> str:
        parts = []
        for index in range(round(self.x_end / self.x_step) + 1):
            value = index * self.x_step
            parts.append(
                f'<text x="{self.x(value):.1f}" y="{HEIGHT - _BOTTOM + 15}" text-anchor="middle">{value:g}</text>'
            )
        for index in range(round(self.y_end / self.y_step) + 1):
            y = self.y(index * self.y_step)
            parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{index * self.y_step:g}</text>')
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
        upright = (HEIGHT - _BOTTOM + _TOP) / 2
        parts.append(
            f'<text x="12" y="{upright:.0f}" text-anchor="middle" transform="rotate(-90 12 {upright:.0f})">{escape(y_label)}</text>'
        )
        shown = escape(f"{y_label} by {x_label}")
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{shown}">'
            f"{''.join(parts)}{''.join(marks)}</svg>"
        )
