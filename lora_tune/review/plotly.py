"""A chart as a plotly figure, for optuna-dashboard and notebooks: the JSON that plotly reads, made without plotly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lora_tune.review.chart import (
    LIGHT,
    Axis,
    Band,
    Bars,
    Chart,
    Lines,
    Mark,
    Markers,
    Rule,
    escape,
    extent,
    log_ticks,
    tick_text,
)

_SEE_THROUGH = 0.16
_CLEAR, _ON_BOTH, _GRID = "rgba(0,0,0,0)", "#76808d", "rgba(128,128,128,0.25)"


def figure(chart: Chart) -> dict[str, Any]:
    """The chart as plotly's own structure, ``{"data": [...], "layout": {...}}``.

    ``plotly.graph_objects.Figure(figure(chart))`` is the figure in a notebook. plotly reads a little HTML in texts,
    so they are escaped.
    """
    data: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    for mark in chart.marks:
        if isinstance(mark, Rule):
            shapes.append(_rule(mark))
            notes.append(_rule_words(mark))
        else:
            data += _TRACES[type(mark)](mark)
    layout = {
        "title": {"text": escape(chart.title), "x": 0.01},
        "xaxis": _axis(chart, "x"),
        "yaxis": _axis(chart, "y"),
        "shapes": shapes,
        "annotations": notes,
        "barmode": "overlay",
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": -0.3, "yanchor": "top"},
        "margin": {"t": 50, "l": 60, "r": 20, "b": 60},
        # On a light page as on a dark one: the page's own ground, and a grey that is read on both.
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"color": _ON_BOTH},
        "modebar": {"bgcolor": _CLEAR, "color": _GRID, "activecolor": _ON_BOTH},
    }
    return {"data": _finite(data), "layout": layout}


def _finite(value: Any) -> Any:
    """Gaps in lines, and whatever number JSON does not know, as its null: a browser would refuse the whole figure."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _axis(chart: Chart, which: str) -> dict[str, Any]:
    axis: Axis = chart.x if which == "x" else chart.y
    low, high = extent(chart, "x" if which == "x" else "y")
    layout: dict[str, Any] = {"title": {"text": escape(axis.label)}, "automargin": True, "gridcolor": _GRID}
    if axis.bare:
        return layout | {"range": [low, high], "showticklabels": False, "showgrid": False, "zeroline": False}
    if axis.log:
        places = log_ticks(low, high)
        layout |= {"tickvals": places, "ticktext": [tick_text(v) for v in places]}
        return layout | {"type": "log", "range": [math.log10(low), math.log10(high)]}
    if axis.categories:
        places = list(range(len(axis.categories)))
        layout |= {"tickvals": places, "ticktext": [escape(name) for name in axis.categories]}
    return layout | {"range": [low, high]}


def _lines(mark: Lines) -> list[dict[str, Any]]:
    """One trace for all lines of a mark, with gaps between them: thousands of traces would be slow."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    texts: list[str] = []
    for i, line in enumerate(mark.lines):
        xs += [x for x, _ in line] + [None]
        ys += [y for _, y in line] + [None]
        texts += [escape(mark.texts[i]) if mark.texts else ""] * (len(line) + 1)
    shape = {"shape": "hv"} if mark.steps else {}
    dash = {"dash": "dash"} if mark.dashed else {}
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": escape(mark.name),
            "showlegend": bool(mark.name),
            "x": xs,
            "y": ys,
            "line": {"color": LIGHT[mark.colour], "width": mark.width, **shape, **dash},
            "opacity": 0.4 if mark.faint else 1.0,
            **({"text": texts, "hoverinfo": "text+x+y"} if mark.texts else {"hoverinfo": "x+y"}),
        }
    ]


def _points(mark: Markers) -> list[dict[str, Any]]:
    whiskers = {}
    if mark.spans:
        up = [high - y for (_, y), (_, high) in zip(mark.points, mark.spans, strict=True)]
        down = [y - low for (_, y), (low, _) in zip(mark.points, mark.spans, strict=True)]
        whiskers = {"error_y": {"type": "data", "array": up, "arrayminus": down, "width": 0, "thickness": 1}}
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": escape(mark.name),
            "x": [x for x, _ in mark.points],
            "y": [y for _, y in mark.points],
            "marker": {
                "color": LIGHT[mark.colour],
                "size": 2 * mark.size,
                "symbol": "circle-open" if mark.hollow else "circle",
            },
            **({"text": [escape(t) for t in mark.texts], "hoverinfo": "text"} if mark.texts else {}),
            **whiskers,
        }
    ]


def _band(mark: Band) -> list[dict[str, Any]]:
    xs = [x for x, _, _ in mark.edges]
    ys = [high for _, _, high in mark.edges] + [low for _, low, _ in reversed(mark.edges)]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": escape(mark.name),
            "showlegend": bool(mark.name),
            "x": xs + xs[::-1],
            "y": ys,
            "fill": "toself",
            "fillcolor": _faded(LIGHT[mark.colour]),
            "line": {"width": 0},
            "hoverinfo": "skip",
        }
    ]


def _bars(mark: Bars) -> list[dict[str, Any]]:
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": escape(mark.name),
            "y": [row for row, _, _ in mark.bars],
            "base": [start for _, start, _ in mark.bars],
            "x": [length for _, _, length in mark.bars],
            "width": mark.height,
            "marker": {"color": LIGHT[mark.colour], "line": {"width": 0}},
            **({"hovertext": [escape(t) for t in mark.texts], "hoverinfo": "text"} if mark.texts else {}),
        }
    ]


def _rule(mark: Rule) -> dict[str, Any]:
    across = {"x0": 0, "x1": 1, "xref": "paper", "y0": mark.value, "y1": mark.value, "yref": "y"}
    up = {"y0": 0, "y1": 1, "yref": "paper", "x0": mark.value, "x1": mark.value, "xref": "x"}
    line = {"color": LIGHT[mark.colour], "width": 1.5, "dash": "dash"}
    return {"type": "line", "line": line, **(across if mark.axis == "y" else up)}


def _rule_words(mark: Rule) -> dict[str, Any]:
    across = {"x": 0, "xref": "paper", "xanchor": "left", "y": mark.value, "yref": "y", "yanchor": "bottom"}
    up = {"y": 1, "yref": "paper", "yanchor": "top", "x": mark.value, "xref": "x", "xanchor": "left"}
    annotation = {"text": escape(mark.name), "showarrow": False, "font": {"color": LIGHT[mark.colour], "size": 12}}
    return annotation | (across if mark.axis == "y" else up)


def _faded(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{_SEE_THROUGH})"


_TRACES: dict[type[Mark], Callable[..., list[dict[str, Any]]]] = {
    Lines: _lines,
    Markers: _points,
    Band: _band,
    Bars: _bars,
}
