"""Guarantee, cost and observed error rate of the stopping rule, and the runs of a race; from the records alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lora_tune.config.spent import counts_node_hours, spent_phrase
from lora_tune.config.study import Study
from lora_tune.controller.evidence import applicable_envelope, contradiction, courses, is_confirmed, whole_runs
from lora_tune.curves.comparison import needed, supported
from lora_tune.search.comparison import RunSummary
from lora_tune.search.noise import TIMES, ResultScale
from lora_tune.search.objectives import objective_of
from lora_tune.store.metrics import RunMetrics
from lora_tune.store.records import StudyRecords, Trial, Verdict

CONFIDENCE = 0.9

ENDED = (Verdict.REACHED, Verdict.CENSORED, Verdict.PRUNED)
"""Verdicts that measure how good a run was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingAccount:
    """The stopping rule's state in a sweep.

    goal: what makes a run good, as text. stated: risk stated in the study; kept: risk that the evidence supports now,
    None while no run is compared. finished: runs that were not stopped; references: the number of best ones that others
    are compared with, once one more has ended; full: references needed for the stated risk. published: the rate rests
    on published runs; unconfirmed: it will, once a good run has lain within them. contradicted_by: the good trial
    outside of them, after which they are not used. stopped, missed: runs stopped by comparison, and all ended runs that
    were not good. used: share of all node-hours in stopped runs. audited, erred: condemned runs that continued to their
    end, and those of them that were good. audit_hours: node-hours of audits after they were condemned; machine_time:
    display them as machine time. false_rate: 90% interval for the share of good runs that the rule condemns, None
    without an ended audit.
    """

    goal: str
    stated: float
    kept: float | None
    references: int
    finished: int
    full: int
    published: bool
    unconfirmed: bool
    contradicted_by: int | None
    stopped: int
    missed: int
    used: float
    audited: int
    erred: int
    audit_hours: float
    machine_time: bool
    false_rate: tuple[float, float] | None


def stopping_account(study: Study, sweep: StudyRecords, now: float) -> StoppingAccount | None:
    """The account at ``now`` (epoch seconds); None if the study compares no curves."""
    if study.pruning.rule == "none" or not objective_of(study).judges_evals:
        return None
    trials, objective, rate = sweep.trials.values(), objective_of(study), study.pruning.false_prune_rate
    ended, count = [t for t in trials if t.verdict in ENDED], study.pruning.references
    whole, tasks = whole_runs(study, sweep), Counter(run.task for run in courses(study, sweep))
    compared = supported(rate, count) if max(tasks.values(), default=0) > count else None
    good = {t.number for t in ended if t.verdict is Verdict.REACHED}
    if not objective.has_target:
        good = {t.number for t in whole[: count + 1]}
    envelope = next((e for t in trials if (e := applicable_envelope(study, sweep, t)) is not None), None)
    against, confirmed = contradiction(study, sweep), is_confirmed(study, sweep)
    stopped = [t for t in ended if t.verdict is Verdict.PRUNED and t.sentence.startswith("stalled")]
    audits = [t for t in ended if t.metrics.audited and t.verdict is not Verdict.PRUNED]
    erred, spent = sum(t.number in good for t in audits), sweep.node_hours(now)
    others = sum(not sweep.trials[number].metrics.audited for number in good)
    return StoppingAccount(
        goal="the target" if objective.has_target else f"the best {count + 1}",
        stated=rate,
        kept=envelope.supported(rate) if envelope and confirmed else compared,
        references=count,
        finished=len(whole),
        full=needed(rate),
        published=envelope is not None and confirmed,
        unconfirmed=envelope is not None and not confirmed,
        contradicted_by=against.number if against else None,
        stopped=len(stopped),
        missed=len(ended) - len(good),
        used=_hours(sweep, stopped, now) / spent if spent else 0.0,
        audited=len(audits),
        erred=erred,
        audit_hours=sum(_after_condemned(sweep, t, now) for t in audits),
        machine_time=not counts_node_hours(study),
        false_rate=false_rate(erred, len(audits), len(stopped) + len(audits), others) if audits else None,
    )


def false_rate(erred: int, audited: int, condemned: int, kept: int) -> tuple[float, float]:
    """A 90% interval for the share of good runs that were condemned.

    Audits are drawn at random, so the share of good runs among all ``condemned`` has the Clopper-Pearson interval of
    ``erred`` of ``audited``; ``kept`` good runs were not condemned.
    """
    from scipy.special import betaincinv

    tail = (1 - CONFIDENCE) / 2
    low = float(betaincinv(erred, audited - erred + 1, tail)) if erred else 0.0
    high = float(betaincinv(erred + 1, audited - erred, 1 - tail)) if erred < audited else 1.0
    rates = [share * condemned / max(share * condemned + kept, 1.0) for share in (low, high)]
    return rates[0], rates[1]


def _hours(sweep: StudyRecords, trials: Sequence[Trial], now: float) -> float:
    return sum(a.node_hours(now) for t in trials for a in sweep.attempts_of(t.number))


def _after_condemned(sweep: StudyRecords, trial: Trial, now: float) -> float:
    """Node-hours of a trial's training after the rule condemned it."""
    last, at = trial.metrics.last_samples or 0.0, trial.metrics.audited_samples or 0.0
    return _hours(sweep, [trial], now) * max(0.0, 1 - at / last) if last else 0.0


def promise_text(study: Study) -> str:
    """The stopping rule's guarantee before the first run, and its cost; "" if the study compares no curves."""
    if study.pruning.rule == "none" or not objective_of(study).judges_evals:
        return ""
    rate, first = study.pruning.false_prune_rate, study.pruning.references
    audits = f"; {study.audit_share:.0%} of condemned runs go on as audits" if study.audit_share else ""
    if study.objective.curves != "own":
        once = "by published curves once a good run has been like them"
        return f"stopping: {_percent(rate)} of good runs by error, {once}{audits}"
    kept = _percent(supported(rate, first))
    terms = (
        f"the first {first + 1} runs go to their ends; then each is compared with the best {first} of those that "
        f"ended: of runs that would have become the best, at most {kept} are stopped"
    )
    short = f"; the stated {_percent(rate)} needs {needed(rate)}" if needed(rate) > first else ""
    return f"stopping: {terms}{short}{audits}"


def account_text(account: StoppingAccount) -> str:
    """The account as one line."""
    parts = [_support_words(account)]
    if account.unconfirmed:
        parts.append("published curves stop no run before a good one of this sweep has been like them")
    if account.contradicted_by is not None:
        parts.append(
            f"trial {account.contradicted_by} reached the target outside of the published curves, by which runs are "
            f"judged no more"
        )
    if account.stopped:
        parts.append(
            f"{account.stopped} of {account.missed} runs that missed {account.goal} were stopped, "
            f"with {account.used:.0%} of what all trials spent"
        )
    if account.false_rate is not None:
        low, high = account.false_rate
        parts.append(
            f"{account.erred} of {account.audited} audits reached {account.goal}, for "
            f"{spent_phrase(account.audit_hours, machine_time=account.machine_time)} more: "
            f"{_percent(low)} to {_percent(high)} of good runs are condemned"
        )
    return "; ".join(parts)


def _support_words(account: StoppingAccount) -> str:
    if account.published and account.kept is not None:
        return f"judged by published runs, at most {_percent(account.kept)} of good runs are stopped by error"
    ended = f"{account.finished} finished run{'s' if account.finished != 1 else ''}"
    if account.kept is None:
        return f"{ended} so far; runs are compared from {account.references + 1} on"
    more = f"; {_percent(account.stated)} from {account.full} references on" if account.kept > account.stated else ""
    judged = f"judged by the best {account.references} of {ended}"
    return f"{judged}, at most {_percent(account.kept)} of runs that would have become the best are stopped{more}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


# Runs of a race, from its records, for confirm, its screen and its pages.


NOT_A_RESULT = (Verdict.FAILED, Verdict.CANCELLED)
"""Verdicts that say nothing about a configuration; such a replicate is run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """One finished run of a configuration.

    of: the sweep's trial. trial, position: the race's trial and the run's index in its job. objective: infinite for a
    run that missed the target or measured nothing; seconds, samples: as logged. slower: slowdown of the machine against
    its reference pace. node_hours: its share of its job's.
    """

    of: int
    trial: int
    position: int
    seed: int
    objective: float
    seconds: float | None
    samples: float | None
    node_hours: float
    slower: float = 1.0


def name_of(trial: int) -> str:
    """A configuration's name in a race."""
    return f"trial {trial}"


def replicates(race: StudyRecords) -> dict[int, list[Replicate]]:
    """Finished runs that count, by the trial that they replicate, in the order of their seeds."""
    runs: dict[int, list[Replicate]] = {}
    for trial in sorted(race.trials.values(), key=lambda t: t.number):
        if trial.replicate_of is not None and trial.verdict is not None and trial.verdict not in NOT_A_RESULT:
            runs.setdefault(trial.replicate_of, []).extend(_runs(trial))
    return runs


def _runs(trial: Trial) -> list[Replicate]:
    """The runs of one job. If it ran out of memory or diverged, all its seeds failed."""
    assert trial.replicate_of is not None
    hours = trial.metrics.node_hours or 0.0
    drawn = trial.metrics.seed if trial.replicates == 1 else None  # drawn by a launch script and logged
    begin = trial.seed if drawn is None else drawn
    listed = trial.metrics.runs or [
        RunMetrics(seed=begin + i, position=i, seconds=trial.seconds, samples=trial.samples, metrics=trial.metrics)
        for i in range(trial.replicates)
    ]
    return [
        Replicate(
            of=trial.replicate_of,
            trial=trial.number,
            position=run.position,
            seed=run.seed,
            objective=math.inf if run.metrics.objective is None else run.metrics.objective,
            seconds=run.seconds,
            samples=run.samples,
            node_hours=hours / len(listed),
            slower=run.metrics.slower or 1.0,
        )
        for run in listed
    ]


def results(runs: Mapping[int, Sequence[Replicate]], field: Iterable[int]) -> dict[str, list[RunSummary]]:
    """The runs of each contender, by its name. field: trial numbers in the sweep."""
    return {name_of(n): [RunSummary(r.objective, r.node_hours) for r in runs.get(n, ())] for n in field}


def missed(runs: Iterable[Replicate]) -> int:
    """Number of runs without a result."""
    return sum(not math.isfinite(run.objective) for run in runs)


def runs_text(runs: int, missed: int, scale: ResultScale = TIMES) -> str:
    """Number of runs, and of those without a result, as text."""
    count = f"{runs} run{'s' if runs != 1 else ''}"
    if not missed:
        return count
    return f"{count}, {f'{missed} {scale.missed}' if missed < runs else f'none {scale.got}'}"
