"""What happens to a trial next: pure functions of (study, records, job status, log, now)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_tune import curve
from lora_tune.diagnose import Diagnosis
from lora_tune.launchers.base import JobState, JobStatus
from lora_tune.mllog import Eval, Run
from lora_tune.records import Attempt, StopKind, Sweep, Trial, TrialState, Verdict
from lora_tune.search.capping import Incumbent, cap
from lora_tune.study import Study

GRACE_SECONDS = 30.0
"""How long a job whose log shows the target may take to end by itself."""

RETRIED = ("flaky", "infrastructure", "preempted", "unknown")
"""Classes of failure that say nothing about the parameters: a new attempt, never a word to the search."""

SAME_FAILURES = 3
"""Trials in a row that fail for a reason of configuration before the whole sweep stops."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the job to end."""

    kind: StopKind
    sentence: str


@dataclass(frozen=True, slots=True)
class Kill:
    """The job was asked and did not end: kill it."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The trial is over."""

    verdict: Verdict
    sentence: str


@dataclass(frozen=True, slots=True)
class Retry:
    """A new attempt of the same trial."""

    sentence: str
    exclude_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the driver sees of a live attempt. ``grew_at``: epoch seconds of the log's last growth.

    replicates: runs that the job is to make, one after another. begun: runs that its log shows so far.
    """

    attempt: Attempt
    status: JobStatus
    run: Run
    grew_at: float
    replicates: int = 1
    begun: int = 1


def watch(study: Study, look: Look, now: float) -> Stop | Kill | None:
    """For a job that is queued or running: leave it alone, stop it, or kill it. The eval curve is judged elsewhere."""
    attempt, site = look.attempt, study.site
    if attempt.stop is not StopKind.NONE:
        overdue = attempt.stop_at is not None and now - (attempt.killed_at or attempt.stop_at) > site.kill_seconds
        return Kill() if overdue else None
    if look.status.state is JobState.QUEUED:
        waited = now - (attempt.submitted_at or attempt.intended_at)
        if waited > site.queue_minutes * 60:
            return Stop(StopKind.QUEUE, f"waited {waited / 60:.0f} min in the queue; {look.status.reason}".rstrip("; "))
        return None
    started = attempt.started_at or now
    limit = study.budget.trial_minutes * look.replicates
    if now - started > limit * 60:
        return Stop(StopKind.TIME_LIMIT, f"ran into the limit of {limit:g} min")
    silence = now - max(look.grew_at, started)
    last = look.begun >= look.replicates
    reached = last and not study.maximise and look.run.reached(study.objective.target) is not None
    if reached and silence > GRACE_SECONDS:
        return Stop(StopKind.REACHED, "reached the target and did not end by itself")
    if silence > site.stall_minutes * 60:
        return Stop(StopKind.SILENT, f"its log has been silent for {silence / 60:.0f} min")
    return None


def judge_curve(study: Study, sweep: Sweep, trial: Trial, run: Run) -> Stop | None:
    """Whether the eval curve says to stop: divergence, a stall at the study's false-prune rate, or no chance to win."""
    if study.pruning.rule == "none":
        return None
    if study.maximise:
        return _too_slow(study, sweep, trial, run)
    if run.train and not math.isfinite(run.train[-1].loss) and not run.reached(study.objective.target):
        return Stop(
            StopKind.PRUNED, f"diverged: train loss is {run.train[-1].loss} at {run.train[-1].samples:g} samples"
        )
    settings = curve.StallSettings(
        false_prune_rate=study.pruning.false_prune_rate,
        no_verdict_before=study.pruning.no_verdict_before,
        healing_samples=_product(trial, "HEALING_ITER", "GBS") or 0.0,
        max_samples=max_samples(trial),
        reference=envelope(study, trial),
    )
    verdict = curve.verdict(run.evals, study.objective.target, references(sweep, trial), settings)
    if verdict.stop:
        return Stop(StopKind.PRUNED, verdict.sentence)
    return _capped(study, sweep, trial, run)


SLOWER = 1.03
"""A trial is too slow when even this times its pace is below the best: ten times what speeds differ between runs."""

STAMP_SECONDS = 1.0
"""How late a line's time may be: logs without time stamps are stamped when they are read."""


def _too_slow(study: Study, sweep: Sweep, trial: Trial, run: Run) -> Stop | None:
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
    pace = curve.fastest_pace(run, STAMP_SECONDS)
    if not rivals or pace is None or pace * SLOWER >= max(rivals):
        return None
    at = run.train[-1].samples
    sentence = f"{pace:.4g} samples/s at best after {at:g} samples; the best on {nodes} nodes is {max(rivals):.4g}"
    return Stop(StopKind.CAPPED, sentence)


def _capped(study: Study, sweep: Sweep, trial: Trial, run: Run) -> Stop | None:
    """Whether the run can no longer beat the best trial, at the study's risk, by the log's own clock."""
    best = sweep.best()
    if not study.pruning.cap or best is None or best.seconds is None or run.run_start_ms is None:
        return None
    known = envelope(study, trial)
    verdict = cap(
        run.evals,
        curve.timing(run),
        Incumbent(
            f"trial {best.number}",
            tuple(best.facts.get("confirmed_each") or (best.seconds,)),
            best.facts.get("pace_spread", 0.0),
        ),
        ((run.last_ms or run.run_start_ms) - run.run_start_ms) / 1000,
        study.pruning.cap_risk,
        target=study.objective.target,
        family=known.family if known else None,
    )
    return Stop(StopKind.CAPPED, verdict.sentence.removeprefix("capped: ")) if verdict.stop else None


def envelope(study: Study, trial: Trial) -> curve.Envelope | None:
    """What the public runs say of good curves at the trial's global batch size, where the study compares with them."""
    batch = trial.parameters.get("GBS")
    if study.objective.curves == "own" or not isinstance(batch, int | float):
        return None
    return curve.published(batch)


def max_samples(trial: Trial) -> float | None:
    """Where the trial's training ends anyway, in samples; None when its parameters do not say."""
    return _product(trial, "MAX_STEPS", "GBS")


def _product(trial: Trial, *names: str) -> float | None:
    """The product of numeric parameters; None when one is not there."""
    values = [trial.parameters.get(name) for name in names]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return math.prod(numbers) if len(numbers) == len(names) else None


def references(sweep: Sweep, trial: Trial) -> list[Sequence[Eval]]:
    """The eval curves of trials that reached the target with this trial's global batch size."""
    batch = trial.parameters.get("GBS")
    return [
        sweep.last_evals(other.number)
        for other in sweep.trials.values()
        if other.verdict is Verdict.REACHED and other.parameters.get("GBS") == batch
    ]


def conclude(
    study: Study, attempts: Sequence[Attempt], status: JobStatus, run: Run, diagnosis: Diagnosis
) -> Finish | Retry:
    """For a job that is over: what its log and the driver's own stops make of the trial.

    The log decides, not the exit code: a target in the log is success whatever the code, and a clean exit without
    evals is a failure.
    """
    attempt = attempts[-1]
    target = study.objective.target
    if study.maximise and attempt.stop is not StopKind.CAPPED:
        if _measured_throughput(run):
            return Finish(Verdict.REACHED, f"measured {_measured_throughput(run):.4g} samples/s")
    elif not study.maximise and (stop := run.reached(target)) is not None:
        return Finish(Verdict.REACHED, f"eval loss {stop.loss:.4f} at {stop.samples:g} samples, {stop.seconds:.1f} s")
    if attempt.stop is StopKind.PRUNED:
        return Finish(Verdict.PRUNED, attempt.stop_sentence)
    if attempt.stop is StopKind.CAPPED:
        return Finish(Verdict.CAPPED, attempt.stop_sentence)
    if attempt.stop is StopKind.USER:
        return Finish(Verdict.CANCELLED, "cancelled by the user")
    if attempt.stop is StopKind.TIME_LIMIT and run.evals:
        return Finish(Verdict.CENSORED, f"{attempt.stop_sentence}; {_last_eval(run, target)}")
    if not diagnosis.kind and run.evals and status.state is JobState.ENDED and not status.exit_code:
        return Finish(Verdict.CENSORED, f"ended before the target; {_last_eval(run, target)}")
    return _after_failure(study, attempts, status, diagnosis)


def _after_failure(
    study: Study, attempts: Sequence[Attempt], status: JobStatus, diagnosis: Diagnosis
) -> Finish | Retry:
    attempt = attempts[-1]
    kind = diagnosis.kind or "unknown"
    what = attempt.stop_sentence or diagnosis.line or f"job {status.state.value}, exit code {status.exit_code}"
    if kind == "infeasible":
        before = any(a.failure == "infeasible" for a in attempts[:-1])
        if before or len(attempts) >= study.budget.attempts or study.site.launcher == "local":
            return Finish(Verdict.INFEASIBLE, what)
        return Retry(f"{what}; once more on another node, memory failures can be flaky", status.nodes)
    if kind == "diverged":
        return Finish(Verdict.PRUNED, what)
    if kind not in RETRIED:
        return Finish(Verdict.FAILED, f"{kind}: {what}")
    if len(attempts) >= study.budget.attempts:
        return Finish(Verdict.FAILED, f"{kind}, {len(attempts)} attempts: {what}")
    return Retry(f"{kind}: {what}", status.nodes if kind in ("infrastructure", "flaky") else ())


def _last_eval(run: Run, target: float) -> str:
    last = run.evals[-1]
    return f"eval loss {last.loss:.4f} at {last.samples:g} samples, target {target:g}"


def _measured_throughput(run: Run) -> float | None:
    """Samples/s: what the program says of the whole run, else the median over warm blocks, else what it said last."""
    warm = curve.timing(run).samples_per_second
    stated = run.stated_throughput[-1] if run.stated_throughput else math.nan
    known = (run.overall_throughput or math.nan, warm, stated)
    return next((speed for speed in known if math.isfinite(speed)), None)


def facts(study: Study, trial: Trial, attempts: Sequence[Attempt], run: Run, now: float) -> dict[str, float | str]:
    """What a finished trial is remembered by, as flat name -> number or words.

    ``objective`` (seconds, or samples/s) is there only when the target was reached or throughput measured.
    Unknown numbers are left out, never zero.
    """
    timing = curve.timing(run)
    known = envelope(study, trial)
    crossing = curve.estimate(run, study.objective.target, family=known.family if known else None)
    stop = None if study.maximise else run.reached(study.objective.target)
    speed: float | None = timing.samples_per_second
    if study.maximise:
        speed = _measured_throughput(run) or curve.fastest_pace(run, 0.0)
    numbers: dict[str, float | None] = {
        "samples_per_second": speed,
        "seconds_per_eval": timing.seconds_per_eval,
        "crossing_samples": crossing.samples,
        "crossing_low": crossing.low,
        "crossing_high": crossing.high,
        "eval_samples": curve.samples_between_evals(run),
        "pace_spread": curve.pace_spread(run),
        "init_seconds": run.init_seconds,
        "evals": float(len(run.evals)),
        "last_loss": run.evals[-1].loss if run.evals else None,
        "last_samples": run.evals[-1].samples if run.evals else None,
        "node_hours": sum(a.node_hours(now) for a in attempts),
    }
    if stop is not None:
        numbers |= {"stop_samples": stop.samples, "stop_seconds": stop.seconds}
        by_curve = _curve_seconds(crossing, timing, run) if study.objective.estimator == "curve" else None
        seconds = by_curve if by_curve is not None and math.isfinite(by_curve) else stop.seconds
        samples = stop.samples if by_curve is None else crossing.samples
        numbers["mlperf_score"] = _mlperf_seconds(study, trial, seconds, samples)
        wanted = numbers["mlperf_score"] if study.objective.score == "mlperf_score" else None
        numbers["objective"] = seconds if wanted is None else wanted
    elif study.maximise:
        numbers["objective"] = speed
    found: dict[str, float | str] = {k: v for k, v in numbers.items() if v is not None and math.isfinite(v)}
    if run.evals:
        found["crossing_method"] = crossing.method
    return found


def several(study: Study, trial: Trial, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The facts of each run of a job that made several, oldest first, with its ``seed``, ``seconds`` and ``samples``.

    ``seconds`` and ``samples`` are None for a run that came to its own end without reaching the target. A run that was
    cut short says nothing and is left out.
    """
    found: list[dict[str, Any]] = []
    begun = [run for run in runs if run.run_start_ms is not None]
    for i, run in enumerate(begun):
        stop = run.reached(study.objective.target)
        if stop is None and (run.run_stop_ms is None or not run.evals):
            continue
        known = {k: v for k, v in facts(study, trial, (), run, 0.0).items() if k != "node_hours"}
        ends = {"seconds": stop.seconds if stop else None, "samples": stop.samples if stop else None}
        found.append({**known, **ends, "seed": trial.seed + i, "position": i})
    return found


def _curve_seconds(crossing: curve.Crossing, timing: curve.Timing, run: Run) -> float | None:
    """The predicted time of the fitted crossing under the run's own eval schedule; None when it cannot be told."""
    if len(run.evals) < 2:
        return None
    schedule = curve.Schedule(run.evals[0].samples, run.evals[1].samples - run.evals[0].samples)
    return curve.predicted_seconds(crossing.samples, timing, schedule)


def _mlperf_seconds(study: Study, trial: Trial, seconds: float, samples: float) -> float | None:
    """``seconds`` after RCP normalisation: a run that converges faster than the reference is scaled back to it.

    None where the study is not of llama2_70b_lora, or its batch size has no reference.
    """
    batch = trial.parameters.get("GBS")
    if study.objective.curves != "llama2_70b_lora" or not isinstance(batch, int):
        return None
    from lora_tune import rules

    reference = rules.reference(batch)
    return None if reference is None else seconds * max(1.0, reference.mean / samples)


def may_propose(study: Study, sweep: Sweep, now: float) -> str:
    """ "" when another trial may be proposed, otherwise the reason why not, in words.

    The budget is checked against what was spent and what runs, so it is exceeded by no more than what runs.
    """
    budget = study.budget
    open_trials = sum(t.state is not TrialState.FINISHED for t in sweep.trials.values())
    if budget.trials is not None and len(sweep.trials) >= budget.trials:
        return f"all {budget.trials} trials are proposed"
    if budget.node_hours is not None and sweep.node_hours(now) >= budget.node_hours:
        return f"the budget of {budget.node_hours:g} node-hours is spent"
    if budget.wall_hours is not None and now - sweep.began_at >= budget.wall_hours * 3600:
        return f"the {budget.wall_hours:g} hours of the sweep are over"
    if open_trials >= budget.parallel:
        return f"{open_trials} of {budget.parallel} slots are taken"
    return ""


def not_worth(study: Study, gain: float | None) -> str:
    """Why the next node-hour is not worth its cost, "" when it is or nobody knows.

    gain: share of the score by which it is expected to improve the recommendation (``GreyBoxSampler.expected_gain``).
    """
    least = study.budget.stop_below
    if least is None or gain is None or gain >= least:
        return ""
    return (
        f"the next node-hour is expected to improve the score by {100 * gain:.2g}%, "
        f"less than budget.stop_below = {100 * least:g}%"
    )


def hopeless(sweep: Sweep) -> Trial | None:
    """The newest of several trials in a row that failed alike for a reason of configuration, with none that ran.

    Such a sweep would only burn its budget.
    """
    ended = sorted((t for t in sweep.trials.values() if t.verdict), key=lambda t: t.finished_at or 0.0)
    recent = ended[-SAME_FAILURES:]
    if len(recent) < SAME_FAILURES or any(t.verdict is not Verdict.FAILED for t in ended):
        return None
    return recent[-1]
