"""The figures of a sweep. Each has a data function and a function that makes a :class:`Chart` of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from lora_tune.base.text import about, counted, duration
from lora_tune.config.spent import counts_node_hours
from lora_tune.config.study import Study
from lora_tune.controller import pruning
from lora_tune.review.chart import GROUPS, Axis, Band, Bars, Chart, Colour, Lines, Mark, Markers, Rule, time_unit
from lora_tune.review.summary import STOPPED_EARLY, batch_text, parameters_text, short_layout
from lora_tune.search.objectives import objective_of
from lora_tune.search.recommendation import leaders
from lora_tune.store.records import StudyRecords, Trial, Verdict

__all__ = ["Chart", "charts"]


def charts(study: Study, sweep: StudyRecords, now: float) -> dict[str, Chart]:
    """All figures for which this sweep has data, by short name, in reading order."""
    drawn = {
        "eval-curves": eval_curves(study, sweep),
        "samples-to-target": samples_to_target(study, sweep),
        "time": time_decomposition(study, sweep),
        "throughput": throughput(study, sweep),
        "spending": spending(study, sweep),
        "timeline": timeline(sweep, now),
    }
    return {name: chart for name, chart in drawn.items() if chart is not None}


Line = list[tuple[float, float]]

HIGHLIGHTED = 6
"""Number of best trials whose curves are drawn unthinned, with their parameters; others are coloured by verdict."""

MOST_DRAWN, FEWEST_DRAWN = 20_000, 8
"""Maximum points of all other curves together, and minimum of each, to limit the size of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveData:
    """Trials with their (samples, eval loss) lines. envelope: (samples, median, limit) at batch size ``gbs``."""

    best: Sequence[tuple[Trial, Line]]
    reached: Sequence[tuple[Trial, Line]]
    stopped: Sequence[tuple[Trial, Line]]
    others: Sequence[tuple[Trial, Line]]
    envelope: Sequence[tuple[float, float, float]]
    gbs: object


def curve_data(study: Study, sweep: StudyRecords) -> CurveData:
    """Every trial's evals, by verdict; the pruning envelope is that of the best trial's batch size."""
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
    """At most ``most`` (>= 2) evenly spaced points of a line, including its first and last."""
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
        batch = "" if data.gbs is None else f"GBS {data.gbs}: "
        name = f"{batch}from the usual curve to where a run is stopped"
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
    """The target and all values except outliers and the worst 3%, so that spikes and diverged runs do not flatten the
    rest.

    Outliers lie more than three interquartile ranges beyond the quartiles on the worse side (Tukey 1977).
    """
    values = [y for line in lines for _, y in line if math.isfinite(y)] or [target or 0.0]
    low, worst_low, first, third, worst_high, high = map(float, np.quantile(values, [0, 0.03, 0.25, 0.75, 0.97, 1]))
    if study.rising:
        low = max(worst_low, first - 3 * (third - first))
    else:
        high = min(worst_high, third + 3 * (third - first))
    if target is not None:
        low, high = min(low, target), max(high, target)
    margin = 0.06 * max(high - low, 1e-3 * max(abs(low), abs(high)))
    return low - margin, high + margin


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergenceData:
    """Samples to the target against one tuned number, by global batch size (None if the study has none).

    groups: GBS -> (value, samples, low, high, trial) of trials that reached the target; samples is the estimated
    crossing, low and high its 90% interval. model: GBS -> (value, samples, low, high) of the fitted curve.
    """

    knob: str
    log: bool
    groups: Mapping[object, Sequence[tuple[float, float, float, float, Trial]]]
    model: Mapping[object, Sequence[tuple[float, float, float, float]]]


def convergence_data(study: Study, sweep: StudyRecords) -> ConvergenceData | None:
    """Samples to target against the learning rate, else the first tuned number; None if no trial reached the target.

    The model of a batch size with at least five trials is a least-squares parabola of ln(samples) over the parameter
    (its logarithm on a log scale), with the 90% interval of the mean under normal residuals (Draper and Smith 1998,
    section 8.1). It describes these trials; the search uses another model.
    """
    knob = _knob(study)
    if knob is None:
        return None
    name, log = knob
    groups: dict[object, list[tuple[float, float, float, float, Trial]]] = {}
    for trial in leaders(study, sweep):
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
"""Minimum trials of one batch size for a fitted curve."""


def _parabola(points: Sequence[tuple[float, float]], log: bool) -> list[tuple[float, float, float, float]]:
    """(value, fit, low, high) on a grid; empty for fewer than five points or three distinct values."""
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
    """The convergence data as points with whiskers, one colour per batch size, with the fitted curves and bands."""
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


# Figures of speed: time decomposition, and throughput by layout.


SHOWN = 15


@dataclass(frozen=True, slots=True)
class TimeParts:
    """One trial's seconds by part. ``start_up`` is not scored; the other three add up to the time to target."""

    trial: Trial
    start_up: float
    training: float
    evals: float
    rest: float


def time_parts(study: Study, sweep: StudyRecords) -> list[TimeParts]:
    """The decomposition of the best trials, best first: ``time = samples / speed + evals * seconds_per_eval + rest``.

    ``rest`` includes the cold first block, data loading and checkpoints. Trials without logged throughput are omitted.
    """
    parts = []
    for trial in leaders(study, sweep)[:SHOWN]:
        metrics = trial.metrics
        speed, seconds, samples = metrics.samples_per_second, trial.seconds, trial.samples
        if not speed or seconds is None or samples is None:
            continue
        count = sum(e.samples <= samples for e in sweep.last_evals(trial.number))
        evals = count * (metrics.seconds_per_eval or 0.0)
        training = min(samples / speed, seconds)
        rest = max(0.0, seconds - training - evals)
        parts.append(TimeParts(trial, metrics.init_seconds or 0.0, training, min(evals, seconds - training), rest))
    return parts


def time_decomposition(study: Study, sweep: StudyRecords) -> Chart | None:
    """Stacked bars of :func:`time_parts`; None if it is empty."""
    parts = time_parts(study, sweep)
    if not parts:
        return None
    unit = time_unit(p.start_up + p.training + p.evals + p.rest for p in parts)
    columns: tuple[tuple[str, Colour, Sequence[float]], ...] = (
        ("start-up (not scored)", "muted", [p.start_up for p in parts]),
        ("training", "one", [p.training for p in parts]),
        ("evals", "two", [p.evals for p in parts]),
        ("rest: cold first block, loading", "four", [p.rest for p in parts]),
    )
    starts = [0.0] * len(parts)
    marks: list[Mark] = []
    for name, colour, lengths in columns:
        rows = [len(parts) - 1 - i for i in range(len(parts))]
        bars = [(float(r), s / unit.seconds, x / unit.seconds) for r, s, x in zip(rows, starts, lengths, strict=True)]
        texts = [f"trial {p.trial.number}: {name} {duration(x)}" for p, x in zip(parts, lengths, strict=True)]
        if any(lengths):
            whose = [p.trial.number for p in parts]
            marks.append(Bars(name=name, bars=bars, colour=colour, texts=texts, trials=whose))
        starts = [s + x for s, x in zip(starts, lengths, strict=True)]
    labels = tuple(f"trial {p.trial.number}" for p in reversed(parts))
    return Chart(
        title="Where the time goes",
        x=Axis(label=f"time from the start of the job ({unit.name})", low=0.0),
        y=Axis(label="best first", categories=labels),
        marks=tuple(marks),
        note=f"Time to the target is {study.progress_unit} / throughput + evals x seconds per eval, and the rest.",
        height=90 + 22 * len(parts),
    )


@dataclass(frozen=True, slots=True)
class LayoutSpeed:
    """Throughput of one layout: samples/s of each of its trials."""

    layout: str
    speeds: Sequence[float]
    trials: Sequence[int]


def layout_speeds(study: Study, sweep: StudyRecords) -> list[LayoutSpeed]:
    """Warm throughput by layout (by batch size if the space has no layout), fastest median first."""
    name = next((n for n, p in study.space.items() if p.type == "layout"), None)
    speeds: dict[str, list[float]] = {}
    trials: dict[str, list[int]] = {}
    for trial in sweep.trials.values():
        speed = trial.metrics.samples_per_second
        if not speed:
            continue
        choice = trial.tuned.get(name) if name else None
        layout = batch_text(trial.parameters) if choice is None else short_layout(str(choice))
        if not layout:
            continue
        speeds.setdefault(layout, []).append(speed)
        trials.setdefault(layout, []).append(trial.number)
    by_layout = [LayoutSpeed(layout, speeds[layout], trials[layout]) for layout in speeds]
    return sorted(by_layout, key=lambda x: -median(x.speeds))


def throughput(study: Study, sweep: StudyRecords) -> Chart | None:
    """Throughput by layout: a bar up to the median, and one point per trial; None without measurements."""
    layouts = layout_speeds(study, sweep)[:SHOWN]
    if not layouts:
        return None
    rows = {x.layout: float(len(layouts) - 1 - i) for i, x in enumerate(layouts)}
    points = [(speed, rows[x.layout]) for x in layouts for speed in x.speeds]
    speed = f"{study.progress_unit}/s"
    texts = [f"trial {t}: {s:.4g} {speed}" for x in layouts for t, s in zip(x.trials, x.speeds, strict=True)]
    whose = [t for x in layouts for t in x.trials]
    return Chart(
        title="Throughput by layout" if any(p.type == "layout" for p in study.space.values()) else "Throughput",
        x=Axis(label=f"{speed}, warm blocks", low=0.0),
        y=Axis(label="layout", categories=tuple(x.layout for x in reversed(layouts))),
        marks=(
            Bars(
                name="median",
                bars=[(rows[x.layout], 0.0, median(x.speeds)) for x in layouts],
                colour="one",
                texts=[
                    f"{x.layout}: median {median(x.speeds):.4g} {speed} over {counted(len(x.speeds), 'trials')}"
                    for x in layouts
                ],
            ),
            Markers(name="one trial", points=points, colour="two", size=3, texts=texts, trials=whose),
        ),
        note="Trials that differ in nothing that costs time agree within a percent; else the machine is noisy.",
        height=90 + 24 * len(layouts),
    )


# Figures of spending: node timeline, and best objective over node-hours.


NODES_SHOWN = 40

_COLOURS: dict[Verdict | None, tuple[Colour, str]] = {
    Verdict.REACHED: ("good", "reached"),
    Verdict.PRUNED: ("stopped", "stopped early"),
    Verdict.CAPPED: ("stopped", "stopped early"),
    Verdict.CENSORED: ("muted", "censored"),
    None: ("one", "open"),
}


@dataclass(frozen=True, slots=True)
class Stay:
    """One attempt on one node. start, end: epoch seconds. outcome: "reached", "failed", ..."""

    node: str
    start: float
    end: float
    trial: int
    attempt: int
    outcome: str
    colour: Colour


def stays(sweep: StudyRecords, now: float) -> list[Stay]:
    """Every started attempt on each of its nodes, by start time; failed attempts as such."""
    on_nodes = []
    for attempt in sorted(sweep.attempts.values(), key=lambda a: a.started_at or math.inf):
        if attempt.started_at is None:
            continue
        trial = sweep.trials.get(attempt.trial)  # None in a database that lost the trial and was partly restored
        colour, outcome = _COLOURS.get(trial.verdict if trial else None, ("bad", "failed or infeasible"))
        if attempt.failure or trial is None:
            colour, outcome = "bad", "failed or infeasible"
        end = attempt.ended_at if attempt.ended_at is not None else now
        for node in attempt.nodes or ("(node unknown)",):
            on_nodes.append(Stay(node, attempt.started_at, end, attempt.trial, attempt.number, outcome, colour))
    return on_nodes


def timeline(sweep: StudyRecords, now: float) -> Chart | None:
    """Attempts on their nodes over time; None before the first start. Concurrent attempts on a node get lanes."""
    on_nodes = stays(sweep, now)
    if not on_nodes:
        return None
    begin = on_nodes[0].start
    rows, names, hidden = _lanes(on_nodes)
    unit = time_unit(s.end - begin for s in on_nodes)
    marks: list[Mark] = []
    for outcome in dict.fromkeys(s.outcome for s in on_nodes):
        chosen = [(r, s) for r, s in zip(rows, on_nodes, strict=True) if s.outcome == outcome and r is not None]
        marks.append(
            Bars(
                name=outcome,
                bars=[
                    (len(names) - 1.0 - r, (s.start - begin) / unit.seconds, (s.end - s.start) / unit.seconds)
                    for r, s in chosen
                ],
                colour=chosen[0][1].colour if chosen else "muted",
                texts=[
                    f"trial {s.trial}, attempt {s.attempt}: {s.outcome}, {duration(s.end - s.start)}" for _, s in chosen
                ],
                trials=[s.trial for _, s in chosen],
            )
        )
    return Chart(
        title="Timeline of nodes",
        x=Axis(label=f"time since the first job started ({unit.name})", low=0.0),
        y=Axis(label="node", categories=tuple(reversed(names))),
        marks=tuple(marks),
        note="Gaps are nodes that waited." + (f" {hidden} more lanes are not shown." if hidden else ""),
        height=80 + 22 * len(names),
    )


def _lanes(on_nodes: Sequence[Stay]) -> tuple[list[int | None], list[str], int]:
    """Row of each stay (None: not shown), names of the rows, and number of rows not shown.

    Overlapping stays on one node get separate lanes, because a machine may run several trials.
    """
    lanes: dict[str, list[float]] = {}
    placed: list[tuple[str, int]] = []
    for stay in on_nodes:
        ends = lanes.setdefault(stay.node, [])
        lane = next((i for i, end in enumerate(ends) if end <= stay.start + 1e-6), len(ends))
        ends[lane : lane + 1] = [stay.end]
        placed.append((stay.node, lane))
    order = [(node, lane) for node in sorted(lanes) for lane in range(len(lanes[node]))]
    row = {key: i for i, key in enumerate(order[:NODES_SHOWN])}
    names = [node if len(lanes[node]) == 1 else f"{node} #{lane + 1}" for node, lane in order[:NODES_SHOWN]]
    return [row.get(key) for key in placed], names, max(0, len(order) - NODES_SHOWN)


@dataclass(frozen=True, slots=True)
class SpendingPoint:
    """A finished trial, with the node-hours spent by all trials that had ended by then."""

    trial: Trial
    node_hours: float
    best: float | None
    """Best objective so far."""


def spending_points(study: Study, sweep: StudyRecords) -> list[SpendingPoint]:
    """Finished trials by end time, with node-hours spent and best objective so far."""
    objective = objective_of(study)
    spent, best = 0.0, None
    bought = []
    for trial in sorted(
        (t for t in sweep.trials.values() if t.finished_at is not None), key=lambda t: t.finished_at or 0.0
    ):
        attempts = sweep.attempts_of(trial.number)
        spent += sum(a.node_hours(trial.finished_at or 0.0) + a.overhead_hours for a in attempts)
        value = trial.metrics.objective if trial.verdict is Verdict.REACHED else None
        if value is not None:
            best = value if best is None or objective.better(value, best) else best
        bought.append(SpendingPoint(trial, spent, best))
    return bought


def spending(study: Study, sweep: StudyRecords) -> Chart | None:
    """Best objective so far against node-hours spent; None before a trial reached the target."""
    bought = spending_points(study, sweep)
    bests = [p.best for p in bought if p.best is not None]
    if not bests:
        return None
    objective = objective_of(study)
    unit = time_unit(bests) if objective.timed else None
    scale = unit.seconds if unit else 1.0
    reached = [p for p in bought if p.trial.verdict is Verdict.REACHED and p.trial.metrics.objective is not None]
    hours = counts_node_hours(study)
    per = 1.0 if hours else 60.0
    line = [(p.node_hours * per, p.best / scale) for p in bought if p.best is not None]
    final = bests[-1]
    texts = [f"trial {p.trial.number}: {_said(study, p.trial.objective, final)}" for p in reached]
    price = study.budget.price_per_node_hour
    money = f" One node-hour costs {price:g}." if price else ""
    return Chart(
        title="What the node-hours bought" if hours else "What the machine time bought",
        x=Axis(label="node-hours spent" if hours else "minutes of machine time", low=0.0),
        y=Axis(label=f"time to the target ({unit.name})" if unit else objective.unit),
        marks=(
            Markers(
                name="a trial that reached the target" if objective.has_target else "a trial",
                points=[(p.node_hours * per, p.trial.objective / scale) for p in reached],
                colour="good",
                size=3.5,
                texts=texts,
                trials=[p.trial.number for p in reached],
            ),
            Lines(name="best so far", lines=[line], colour="best", width=2.4, steps=True),
        ),
        note="A flat end means that more trials bought nothing." + money,
    )


def _said(study: Study, value: float, final: float) -> str:
    objective = objective_of(study)
    if not objective.timed:
        return objective.text(value)
    away = value / final - 1 if final else 0.0  # a log that arrived at once has no times
    return f"{duration(value)}, {away:+.1%} against the best"
