"""Figures of convergence: eval curves with the pruning envelope, and samples to the target against one knob."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.base.format import about
from lora_tune.config.study import Study
from lora_tune.controller import pruning
from lora_tune.review.describe import parameters_text
from lora_tune.review.plots.chart import GROUPS, Axis, Band, Chart, Colour, Lines, Mark, Markers, Rule
from lora_tune.review.summary import STOPPED_EARLY, ranked
from lora_tune.search.objectives import objective_of
from lora_tune.search.recommendation import leaders
from lora_tune.store.records import StudyRecords, Trial, Verdict

Line = list[tuple[float, float]]

HIGHLIGHTED = 6
"""The best trials, whose curves are drawn whole and say their parameters; the others' colour says how they ended."""

MOST_DRAWN, FEWEST_DRAWN = 20_000, 8
"""Points of all other curves together, and of each at least: the page of thousands of long curves stays small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveData:
    """Trials with their (samples, eval loss) lines. envelope: (samples, median, limit) of batch ``gbs``."""

    best: Sequence[tuple[Trial, Line]]
    reached: Sequence[tuple[Trial, Line]]
    stopped: Sequence[tuple[Trial, Line]]
    others: Sequence[tuple[Trial, Line]]
    envelope: Sequence[tuple[float, float, float]]
    gbs: object


def curve_data(study: Study, sweep: StudyRecords) -> CurveData:
    """Every trial's evals, by how it ended; the pruning envelope is the one that runs of the best trial's batch met."""
    top = leaders(study, sweep)[:HIGHLIGHTED]
    best = [(trial, _line(study, sweep, trial)) for trial in top]
    shown = {trial.number for trial in top}
    rest = [t for t in sweep.trials.values() if t.number not in shown and sweep.last_evals(t.number)]
    lines = [(t, thinned(_line(study, sweep, t), max(FEWEST_DRAWN, MOST_DRAWN // len(rest)))) for t in rest]
    return CurveData(
        best=best,
        reached=[(t, line) for t, line in lines if t.verdict is Verdict.REACHED],
        stopped=[(t, line) for t, line in lines if t.verdict in STOPPED_EARLY],
        others=[(t, line) for t, line in lines if t.verdict is not Verdict.REACHED and t.verdict not in STOPPED_EARLY],
        envelope=[(x, study.shown(a), study.shown(b)) for x, a, b in pruning.band(study, sweep, top[0])] if top else (),
        gbs=top[0].parameters.get("GBS") if top else None,
    )


def thinned(line: Line, most: int) -> Line:
    """At most ``most`` (from 2) points of a line, evenly among all, its first and its last among them. Pure."""
    if len(line) <= most:
        return line
    return [line[round(i * (len(line) - 1) / (most - 1))] for i in range(most)]


def _line(study: Study, sweep: StudyRecords, trial: Trial) -> Line:
    return [(e.samples, study.shown(e.loss)) for e in sweep.last_evals(trial.number)]


def eval_curves(study: Study, sweep: StudyRecords) -> Chart | None:
    """Eval loss over samples, with the target; None before the first eval."""
    data = curve_data(study, sweep)
    lines = [line for _, line in (*data.best, *data.reached, *data.stopped, *data.others)]
    if not lines or not objective_of(study).judges_evals:
        return None
    marks: list[Mark] = []
    if data.envelope:
        name = f"GBS {data.gbs}: from the usual curve to where a run is stopped"
        marks.append(Band(name=name, edges=data.envelope, colour="muted"))
    groups: tuple[tuple[str, Sequence[tuple[Trial, Line]], Colour], ...] = (
        ("open, censored or failed", data.others, "muted"),
        ("stopped early", data.stopped, "stopped"),
        ("reached", data.reached, "good"),
    )
    for name, group, colour in groups:
        if group:
            drawn, whose = [line for _, line in group], [t.number for t, _ in group]
            faint = len(group) > 12
            marks.append(Lines(name=name, lines=drawn, colour=colour, width=1.2, faint=faint, trials=whose))
    if data.best:
        texts = [f"trial {t.number}: {parameters_text(t)}" for t, _ in data.best]
        name = f"best {len(data.best)}"
        marks.append(
            Lines(
                name=name,
                lines=[x for _, x in data.best],
                colour="best",
                width=2.2,
                texts=texts,
                trials=[t.number for t, _ in data.best],
            )
        )
    target = study.objective.target if objective_of(study).has_target else None
    if target is not None:
        marks.append(Rule(name=f"target {target:g}", value=target))
    low, high = _value_range(study, lines, target)
    return Chart(
        title="Eval curves",
        x=Axis(label=f"training {study.progress_unit}", log=True),
        y=Axis(label=study.measure, low=low, high=high),
        marks=tuple(marks),
        note="Each line is one trial. Values far off the others are cut off.",
    )


def _value_range(study: Study, lines: Sequence[Line], target: float | None) -> tuple[float, float]:
    """The target and all values but the worst 3%, so that one spike does not flatten the picture."""
    values = [y for line in lines for _, y in line if math.isfinite(y)] or [target or 0.0]
    low, high = (float(v) for v in np.quantile(values, [0.03, 1.0] if study.rising else [0.0, 0.97]))
    if target is not None:
        low, high = min(low, target), max(high, target)
    margin = 0.06 * max(high - low, 1e-3 * max(abs(low), abs(high)))
    return low - margin, high + margin


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergenceData:
    """Samples to the target against one tuned number, by global batch size (None: the study has none).

    groups: GBS -> (value, samples, low, high, trial) of trials that reached the target; samples is the estimated
    crossing and low to high its 90% interval. model: GBS -> (value, samples, low, high) of the fitted curve.
    """

    knob: str
    log: bool
    groups: Mapping[object, Sequence[tuple[float, float, float, float, Trial]]]
    model: Mapping[object, Sequence[tuple[float, float, float, float]]]


def convergence_data(study: Study, sweep: StudyRecords) -> ConvergenceData | None:
    """Samples to target against the learning rate, else against the first tuned number; None without a reached trial.

    The model of each batch size with at least five trials is a parabola in ln(samples) over the knob (over its
    logarithm where it is drawn on one), by least squares; its band is the 90% interval of the mean under normal
    residuals (Draper and Smith 1998, section 8.1). A picture of these trials, not the model that proposes.
    """
    knob = _knob(study)
    if knob is None:
        return None
    name, log = knob
    groups: dict[object, list[tuple[float, float, float, float, Trial]]] = {}
    for trial in ranked(study, sweep):
        metrics = trial.metrics
        samples = trial.samples if metrics.crossing_samples is None else metrics.crossing_samples
        if samples is None or name not in trial.tuned:
            continue
        low, high = (samples if v is None else v for v in (metrics.crossing_low, metrics.crossing_high))
        groups.setdefault(trial.parameters.get("GBS"), []).append((float(trial.tuned[name]), samples, low, high, trial))
    if not groups:
        return None
    model = {gbs: fit for gbs, rows in groups.items() if (fit := _parabola([r[:2] for r in rows], log))}
    return ConvergenceData(knob=name, log=log, groups=groups, model=model)


def _knob(study: Study) -> tuple[str, bool] | None:
    numbers = [(n, p) for n, p in study.space.items() if p.type in ("float", "int")]
    rates = [(n, p) for n, p in numbers if n in ("LR", "learning_rate")]
    for name, parameter in rates or numbers:
        return name, bool(getattr(parameter, "log", False))
    return None


FEWEST_FITTED = 5
"""Trials of one batch size that a curve is fitted to."""


def _parabola(points: Sequence[tuple[float, float]], log: bool) -> list[tuple[float, float, float, float]]:
    """(value, fit, low, high) on a grid; empty with fewer than five points or three distinct values."""
    from scipy.special import stdtrit

    if len(points) < FEWEST_FITTED or len({v for v, _ in points}) < 3:
        return []
    values, samples = np.array(points).T
    x, y = np.log(values) if log else values, np.log(samples)
    middle, scale = x.mean(), x.std() or 1.0
    basis = np.vander((x - middle) / scale, 3)
    weights, *_ = np.linalg.lstsq(basis, y, rcond=None)
    left = len(y) - 3
    variance = float(((y - basis @ weights) ** 2).sum() / left)
    covariance = variance * np.linalg.pinv(basis.T @ basis)
    grid = np.linspace(x.min(), x.max(), 40)
    rows = np.vander((grid - middle) / scale, 3)
    fit, sd = rows @ weights, np.sqrt(np.einsum("ij,jk,ik->i", rows, covariance, rows))
    half = float(stdtrit(left, 0.95)) * sd
    shown = np.exp(grid) if log else grid
    table = zip(shown, np.exp(fit), np.exp(fit - half), np.exp(fit + half), strict=True)
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in table]


def samples_to_target(study: Study, sweep: StudyRecords) -> Chart | None:
    """The convergence data as points with whiskers, one colour a batch size, and the fitted curves with bands."""
    data = convergence_data(study, sweep) if objective_of(study).has_target else None
    if data is None:
        return None
    marks: list[Mark] = []
    order = sorted(data.groups, key=lambda g: -len(data.groups[g]))
    shown = sorted(order[: len(GROUPS)], key=str)
    for colour, gbs in zip(GROUPS, shown, strict=False):
        if fit := data.model.get(gbs):
            marks.append(Band(name="", edges=[(v, low, high) for v, _, low, high in fit], colour=colour))
            marks.append(Lines(name="", lines=[[(v, s) for v, s, _, _ in fit]], colour=colour, width=2))
    for colour, gbs in zip(GROUPS, shown, strict=False):
        marks.append(_group(study, data, gbs, colour))
    more = (
        f" Of {len(order)} batch sizes the {len(shown)} with the most trials are shown."
        if len(order) > len(shown)
        else ""
    )
    fitted = (
        "the curve is a parabola fitted to the trials of one batch size, its band the 90% interval of the mean."
        if any(isinstance(mark, Lines) for mark in marks)
        else f"a curve is fitted from {FEWEST_FITTED} trials of one batch size on."
    )
    return Chart(
        title=f"{study.progress_unit.capitalize()} to the target against {data.knob}",
        x=Axis(label=data.knob, log=data.log),
        y=Axis(label=f"{study.progress_unit} to the target", log=True),
        marks=tuple(marks),
        note=f"Estimated crossings with 90% intervals; {fitted}{more}",
    )


def _group(study: Study, data: ConvergenceData, gbs: object, colour: Colour) -> Markers:
    rows = data.groups[gbs]
    return Markers(
        name="trials" if gbs is None else f"GBS {gbs}",
        points=[(value, samples) for value, samples, _, _, _ in rows],
        spans=[(low, high) if math.isfinite(high) else (low, s) for _, s, low, high, _ in rows],
        texts=[
            f"trial {t.number}: {about(s)} {study.progress_unit} ({about(low)} to {about(high)})"
            for _, s, low, high, t in rows
        ],
        trials=[t.number for *_, t in rows],
        colour=colour,
    )
