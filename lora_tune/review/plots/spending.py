"""Figures of spending: what ran on which node when, and what the node-hours bought."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune.base.format import duration
from lora_tune.config.spent import counts_node_hours
from lora_tune.config.study import Study
from lora_tune.review.plots.chart import Axis, Bars, Chart, Colour, Lines, Mark, Markers
from lora_tune.review.plots.units import time_unit
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import StudyRecords, Trial, Verdict

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
    """One attempt's stay on one node. start, end: epoch seconds. outcome: "reached", "failed", ..."""

    node: str
    start: float
    end: float
    trial: int
    attempt: int
    outcome: str
    colour: Colour


def stays(sweep: StudyRecords, now: float) -> list[Stay]:
    """Every attempt that started, on each of its nodes, by start; a failed attempt shows as failed."""
    on_nodes = []
    for attempt in sorted(sweep.attempts.values(), key=lambda a: a.started_at or math.inf):
        if attempt.started_at is None:
            continue
        trial = sweep.trials.get(attempt.trial)  # None: a database of which parts were put back had lost it
        colour, outcome = _COLOURS.get(trial.verdict if trial else None, ("bad", "failed or infeasible"))
        if attempt.failure or trial is None:
            colour, outcome = "bad", "failed or infeasible"
        end = attempt.ended_at if attempt.ended_at is not None else now
        for node in attempt.nodes or ("(node unknown)",):
            on_nodes.append(Stay(node, attempt.started_at, end, attempt.trial, attempt.number, outcome, colour))
    return on_nodes


def timeline(sweep: StudyRecords, now: float) -> Chart | None:
    """Attempts on their nodes over time; None before the first start. One node with several trials gets lanes."""
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
    """A row for each stay (None: not shown), the rows' names, and how many rows are not shown.

    Stays that overlap on one node go into lanes of their own, since one machine may run several trials.
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
class Purchase:
    """A finished trial with the node-hours spent by all trials that had ended by then."""

    trial: Trial
    node_hours: float
    best: float | None
    """The best objective so far."""


def purchases(study: Study, sweep: StudyRecords) -> list[Purchase]:
    """Finished trials in order of their ends, with what was spent and the best so far."""
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
        bought.append(Purchase(trial, spent, best))
    return bought


def spending(study: Study, sweep: StudyRecords) -> Chart | None:
    """The best so far against node-hours spent; None before a trial reached the target."""
    bought = purchases(study, sweep)
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
    away = value / final - 1 if final else 0.0  # a log that came all at once has no times
    return f"{duration(value)}, {away:+.1%} against the best"
