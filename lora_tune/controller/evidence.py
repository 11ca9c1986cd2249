"""Which curves apply to a running trial: one answer for the stall rule, the cap, the figure and replay alike.

These are the sweep's own finished runs of its batch and precision, or the published ones where the study says that its
curves are like those. Its own machine may say otherwise: no trial is stopped by them before good runs of the sweep at
its global batch size have lain among them, the one that the sweep begins with never is, and one good run that lay
outside of them ends the belief for the whole sweep.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from lora_tune.config.study import Study, goal_of
from lora_tune.controller import healing
from lora_tune.curves import Envelope, Family
from lora_tune.curves.comparison import ComparedRun, compared_run
from lora_tune.curves.points import Array
from lora_tune.curves.published import PUBLISHED_STEP, BesideEnvelope, credibility
from lora_tune.curves.stopping import Evidence
from lora_tune.logs.run import RunLog
from lora_tune.mlperf import convergence
from lora_tune.mlperf.gate import FP4
from lora_tune.search.objectives import objective_of
from lora_tune.search.pace import equal_work, times_as_long
from lora_tune.search.recommendation import ranked
from lora_tune.store.records import StudyRecords, Trial, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicable:
    """What applies to a run. evidence: by which the stall rule judges it. change: samples at which it changes its
    precision, 0: never. published: the envelope that is believed of it, which may not stop it yet; family: its shape,
    where that says how the run's curve goes on from here. task: what runs must share with it."""

    evidence: Evidence
    change: float
    published: Envelope | None
    family: Family | None
    task: Hashable


def applicable(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> Applicable:
    """Which curves apply to a trial. run: its log, as far as it goes."""
    change = healing.healing_samples(trial, run, sweep)
    known, of_workload, kind = (
        applicable_envelope(study, sweep, trial),
        public_envelope(study, trial),
        task(trial, change, run),
    )
    alike = [(t, r) for t, r in _referenced(study, sweep) if r.task == kind]
    beside = [(t, r, times_as_long(study, sweep, t, trial, run)) for t, r in alike]
    faster = _faster(study, trial, beside)
    stated = bool(healing.precision(trial, run).lowest) and not faster
    begin = _begins_at(trial, run, sweep, of_workload, stated=stated) if of_workload else 0.0
    judges = (
        known is not None
        and math.isfinite(begin)
        and _confirmed(study, sweep, trial)
        and trial.number != start_of(sweep)
    )
    may_heal = faster or bool(goal_of(study) or run.hyperparameters.get("submission_benchmark"))
    own = _healed(study, beside) if may_heal and not change and not judges else 0.0
    like = known is not None and not healing.has_special_curve(trial, run)
    follows = like and bool(run.evals) and run.evals[-1].samples >= begin
    evidence = Evidence(
        finished=[replace(r, longer=max(1.0, float(times[-1]))) for _, r, times in beside],
        count=study.pruning.references, rate=study.pruning.false_prune_rate,
        published=known if judges else None, published_from=begin,
        shown=_credibility(study, sweep).shown.get(trial.parameters.get("GBS"), ()) if judges else (),
        no_verdict_before=max(study.pruning.no_verdict_before, 0.0 if stated else max(begin, own)),
        unit=study.progress_unit,
    )  # fmt: skip
    return Applicable(
        evidence=evidence, change=change, published=known if like else None,
        family=known.family if known and follows else None, task=kind,
    )  # fmt: skip


def is_audit(study: Study, trial: Trial) -> bool:
    """Whether the trial goes on when it is condemned: settled by its seed, long before anybody knows its curve."""
    draw = int.from_bytes(hashlib.sha256(f"audit {study.name} {trial.seed}".encode()).digest()[:8], "big") / 2**64
    return draw < study.audit_share


# The sweep's own runs.


def level(study: Study) -> float:
    """What runs come down to, as evals are kept: the target; minus infinity where the study has none."""
    return study.target if objective_of(study).has_target else -math.inf


def whole_runs(study: Study, sweep: StudyRecords) -> Sequence[Trial]:
    """Trials that ran to their ends and have evals, the best first. Stopped ones are none of them."""
    ended = (Verdict.REACHED, Verdict.CENSORED)
    every = ranked(study, sweep)
    return [t for t in every if t.verdict in ended and not t.probe and sweep.last_evals(t.number)]


def courses(study: Study, sweep: StudyRecords) -> Sequence[ComparedRun]:
    """The whole runs as they are compared, the best first: of each task as many as anybody asks for."""
    return [run for _, run in _referenced(study, sweep)]


def _referenced(study: Study, sweep: StudyRecords) -> Sequence[tuple[Trial, ComparedRun]]:
    """The same with their trials."""
    return sweep.once(("references", study.digest), lambda: _compared(study, sweep))


def _compared(study: Study, sweep: StudyRecords) -> Sequence[tuple[Trial, ComparedRun]]:
    kept, tasks = [], Counter[Hashable]()
    for trial in whole_runs(study, sweep):
        kind = task(trial, _change(trial))
        tasks[kind] += 1
        if tasks[kind] <= study.pruning.references + 1:
            kept.append((trial, compared_run(sweep.last_evals(trial.number), length=max_samples(trial), task=kind)))
    return kept


Beside = Sequence[tuple[Trial, ComparedRun, Array]]
"""References of a run: the trial, its curve, and how many times as long it took by each of the run's evals."""


def _faster(study: Study, trial: Trial, beside: Beside) -> bool:
    """Whether a run was once so much faster than those of equal work that it hardly computes as they did."""
    times = [float(ratios.max()) for other, _, ratios in beside if equal_work(study, trial, other)]
    return bool(times) and median(times) > OTHER_ARITHMETIC


def _healed(study: Study, beside: Beside) -> float:
    """Samples by which a run in FP4 has healed, by those that the sweep's own runs needed; 0 where none is known."""
    stops = [stop for _, other, _ in beside if math.isfinite(stop := other.stop(level(study)))]
    return HEALED * median(stops) if stops else 0.0


def task(trial: Trial, change: float = 0.0, run: RunLog | None = None) -> Hashable:
    """What runs must share for one to say anything of the other: the batch size, FP4, and a change of precision.

    change: samples at which the run changes it, 0: never. run: its log, as far as it goes.
    """
    return trial.parameters.get("GBS"), healing.precision(trial, run).lowest == FP4, change > 0


def _change(trial: Trial) -> float:
    """Samples at which a finished trial changed its precision; 0: it did not, as far as is known."""
    known: float = trial.metrics.healing_samples or 0.0
    return known or (_product(trial, "HEALING_ITER", "GBS") or 0.0)


def max_samples(trial: Trial) -> float | None:
    """Where the trial's training ends anyway, in samples; None when its parameters do not say.

    Some trainings call it -1 steps when nothing but the target ends them.
    """
    end = _product(trial, "MAX_STEPS", "GBS")
    return end if end is not None and 0 < end < math.inf else None


def _product(trial: Trial, *names: str) -> float | None:
    """The product of numeric parameters; None when one is not there."""
    values = [trial.parameters.get(name) for name in names]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return math.prod(numbers) if len(numbers) == len(names) else None


# The published runs.


def public_envelope(study: Study, trial: Trial) -> Envelope | None:
    """What the public runs say of good curves at the trial's global batch size, where the study compares with them."""
    batch = trial.parameters.get("GBS")
    if study.objective.curves == "own" or not isinstance(batch, int | float):
        return None
    return convergence.published(batch)


def applicable_envelope(study: Study, sweep: StudyRecords, trial: Trial) -> Envelope | None:
    """:func:`public_envelope`, until a good run of the sweep has contradicted it."""
    return public_envelope(study, trial) if contradiction(study, sweep) is None else None


def contradiction(study: Study, sweep: StudyRecords) -> Trial | None:
    """The first trial to end that reached the target although it had lain outside of the public runs' envelope."""
    return _credibility(study, sweep).contradiction


def is_confirmed(study: Study, sweep: StudyRecords) -> bool:
    """Whether good trials lay among the public runs, at any batch."""
    return bool(_credibility(study, sweep).confirmed)


def _confirmed(study: Study, sweep: StudyRecords, trial: Trial) -> bool:
    """The same at the trial's batch: one public code needs the usual samples at GBS 8 and a third more at 32."""
    return trial.parameters.get("GBS") in _credibility(study, sweep).confirmed


@dataclass(frozen=True, slots=True)
class _SweepCredibility:
    """What :class:`~lora_tune.curves.published.Credibility` says, of trials."""

    shown: Mapping[Hashable, Sequence[float]]
    confirmed: frozenset[Hashable]
    contradiction: Trial | None


def _credibility(study: Study, sweep: StudyRecords) -> _SweepCredibility:
    if study.objective.curves == "own" or not objective_of(study).has_target:
        return _SweepCredibility({}, frozenset(), None)
    return sweep.once(("credibility", study.digest), lambda: _compute_credibility(study, sweep))


def _compute_credibility(study: Study, sweep: StudyRecords) -> _SweepCredibility:
    good = list(_good(study, sweep))
    credible = credibility((run for _, run in good), study.target, study.pruning.false_prune_rate)
    against = None if credible.contradicted is None else good[credible.contradicted][0]
    return _SweepCredibility(credible.shown, frozenset(credible.confirmed), against)


def _good(study: Study, sweep: StudyRecords) -> Iterator[tuple[Trial, BesideEnvelope]]:
    """Trials that reached the target in the order in which they ended, of which the public runs say anything."""
    for trial in sorted(sweep.reached(), key=lambda t: t.finished_at or 0.0):
        envelope = None if trial.probe else public_envelope(study, trial)
        # Later trials change nothing of this one.
        begin = _begins_at(trial, None, None, envelope) if envelope else math.inf
        if envelope is not None and math.isfinite(begin):
            run = compared_run(sweep.last_evals(trial.number), task=trial.parameters.get("GBS"))
            yield trial, BesideEnvelope(run, envelope, begin)


NEVER_TRAINED = (Verdict.INFEASIBLE, Verdict.FAILED, Verdict.CANCELLED)


def start_of(sweep: StudyRecords) -> int | None:
    """Number of the trial that the sweep begins with: the first one that trains, which no probe does; None before it.

    It is what was there before, where the study says what that is: that is measured first.
    """
    begun = (t.number for t in sweep.trials.values() if not t.probe and t.verdict not in NEVER_TRAINED)
    return min(begun, default=None)


HEALED = 1.07
"""Of the median samples to target: from here on public FP4 runs have changed their precision and come down."""

EVALS_TO_HEAL = 1
"""Evals that an FP4 curve takes to come down after its healing step: public ones are within 0.006 of the target by the
first, and two more in a row must lie outside before a run is stopped."""


OTHER_ARITHMETIC = 1.1
"""Times as fast as runs of equal work, from which on a run does not compute as they did, whatever it states: FP4 on
public B200 and GB200 is 1.2 to 1.4 times as fast as FP8 (v5.0, v5.1)."""


def _begins_at(
    trial: Trial, run: RunLog | None, sweep: StudyRecords | None, published: Envelope, *, stated: bool = True
) -> float:
    """Samples before which runs in other precisions say nothing of the trial, because it may train in FP4 until then.

    0 where its precision is known to be another one; infinite where it trains in FP4 and nobody knows for how long.
    run: its log, as far as it goes; sweep: whose trials alike may tell. None: only what is kept of the trial counts.
    stated: what is stated of its precision can be true.
    """
    change = healing.healing_samples(trial, run or RunLog(), sweep)
    if change > 0:
        return change + EVALS_TO_HEAL * PUBLISHED_STEP
    if stated and (lowest := healing.precision(trial, run).lowest):
        return math.inf if lowest == FP4 else 0.0
    return HEALED * float(np.exp(published.family.log_samples[-1]))
