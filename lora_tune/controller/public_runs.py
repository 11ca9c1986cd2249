"""The public runs' envelope as a sweep uses it: of which trials it says something, and whether it is believed at all.

The study says that its curves are like the public ones; its own machine may say otherwise. So no trial is stopped by
them before good runs of the sweep at its global batch size have lain among them, the one that the sweep begins with
never is, and one good run that lay outside of them ends the belief for the whole sweep.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.config.study import Study
from lora_tune.controller import healing
from lora_tune.curves import Envelope
from lora_tune.curves.credibility import PUBLISHED_STEP, BesideEnvelope, credibility
from lora_tune.curves.overlay import course
from lora_tune.logs.run import RunLog
from lora_tune.mlperf import convergence
from lora_tune.mlperf.gate import FP4
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import StudyRecords, Trial, Verdict


def public_envelope(study: Study, trial: Trial) -> Envelope | None:
    """What the public runs say of good curves at the trial's global batch size, where the study compares with them."""
    batch = trial.parameters.get("GBS")
    if study.objective.curves == "own" or not isinstance(batch, int | float):
        return None
    return convergence.published(batch)


def judging_envelope(study: Study, sweep: StudyRecords, trial: Trial) -> Envelope | None:
    """What the public runs may stop the trial by: nothing at the sweep's start or before a good run confirms.

    At another batch nothing is confirmed: one public code needs the usual samples at GBS 8 and a third more at 32.
    """
    if trial.parameters.get("GBS") not in _credibility(study, sweep).confirmed or trial.number == start_of(sweep):
        return None
    return believed(study, sweep, trial)


def believed(study: Study, sweep: StudyRecords, trial: Trial) -> Envelope | None:
    """:func:`public_envelope`, until a good run of the sweep has contradicted it."""
    return public_envelope(study, trial) if contradiction(study, sweep) is None else None


def contradiction(study: Study, sweep: StudyRecords) -> Trial | None:
    """The first trial to end that reached the target although it had lain outside of the public runs' envelope."""
    return _credibility(study, sweep).contradiction


def confirmed_at(study: Study, sweep: StudyRecords) -> float | None:
    """Epoch seconds at which the good trials that had ended at a batch lay among the public runs; None: none do yet."""
    return min((ended_at(trial) for trial in _credibility(study, sweep).confirmed.values()), default=None)


def shown(study: Study, sweep: StudyRecords, trial: Trial) -> Sequence[float]:
    """How far each good run of the trial's batch lay outside of the public ones, where these say anything."""
    return _credibility(study, sweep).shown.get(trial.parameters.get("GBS"), ())


@dataclass(frozen=True, slots=True)
class _SweepCredibility:
    """What :class:`~lora_tune.curves.credibility.Credibility` says, of trials."""

    shown: Mapping[Hashable, Sequence[float]]
    confirmed: Mapping[Hashable, Trial]
    contradiction: Trial | None


def _credibility(study: Study, sweep: StudyRecords) -> _SweepCredibility:
    if study.objective.curves == "own" or not objective_of(study).has_target:
        return _SweepCredibility({}, {}, None)
    return sweep.once(("credibility", study.digest), lambda: _hear(study, sweep))


def _hear(study: Study, sweep: StudyRecords) -> _SweepCredibility:
    good = list(_good(study, sweep))
    belief = credibility((run for _, run in good), study.target, study.pruning.false_prune_rate)
    against = None if belief.contradicted is None else good[belief.contradicted][0]
    return _SweepCredibility(
        belief.shown, {batch: good[index][0] for batch, index in belief.confirmed.items()}, against
    )


def _good(study: Study, sweep: StudyRecords) -> Iterator[tuple[Trial, BesideEnvelope]]:
    """Trials that reached the target in the order in which they ended, of which the public runs say anything."""
    for trial in sorted(sweep.reached(), key=ended_at):
        envelope = None if trial.probe else public_envelope(study, trial)
        # Later trials change nothing of this one.
        begin = begins_at(trial, None, None, envelope) if envelope else math.inf
        if envelope is not None and math.isfinite(begin):
            run = course(sweep.last_evals(trial.number), task=trial.parameters.get("GBS"))
            yield trial, BesideEnvelope(run, envelope, begin)


def ended_at(trial: Trial) -> float:
    """Epoch seconds at which the trial ended; 0 where an old record does not say."""
    return trial.finished_at or 0.0


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


def begins_at(trial: Trial, run: RunLog | None, sweep: StudyRecords | None, published: Envelope) -> float:
    """Samples before which the public runs say nothing of the trial, because it may train in FP4 until then.

    0 where its precision is known to be another one; infinite where it trains in FP4 and nobody knows for how long.
    run: its log, as far as it goes; sweep: whose trials alike may tell. None: only what is kept of the trial counts.
    """
    change = healing.healing_samples(trial, run or RunLog(), sweep)
    if change > 0:
        return change + EVALS_TO_HEAL * PUBLISHED_STEP
    stated = healing.precision(trial, run).lowest
    if stated:
        return math.inf if stated == FP4 else 0.0
    return HEALED * float(np.exp(published.family.log_samples[-1]))
