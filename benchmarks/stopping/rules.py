"""Stopping rules as functions of a whole run: the samples at which each would have stopped it, or None."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import optuna
from optuna.pruners import BasePruner

from benchmarks.stopping import earlier
from benchmarks.stopping.tables import Table, seen
from lora_tune.curves.conformal import FEWEST, compare, supported
from lora_tune.curves.overlay import ComparedRun
from lora_tune.curves.points import Points
from lora_tune.curves.stopping import Evidence, verdict
from lora_tune.logs.run import Eval

Rule = Callable[[ComparedRun], float | None]
"""Takes a whole run, shows a rule what it had shown eval by eval, and returns where it was stopped."""

PERMILLE = 1000
"""Steps of training for Optuna's pruners: they too compare at equal shares of it."""


def ours(table: Table, references: Sequence[ComparedRun], rate: float) -> Rule:
    """The rule as shipped, from three references on (a study waits for eight by default).

    What it says of a run does not change as the run goes on, so one comparison tells where it would have been stopped.
    """
    evidence = Evidence(references=references, fewest=FEWEST, rate=rate)

    def rule(run: ComparedRun) -> float | None:
        shown = seen(run, table.target)
        if not len(shown.curve.samples) and not shown.blank:
            return None
        if len(references) >= FEWEST:
            found = compare(shown, references, target=table.target, rate=rate)
            return found.at if found.outside else None
        evals = evals_of(shown)
        stops = (
            e.samples
            for i, e in enumerate(evals)
            if verdict(evals[: i + 1], table.target, evidence, length=run.length, task=run.task, kind=run.kind).stop
        )
        return next(stops, None)

    return rule


def ours_supports(references: int, rate: float) -> float:
    """The rate that is stated to the user; 0 where no comparison takes place."""
    return supported(rate, references) if references >= FEWEST else 0.0


def as_it_was(table: Table, references: Sequence[ComparedRun], rate: float) -> Rule:
    """The rule until 2026-11-22, with an envelope learned from the references."""
    envelope = earlier.envelope_from([evals_of(r) for r in references], table.target)

    def rule(run: ComparedRun) -> float | None:
        evals = evals_of(seen(run, table.target))
        for i, e in enumerate(evals):
            found = earlier.stalled(
                evals[: i + 1], table.target, reference=envelope, false_prune_rate=rate, max_samples=run.length
            )
            if found.stop:
                return e.samples
        return None

    return rule


PEERS: dict[str, Callable[[], BasePruner]] = {
    "Median": lambda: optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=PERMILLE // 10),
    "Percentile(75)": lambda: optuna.pruners.PercentilePruner(75.0, n_warmup_steps=PERMILLE // 10),
    "Patient(None, 3)": lambda: optuna.pruners.PatientPruner(None, patience=3),
    "Patient(Median, 3)": lambda: optuna.pruners.PatientPruner(optuna.pruners.MedianPruner(), patience=3),
    "Wilcoxon(0.1)": lambda: optuna.pruners.WilcoxonPruner(p_threshold=0.1),
    "SuccessiveHalving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=PERMILLE // 10),
}


def in_study(make: Callable[[], BasePruner], finished: Sequence[ComparedRun], target: float) -> Rule:
    """A pruner in a study in which ``finished`` have run to their ends; each run asked about leaves no trace."""
    study = optuna.create_study(pruner=make(), sampler=optuna.samplers.RandomSampler(seed=0), study_name="stopping")
    for run in finished:
        trial = study.ask()
        for step, loss in _steps(run, min(run.stop(target), run.length or math.inf)):
            trial.report(loss, step)
        study.tell(trial, min(run.stop(target) / (run.length or 1), 2.0))

    def rule(run: ComparedRun) -> float | None:
        trial = study.ask()
        try:
            for step, loss in _steps(seen(run, target), math.inf):
                trial.report(loss, step)
                if trial.should_prune():
                    return step / PERMILLE * (run.length or 1)
            return None
        finally:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)

    return rule


def _steps(run: ComparedRun, end: float) -> list[tuple[int, float]]:
    """(step, loss), one a step, up to ``end`` samples; a whole run's evals by share of its training."""
    rows = zip(*run.curve, strict=True)
    return list({round(PERMILLE * s / (run.length or 1)): float(v) for s, v in rows if s <= end}.items())


def evals_of(run: ComparedRun) -> list[Eval]:
    """The run's evals; its samples stand for seconds."""
    curve: Points = run.curve
    return [Eval(float(s), float(v), float(s)) for s, v in zip(*curve, strict=True)]
