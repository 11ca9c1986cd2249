"""Sweeps of the tiny study in which nothing is stopped, and what the driver's own rule would have stopped in them.

Each seed is a sweep of the shipped study with its own sampler and two trials at a time. A trial is a recorded one: the
point of the measured grid (``lora_tiny``, the same task on a GPU) that lies nearest to the proposal, and one of its
eight seeds. Whole runs take as many seconds as samples, so that trials end in the order in which they would.
The rule is asked at each eval, with the records as they were then; what it stops ends there for the trials after it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from scipy.special import betaincinv

import lora_tune.studies
from lora_tune.config.study import Study, load_study
from lora_tune.controller.evidence import courses
from lora_tune.controller.pruning import judge_curve
from lora_tune.logs.run import Eval, RunLog
from lora_tune.search.samplers import make_sampler
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict
from lora_tune_simulation.tabular import TABLES, Table, read_table

SEEDS = 20
TRIALS = (16, 32)
"""Trials of a sweep: the study's own budget, and one that lets most trials be compared."""
SLOTS = 2


@dataclass(frozen=True, slots=True)
class Judged:
    """One trial that ran to its end. compared: with finished runs, at some eval. used: share of its training
    at which the rule would have stopped it; None: nowhere."""

    good: bool
    compared: bool
    used: float | None


def main() -> None:
    """Print what is stopped, by budget."""
    table = read_table(TABLES / "lora_tiny.npz")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"\nThe tiny study without pruning, {SEEDS} seeds; what the rule would have stopped")
    print("| trials | good | of them compared | good stopped (90%) | of those compared (90%) | bad stopped | used |")
    print("|---|---|---|---|---|---|---|")
    for trials in TRIALS:
        judged = [one for seed in range(SEEDS) for one in judge(*play(table, seed, trials))]
        good, bad = ([one for one in judged if one.good is kind] for kind in (True, False))
        compared = [one for one in good if one.compared]
        used = np.mean([1.0 if one.used is None else one.used for one in bad])
        caught = sum(one.used is not None for one in bad)
        cells = f"{_share(good)} | {_share(compared)} | {caught} of {len(bad)} | {used:.0%}"
        print(f"| {trials} | {len(good)} | {len(compared)} | {cells} |", flush=True)


def _share(runs: list[Judged]) -> str:
    """Stopped ones with their Clopper-Pearson interval."""
    count, stopped = len(runs), sum(one.used is not None for one in runs)
    low = betaincinv(stopped, count - stopped + 1, 0.05) if stopped else 0.0
    high = betaincinv(stopped + 1, count - stopped, 0.95) if stopped < count else 1.0
    return f"{stopped}, {stopped / max(1, count):.1%} ({low:.1%} to {high:.1%})"


def play(table: Table, seed: int, trials: int) -> tuple[Study, StudyRecords]:
    """A whole sweep in which nothing is stopped."""
    path = Path(lora_tune.studies.__path__[0]) / "tiny.toml"
    study = load_study(path).with_options(
        {"search": {"seed": seed}, "budget": {"trials": trials}, "pruning": {"cap": False}}
    )
    known = optuna.create_study(sampler=make_sampler(study))
    sweep = StudyRecords(name=study.name, digest=study.digest, study_toml="", began_at=0.0)
    free: list[tuple[float, int, Any]] = [(0.0, slot, None) for slot in range(SLOTS)]
    records: dict[int, Trial] = {}
    attempts: dict[tuple[int, int], Attempt] = {}
    evals: dict[tuple[int, int], tuple[Eval, ...]] = {}
    for number in range(trials):
        now, slot, ended = heapq.heappop(free)
        if ended is not None:
            _tell(known, ended, records[ended.number])
        asked = known.ask(study.search_space.distributions())
        trial, curve = _run(study, table, number, dict(asked.params), now)
        records[number], evals[number, 0] = trial, curve
        attempts[number, 0] = Attempt(trial=number, number=0, job_name=f"trial {number}", folder="")
        heapq.heappush(free, (trial.finished_at or now, slot, asked))
    return study, replace(sweep, trials=records, attempts=attempts, evals=evals)


def _run(
    study: Study, table: Table, number: int, tuned: Mapping[str, Any], now: float
) -> tuple[Trial, tuple[Eval, ...]]:
    """The recorded trial nearest to a proposal, as a trial of the study that has ended, and its evals."""
    rng = np.random.default_rng([study.search.seed, number])
    asked = study.search_space.resolve(tuned)
    place = {name: _nearest(float(str(asked[name])), axis) for name, axis in table.axes.items()}
    at = (*place.values(), int(rng.integers(table.seeds)))
    steps, batch = (table.axes[name][place[name]] for name in ("MAX_STEPS", "GBS"))
    parameters = {**asked, **{name: table.axes[name][i] for name, i in place.items()}}
    rows = [(s, v) for s, v in zip(table.samples[at], table.losses[at], strict=True) if s <= steps * batch]
    curve = tuple(Eval(float(s), float(v), float(s)) for s, v in rows)
    end = next((i for i, e in enumerate(curve) if e.loss <= study.target), None)
    seconds = curve[end].samples if end is not None else steps * batch
    trial = Trial(number=number, seed=study.trial_seed(number), tuned=tuned, parameters=parameters, proposed_at=now)
    verdict = Verdict.CENSORED if end is None else Verdict.REACHED
    trial = replace(trial, samples=None if end is None else seconds, seconds=None if end is None else seconds)
    return trial.finished(verdict, "", now + seconds), curve[: None if end is None else end + 1]


def _nearest(value: float, axis: tuple[float, ...]) -> int:
    grid = np.log(axis) if axis[0] > 0 else np.array(axis)
    return int(np.abs(grid - (math.log(value) if axis[0] > 0 else value)).argmin())


def _tell(known: optuna.Study, asked: optuna.Trial, trial: Trial) -> None:
    if trial.seconds is not None:
        known.tell(asked, trial.seconds)
    else:
        known.tell(asked, state=optuna.trial.TrialState.PRUNED)


def judge(study: Study, sweep: StudyRecords) -> Iterator[Judged]:
    """Ask the rule at each eval of each trial, with the sweep as it was then. Those that it stops are no references."""
    for trial in list(sweep.trials.values()):
        curve, compared, used = sweep.evals[trial.number, 0], False, None
        for i, e in enumerate(curve):
            now = trial.proposed_at + e.seconds
            then = as_of(sweep, trial, now)
            run = RunLog(run_start_ms=0, evals=curve[: i + 1])
            compared |= len(courses(study, then)) > study.pruning.references and e.loss > study.target
            if judge_curve(study, then, then.trials[trial.number], run) is not None:
                used = e.samples / (float(str(trial.parameters["MAX_STEPS"])) * float(str(trial.parameters["GBS"])))
                stopped = replace(trial, seconds=None, samples=None).finished(Verdict.PRUNED, "", now)
                sweep = replace(sweep, trials={**sweep.trials, trial.number: stopped})
                break
        yield Judged(trial.verdict is Verdict.REACHED, compared, used)


def as_of(sweep: StudyRecords, judged: Trial, now: float) -> StudyRecords:
    """The records at a time: trials that had begun by then, those that had not ended as running ones."""
    begun = (t for t in sweep.trials.values() if t.proposed_at <= now)
    trials = {
        t.number: t
        if (t.finished_at or now) <= now and t.number != judged.number
        else replace(t, state=TrialState.RUNNING, verdict=None, finished_at=None, seconds=None, samples=None)
        for t in begun
    }
    return replace(sweep, trials=trials)
