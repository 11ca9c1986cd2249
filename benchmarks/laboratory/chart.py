"""Regret over node-hours as an SVG file, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from benchmarks.laboratory.summary import NEAR, Record, median_interval, regret_at

WIDTH, HEIGHT, LEFT, BOTTOM, LEGEND = 640, 420, 60, 48, 190
COLOURS = ("#0b6e4f", "#c1292e", "#235789", "#f1a208", "#6a4c93", "#8d6a9f", "#444444", "#00a6a6", "#d36135", "#7a7a00")
FLOOR, CEILING = 0.001, 2.0
"""Regrets shown, on a log scale; none yet counts as the ceiling."""
MARKS = 60


def draw(records: Sequence[Record], title: str) -> str:
    """One chart: a line per method, the median over its repeats, with its 90% interval as a band."""
    longest = max(r.budget for r in records)
    hours = [longest * (k + 1) / MARKS for k in range(MARKS)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + LEGEND}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
        *_axes(longest),
    ]
    for index, method in enumerate(dict.fromkeys(r.method for r in records)):
        own = [r for r in records if r.method == method]
        colour = COLOURS[index % len(COLOURS)]
        dash = "" if index < len(COLOURS) else ' stroke-dasharray="5 3"'
        shown = [h for h in hours if h <= max(r.budget for r in own) + 1e-9]
        triples = [median_interval([min(regret_at(r, h), CEILING) for r in own]) for h in shown]
        low = [f"{_x(h, longest):.1f},{_y(t[1]):.1f}" for h, t in zip(shown, triples, strict=True)]
        high = [f"{_x(h, longest):.1f},{_y(t[2]):.1f}" for h, t in zip(shown, triples, strict=True)]
        middle = [f"{_x(h, longest):.1f},{_y(t[0]):.1f}" for h, t in zip(shown, triples, strict=True)]
        parts.append(f'<polygon points="{" ".join(low + high[::-1])}" fill="{colour}" opacity="0.12"/>')
        parts.append(f'<polyline points="{" ".join(middle)}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        y = 40 + 20 * index
        parts.append(
            f'<line x1="{WIDTH}" x2="{WIDTH + 22}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"{dash}/>'
        )
        parts.append(f'<text x="{WIDTH + 28}" y="{y + 4}">{escape(method)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _axes(longest: float) -> list[str]:
    right, bottom = WIDTH - 20, HEIGHT - BOTTOM
    parts = []
    for regret in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0):
        y = _y(regret)
        strong = regret == NEAR
        parts.append(
            f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{"#888" if strong else "#ddd"}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * regret:g}%</text>'
        )
    step = 10 ** math.floor(math.log10(longest))
    step = step / 2 if longest / step < 3 else step
    for k in range(int(longest / step) + 1):
        x = _x(k * step, longest)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{k * step:g}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">node-hours spent</text>')
    parts.append(f'<text x="14" y="{bottom / 2}" transform="rotate(-90 14 {bottom / 2})" text-anchor="middle">'
                 "regret of the recommended configuration</text>")  # fmt: skip
    return parts


def _x(hours: float, longest: float) -> float:
    return LEFT + (WIDTH - 20 - LEFT) * hours / longest


def _y(regret: float) -> float:
    share = math.log(min(max(regret, FLOOR), CEILING) / FLOOR) / math.log(CEILING / FLOOR)
    return (HEIGHT - BOTTOM) - (HEIGHT - BOTTOM - 30) * share
