"""What the stopping rule promises in a sweep, what it has cost, and how often it erred: from the records alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune.config.study import Study
from lora_tune.controller.evidence import courses, level
from lora_tune.controller.public_runs import believed, confirmed_at, contradiction
from lora_tune.curves.conformal import needed, supported
from lora_tune.objectives import objective_of
from lora_tune.store.records import StudyRecords, Trial, Verdict

CONFIDENCE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingAccount:
    """The stopping rule's state in a sweep.

    stated: false-prune rate that the study asks for; kept: the rate that its evidence supports now, None while no run
    is compared. references: good runs that nothing could have stopped, which are what supports it, of all ``good``
    ones; wanted: as many as must end before runs are compared; full: as many as support the stated rate. published:
    the rate rests on public runs; unconfirmed: it will, once a good run has lain among them. contradicted_by: the good
    trial by which they are no longer believed. stopped, missed: runs that the comparison stopped, and all that ended
    without the target. used: share of all node-hours that the stopped ones took. audited, erred: condemned runs that
    went on and have ended, and those of them that reached the target. audit_hours: node-hours that they took after they
    were condemned. false_rate: low and high of a 90% interval for the share of good runs that the rule condemns, None
    without an ended audit.
    """

    stated: float
    kept: float | None
    references: int
    good: int
    wanted: int
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
    false_rate: tuple[float, float] | None


def stopping_account(study: Study, sweep: StudyRecords, now: float) -> StoppingAccount | None:
    """The account at ``now`` (epoch seconds); None where the study compares no curves."""
    if study.pruning.rule == "none" or not objective_of(study).judges_evals:
        return None
    trials = sweep.trials.values()
    good = level(study, sweep)
    free = sum(c.free and (good == -math.inf or math.isfinite(c.stop(good))) for c in courses(study, sweep))
    envelope = next((e for t in trials if (e := believed(study, sweep, t)) is not None), None)
    against, confirmed = contradiction(study, sweep), confirmed_at(study, sweep) is not None
    stopped = [t for t in trials if t.verdict is Verdict.PRUNED and t.sentence.startswith("stalled")]
    ended = [t for t in trials if t.metrics.audited and t.verdict in (Verdict.REACHED, Verdict.CENSORED)]
    erred = sum(t.verdict is Verdict.REACHED for t in ended)
    reached = sum(t.verdict is Verdict.REACHED and not t.metrics.audited for t in trials)
    rate, spent = study.pruning.false_prune_rate, sweep.node_hours(now)
    compared = supported(rate, free) if free >= study.pruning.references else None
    return StoppingAccount(
        stated=rate,
        kept=envelope.supported(rate) if envelope and confirmed else compared,
        references=free,
        good=len(sweep.reached()),
        wanted=study.pruning.references,
        full=needed(rate),
        published=envelope is not None and confirmed,
        unconfirmed=envelope is not None and not confirmed,
        contradicted_by=against.number if against else None,
        stopped=len(stopped),
        missed=sum(t.verdict in (Verdict.PRUNED, Verdict.CENSORED) for t in trials),
        used=_hours(sweep, stopped, now) / spent if spent else 0.0,
        audited=len(ended),
        erred=erred,
        audit_hours=sum(_after_condemned(sweep, t, now) for t in ended),
        false_rate=false_rate(erred, len(ended), len(stopped) + len(ended), reached) if ended else None,
    )


def false_rate(erred: int, audited: int, condemned: int, others: int) -> tuple[float, float]:
    """A 90% interval for the share of good runs that were condemned, from the audited part of the condemned ones.

    Audits are drawn by lot, so the share of good runs among all ``condemned`` has the Clopper-Pearson interval of
    ``erred`` of ``audited``; with ``others`` good runs that were not condemned it makes the rate.
    """
    from scipy.special import betaincinv

    tail = (1 - CONFIDENCE) / 2
    low = float(betaincinv(erred, audited - erred + 1, tail)) if erred else 0.0
    high = float(betaincinv(erred + 1, audited - erred, 1 - tail)) if erred < audited else 1.0
    rates = [share * condemned / max(share * condemned + others, 1.0) for share in (low, high)]
    return rates[0], rates[1]


def _hours(sweep: StudyRecords, trials: Sequence[Trial], now: float) -> float:
    return sum(a.node_hours(now) for t in trials for a in sweep.attempts_of(t.number))


def _after_condemned(sweep: StudyRecords, trial: Trial, now: float) -> float:
    """Node-hours of a trial's training after the rule had condemned it."""
    last, at = trial.metrics.last_samples or 0.0, trial.metrics.audited_samples or 0.0
    return _hours(sweep, [trial], now) * max(0.0, 1 - at / last) if last else 0.0


def promise_words(study: Study) -> str:
    """What a study promises before its first run, and at what price; "" where it compares no curves."""
    if study.pruning.rule == "none" or not objective_of(study).judges_evals:
        return ""
    rate, first = study.pruning.false_prune_rate, study.pruning.references
    audits = f"; {study.audit_share:.0%} of condemned runs go on as audits" if study.audit_share else ""
    if study.objective.curves != "own":
        once = "by published curves once a good run has been like them"
        return f"stopping: {_percent(rate)} of good runs by error, {once}{audits}"
    if not objective_of(study).has_target:
        return f"stopping: the first {2 * first} runs go free, and what the better half of them did is asked of others"
    terms = f"stopping: the first {first} good runs go free and support {_percent(supported(rate, first))} of good runs"
    short = f"; the stated {_percent(rate)} needs {needed(rate)}" if needed(rate) > first else ""
    return f"{terms} stopped by error{short}{audits}"


def account_words(account: StoppingAccount) -> str:
    """The account in a line."""
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
            f"{account.stopped} of {account.missed} runs that missed the target were stopped, "
            f"with {account.used:.0%} of the node-hours"
        )
    if account.false_rate is not None:
        low, high = account.false_rate
        parts.append(
            f"{account.erred} of {account.audited} audits reached the target, for {account.audit_hours:.2g} node-hours "
            f"more: {_percent(low)} to {_percent(high)} of good runs are condemned"
        )
    return "; ".join(parts)


def _support_words(account: StoppingAccount) -> str:
    if account.published and account.kept is not None:
        return f"published runs support {_percent(account.kept)} of good runs stopped by error"
    rest = account.good - account.references
    others = f" ({rest} more good runs were let through by the rule and support nothing)" if rest > 0 else ""
    count = f"so far {account.references} finished references{others}"
    if account.kept is None:
        return f"{count}; runs are compared from {account.wanted} on"
    more = f"; {_percent(account.stated)} from {account.full} on" if account.kept > account.stated else ""
    return f"{count} support {_percent(account.kept)}{more}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
