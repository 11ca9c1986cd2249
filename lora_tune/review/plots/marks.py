"""The marks of a chart as SVG: lines, points, bands, bars, rules and scales, each in the pixels of its frame."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_tune.base.format import visible
from lora_tune.review.plots.chart import AxisScale, Band, Bars, Lines, Mark, Markers, Rule

CHARACTER = 7.0
"""Width of a character in pixels, about."""


@dataclass(frozen=True, slots=True)
class PlotFrame:
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


def text_at(x: float, y: float, text: str, anchor: str, colour: str = "soft") -> str:
    return f'<text class="f-{colour}" x="{px(x)}" y="{px(y)}" text-anchor="{anchor}">{escape(text)}</text>'


def _lines(mark: Lines, f: PlotFrame) -> str:
    classes = f"s-{mark.colour}" + (" faint" if mark.faint else "") + (" dash" if mark.dashed else "")
    paths = [_path(line, f, steps=mark.steps) for line in mark.lines]
    if not mark.texts and not mark.trials:  # one element for them all
        return f'<path class="{classes}" stroke-width="{mark.width:g}" d="{"".join(paths)}"/>'
    inner = "".join(f'<path{_whose(mark, i)} d="{d}"{_end("path", mark, i)}' for i, d in enumerate(paths))
    return f'<g class="{classes.replace(" faint", " faints")}" stroke-width="{mark.width:g}">{inner}</g>'


def _whose(mark: Lines | Markers | Bars, i: int) -> str:
    """The attribute that names the trial which the i-th element of a mark shows."""
    return f' data-t="{mark.trials[i]}"' if mark.trials else ""


def _end(tag: str, mark: Lines | Markers | Bars, i: int) -> str:
    """The rest of an element: what it says when pointed at."""
    return f">{_title(mark.texts[i])}</{tag}>" if mark.texts else "/>"


def _path(line: Sequence[tuple[float, float]], f: PlotFrame, *, steps: bool) -> str:
    """Path data; a value that cannot be shown interrupts the line."""
    parts, pen, before = [], "M", ""
    for x, y in line:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        at = f"{px(f.x(x))}"
        if steps and pen == "L":
            parts.append(f"L{at} {before}")
        before = px(f.y(y))
        parts.append(f"{pen}{at} {before}")
        pen = "L"
    return "".join(parts)


def _points(mark: Markers, f: PlotFrame) -> str:
    parts = []
    for i, (x, y) in enumerate(mark.points):
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        if mark.spans:
            low, high = mark.spans[i]
            parts.append(line_between(f"s-{mark.colour} faint", (f.x(x), f.y(low)), (f.x(x), f.y(high)), 1.5))
        parts.append(dot(f.x(x), f.y(y), mark, _whose(mark, i), _end("circle", mark, i)))
    return "".join(parts)


def dot(x: float, y: float, mark: Markers, whose: str = "", end: str = "/>") -> str:
    paint = f's-{mark.colour} f-paper" stroke-width="1.5' if mark.hollow else f"area f-{mark.colour}"
    return f'<circle{whose} class="{paint}" cx="{px(x)}" cy="{px(y)}" r="{mark.size:g}"{end}'


def _band(mark: Band, f: PlotFrame) -> str:
    there = [(x, high) for x, _, high in mark.edges]
    back = [(x, low) for x, low, _ in reversed(mark.edges)]
    return f'<path class="area band f-{mark.colour}" d="{_path([*there, *back], f, steps=False)}Z"/>'


def _bars(mark: Bars, f: PlotFrame) -> str:
    parts = []
    for i, (row, start, length) in enumerate(mark.bars):
        left, right = f.x(start), f.x(start + length)
        top, bottom = sorted((f.y(row - mark.height / 2), f.y(row + mark.height / 2)))
        parts.append(
            f'<rect{_whose(mark, i)} class="area f-{mark.colour}" x="{px(left)}" y="{px(top)}" '
            f'width="{px(max(0.7, right - left))}" height="{px(bottom - top)}"{_end("rect", mark, i)}'
        )
    return "".join(parts)


def _rule(mark: Rule, f: PlotFrame) -> str:
    if mark.axis == "y":
        start, end = (f.left, f.y(mark.value)), (f.right, f.y(mark.value))
        label = text_at(f.left + 4, f.y(mark.value) - 5, mark.name, "start", mark.colour)
    else:
        start, end = (f.x(mark.value), f.top), (f.x(mark.value), f.bottom)
        label = text_at(f.x(mark.value) + 5, f.top + 13, mark.name, "start", mark.colour)
    return line_between(f"s-{mark.colour} dash", start, end, 1.5) + label


_OVER_LINES = "ink s-paper halo"
"""The class of a text that lines pass behind."""


def _scale(mark: AxisScale, f: PlotFrame) -> str:
    """The axis with its name above and, below, the texts that leave each other room."""
    at = f.y(mark.row)
    parts = [
        line_between("s-muted", (f.x(0.0), at), (f.x(1.0), at), 1.5),
        text_at(f.x(0.0), at - 9, mark.name, "start", _OVER_LINES),
    ]
    free, end = f.left, f.x(1.0)
    last = end - len(mark.ticks[-1][1]) * CHARACTER if mark.ticks else end
    for i, (x, text) in enumerate(mark.ticks):
        anchor = "start" if x <= 0 else "end" if x >= 1 else "middle"
        middle, width = f.x(x), len(text) * CHARACTER
        left = middle - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
        parts.append(line_between("s-muted", (middle, at - 4), (middle, at + 4)))
        ends = i in (0, len(mark.ticks) - 1)
        if ends or (left >= free and left + width + 10 <= last):
            parts.append(text_at(middle, at + 17, text, anchor, _OVER_LINES))
            free = left + width + 10
    return "".join(parts)


def line_between(classes: str, start: tuple[float, float], end: tuple[float, float], width: float = 1.0) -> str:
    (x1, y1), (x2, y2) = start, end
    thick = f' stroke-width="{width:g}"' if width != 1 else ""
    return f'<line class="{classes}"{thick} x1="{px(x1)}" y1="{px(y1)}" x2="{px(x2)}" y2="{px(y2)}"/>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def escape(text: str) -> str:
    """A text for XML: nothing in it is markup, and no character of it is one that XML forbids."""
    return html.escape(visible(text))


def px(value: float) -> str:
    """A pixel position, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


_DRAW: dict[type, Callable[..., str]] = {
    Lines: _lines,
    Markers: _points,
    Band: _band,
    Bars: _bars,
    Rule: _rule,
    AxisScale: _scale,
}


def draw(mark: Mark, frame: PlotFrame) -> str:
    """A mark of a chart as SVG."""
    return _DRAW[type(mark)](mark, frame)
