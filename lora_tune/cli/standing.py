"""Where a sweep stands, for programs: its condition as a word, an exit code, and the whole picture as plain data."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

from lora_tune import store as stores
from lora_tune.base import errors
from lora_tune.cli.options import Review
from lora_tune.config.study import Study
from lora_tune.review.describe import money
from lora_tune.review.summary import Overview, overview
from lora_tune.search.objectives import objective_of
from lora_tune.search.pace import clock_words
from lora_tune.search.recommendation import Recommended
from lora_tune.store import LEASE_SECONDS
from lora_tune.store.records import StudyRecords, Trial, TrialState


class Standing:
    """A sweep's condition, as one word."""

    RUNNING = "running"
    """A driver is at work."""
    UNATTENDED = "unattended"
    """It is not over, and nobody drives it: jobs may run, nobody decides. The same sweep command takes over."""
    ENDED = "ended"


def standing(sweep: StudyRecords, driver: tuple[str, float], now: float, *, over: bool = True) -> str:
    """The sweep's condition. driver: who drives, and the epoch second of its last sign of life.

    over: whether its last driver noted its end; also True where no driver noted anything (older releases).
    """
    owner, sign = driver
    if owner and now - sign < LEASE_SECONDS:
        return Standing.RUNNING
    return Standing.ENDED if over and not open_trials(sweep) else Standing.UNATTENDED


def open_trials(sweep: StudyRecords) -> int:
    """How many trials are not over."""
    return sum(t.state is not TrialState.FINISHED for t in sweep.trials.values())


def exit_code(condition: str, overview: Overview) -> int:
    """For monitoring: 0 running, or ended with a best trial; 3 unattended; 4 ended and nothing reached the target."""
    if condition == Standing.UNATTENDED:
        return errors.EXIT_SETUP
    if condition == Standing.ENDED and overview.best is None:
        return errors.EXIT_NOTHING_REACHED
    return errors.EXIT_DONE


def as_json(
    study: Study, sweep: StudyRecords, driver: tuple[str, float], now: float, *, over: bool = True
) -> dict[str, Any]:
    """The whole picture as plain data: seconds, node-hours; None where unknown. over: see :func:`standing`.

    samples are counted in ``progress_unit``, as the log counts them.
    """
    seen = overview(study, sweep, now)
    best = seen.best
    return {
        "study": study.name,
        "hash": sweep.digest,
        "state": standing(sweep, driver, now, over=over),
        "driver": driver[0] or None,
        "progress_unit": study.progress_unit,
        "driver_sign_seconds_ago": round(now - driver[1], 1) if driver[0] else None,
        "target": study.objective.target if objective_of(study).has_target else None,
        "trials": seen.trials,
        "trials_planned": seen.planned,
        "open": seen.open,
        "verdicts": {v.value: n for v, n in seen.verdicts.items()},
        "node_hours": seen.node_hours,
        "node_hours_overhead": seen.overhead_hours,
        "node_hours_budget": study.budget.node_hours,
        "node_hours_saved": seen.saved,
        "stopping": None if seen.stopping is None else asdict(seen.stopping),
        "money": money(study, seen.node_hours),
        "seconds": seen.seconds,
        "recommended": None if seen.recommended is None else _recommended(seen.recommended),
        "best": None if best is None else _trial(study, sweep, best, now),
        "nearest": None
        if seen.nearest is None
        else {**_trial(study, sweep, seen.nearest.trial, now), "missing": seen.nearest.missing},
        "running": [_trial(study, sweep, t, now) for t in sweep.trials.values() if t.state is not TrialState.FINISHED],
        "trouble": seen.trouble or None,
        "failures": [
            {"class": f.kind, "attempts": f.attempts, "trials": f.trials, "line": f.line, "remedy": f.remedy}
            for f in seen.failures
        ],
    }


def _recommended(believed: Recommended) -> dict[str, Any]:
    """The configuration that is handed over; ``trial`` is None where none has run it as a whole."""
    return {
        "trial": believed.trial.number if believed.ran else None,
        "objective": believed.objective,
        "interval": (believed.low, believed.high),
        "runs": believed.runs,
        "confirmed": believed.confirmed,
        "why": believed.why,
        "best_run": believed.best_run.number,
        "parameters": dict(believed.trial.parameters),
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
        "machine": clock_words(study, trial) or None,
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
    """The sweep as it was at ``now``; :meth:`again` reads what is new."""

    def __init__(self, review: Review, store: stores.Store) -> None:
        self._store = store
        self.study, self.sweep = review.study, review.sweep
        self.again()

    def again(self) -> None:
        name = self.study.name
        # In this order: a driver writes the last trials, notes the end, and then gives its lease back.
        self.driver, self.now = _driver(self._store, name), time.time()
        self.requests = stores.Requests(self._store, name).all()
        self.over = all(row.ended for row in self._store.registered() if row.name == name)
        self.sweep = self._store.load(name, self.sweep) or self.sweep

    @property
    def standing(self) -> str:
        return standing(self.sweep, self.driver, self.now, over=self.over)


def _driver(store: stores.Store, name: str) -> tuple[str, float]:
    """Who drives the sweep ("": nobody) and the epoch second of its last sign of life."""
    held = store.held(name)
    return held.owner, held.renewed_at
