"""A chart as data (axes and marks), and its drawing as SVG."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple
from zlib import crc32

from lora_tune.base.text import visible

Colour = Literal["best", "good", "stopped", "bad", "muted", "target", "one", "two", "three", "four", "five", "six"]
"""Meaning of a colour; the theme assigns its value. ``one`` to ``six`` distinguish groups."""

GROUPS: tuple[Colour, ...] = ("one", "two", "three", "four", "five", "six")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis. label: quantity and unit. log: logarithmic scale.

    low, high: the range; None: from the marks. categories: names of the positions 0, 1, ... instead of numbers.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Polylines in one colour, each a sequence of (x, y). steps: first horizontal, then vertical.

    trials: the trial of each line, so that the page can link figures and table; may be empty. Likewise in other marks.
    """

    name: str
    lines: Sequence[Sequence[tuple[float, float]]]
    colour: Colour
    width: float = 1.5
    faint: bool = False
    steps: bool = False
    texts: Sequence[str] = ()
    """Tooltip of each line; may be empty."""
    trials: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Markers at (x, y). spans: (low, high) on the y axis per point, drawn as whiskers; may be empty."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: Colour
    size: float = 4.0
    texts: Sequence[str] = ()
    spans: Sequence[tuple[float, float]] = ()
    trials: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The area between two curves: (x, low, high)."""

    name: str
    edges: Sequence[tuple[float, float, float]]
    colour: Colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars: (row, start, length); row is a position on a categorical y axis."""

    name: str
    bars: Sequence[tuple[float, float, float]]
    colour: Colour
    height: float = 0.7
    texts: Sequence[str] = ()
    trials: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A labelled horizontal line across the chart at one y value."""

    name: str
    value: float
    colour: Colour = "target"


Mark = Lines | Markers | Band | Bars | Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Marks are drawn in order, the first at the back. note: caption of a sentence or two."""

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    note: str = ""
    height: int = 330


def extent(chart: Chart, which: Literal["x", "y"]) -> tuple[float, float]:
    """The range of an axis: its limits, else those of the marks with a small margin."""
    axis = chart.x if which == "x" else chart.y
    if axis.categories:
        return -0.5, len(axis.categories) - 0.5
    values = [v for mark in chart.marks for v in _values(mark, which) if _usable(v, axis.log)]
    low = axis.low if axis.low is not None else min(values, default=0.1 if axis.log else 0.0)
    high = axis.high if axis.high is not None else max(values, default=1.0)
    if axis.log and not high > low:
        low, high = low / 1.5, low * 1.5
    elif not axis.log and not high - low > 1e-90:  # a single value, or a range too small for double arithmetic
        half = 0.5 * (abs(low) if abs(low) > 1e-90 else 1.0)
        low, high = low - half, high + half
    margin = (high / low) ** 0.03 if axis.log else 0.03 * (high - low)
    if axis.low is None:
        low = low / margin if axis.log else low - margin
    if axis.high is None:
        high = high * margin if axis.log else high + margin
    return low, high


def _usable(value: float, log: bool) -> bool:
    return abs(value) < 1e100 and (value > 1e-100 or not log)  # False for NaN; bounds keep the arithmetic finite


def _values(mark: Mark, which: Literal["x", "y"]) -> Sequence[float]:
    at = 0 if which == "x" else 1
    if isinstance(mark, Lines):
        return [point[at] for line in mark.lines for point in line]
    if isinstance(mark, Markers):
        spans = [v for span in mark.spans for v in span] if which == "y" else []
        return [*(point[at] for point in mark.points), *spans]
    if isinstance(mark, Band):
        return [v for edge in mark.edges for v in (edge[:1] if which == "x" else edge[1:])]
    if isinstance(mark, Bars):
        return [v for _, start, length in mark.bars for v in (start, start + length)] if which == "x" else []
    return [mark.value] if which == "y" else []


# SVG of the marks, in pixels of the plot frame.


CHARACTER = 7.0
"""Approximate width of a character in pixels."""


@dataclass(frozen=True, slots=True)
class PlotFrame:
    """Maps data to pixels."""

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
    classes = f"s-{mark.colour}" + (" faint" if mark.faint else "")
    paths = [_path(line, f, steps=mark.steps) for line in mark.lines]
    if not mark.texts and not mark.trials:  # one element for all lines
        return f'<path class="{classes}" stroke-width="{mark.width:g}" d="{"".join(paths)}"/>'
    inner = "".join(f'<path{_whose(mark, i)} d="{d}"{_end("path", mark, i)}' for i, d in enumerate(paths))
    return f'<g class="{classes.replace(" faint", " faints")}" stroke-width="{mark.width:g}">{inner}</g>'


def _whose(mark: Lines | Markers | Bars, i: int) -> str:
    """The attribute with the trial of the i-th element of a mark."""
    return f' data-t="{mark.trials[i]}"' if mark.trials else ""


def _end(tag: str, mark: Lines | Markers | Bars, i: int) -> str:
    """The end of an element, with its tooltip."""
    return f">{_title(mark.texts[i])}</{tag}>" if mark.texts else "/>"


def _path(line: Sequence[tuple[float, float]], f: PlotFrame, *, steps: bool) -> str:
    """Path data; non-finite values interrupt the line."""
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
    return f'<circle{whose} class="area f-{mark.colour}" cx="{px(x)}" cy="{px(y)}" r="{mark.size:g}"{end}'


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
    y = f.y(mark.value)
    label = text_at(f.left + 4, y - 5, mark.name, "start", mark.colour)
    return line_between(f"s-{mark.colour} dash", (f.left, y), (f.right, y), 1.5) + label


def line_between(classes: str, start: tuple[float, float], end: tuple[float, float], width: float = 1.0) -> str:
    (x1, y1), (x2, y2) = start, end
    thick = f' stroke-width="{width:g}"' if width != 1 else ""
    return f'<line class="{classes}"{thick} x1="{px(x1)}" y1="{px(y1)}" x2="{px(x2)}" y2="{px(y2)}"/>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def escape(text: str) -> str:
    """Escape a text for XML; control characters become spaces."""
    return html.escape(visible(text))


def px(value: float) -> str:
    """A pixel position, rounded to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


_DRAW: dict[type, Callable[..., str]] = {
    Lines: _lines,
    Markers: _points,
    Band: _band,
    Bars: _bars,
    Rule: _rule,
}


def draw(mark: Mark, frame: PlotFrame) -> str:
    """A mark as SVG."""
    return _DRAW[type(mark)](mark, frame)


# Axis ticks and their labels.


def linear_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About ``count`` round numbers (steps of 1, 2, 2.5 or 5 times a power of ten) within the range."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, also 2 and 5 times them within three decades; linear ticks within one decade."""
    decades = math.log10(high / low)
    if decades < 0.8:
        return [t for t in linear_ticks(low, high) if t > 0]
    factors = (1, 2, 5) if decades <= 3 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [f * 10.0**p for p in powers for f in factors if low * 0.999 <= f * 10.0**p <= high * 1.001]


def tick_text(value: float, step: float = 0.0) -> str:
    """The shortest text that distinguishes ticks ``step`` apart (0: four significant digits)."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        power = math.floor(math.log10(abs(value)) + 1e-9)
        digits = max(0, power - _last_place(step)) if step > 0 else 3
        mantissa = f"{value / 10.0**power:.{digits}f}"
        return f"{mantissa.rstrip('0').rstrip('.') if step <= 0 else mantissa}e{power}"
    if step > 0:
        return f"{value:,.{max(0, -_last_place(step))}f}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _last_place(step: float) -> int:
    """The power of ten of the last digit that multiples of ``step`` (1, 2, 2.5 or 5 times a power of ten) need."""
    power = math.floor(math.log10(step) + 1e-9)
    return power if abs(step / 10.0**power - round(step / 10.0**power)) < 1e-6 else power - 1


# The chart as SVG: small, scalable, readable without scripts.


WIDTH = 580
_RIGHT, _BOTTOM = 14, 46
_ROW_NAME, _LINE = 26, 12.0
"""Characters per line of a row's name, and the height of a line in pixels."""

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
    """CSS for a standalone file, in one theme's colours."""
    structure = "".join(f"{selector}{{{rule}}}" for selector, rule in _STRUCTURE.items())
    return structure + "".join(f".s-{name}{{stroke:{value}}}.f-{name}{{fill:{value}}}" for name, value in theme.items())


def page_style() -> str:
    """CSS for charts in a page that defines the colours as ``--best``, ``--ink``, ..."""
    structure = "".join(f".chart {selector}{{{rule}}}" for selector, rule in _STRUCTURE.items())
    colours = "".join(f".chart .s-{n}{{stroke:var(--{n})}}.chart .f-{n}{{fill:var(--{n})}}" for n in LIGHT)
    return structure + colours


def standalone(chart: Chart) -> str:
    """The chart as an SVG file with its title."""
    inner, height = _body(chart, top=40)
    paper = f'<rect width="{WIDTH}" height="{height}" fill="{LIGHT["paper"]}"/>'
    title = f'<text x="14" y="24" class="f-ink" style="font-size:15px;font-weight:600">{escape(chart.title)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f"<style>{style(LIGHT)}</style>{paper}{title}{inner}</svg>\n"
    )


def inline(chart: Chart) -> str:
    """The chart without its title, for a page that includes :func:`page_style`."""
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
    bottom = top + legend_height + chart.height - _BOTTOM
    x_range, y_range = extent(chart, "x"), extent(chart, "y")
    frame = PlotFrame(left, top + legend_height, WIDTH - _RIGHT, bottom, x_range, y_range, chart.x.log, chart.y.log)
    axes = _axes(chart, frame, y_ticks)
    clip = f"clip{crc32(chart.title.encode())}"
    box = f'<clipPath id="{clip}"><rect x="{px(frame.left)}" y="{px(frame.top)}" width="{px(frame.right - frame.left)}"'
    box += f' height="{px(frame.bottom - frame.top)}"/></clipPath>'
    marks = "".join(draw(mark, frame) for mark in chart.marks)
    return f'{box}{legend}{axes}<g clip-path="url(#{clip})">{marks}</g>', round(bottom + _BOTTOM)


def _ticks(axis: Axis, limits: tuple[float, float]) -> list[tuple[float, str]]:
    if axis.categories:
        return [(float(i), name) for i, name in enumerate(axis.categories)]
    if axis.log:
        return [(v, tick_text(v)) for v in log_ticks(*limits)]
    values = linear_ticks(*limits)
    step = values[1] - values[0] if len(values) > 1 else 0.0
    return [(v, tick_text(v, step)) for v in values]


def _wrapped(name: str) -> list[str]:
    """The name of a row, wrapped at spaces where possible."""
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
    return [m for m in marks if m.name and not isinstance(m, Rule)]


def _legend(marks: Sequence[_Named], top: int) -> tuple[str, int]:
    """Legend keys in rows above the drawing, and their height."""
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
        return line_between(f"s-{mark.colour}", (x, y), (x + 15, y), 2.5)
    if isinstance(mark, Markers):
        return dot(x + 8, y, mark)
    band = " band" if isinstance(mark, Band) else ""
    return f'<rect class="area f-{mark.colour}{band}" x="{px(x + 1)}" y="{px(y - 6)}" width="13" height="12" rx="2"/>'


# Units of time axes.


class TimeUnit(NamedTuple):
    """A unit of time: name, and length in seconds."""

    name: str
    seconds: float


def time_unit(seconds: Iterable[float]) -> TimeUnit:
    """Seconds, minutes, hours or days: the largest unit in which the largest finite value exceeds 2.5."""
    largest = max((s for s in seconds if s == s and s < float("inf")), default=0.0)
    for unit in (TimeUnit("days", 86400), TimeUnit("h", 3600), TimeUnit("min", 60)):
        if largest > 2.5 * unit.seconds:
            return unit
    return TimeUnit("s", 1)
