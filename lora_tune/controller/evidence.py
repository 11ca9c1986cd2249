"""What a running trial is judged by: the sweep's finished good runs as references, and which trials are audits."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence

import numpy as np

from lora_tune.config.study import Study
from lora_tune.controller import healing
from lora_tune.controller.public_runs import (
    begins_at,
    confirmed_at,
    contradiction,
    ended_at,
    judging_envelope,
    shown,
    start_of,
)
from lora_tune.curves.overlay import ComparedRun, comparable, course
from lora_tune.curves.stopping import Evidence
from lora_tune.logs.run import RunLog
from lora_tune.mlperf.gate import FP4
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict


def is_audit(study: Study, trial: Trial) -> bool:
    """Whether the trial goes on when it is condemned: settled by its seed, long before anybody knows its curve."""
    draw = int.from_bytes(hashlib.sha256(f"audit {study.name} {trial.seed}".encode()).digest()[:8], "big") / 2**64
    return draw < study.audit_share


def evidence(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> Evidence:
    """What the trial is judged by: this sweep's good runs, and the public ones where they apply and are believed."""
    published = judging_envelope(study, sweep, trial)
    begin = begins_at(trial, run, sweep, published) if published else math.inf
    known = math.isfinite(level(study, sweep))
    return Evidence(
        references=courses(study, sweep) if known else (),
        fewest=study.pruning.references, rate=study.pruning.false_prune_rate,
        published=published if math.isfinite(begin) else None, published_from=begin,
        shown=shown(study, sweep, trial) if published else (),
        no_verdict_before=study.pruning.no_verdict_before, unit=study.progress_unit,
    )  # fmt: skip


def courses(study: Study, sweep: StudyRecords) -> Sequence[ComparedRun]:
    """The trials that reached the target, in the order in which they ended, as references: the newest of them.

    All but the free ones were let through by the rule, and how bad a good run may look cannot be learned from them.
    """
    return sweep.once(("courses", study.digest), lambda: _courses(study, sweep))


def level(study: Study, sweep: StudyRecords) -> float:
    """What a good run comes down to, as evals are kept: the target; without one, what half of the free trials did.

    Free trials are those that no rule could stop. Until there are enough of them nothing is known: -inf.
    """
    if objective_of(study).has_target:
        return study.target
    return sweep.once(("level", study.digest), lambda: _half_came_to(study, sweep))


def _half_came_to(study: Study, sweep: StudyRecords) -> float:
    free = free_trials(study, sweep)
    if len(free) < fewest_free(study):
        return -math.inf
    return float(np.median([_lowest(sweep, number) for number in free]))


def fewest_free(study: Study) -> int:
    """Good trials that go free before any is compared: where no target tells good ones, half of those that ended."""
    return study.pruning.references * (1 if objective_of(study).has_target else 2)


def is_good(study: Study, sweep: StudyRecords, trial: Trial) -> bool:
    """Whether an ended trial is a good run: one that came to the target, or without one to :func:`level`."""
    if trial.verdict is not Verdict.REACHED or objective_of(study).has_target:
        return trial.verdict is Verdict.REACHED
    return _lowest(sweep, trial.number) <= level(study, sweep)


def _lowest(sweep: StudyRecords, number: int) -> float:
    """The lowest eval of a trial; infinite where none is a number."""
    return float(comparable(sweep.last_evals(number)).loss.min(initial=math.inf))


MOST_REFERENCES = 200
"""References that a run is compared with at most; free ones are kept before others, newer ones before older."""


def _courses(study: Study, sweep: StudyRecords) -> Sequence[ComparedRun]:
    done = sorted(sweep.reached(), key=lambda t: t.finished_at or 0.0)
    numbers = free_trials(study, sweep)
    free = [t for t in done if t.number in numbers]
    others = [t for t in done if t.number not in numbers]
    room = max(0, MOST_REFERENCES - len(free))
    kept = [*free[-MOST_REFERENCES:], *(others[-room:] if room else [])]
    return [
        course(
            sweep.last_evals(t.number),
            length=max_samples(t),
            task=task(t),
            kind=kind(t, _change(t)),
            free=i < len(free),
        )
        for i, t in enumerate(kept)
    ]


def free_trials(study: Study, sweep: StudyRecords) -> set[int]:
    """Numbers of the good trials that nothing selected, not even by how soon they ended.

    The first good ones of the sweep in the order in which they began, up to the first that has not ended: no run is
    compared before these have. Of those that begin together, the first to end are the fastest, and beside them alone
    every slower one would look bad. Then the first of each batch size (without one no run of it is compared), and the
    audits, each again up to the first that has not ended. Where the public runs were believed and are no more, those
    that ran in the meantime were selected by them: only the start, and what came before or afterwards, is free.
    """
    begun = sorted((t for t in sweep.trials.values() if not t.probe), key=lambda t: t.number)
    unselected = _unselected(study, sweep, begun)
    first = _first_good(unselected, fewest_free(study))
    if len(first) < fewest_free(study):
        return first
    of_tasks = (_first_good([t for t in unselected if task(t) == some], 1) for some in {task(t) for t in unselected})
    audits = _first_good([t for t in begun if is_audit(study, t)], len(begun))
    return first.union(audits, *of_tasks)


def _unselected(study: Study, sweep: StudyRecords, begun: Sequence[Trial]) -> Sequence[Trial]:
    """Those of the trials that public runs, once they are no longer believed, had no part in stopping."""
    against = contradiction(study, sweep)
    if against is None:
        return begun
    start, since, until = start_of(sweep), confirmed_at(study, sweep), ended_at(against)
    if since is None or since >= until:
        return begun
    ran_before = {t.number for t in begun if t.finished_at is not None and t.finished_at <= since}
    return [t for t in begun if t.number == start or t.number in ran_before or t.proposed_at >= until]


def _first_good(begun: Sequence[Trial], most: int) -> set[int]:
    ended = itertools.takewhile(lambda t: t.state is TrialState.FINISHED, begun)
    good = (t.number for t in ended if t.verdict is Verdict.REACHED)
    return set(itertools.islice(good, most))


def task(trial: Trial) -> object:
    """What a run must share with a reference for anything to be said of it: the global batch size."""
    return trial.parameters.get("GBS")


def kind(trial: Trial, change: float, run: RunLog | None = None) -> tuple[object, ...]:
    """What the shape of a trial's curve depends on beside batch and length: warm-up, change of precision, and FP4.

    The first two, the change at ``change`` samples (0: none), count as alike within an eighth of the length. run: the
    trial's log, as far as it goes.
    """
    end, in_fp4 = max_samples(trial), healing.precision(trial, run).lowest == FP4
    parts = (_product(trial, "WARMUP_STEPS", "GBS"), change)
    return (in_fp4, *(round(8 * part / end) if part and end and math.isfinite(part) else 0 for part in parts))


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
