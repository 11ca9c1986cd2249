"""Whether a running trial's curve calls for a stop: diverged, stalled, or unable to win. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.controller import healing
from lora_tune.controller.evidence import Applicable, applicable, courses, is_audit, level, max_samples, public_envelope
from lora_tune.controller.policy import Stop
from lora_tune.curves.comparison import IN_A_ROW, compare, compared_run
from lora_tune.curves.stopping import Evidence, for_rising_metric, verdict
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.run import RunLog
from lora_tune.search.capping import Incumbent, cap
from lora_tune.search.noise import clock_noise, seconds_of, settings
from lora_tune.search.objectives import objective_of
from lora_tune.search.pace import MUCH_SLOWER, slowdown, slowdown_on_nodes
from lora_tune.search.recommendation import best_run
from lora_tune.store.records import StopKind, StudyRecords, Trial, Verdict


@dataclass(frozen=True, slots=True)
class Audited:
    """The rule would stop the run, which continues to its end to measure how often the rule errs."""

    sentence: str


def judge_curve(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> Stop | Audited | None:
    """Whether to stop by the eval curve: divergence, comparison with the best runs, or no chance to win.

    An audit trial that the comparison would stop continues to its end.
    """
    if study.pruning.rule == "none" or trial.probe or run.run_stop_ms is not None:
        return None
    objective = objective_of(study)
    if not objective.judges_evals:
        return _too_slow(study, sweep, trial, run)
    lately = run.train[-IN_A_ROW:]
    if len(lately) == IN_A_ROW and not any(math.isfinite(t.loss) for t in lately) and not objective.stop(run):
        last = run.train[-1]
        return Stop(StopKind.PRUNED, f"diverged: train loss is {last.loss} at {study.counted(last.samples)}")
    known = applicable(study, sweep, trial, run)
    judgement = verdict(run.evals, level(study), known.evidence, length=max_samples(trial), task=known.task)
    if study.rising:
        kept = level(study)
        judgement = replace(judgement, sentence=for_rising_metric(judgement.sentence, kept, study.shown(kept)))
    audit = is_audit(study, trial)
    if judgement.stop and not (audit and judgement.reason == "stalled"):
        return Stop(StopKind.PRUNED, judgement.sentence)
    if audit and (judgement.stop or trial.metrics.audited):
        return Audited(judgement.sentence)
    return _capped(study, sweep, trial, run, known)


SLOWER = 1.03
"""A trial is too slow if even this times its pace is below the best: ten times the scatter of speed between runs."""

STAMP_SECONDS = 1.0
"""How late a line's time may be: logs without time stamps are stamped when they are read."""


def _too_slow(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> Stop | None:
    """A stop if the trial's pace cannot become the best throughput on its number of nodes.

    Compared at the reference pace, and only among equal node counts: fewer nodes are slower for another reason, and
    their result is of interest.
    """
    nodes = study.search_space.node_count(trial.parameters)
    rivals = [
        other.objective
        for other in sweep.trials.values()
        if other.verdict is Verdict.REACHED
        and other.metrics.objective is not None
        and study.search_space.node_count(other.parameters) == nodes
    ]
    pace = curves.fastest_pace(run, STAMP_SECONDS)
    if not rivals or pace is None or pace * SLOWER * slowdown(study, sweep, trial, run) >= max(rivals):
        return None
    at, unit = study.counted(run.train[-1].samples), study.progress_unit
    sentence = f"{pace:.4g} {unit}/s at best after {at}; the best on {nodes} nodes is {max(rivals):.4g}"
    return Stop(StopKind.CAPPED, sentence)


def _capped(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog, known: Applicable) -> Stop | None:
    """A stop if the run can no longer beat the best trial, at the study's risk, by the log's own clock.

    If the machine is slower than at the reference pace, the best trial's times are scaled likewise.
    """
    best = best_run(study, sweep)
    comparable = objective_of(study).timed and study.objective.second is None
    if (
        not study.pruning.cap
        or not comparable
        or best is None
        or best.reference_seconds is None
        or run.run_start_ms is None
    ):
        return None
    verdict = cap(
        run.evals,
        curves.timing(run, known.change),
        _incumbent(study, sweep, best, slowdown(study, sweep, trial, run)),
        ((run.last_ms or run.run_start_ms) - run.run_start_ms) / 1000,
        study.pruning.cap_risk,
        target=study.target,
        family=known.family,
        healing=known.change,
    )
    return Stop(StopKind.CAPPED, verdict.sentence.removeprefix("capped: ")) if verdict.stop else None


def by_the_machine(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog, stop: Stop) -> Stop:
    """A stop at a wall-clock limit, attributed to the machine instead of the configuration if the machine was slow.

    A trial without an eval is run again. If it shows no progress at all, the slowdown of its nodes in earlier runs
    counts.
    """
    if stop.kind is not StopKind.TIME_LIMIT:
        return stop
    slower = (slowdown if run.evals or run.train else slowdown_on_nodes)(study, sweep, trial, run)
    if slower < MUCH_SLOWER:
        return stop
    sentence = f"{stop.sentence} on a machine {slower:.1f} times slower than at its reference pace"
    kind = stop.diagnosis.kind if run.evals else FailureKind.INFRASTRUCTURE
    remedy = "look at what else runs there; its limit is budget.trial_minutes"
    return replace(stop, sentence=sentence, diagnosis=Diagnosis(kind, sentence, remedy))


def _incumbent(study: Study, sweep: StudyRecords, best: Trial, slower: float) -> Incumbent:
    """The best trial with all runs of its configuration, on a machine ``slower`` times as slow. With repeats, all runs
    count instead of the luckiest alone."""
    confirmed = best.metrics.confirmed.each if best.metrics.confirmed else ()
    machine = f" on this machine, now {slower:.3g} times slower," if slower >= SLOWER else ""
    seconds = tuple(slower * each for each in confirmed or seconds_of(sweep).get(settings(best), (math.inf,)))
    noise, spread = clock_noise(study, sweep), best.metrics.pace_spread or 0.0
    return Incumbent(f"trial {best.number}{machine}", seconds, noise, spread)


def envelope(study: Study, trial: Trial) -> curves.Envelope | None:
    """The public runs' envelope, if the study compares with it and it applies to the trial."""
    return None if healing.has_special_curve(trial) else public_envelope(study, trial)


def band(study: Study, sweep: StudyRecords, trial: Trial) -> list[tuple[float, float, float]]:
    """(samples, usual loss, loss above which a run like this trial is stopped); empty if undefined."""
    evals = sweep.last_evals(trial.number)
    known = applicable(study, sweep, trial, RunLog(evals=tuple(evals)))
    if known.evidence.published is not None:
        return _published_band(known.evidence, known.evidence.published)
    run = compared_run(evals, length=max_samples(trial), task=known.task)
    evidence = known.evidence
    compared = compare(run, evidence.finished, target=level(study), rate=evidence.rate, count=evidence.count)
    rows = zip(compared.limit.samples, compared.usual, compared.limit.loss, strict=True)
    return [(float(s), float(u), float(x)) for s, u, x in rows if math.isfinite(u) and math.isfinite(x)]


def lone_reason(study: Study, sweep: StudyRecords, trial: Trial) -> str:
    """Why a trial is compared with no other although others are; "" if it is compared."""
    known = applicable(study, sweep, trial, RunLog(evals=tuple(sweep.last_evals(trial.number))))
    finished = courses(study, sweep)
    if known.evidence.published or len(finished) <= known.evidence.count:
        return ""
    if any(r.task == known.task for r in finished):
        return ""
    return f"no like runs: none of {len(finished)} finished ones has its batch size and precision; it is not compared"


def _published_band(evidence: Evidence, published: curves.Envelope) -> list[tuple[float, float, float]]:
    family = published.family
    grid = np.exp(np.linspace(family.log_samples[0], family.log_samples[-1] + BEYOND, 40))
    middle, unit = family.loss_at(grid), np.hypot(family.noise_at(grid), family.spread)
    limit = middle + published.limit(evidence.rate, evidence.shown) * unit
    return [(float(s), float(m), float(x)) for s, m, x in zip(grid, middle, limit, strict=True)]


BEYOND = 0.3
"""How far beyond the public runs' median stop, in ln(samples), their band is drawn."""
