"""``python -m lora_tune.status --study NAME``: the state of a sweep. Read only; any number may run, on any host."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lora_tune import store as stores
from lora_tune.base import errors
from lora_tune.base.text import duration, visible
from lora_tune.cli.options import (
    Review,
    command_line,
    load_review,
    watch_store,
)
from lora_tune.cli.steer import listed as steering_lines
from lora_tune.config.spent import spent_name, spent_text
from lora_tune.config.study import Study
from lora_tune.controller.steering import apply_requests
from lora_tune.review import screen
from lora_tune.review.importance import scaling, table
from lora_tune.review.stopping import account_text
from lora_tune.review.summary import (
    Overview,
    confirmed_text,
    money,
    overview,
    parameters_text,
    price,
    recommended_text,
    score_text,
    trial_name,
)
from lora_tune.search.objectives import objective_of
from lora_tune.search.pace import clock_text
from lora_tune.search.recommendation import Recommended, leaders, nearest_text
from lora_tune.store import LEASE_SECONDS
from lora_tune.store.port import Request
from lora_tune.store.records import StudyRecords, Trial, TrialState

# The state for programs: condition, exit code, JSON.


class SweepCondition:
    """A sweep's condition, as one word."""

    RUNNING = "running"
    """A driver holds the lease."""
    UNATTENDED = "unattended"
    """Not over, and without a driver: jobs may run. The same sweep command takes over."""
    ENDED = "ended"


def sweep_condition(sweep: StudyRecords, driver: tuple[str, float], now: float, *, over: bool = True) -> str:
    """The sweep's condition. driver: owner of the lease and epoch second of its last renewal.

    over: whether the last driver recorded the end; True also for records of older releases, which had no such mark.
    """
    owner, sign = driver
    if owner and now - sign < LEASE_SECONDS:
        return SweepCondition.RUNNING
    return SweepCondition.ENDED if over and not open_trials(sweep) else SweepCondition.UNATTENDED


def open_trials(sweep: StudyRecords) -> int:
    """Number of unfinished trials."""
    return sum(t.state is not TrialState.FINISHED for t in sweep.trials.values())


def exit_code(condition: str, overview: Overview) -> int:
    """For monitoring: 0 running, or ended with a best trial; 3 unattended; 4 ended and nothing reached the target."""
    if condition == SweepCondition.UNATTENDED:
        return errors.EXIT_SETUP
    if condition == SweepCondition.ENDED and overview.best is None:
        return errors.EXIT_NOTHING_REACHED
    return errors.EXIT_DONE


def as_json(
    study: Study, sweep: StudyRecords, driver: tuple[str, float], now: float, *, over: bool = True
) -> dict[str, Any]:
    """The state as plain data, in seconds and node-hours; None if unknown. over: see :func:`sweep_condition`.

    samples are in ``progress_unit``, as the log counts them.
    """
    totals = overview(study, sweep, now)
    best = totals.best
    return {
        "study": study.name,
        "hash": sweep.digest,
        "state": sweep_condition(sweep, driver, now, over=over),
        "driver": driver[0] or None,
        "progress_unit": study.progress_unit,
        "driver_sign_seconds_ago": round(now - driver[1], 1) if driver[0] else None,
        "target": study.objective.target if objective_of(study).has_target else None,
        "trials": totals.trials,
        "trials_planned": totals.planned,
        "open": totals.open,
        "verdicts": {v.value: n for v, n in totals.verdicts.items()},
        "node_hours": totals.node_hours,
        "node_hours_overhead": totals.overhead_hours,
        "node_hours_budget": study.budget.node_hours,
        "node_hours_saved": totals.saved,
        "stopping": None if totals.stopping is None else asdict(totals.stopping),
        "money": money(study, totals.node_hours),
        "seconds": totals.seconds,
        "recommended": None if totals.recommended is None else _recommended(totals.recommended),
        "best": None if best is None else _trial(study, sweep, best, now),
        "nearest": None
        if totals.nearest is None
        else {**_trial(study, sweep, totals.nearest.trial, now), "missing": totals.nearest.missing},
        "running": [_trial(study, sweep, t, now) for t in sweep.trials.values() if t.state is not TrialState.FINISHED],
        "machine": totals.machine or None,
        "trouble": totals.warning or None,
        "failures": [
            {"class": f.kind, "attempts": f.attempts, "trials": f.trials, "line": f.line, "remedy": f.remedy}
            for f in totals.failures
        ],
    }


def _recommended(recommended: Recommended) -> dict[str, Any]:
    """The recommendation; ``trial`` is None if no trial ran exactly this configuration."""
    return {
        "trial": recommended.trial.number if recommended.ran else None,
        "objective": recommended.objective,
        "interval": (recommended.low, recommended.high),
        "runs": recommended.runs,
        "confirmed": recommended.confirmed,
        "why": recommended.why,
        "best_run": recommended.best_run.number,
        "parameters": dict(recommended.trial.parameters),
    }


def _trial(study: Study, sweep: StudyRecords, trial: Trial, now: float) -> dict[str, Any]:
    evals = sweep.last_evals(trial.number)
    attempts = sweep.attempts_of(trial.number)
    return {
        "trial": trial.number,
        "state": str(trial.verdict or (attempts[-1].state if attempts else trial.state)),
        "objective": trial.metrics.objective,
        "seconds": trial.seconds,
        "machine_slower": trial.metrics.slower,
        "machine": clock_text(study, trial) or None,
        "samples": trial.samples,
        "eval_loss": _finite(study.shown(evals[-1].loss)) if evals else None,
        "eval_samples": evals[-1].samples if evals else None,
        "node_hours": sum(a.node_hours(now) for a in attempts),
        "remark": trial.sentence or None,
        "attempts": len(attempts),
        "parameters": dict(trial.parameters),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class SweepSnapshot:
    """The sweep as it was at ``now``; :meth:`refresh` reads it again."""

    def __init__(self, review: Review, store: stores.Store) -> None:
        self._store = store
        self.study, self.sweep = review.study, review.sweep
        self.refresh()

    def refresh(self) -> None:
        name = self.study.name
        # In this order, because a driver writes the last trials, records the end, and then releases its lease.
        self.driver, self.now = _driver(self._store, name), time.time()
        self.requests = stores.Requests(self._store, name).all()
        self.over = all(row.ended for row in self._store.registered() if row.name == name)
        self.sweep = self._store.load(name, self.sweep) or self.sweep

    @property
    def condition(self) -> str:
        return sweep_condition(self.sweep, self.driver, self.now, over=self.over)


def _driver(store: stores.Store, name: str) -> tuple[str, float]:
    """Owner of the sweep's lease ("": none) and epoch second of its last renewal."""
    held = store.held(name)
    return held.owner, held.renewed_at


BEST_SHOWN = 5


def picture(
    study: Study,
    sweep: StudyRecords,
    driver: tuple[str, float],
    now: float,
    *,
    every: bool,
    over: bool = True,
    requests: Sequence[Request] = (),
) -> RenderableType:
    """The status as a rich renderable. every: show all trials instead of the open and the best.

    over: see :func:`sweep_condition`. requests: of users.
    """
    summary = overview(study, sweep, now)
    condition = _condition(study, sweep, driver, now, over=over)
    parts: list[RenderableType] = [_head(study, sweep, summary, condition), ""]
    if every:
        parts += [screen.trials_table(study, sweep, list(sweep.trials.values()), now, "all trials")]
    else:
        running = [t for t in sweep.trials.values() if t.state is not TrialState.FINISHED]
        if running:
            parts += [screen.trials_table(study, sweep, running, now, "open"), ""]
            parts += [Text(f"trial {t.number}: {visible(t.sentence)}", style="red") for t in running if t.sentence]
        if best := leaders(study, sweep)[:BEST_SHOWN]:
            parts += [screen.trials_table(study, sweep, best, now, f"best {len(best)}")]
    if requests:
        parts += ["", Text("requests", style="bold"), Text("\n".join(steering_lines(list(requests), now)))]
    if scales := scaling(study, sweep):
        parts += ["", Text(table(study, scales))]
    if summary.failures:
        parts += ["", _failures(summary)]
    return Group(*parts)


def _head(study: Study, sweep: StudyRecords, summary: Overview, condition: Text) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("sweep", Text(f"{study.name}  {sweep.digest}"))
    grid.add_row("state", condition)
    of = f" of {summary.planned}" if summary.planned else ""
    counts = ", ".join(f"{n} {objective_of(study).verdict_name(v)}" for v, n in summary.verdicts.items())
    open_ = f"{summary.open} open" if summary.open else ""
    states = ", ".join(part for part in (open_, counts) if part) or "none ended"
    grid.add_row("trials", Text(f"{summary.trials}{of}: {states}"))
    if summary.warning:
        grid.add_row("trouble", Text(summary.warning, style="bold red"))
    if summary.recommended:
        sentence = f"{recommended_text(study, summary.recommended)}, {trial_name(summary.recommended.trial)}"
        grid.add_row("recommended", _styled(sentence, parameters_text(summary.recommended.trial)))
    grid.add_row("best run", _best(study, summary))
    if sentence := confirmed_text(study, summary.best):
        grid.add_row("confirmed", sentence)
    budget = f" of {study.budget.node_hours:g}" if study.budget.node_hours else ""
    overhead = f"; {summary.overhead_hours:.2g} of them in packs that trained nobody" if summary.overhead_hours else ""
    saved = f"; about {spent_text(study, summary.saved)} saved by stopping early" if summary.saved else ""
    spent = f"{spent_text(study, summary.node_hours)}{budget}{price(study, summary.node_hours)}"
    grid.add_row(spent_name(study), Text(f"{spent}{overhead}{saved}"))
    if summary.machine:
        grid.add_row("machine", Text(summary.machine))
    if summary.stopping:
        grid.add_row("stopping", Text(account_text(summary.stopping)))
    grid.add_row("time", duration(summary.seconds))
    return grid


def _condition(study: Study, sweep: StudyRecords, driver: tuple[str, float], now: float, *, over: bool) -> Text:
    owner, sign = driver
    condition = sweep_condition(sweep, driver, now, over=over)
    if condition == SweepCondition.RUNNING:
        who = visible(owner).partition(" start ")[0]  # the process start time serves programs, not people
        return Text(f"running, driven by {who}, last sign {now - sign:.0f} s ago", style="green")
    if condition == SweepCondition.UNATTENDED:
        what = "trials are open" if open_trials(sweep) else "it is not over"
        if study.site.launcher == "outside":
            return Text(f"{what}; trials are run by you; the next one: {command_line('ask', study.name)}", style="bold")
        line = command_line("sweep", study.name)
        return Text(f"{what} and no driver is running; take over with: {line}", style="bold red")
    return Text("ended")


def _styled(sentence: str, parameters: str) -> Text:
    return Text(sentence, style="bold green").append(f"  {parameters}", style="default")


def _best(study: Study, summary: Overview) -> Text:
    if summary.best is None:
        missing = Text(f"{objective_of(study).nothing} yet", style="dim")
        nearest = summary.nearest
        return missing if nearest is None else missing.append(f"; {nearest_text(nearest)}", style="default")
    text = Text(objective_of(study).text(summary.best.objective), style="bold green")
    if score := score_text(study, summary.best):
        text.append(f", {score}", style="green")
    text.append(f"  trial {summary.best.number}  {parameters_text(summary.best)}", style="default")
    return text


def _failures(summary: Overview) -> Table:
    table = Table(title="failures", title_justify="left", title_style="bold", box=None, padding=(0, 1))
    for name in ("class", "attempts", "what", "remedy"):
        table.add_column(name, overflow="fold")
    for f in summary.failures:
        table.add_row(Text(f.kind, style="red"), str(f.attempts), Text(visible(f.line)), Text(visible(f.remedy)))
    return table


def run(
    study_name: str, storage: str | None, output: Path | None, watch: bool, period: float, json_: bool, all_: bool
) -> None:
    """Run ``status``; options: cli/commands.py."""
    console = Console()
    review = load_review(study_name, output, storage)
    store = watch_store(review.paths, storage)
    try:
        snapshot = SweepSnapshot(review, store)
        if watch and not json_:
            _watch(console, snapshot, period, every=all_)
        else:
            _show(console, snapshot, json_=json_, every=all_)
            while watch and snapshot.condition == SweepCondition.RUNNING:
                time.sleep(period)
                snapshot.refresh()
                _show(console, snapshot, json_=json_, every=all_)
    finally:
        store.close()
    sys.exit(exit_code(snapshot.condition, overview(snapshot.study, snapshot.sweep, snapshot.now)))


def _watch(console: Console, snapshot: SweepSnapshot, period: float, *, every: bool) -> None:
    """Refresh one screen until the sweep stops running, or Ctrl-C."""
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            drawn = _picture(snapshot, every=every)
            live.update(drawn, refresh=True)
            if snapshot.condition != SweepCondition.RUNNING:
                return
            try:
                time.sleep(period)
                snapshot.refresh()
            except KeyboardInterrupt:
                return


def _show(console: Console, snapshot: SweepSnapshot, *, json_: bool, every: bool) -> None:
    if json_:
        record = as_json(snapshot.study, snapshot.sweep, snapshot.driver, snapshot.now, over=snapshot.over)
        click.echo(json.dumps({**record, "requests": [asdict(request) for request in snapshot.requests]}))
    else:
        console.print(_picture(snapshot, every=every))


def _picture(snapshot: SweepSnapshot, *, every: bool) -> RenderableType:
    shown = apply_requests(snapshot.study, snapshot.requests).study
    return picture(
        shown,
        snapshot.sweep,
        snapshot.driver,
        snapshot.now,
        every=every,
        over=snapshot.over,
        requests=snapshot.requests,
    )
