"""A chart as SVG: small, sharp at every size, and readable without scripts."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from zlib import crc32

from lora_tune.review.plots.chart import Axis, AxisScale, Band, Bars, Chart, Lines, Mark, Markers, Rule, extent
from lora_tune.review.plots.marks import CHARACTER, PlotFrame, dot, draw, escape, line_between, px, text_at
from lora_tune.review.plots.ticks import linear_ticks, log_ticks, tick_text

WIDTH = 580
_RIGHT, _BOTTOM, _BARE_BOTTOM = 14, 46, 6
_ROW_NAME, _LINE = 26, 12.0
"""Characters of a line of a row's name, and the height of such a line in pixels."""

LIGHT: Mapping[str, str] = {
    "best": "#0b6e4f", "good": "#2a9d6f", "stopped": "#d9822b", "bad": "#c23030", "muted": "#8a94a0",
    "target": "#6f42c1", "one": "#2563a8", "two": "#d9822b", "three": "#2a9d6f", "four": "#b0399b",
    "five": "#7a6a1f", "six": "#138a9e", "ink": "#1d2730", "soft": "#5a6672", "grid": "#e3e7eb", "paper": "#ffffff",
    "wash": "#f4f6f7",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "best": "#4fe0a8", "good": "#45bd8a", "stopped": "#f0a050", "bad": "#ff7b72", "muted": "#7d8895",
    "target": "#b794f6", "one": "#6cb2ff", "two": "#f0a050", "three": "#45bd8a", "four": "#ea84d8",
    "five": "#d8c45a", "six": "#4ccbe0", "ink": "#e6ebf0", "soft": "#a3aeb9", "grid": "#2c3540", "paper": "#141a20",
    "wash": "#1d252d",
}  # fmt: skip


_FONT = "font:12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
_STRUCTURE = {
    "text": _FONT,
    "path": "fill:none",
    "line": "fill:none",
    ".area": "stroke:none",
    ".faint": "opacity:.35",
    ".faints>*": "opacity:.35",
    ".band": "opacity:.16",
    ".dash": "stroke-dasharray:5 4",
    ".halo": "paint-order:stroke;stroke-width:3px",
}


def style(theme: Mapping[str, str]) -> str:
    """CSS for a file that stands alone, in one theme's colours."""
    structure = "".join(f"{selector}{{{rule}}}" for selector, rule in _STRUCTURE.items())
    return structure + "".join(f".s-{name}{{stroke:{value}}}.f-{name}{{fill:{value}}}" for name, value in theme.items())


def page_style() -> str:
    """CSS for a page with charts that defines the colours itself, as ``--best``, ``--ink``, ..."""
    structure = "".join(f".chart {selector}{{{rule}}}" for selector, rule in _STRUCTURE.items())
    colours = "".join(f".chart .s-{n}{{stroke:var(--{n})}}.chart .f-{n}{{fill:var(--{n})}}" for n in LIGHT)
    return structure + colours


def standalone(chart: Chart) -> str:
    """The chart as an SVG file with its title, for slides."""
    inner, height = _body(chart, top=40)
    paper = f'<rect width="{WIDTH}" height="{height}" fill="{LIGHT["paper"]}"/>'
    title = f'<text x="14" y="24" class="f-ink" style="font-size:15px;font-weight:600">{escape(chart.title)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f"<style>{style(LIGHT)}</style>{paper}{title}{inner}</svg>\n"
    )


def inline(chart: Chart) -> str:
    """The chart for a page that holds :func:`page_style`, without its title."""
    inner, height = _body(chart, top=12)
    return (
        f'<svg class="chart" role="img" aria-label="{escape(chart.title)}" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">{inner}</svg>'
    )


def _body(chart: Chart, top: int) -> tuple[str, int]:
    """The drawing and its height in pixels."""
    names = _legend_entries(chart.marks)
    legend, legend_height = _legend(names, top) if len(names) > 1 else ("", 0)
    y_ticks = _ticks(chart.y, extent(chart, "y"))
    longest = max((len(line) for _, text in y_ticks for line in _wrapped(text)), default=0)
    left = (34 if chart.y.label or y_ticks else 10) + longest * CHARACTER
    below = _BOTTOM if chart.x.label or not chart.x.bare else _BARE_BOTTOM
    bottom = top + legend_height + chart.height - _BOTTOM
    x_range, y_range = extent(chart, "x"), extent(chart, "y")
    frame = PlotFrame(left, top + legend_height, WIDTH - _RIGHT, bottom, x_range, y_range, chart.x.log, chart.y.log)
    axes = _axes(chart, frame, y_ticks)
    clip = f"clip{crc32(chart.title.encode())}"
    box = f'<clipPath id="{clip}"><rect x="{px(frame.left)}" y="{px(frame.top)}" width="{px(frame.right - frame.left)}"'
    box += f' height="{px(frame.bottom - frame.top)}"/></clipPath>'
    marks = "".join(draw(mark, frame) for mark in chart.marks)
    return f'{box}{legend}{axes}<g clip-path="url(#{clip})">{marks}</g>', round(bottom + below)


def _ticks(axis: Axis, limits: tuple[float, float]) -> list[tuple[float, str]]:
    if axis.bare:
        return []
    if axis.categories:
        return [(float(i), name) for i, name in enumerate(axis.categories)]
    if axis.log:
        return [(v, tick_text(v)) for v in log_ticks(*limits)]
    values = linear_ticks(*limits)
    step = values[1] - values[0] if len(values) > 1 else 0.0
    return [(v, tick_text(v, step)) for v in values]


def _wrapped(name: str) -> list[str]:
    """The name of a row in as many lines as it needs; it breaks at spaces where it has them."""
    return textwrap.wrap(name, _ROW_NAME) or [""]


def _axes(chart: Chart, f: PlotFrame, y_ticks: Sequence[tuple[float, str]]) -> str:
    parts = []
    for value, text in y_ticks:
        at = f.y(value)
        parts.append(line_between("s-grid", (f.left, at), (f.right, at)))
        lines = _wrapped(text)
        first = at + 4 - _LINE * (len(lines) - 1) / 2
        parts += [text_at(f.left - 7, first + _LINE * i, line, "end") for i, line in enumerate(lines)]
    x_ticks = _ticks(chart.x, f.x_range)
    room = max(1, int((f.right - f.left) / (max((len(t) for _, t in x_ticks), default=1) * CHARACTER + 12)))
    skip = max(1, math.ceil(len(x_ticks) / room))
    for value, text in x_ticks[::skip]:
        at = f.x(value)
        parts.append(line_between("s-grid", (at, f.top), (at, f.bottom)))
        parts.append(text_at(at, f.bottom + 17, text, "middle"))
    parts.append(text_at((f.left + f.right) / 2, f.bottom + 37, chart.x.label, "middle"))
    middle = (f.top + f.bottom) / 2
    turned = f'transform="translate(14 {px(middle)}) rotate(-90)"'
    parts.append(f'<text class="f-soft" text-anchor="middle" {turned}>{escape(chart.y.label)}</text>')
    return "".join(parts)


_Named = Lines | Markers | Band | Bars


def _legend_entries(marks: Sequence[Mark]) -> list[_Named]:
    return [m for m in marks if m.name and not isinstance(m, Rule | AxisScale)]


def _legend(marks: Sequence[_Named], top: int) -> tuple[str, int]:
    """Keys in rows above the drawing; returns them and their height."""
    parts, x, y = [], 16.0, top + 8.0
    for mark in marks:
        width = 30 + len(mark.name) * CHARACTER
        if x + width > WIDTH - _RIGHT and x > 16:
            x, y = 16.0, y + 19
        parts.append(_key(mark, x, y) + text_at(x + 20, y + 4, mark.name, "start", "ink"))
        x += width + 8
    return "".join(parts), round(y - top + 20)


def _key(mark: _Named, x: float, y: float) -> str:
    if isinstance(mark, Lines):
        dash = " dash" if mark.dashed else ""
        return line_between(f"s-{mark.colour}{dash}", (x, y), (x + 15, y), 2.5)
    if isinstance(mark, Markers):
        return dot(x + 8, y, mark)
    band = " band" if isinstance(mark, Band) else ""
    return f'<rect class="area f-{mark.colour}{band}" x="{px(x + 1)}" y="{px(y - 6)}" width="13" height="12" rx="2"/>'
