"""A chart as data: axes and marks. One drawing function makes it; SVG and plotly both show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Colour = Literal["best", "good", "stopped", "bad", "muted", "target", "one", "two", "three", "four", "five", "six"]
"""What a colour means, not what it is: the renderer's theme decides. ``one`` to ``six`` tell groups apart."""

GROUPS: tuple[Colour, ...] = ("one", "two", "three", "four", "five", "six")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis. label: what it shows, with its unit. log: decades.

    low, high: the range; None: from the marks. categories: names of the positions 0, 1, ... instead of numbers.
    bare: neither ticks nor grid, because the marks bring scales of their own.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    categories: tuple[str, ...] = ()
    bare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Polylines in one colour. Each is a sequence of (x, y); ``steps``: horizontal, then vertical.

    trials: whose line each is, for a page that links figures and table; empty, or one a line. So for the other marks.
    """

    name: str
    lines: Sequence[Sequence[tuple[float, float]]]
    colour: Colour
    width: float = 1.5
    faint: bool = False
    dashed: bool = False
    steps: bool = False
    texts: Sequence[str] = ()
    """What a line says when pointed at; empty, or one a line."""
    trials: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Markers at (x, y). spans: (low, high) on the y axis a point, drawn as whiskers; empty: none."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: Colour
    hollow: bool = False
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
    """A straight line across the chart at one value of one axis, with its name beside it."""

    name: str
    value: float
    axis: Literal["x", "y"] = "y"
    colour: Colour = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisScale:
    """A horizontal axis of its own at height ``row``, from x = 0 to x = 1, with its name above and texts below.

    ticks: (x, text), x from 0 to 1.
    """

    name: str
    row: float
    ticks: Sequence[tuple[float, str]]


Mark = Lines | Markers | Band | Bars | Rule | AxisScale


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Marks are drawn in order, the first at the back. note: what the reader should know, a sentence or two."""

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    note: str = ""
    height: int = 330


def extent(chart: Chart, which: Literal["x", "y"]) -> tuple[float, float]:
    """The range that an axis must show: its own limits, else those of the marks with a small margin."""
    axis = chart.x if which == "x" else chart.y
    if axis.categories:
        return -0.5, len(axis.categories) - 0.5
    values = [v for mark in chart.marks for v in _values(mark, which) if _usable(v, axis.log)]
    low = axis.low if axis.low is not None else min(values, default=0.1 if axis.log else 0.0)
    high = axis.high if axis.high is not None else max(values, default=1.0)
    if axis.log and not high > low:
        low, high = low / 1.5, low * 1.5
    elif not axis.log and not high - low > 1e-90:  # all one value, or so small that doubles cannot divide it
        half = 0.5 * (abs(low) if abs(low) > 1e-90 else 1.0)
        low, high = low - half, high + half
    margin = (high / low) ** 0.03 if axis.log else 0.03 * (high - low)
    if axis.low is None:
        low = low / margin if axis.log else low - margin
    if axis.high is None:
        high = high * margin if axis.log else high + margin
    return low, high


def _usable(value: float, log: bool) -> bool:
    return abs(value) < 1e100 and (value > 1e-100 or not log)  # NaN is neither; doubles must bear the arithmetic


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
    if isinstance(mark, AxisScale):
        return [0.0, 1.0] if which == "x" else [mark.row]
    return [mark.value] if mark.axis == which else []
