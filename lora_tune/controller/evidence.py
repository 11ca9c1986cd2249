"""The curves that a running trial is compared with, shared by the stall rule, the cap, the figure and replay.

They are the sweep's own finished runs of its batch and precision, or the published ones if the study declares its
curves to be like those. The sweep may contradict that: published curves stop no trial before good runs of the sweep at
its global batch size lie among them, they never stop the sweep's first trial, and one good run outside of them
invalidates them for the whole sweep.
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
    """The evidence that applies to a run. evidence: for the stall rule. change: samples at which it changes its
    precision, 0: never. published: the envelope that applies to it, but may not stop it yet; family: its shape, if that
    predicts how the run's curve continues. task: what runs must share with it."""

    evidence: Evidence
    change: float
    published: Envelope | None
    family: Family | None
    task: Hashable


def applicable(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> Applicable:
    """The curves that apply to a trial. run: its log so far."""
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
    """Whether the trial continues when the rule would stop it; decided by its seed, before its curve is known."""
    draw = int.from_bytes(hashlib.sha256(f"audit {study.name} {trial.seed}".encode()).digest()[:8], "big") / 2**64
    return draw < study.audit_share


# The sweep's own runs.


def level(study: Study) -> float:
    """The level that runs are to reach, as evals are stored: the target; minus infinity if the study has none."""
    return study.target if objective_of(study).has_target else -math.inf


def whole_runs(study: Study, sweep: StudyRecords) -> Sequence[Trial]:
    """Trials that ran to their ends and have evals, best first; without stopped ones."""
    ended = (Verdict.REACHED, Verdict.CENSORED)
    every = ranked(study, sweep)
    return [t for t in every if t.verdict in ended and not t.probe and sweep.last_evals(t.number)]


def courses(study: Study, sweep: StudyRecords) -> Sequence[ComparedRun]:
    """The whole runs for comparisons, best first: of each task as many as are used."""
    return [run for _, run in _referenced(study, sweep)]


def _referenced(study: Study, sweep: StudyRecords) -> Sequence[tuple[Trial, ComparedRun]]:
    """As :func:`courses`, with their trials."""
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
"""References of a run: the trial, its curve, and its time at each of the run's evals relative to the run's."""


def _faster(study: Study, trial: Trial, beside: Beside) -> bool:
    """Whether a run was ever so much faster than runs of equal work that its arithmetic must differ."""
    times = [float(ratios.max()) for other, _, ratios in beside if equal_work(study, trial, other)]
    return bool(times) and median(times) > OTHER_ARITHMETIC


def _healed(study: Study, beside: Beside) -> float:
    """Samples by which an FP4 run has healed, by the samples that the sweep's own runs needed; 0 if unknown."""
    stops = [stop for _, other, _ in beside if math.isfinite(stop := other.stop(level(study)))]
    return HEALED * median(stops) if stops else 0.0


def task(trial: Trial, change: float = 0.0, run: RunLog | None = None) -> Hashable:
    """What comparable runs must share: the batch size, FP4, and a change of precision.

    change: samples at which the run changes it, 0: never. run: its log so far.
    """
    return trial.parameters.get("GBS"), healing.precision(trial, run).lowest == FP4, change > 0


def _change(trial: Trial) -> float:
    """Samples at which a finished trial changed its precision; 0: never, as far as is known."""
    known: float = trial.metrics.healing_samples or 0.0
    return known or (_product(trial, "HEALING_ITER", "GBS") or 0.0)


def max_samples(trial: Trial) -> float | None:
    """Samples at the end of the trial's training; None if its parameters do not state it.

    Some trainings use -1 steps if only the target ends them.
    """
    end = _product(trial, "MAX_STEPS", "GBS")
    return end if end is not None and 0 < end < math.inf else None


def _product(trial: Trial, *names: str) -> float | None:
    """The product of numeric parameters; None if one is missing."""
    values = [trial.parameters.get(name) for name in names]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return math.prod(numbers) if len(numbers) == len(names) else None


# The published runs.


def public_envelope(study: Study, trial: Trial) -> Envelope | None:
    """The public runs' envelope at the trial's global batch size, if the study compares with them."""
    batch = trial.parameters.get("GBS")
    if study.objective.curves == "own" or not isinstance(batch, int | float):
        return None
    return convergence.published(batch)


def applicable_envelope(study: Study, sweep: StudyRecords, trial: Trial) -> Envelope | None:
    """:func:`public_envelope`; None after a good run of the sweep has contradicted it."""
    return public_envelope(study, trial) if contradiction(study, sweep) is None else None


def contradiction(study: Study, sweep: StudyRecords) -> Trial | None:
    """The first trial to end that reached the target although it was outside the public runs' envelope."""
    return _credibility(study, sweep).contradiction


def is_confirmed(study: Study, sweep: StudyRecords) -> bool:
    """Whether good trials were within the public runs' envelope, at any batch."""
    return bool(_credibility(study, sweep).confirmed)


def _confirmed(study: Study, sweep: StudyRecords, trial: Trial) -> bool:
    """As :func:`is_confirmed`, at the trial's batch: a public code needs the usual samples at GBS 8, 1/3 more at 32."""
    return trial.parameters.get("GBS") in _credibility(study, sweep).confirmed


@dataclass(frozen=True, slots=True)
class _SweepCredibility:
    """:class:`~lora_tune.curves.published.Credibility`, with trials in place of indices."""

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
    """Trials that reached the target, in order of their ends, for which an envelope exists."""
    for trial in sorted(sweep.reached(), key=lambda t: t.finished_at or 0.0):
        envelope = None if trial.probe else public_envelope(study, trial)
        # Without the sweep, so that later trials do not change the result.
        begin = _begins_at(trial, None, None, envelope) if envelope else math.inf
        if envelope is not None and math.isfinite(begin):
            run = compared_run(sweep.last_evals(trial.number), task=trial.parameters.get("GBS"))
            yield trial, BesideEnvelope(run, envelope, begin)


NEVER_TRAINED = (Verdict.INFEASIBLE, Verdict.FAILED, Verdict.CANCELLED)


def start_of(sweep: StudyRecords) -> int | None:
    """Number of the sweep's first trial that trains, which is no probe; None before it.

    If the study names a base config, that is measured first.
    """
    begun = (t.number for t in sweep.trials.values() if not t.probe and t.verdict not in NEVER_TRAINED)
    return min(begun, default=None)


HEALED = 1.07
"""Multiple of the median samples to target by which public FP4 runs have changed precision and come down."""

EVALS_TO_HEAL = 1
"""Evals until an FP4 curve has fallen after its healing step: public ones are within 0.006 of the target by the first,
and two more in a row must lie outside before a run is stopped."""


OTHER_ARITHMETIC = 1.1
"""Speed relative to runs of equal work above which a run's arithmetic must differ, whatever it states: FP4 on public
B200 and GB200 is 1.2 to 1.4 times as fast as FP8 (v5.0, v5.1)."""


def _begins_at(
    trial: Trial, run: RunLog | None, sweep: StudyRecords | None, published: Envelope, *, stated: bool = True
) -> float:
    """Samples before which runs in other precisions are no evidence on the trial, as it may train in FP4 until then.

    0 if its precision is known to be another one; infinite if it trains in FP4 for an unknown time. run: its log so
    far; sweep: its similar trials may tell. None: only the trial's own records count. stated: whether its stated
    precision is credible.
    """
    change = healing.healing_samples(trial, run or RunLog(), sweep)
    if change > 0:
        return change + EVALS_TO_HEAL * PUBLISHED_STEP
    if stated and (lowest := healing.precision(trial, run).lowest):
        return math.inf if lowest == FP4 else 0.0
    return HEALED * float(np.exp(published.family.log_samples[-1]))
