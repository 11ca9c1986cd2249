"""A chart as SVG: small, sharp at every size, and readable without scripts."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from lora_tune.base.format import visible
from lora_tune.review.plots.chart import Axis, Band, Bars, Chart, Lines, Mark, Points, Rule, Scale, extent
from lora_tune.review.plots.ticks import linear_ticks, log_ticks, tick_text

WIDTH = 580
_RIGHT, _BOTTOM, _CHARACTER = 14, 46, 7.0
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


def standalone(chart: Chart, theme: Mapping[str, str] = LIGHT) -> str:
    """The chart as an SVG file with its title, for slides."""
    inner, height = _body(chart, top=40)
    paper = f'<rect width="{WIDTH}" height="{height}" fill="{theme["paper"]}"/>'
    title = f'<text x="14" y="24" class="f-ink" style="font-size:15px;font-weight:600">{escape(chart.title)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f"<style>{style(theme)}</style>{paper}{title}{inner}</svg>\n"
    )


def inline(chart: Chart) -> str:
    """The chart for a page that holds :func:`page_style`, without its title."""
    inner, height = _body(chart, top=12)
    return (
        f'<svg class="chart" role="img" aria-label="{escape(chart.title)}" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">{inner}</svg>'
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """Data to pixels."""

    left: float
    top: float
    right: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_log: bool
    y_log: bool

    def x(self, value: float) -> float:
        return self.left + _share(value, self.x_range, self.x_log) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - _share(value, self.y_range, self.y_log) * (self.bottom - self.top)


def _share(value: float, limits: tuple[float, float], log: bool) -> float:
    low, high = limits
    if log:
        value, low, high = math.log(max(value, low * 1e-6)), math.log(low), math.log(high)
    return min(2.0, max(-1.0, (value - low) / (high - low)))


def _body(chart: Chart, top: int) -> tuple[str, int]:
    """The drawing and its height in pixels."""
    names = _legend_entries(chart.marks)
    legend, legend_height = _legend(names, top) if len(names) > 1 else ("", 0)
    y_ticks = _ticks(chart.y, extent(chart, "y"))
    longest = max((len(line) for _, text in y_ticks for line in _wrapped(text)), default=0)
    left = (34 if chart.y.label or y_ticks else 10) + longest * _CHARACTER
    bottom = top + legend_height + chart.height - _BOTTOM
    x_range, y_range = extent(chart, "x"), extent(chart, "y")
    frame = _Frame(left, top + legend_height, WIDTH - _RIGHT, bottom, x_range, y_range, chart.x.log, chart.y.log)
    axes = _axes(chart, frame, y_ticks)
    clip = f"clip{crc32(chart.title.encode())}"
    box = f'<clipPath id="{clip}"><rect x="{_n(frame.left)}" y="{_n(frame.top)}" width="{_n(frame.right - frame.left)}"'
    box += f' height="{_n(frame.bottom - frame.top)}"/></clipPath>'
    marks = "".join(_DRAW[type(mark)](mark, frame) for mark in chart.marks)
    return f'{box}{legend}{axes}<g clip-path="url(#{clip})">{marks}</g>', round(bottom + _BOTTOM)


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


def _axes(chart: Chart, f: _Frame, y_ticks: Sequence[tuple[float, str]]) -> str:
    parts = []
    for value, text in y_ticks:
        at = f.y(value)
        parts.append(_line("s-grid", (f.left, at), (f.right, at)))
        lines = _wrapped(text)
        first = at + 4 - _LINE * (len(lines) - 1) / 2
        parts += [_text(f.left - 7, first + _LINE * i, line, "end") for i, line in enumerate(lines)]
    x_ticks = _ticks(chart.x, f.x_range)
    room = max(1, int((f.right - f.left) / (max((len(t) for _, t in x_ticks), default=1) * _CHARACTER + 12)))
    skip = max(1, math.ceil(len(x_ticks) / room))
    for value, text in x_ticks[::skip]:
        at = f.x(value)
        parts.append(_line("s-grid", (at, f.top), (at, f.bottom)))
        parts.append(_text(at, f.bottom + 17, text, "middle"))
    parts.append(_text((f.left + f.right) / 2, f.bottom + 37, chart.x.label, "middle"))
    middle = (f.top + f.bottom) / 2
    turned = f'transform="translate(14 {_n(middle)}) rotate(-90)"'
    parts.append(f'<text class="f-soft" text-anchor="middle" {turned}>{escape(chart.y.label)}</text>')
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "soft") -> str:
    return f'<text class="f-{colour}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{escape(text)}</text>'


_Named = Lines | Points | Band | Bars


def _legend_entries(marks: Sequence[Mark]) -> list[_Named]:
    return [m for m in marks if m.name and not isinstance(m, Rule | Scale)]


def _legend(marks: Sequence[_Named], top: int) -> tuple[str, int]:
    """Keys in rows above the drawing; returns them and their height."""
    parts, x, y = [], 16.0, top + 8.0
    for mark in marks:
        width = 30 + len(mark.name) * _CHARACTER
        if x + width > WIDTH - _RIGHT and x > 16:
            x, y = 16.0, y + 19
        parts.append(_key(mark, x, y) + _text(x + 20, y + 4, mark.name, "start", "ink"))
        x += width + 8
    return "".join(parts), round(y - top + 20)


def _key(mark: _Named, x: float, y: float) -> str:
    if isinstance(mark, Lines):
        dash = " dash" if mark.dashed else ""
        return _line(f"s-{mark.colour}{dash}", (x, y), (x + 15, y), 2.5)
    if isinstance(mark, Points):
        return _dot(x + 8, y, mark)
    band = " band" if isinstance(mark, Band) else ""
    return f'<rect class="area f-{mark.colour}{band}" x="{_n(x + 1)}" y="{_n(y - 6)}" width="13" height="12" rx="2"/>'


def _lines(mark: Lines, f: _Frame) -> str:
    classes = f"s-{mark.colour}" + (" faint" if mark.faint else "") + (" dash" if mark.dashed else "")
    paths = [_path(line, f, steps=mark.steps) for line in mark.lines]
    if not mark.texts and not mark.trials:  # one element for them all
        return f'<path class="{classes}" stroke-width="{mark.width:g}" d="{"".join(paths)}"/>'
    inner = "".join(f'<path{_whose(mark, i)} d="{d}"{_end("path", mark, i)}' for i, d in enumerate(paths))
    return f'<g class="{classes.replace(" faint", " faints")}" stroke-width="{mark.width:g}">{inner}</g>'


def _whose(mark: Lines | Points | Bars, i: int) -> str:
    """The attribute that names the trial which the i-th element of a mark shows."""
    return f' data-t="{mark.trials[i]}"' if mark.trials else ""


def _end(tag: str, mark: Lines | Points | Bars, i: int) -> str:
    """The rest of an element: what it says when pointed at."""
    return f">{_title(mark.texts[i])}</{tag}>" if mark.texts else "/>"


def _path(line: Sequence[tuple[float, float]], f: _Frame, *, steps: bool) -> str:
    """Path data; a value that cannot be shown interrupts the line."""
    parts, pen, before = [], "M", ""
    for x, y in line:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        at = f"{_n(f.x(x))}"
        if steps and pen == "L":
            parts.append(f"L{at} {before}")
        before = _n(f.y(y))
        parts.append(f"{pen}{at} {before}")
        pen = "L"
    return "".join(parts)


def _points(mark: Points, f: _Frame) -> str:
    parts = []
    for i, (x, y) in enumerate(mark.points):
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        if mark.spans:
            low, high = mark.spans[i]
            parts.append(_line(f"s-{mark.colour} faint", (f.x(x), f.y(low)), (f.x(x), f.y(high)), 1.5))
        parts.append(_dot(f.x(x), f.y(y), mark, _whose(mark, i), _end("circle", mark, i)))
    return "".join(parts)


def _dot(x: float, y: float, mark: Points, whose: str = "", end: str = "/>") -> str:
    paint = f's-{mark.colour} f-paper" stroke-width="1.5' if mark.hollow else f"area f-{mark.colour}"
    return f'<circle{whose} class="{paint}" cx="{_n(x)}" cy="{_n(y)}" r="{mark.size:g}"{end}'


def _band(mark: Band, f: _Frame) -> str:
    there = [(x, high) for x, _, high in mark.edges]
    back = [(x, low) for x, low, _ in reversed(mark.edges)]
    return f'<path class="area band f-{mark.colour}" d="{_path([*there, *back], f, steps=False)}Z"/>'


def _bars(mark: Bars, f: _Frame) -> str:
    parts = []
    for i, (row, start, length) in enumerate(mark.bars):
        left, right = f.x(start), f.x(start + length)
        top, bottom = sorted((f.y(row - mark.height / 2), f.y(row + mark.height / 2)))
        parts.append(
            f'<rect{_whose(mark, i)} class="area f-{mark.colour}" x="{_n(left)}" y="{_n(top)}" '
            f'width="{_n(max(0.7, right - left))}" height="{_n(bottom - top)}"{_end("rect", mark, i)}'
        )
    return "".join(parts)


def _rule(mark: Rule, f: _Frame) -> str:
    if mark.axis == "y":
        start, end = (f.left, f.y(mark.value)), (f.right, f.y(mark.value))
        words = _text(f.left + 4, f.y(mark.value) - 5, mark.name, "start", mark.colour)
    else:
        start, end = (f.x(mark.value), f.top), (f.x(mark.value), f.bottom)
        words = _text(f.x(mark.value) + 5, f.top + 13, mark.name, "start", mark.colour)
    return _line(f"s-{mark.colour} dash", start, end, 1.5) + words


_OVER_LINES = "ink s-paper halo"
"""The class of a text that lines pass behind."""


def _scale(mark: Scale, f: _Frame) -> str:
    """The axis with its name above and, below, the texts that leave each other room."""
    at = f.y(mark.row)
    parts = [
        _line("s-muted", (f.x(0.0), at), (f.x(1.0), at), 1.5),
        _text(f.x(0.0), at - 9, mark.name, "start", _OVER_LINES),
    ]
    free, end = f.left, f.x(1.0)
    last = end - len(mark.ticks[-1][1]) * _CHARACTER if mark.ticks else end
    for i, (x, text) in enumerate(mark.ticks):
        anchor = "start" if x <= 0 else "end" if x >= 1 else "middle"
        middle, width = f.x(x), len(text) * _CHARACTER
        left = middle - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
        parts.append(_line("s-muted", (middle, at - 4), (middle, at + 4)))
        ends = i in (0, len(mark.ticks) - 1)
        if ends or (left >= free and left + width + 10 <= last):
            parts.append(_text(middle, at + 17, text, anchor, _OVER_LINES))
            free = left + width + 10
    return "".join(parts)


def _line(classes: str, start: tuple[float, float], end: tuple[float, float], width: float = 1.0) -> str:
    (x1, y1), (x2, y2) = start, end
    thick = f' stroke-width="{width:g}"' if width != 1 else ""
    return f'<line class="{classes}"{thick} x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def escape(text: str) -> str:
    """A text for XML: nothing in it is markup, and no character of it is one that XML forbids."""
    return html.escape(visible(text))


def _n(value: float) -> str:
    """A pixel position, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


_DRAW: dict[type, Callable[..., str]] = {
    Lines: _lines,
    Points: _points,
    Band: _band,
    Bars: _bars,
    Rule: _rule,
    Scale: _scale,
}
