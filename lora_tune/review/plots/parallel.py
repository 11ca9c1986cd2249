"""Parallel coordinates: every trial as one line across the axes of what it was tuned by and of what came out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_tune.config.parameters import Value
from lora_tune.config.study import Study
from lora_tune.review.describe import short_layout
from lora_tune.review.importance import knobs
from lora_tune.review.plots.chart import Axis, AxisScale, Chart, Colour, Lines, Mark
from lora_tune.review.summary import ranked
from lora_tune.search.objectives import Objective, objective_of
from lora_tune.store.records import StudyRecords, Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution, CategoricalDistribution

ROW = 1.0
"""Distance of two axes, in the units of the chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelAxis:
    """One axis. places: trial -> where its value lies, from 0 to 1. ticks: (place, text)."""

    name: str
    places: Mapping[int, float]
    ticks: Sequence[tuple[float, str]]


def parallel_axes(study: Study, sweep: StudyRecords) -> list[ParallelAxis]:
    """The objective's axis, then the tuned parameters', the most important first where importances are known.

    A parameter with a single value has none. [] before the first trial.
    """
    if not sweep.trials:
        return []
    tuned = {n: d for n, d in study.search_space.distributions().items() if not d.single()}
    order = {knob.name: i for i, knob in enumerate(knobs(study, sweep))}
    names = sorted(tuned, key=lambda name: order.get(name, len(order)))
    axes = [_parameter(name, tuned[name], sweep) for name in names]
    outcome = _outcome(objective_of(study), ranked(study, sweep))
    return [*([outcome] if outcome else []), *axes]


def _outcome(objective: Objective, done: Sequence[Trial]) -> ParallelAxis | None:
    """What the trials that have a result came to, the best at the left end."""
    if not done:
        return None
    values = {t.number: t.objective for t in done}
    best, worst = done[0].objective, done[-1].objective
    span = worst - best
    places = {number: (value - best) / span if span else 0.0 for number, value in values.items()}
    ticks = [(0.0, objective.text(best)), (1.0, objective.text(worst))] if span else [(0.0, objective.text(best))]
    return ParallelAxis(name=f"{objective.heading} (best at the left)", places=places, ticks=ticks)


def _parameter(name: str, distribution: BaseDistribution, sweep: StudyRecords) -> ParallelAxis:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    values = {t.number: t.tuned[name] for t in sweep.trials.values() if name in t.tuned}
    if isinstance(distribution, CategoricalDistribution):
        return _choices(name, distribution, values)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high, log = float(distribution.low), float(distribution.high), distribution.log
    middle = math.sqrt(low * high) if log else (low + high) / 2

    def place(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return min(1.0, max(0.0, share))  # an enqueued value of an earlier, wider range stays on the axis

    places = {number: place(float(value)) for number, value in values.items()}
    return ParallelAxis(name=name, places=places, ticks=[(place(v), f"{v:.4g}") for v in (low, middle, high)])


def _choices(name: str, distribution: CategoricalDistribution, values: Mapping[int, Value]) -> ParallelAxis:
    index = {choice: i for i, choice in enumerate(distribution.choices)}
    last = len(index) - 1
    places = {number: index[value] / last for number, value in values.items() if value in index}
    ticks = [(i / last, _short(choice)) for choice, i in index.items()]
    return ParallelAxis(name=name, places=places, ticks=ticks)


def _short(choice: object) -> str:
    return short_layout(choice) if isinstance(choice, str) and choice.startswith("tp") else str(choice)


def parallel_coordinates(study: Study, sweep: StudyRecords) -> Chart | None:
    """The chart, its axes one below the other so that any number of them fits; None with fewer than two axes."""
    axes = parallel_axes(study, sweep)
    if len(axes) < 2:
        return None
    done = ranked(study, sweep)
    best = {t.number for t in done[: max(1, len(done) // 3)]}
    rest = {t.number for t in done} - best
    groups: tuple[tuple[str, set[int], Colour], ...] = (
        ("without a result", sweep.trials.keys() - best - rest, "muted"),
        ("with a result", rest, "one"),
        ("the best third", best, "best"),
    )
    marks: list[Mark] = [
        Lines(
            name=name,
            lines=[_across(axes, number) for number in sorted(numbers)],
            colour=colour,
            width=1.6 if numbers is best else 1.2,
            faint=len(numbers) > 12,
            trials=sorted(numbers),
        )
        for name, numbers, colour in groups
        if numbers
    ]
    rows = len(axes)
    marks += [AxisScale(name=a.name, row=ROW * (rows - 1 - i), ticks=a.ticks) for i, a in enumerate(axes)]
    return Chart(
        title="Parallel coordinates",
        x=Axis(label="", low=-0.02, high=1.02, bare=True),
        y=Axis(label="", low=-0.45, high=ROW * (rows - 1) + 0.4, bare=True),
        marks=tuple(marks),
        note="Each line is one trial; the parameters that matter most stand first where that is known.",
        height=60 + 52 * rows,
    )


def _across(axes: Sequence[ParallelAxis], trial: int) -> list[tuple[float, float]]:
    """One trial's line from the first axis down; what it has no value for interrupts it."""
    last = len(axes) - 1
    return [(axis.places.get(trial, math.nan), ROW * (last - i)) for i, axis in enumerate(axes)]
