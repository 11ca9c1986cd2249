"""Whether a running trial's curve says to stop it: diverged, stalled, or without a chance to win. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.controller import healing
from lora_tune.controller.policy import Stop
from lora_tune.logs.mllog import Eval, RunLog
from lora_tune.mlperf import published_curves
from lora_tune.search.capping import Incumbent, cap
from lora_tune.store.records import StopKind, Sweep, Trial, Verdict


def judge_curve(study: Study, sweep: Sweep, trial: Trial, run: RunLog) -> Stop | None:
    """Whether the eval curve says to stop: divergence, a stall at the study's false-prune rate, or no chance to win."""
    if study.pruning.rule == "none" or trial.probe:
        return None
    if study.maximise:
        return _too_slow(study, sweep, trial, run)
    if run.train and not math.isfinite(run.train[-1].loss) and not run.reached(study.objective.target):
        return Stop(
            StopKind.PRUNED, f"diverged: train loss is {run.train[-1].loss} at {run.train[-1].samples:g} samples"
        )
    settings = curves.StallSettings(
        false_prune_rate=study.pruning.false_prune_rate,
        no_verdict_before=study.pruning.no_verdict_before,
        healing_samples=healing.healing_samples(trial, run, sweep),
        max_samples=max_samples(trial),
        reference=envelope(study, trial) or _learned_envelope(study, sweep, trial),
    )
    verdict = curves.verdict(run.evals, study.objective.target, settings=settings)
    if verdict.stop:
        return Stop(StopKind.PRUNED, verdict.sentence)
    return _capped(study, sweep, trial, run)


SLOWER = 1.03
"""A trial is too slow when even this times its pace is below the best: ten times what speeds differ between runs."""

STAMP_SECONDS = 1.0
"""How late a line's time may be: logs without time stamps are stamped when they are read."""


def _too_slow(study: Study, sweep: Sweep, trial: Trial, run: RunLog) -> Stop | None:
    """Whether the trial's pace cannot become the best throughput on its number of nodes.

    Compared on equal nodes only: fewer nodes are slower for another reason, and worth knowing for its own.
    """
    nodes = study.search_space.node_count(trial.parameters)
    rivals = [
        float(other.facts["objective"])
        for other in sweep.trials.values()
        if other.verdict is Verdict.REACHED
        and "objective" in other.facts
        and study.search_space.node_count(other.parameters) == nodes
    ]
    pace = curves.fastest_pace(run, STAMP_SECONDS)
    if not rivals or pace is None or pace * SLOWER >= max(rivals):
        return None
    at = run.train[-1].samples
    sentence = f"{pace:.4g} samples/s at best after {at:g} samples; the best on {nodes} nodes is {max(rivals):.4g}"
    return Stop(StopKind.CAPPED, sentence)


def _capped(study: Study, sweep: Sweep, trial: Trial, run: RunLog) -> Stop | None:
    """Whether the run can no longer beat the best trial, at the study's risk, by the log's own clock."""
    best = sweep.best()
    if not study.pruning.cap or best is None or best.seconds is None or run.run_start_ms is None:
        return None
    change = healing.healing_samples(trial, run, sweep)
    known = envelope(study, trial)
    verdict = cap(
        run.evals,
        curves.timing(run, change),
        Incumbent(
            f"trial {best.number}",
            tuple(best.facts.get("confirmed_each") or (best.seconds,)),
            best.facts.get("pace_spread", 0.0),
        ),
        ((run.last_ms or run.run_start_ms) - run.run_start_ms) / 1000,
        study.pruning.cap_risk,
        target=study.objective.target,
        family=known.family if known else None,
        healing=change,
    )
    return Stop(StopKind.CAPPED, verdict.sentence.removeprefix("capped: ")) if verdict.stop else None


def envelope(study: Study, trial: Trial) -> curves.Envelope | None:
    """What the public runs say of good curves at the trial's global batch size, where the study compares with them."""
    batch = trial.parameters.get("GBS")
    if study.objective.curves == "own" or not isinstance(batch, int | float) or healing.own_shape(trial):
        return None
    return published_curves.published(batch)


def max_samples(trial: Trial) -> float | None:
    """Where the trial's training ends anyway, in samples; None when its parameters do not say."""
    return _product(trial, "MAX_STEPS", "GBS")


def _product(trial: Trial, *names: str) -> float | None:
    """The product of numeric parameters; None when one is not there."""
    values = [trial.parameters.get(name) for name in names]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return math.prod(numbers) if len(numbers) == len(names) else None


def _learned_envelope(study: Study, sweep: Sweep, trial: Trial) -> curves.Envelope | None:
    """What the sweep's own good curves at this trial's global batch size say; None while they are too few."""
    batch, target = trial.parameters.get("GBS"), study.objective.target
    key = ("envelope", batch, target)
    return sweep.once(key, lambda: curves.envelope_from(references(sweep, trial), target))


def references(sweep: Sweep, trial: Trial) -> list[Sequence[Eval]]:
    """The eval curves of trials that reached the target with this trial's global batch size."""
    batch = trial.parameters.get("GBS")
    return [sweep.last_evals(other.number) for other in sweep.reached() if other.parameters.get("GBS") == batch]
