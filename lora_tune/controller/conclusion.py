"""The conclusion from an ended job about its trial: pure functions of (study, records, job status, log)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.controller import healing, limits, pruning
from lora_tune.controller.policy import probed
from lora_tune.launchers.base import JobState, JobStatus, launcher_kind
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.run import RunLog, as_number
from lora_tune.mlperf import convergence
from lora_tune.search.objectives import Finished, objective_of, objectives_of
from lora_tune.store.metrics import RunMetrics, TrialMetrics
from lora_tune.store.records import Attempt, StopKind, Trial, Verdict

# Metrics of a finished trial, from its log and its attempts.


def measured(study: Study, trial: Trial, attempts: Sequence[Attempt], run: RunLog, now: float) -> TrialMetrics:
    """The metrics of a finished trial, from its log and its attempts.

    ``objective`` (see ``lora_tune.search.objectives``) is set only if the target was reached, or if there is none.
    Unknown numbers are None, never zero or infinite.
    """
    change = healing.healing_samples(trial, run)
    timing = curves.timing(run, change)
    unlike = change or (math.inf if healing.has_special_curve(trial, run) else 0.0)
    family = None if unlike else _public_family(study, trial)
    crossing = curves.estimate(run, study.target, family=family, healing=unlike)
    objective = objective_of(study)
    stop, aimed = objective.stop(run), objective.has_target
    speed: float | None = timing.samples_per_second
    if not objective.judges_evals:
        speed = curves.measured_throughput(run) or curves.fastest_pace(run, 0.0)
    metrics = TrialMetrics(
        samples_per_second=_known(speed),
        seconds_per_eval=_known(timing.seconds_per_eval),
        eval_samples=_known(curves.samples_between_evals(run)),
        pace_spread=_known(curves.pace_spread(run)),
        init_seconds=_known(run.init_seconds),
        packed_seconds=_known(run.packed_seconds),
        peak_gib=_known(run.peak_gib),
        evals=float(len(run.evals)),
        last_loss=_known(study.shown(run.evals[-1].loss)) if run.evals else None,
        last_samples=_known(run.evals[-1].samples) if run.evals else None,
        node_hours=_known(sum(a.node_hours(now) for a in attempts)),
        seed=seed if (seed := _announced_seed(run)) != trial.seed else None,
    ) | healing.remembered(run.hyperparameters)
    if aimed:
        metrics |= _where_it_crosses(crossing, run)
    if timing.healed is not None and math.isfinite(change):
        metrics |= _second_phase(timing.healed)
    if stop is None:
        return metrics if aimed else _valued(study, Finished(trial=trial, run=run, metrics=metrics))
    seconds, samples = stop.seconds, stop.samples
    if study.objective.estimator == "curve" and len(run.evals) > 1 and not crossing.by_stop:
        seconds, samples = _by_curve(crossing, timing, run)
    score = _mlperf_seconds(study, trial, run, seconds, samples)
    metrics = replace(
        metrics, stop_samples=_known(stop.samples), stop_seconds=_known(stop.seconds), mlperf_score=_known(score)
    )
    return _valued(study, Finished(trial=trial, run=run, metrics=metrics, seconds=seconds))


def _where_it_crosses(crossing: curves.Crossing, run: RunLog) -> TrialMetrics:
    return TrialMetrics(
        crossing_samples=_known(crossing.samples),
        crossing_low=_known(crossing.low),
        crossing_high=_known(crossing.high),
        crossing_method=crossing.method if run.evals else None,
    )


def _public_family(study: Study, trial: Trial) -> curves.Family | None:
    """The shape of public curves, if the study compares with them and it applies to the trial."""
    if pruning.envelope(study, trial) is None:
        return None
    return convergence.crossing_family(float(trial.parameters["GBS"]))


def _valued(study: Study, done: Finished) -> TrialMetrics:
    """The metrics of a finished run, with the value of each of the study's objectives."""
    first, second = (*(_known(o.value(done)) for o in objectives_of(study)), None)[:2]
    return replace(done.metrics, objective=first, second_objective=second)


def _known(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _second_phase(healed: curves.Healed) -> TrialMetrics:
    """The effect of a change of precision on the trial's pace."""
    return TrialMetrics(
        healing_samples=healed.samples,
        healed_samples_per_second=healed.samples_per_second,
        healed_seconds_per_eval=healed.seconds_per_eval,
        switch_seconds=healed.switch_seconds,
    )


def estimate_text(metrics: TrialMetrics) -> str:
    """A message about the estimated part of a trial's time; "" if it was measured."""
    estimated = metrics.estimated_seconds
    return f"{estimated:.3g} s of it are estimated: its log was not being read then" if estimated else ""


def pause_text(metrics: TrialMetrics) -> str:
    """A message about pauses excluded from a trial's time; "" if there were none."""
    paused = metrics.paused_seconds
    return f"its job stood still for {paused:.3g} s beside, which do not count" if paused else ""


def again_text(study: Study, run: RunLog) -> str:
    """That a program started again and did not say so, for people; "" where none did."""
    if not run.again:
        return ""
    lowest = f", the lowest {study.shown(run.lowest_again):.4g}" if math.isfinite(run.lowest_again) else ""
    return (
        f"its log goes back to progress that it had passed: its program may have started again; {run.again} of its "
        f"evals{lowest}, do not count, and times are those since the first start"
    )


def _announced_seed(run: RunLog) -> int | None:
    """The seed in the log, because some launch scripts choose their own."""
    seed = run.hyperparameters.get("seed")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def several(study: Study, trial: Trial, runs: Sequence[RunLog]) -> tuple[RunMetrics, ...]:
    """Metrics of each run in a job of several runs, oldest first; interrupted runs are left out."""
    metrics: list[RunMetrics] = []
    begun = [run for run in runs if run.run_start_ms is not None]
    for i, run in enumerate(begun):
        stop = run.reached(study.target)
        if stop is None and (run.run_stop_ms is None or not run.evals):
            continue
        known = measured(study, trial, (), run, 0.0)
        metrics.append(
            RunMetrics(
                seed=_announced_seed(run) or trial.seed + i,
                position=i,
                seconds=stop.seconds if stop else None,
                samples=stop.samples if stop else None,
                metrics=replace(known, node_hours=None, seed=None),
            )
        )
    return tuple(metrics)


def _by_curve(crossing: curves.Crossing, timing: curves.Timing, run: RunLog) -> tuple[float, float]:
    """(seconds, samples) at which a run of this configuration is expected to stop.

    The run's measured time, corrected for its luck by the fitted crossing under the run's own eval schedule;
    references of convergence are mean stops, half an eval interval after crossings.
    """
    schedule = curves.Schedule(run.evals[0].samples, run.evals[1].samples - run.evals[0].samples)
    seconds = curves.clock_seconds(crossing, timing, schedule)
    assert seconds is not None, "asked of runs that reached the target"
    return seconds, max(schedule.first_samples, crossing.samples + schedule.interval_samples / 2)


def _mlperf_seconds(study: Study, trial: Trial, run: RunLog, seconds: float, samples: float) -> float | None:
    """``seconds`` after RCP normalisation, which scales back a run that converges faster than the reference.

    None if the study has no MLPerf benchmark, or its batch size no reference.
    """
    batch = trial.parameters.get("GBS")
    benchmark = study.benchmark
    if benchmark is None or not isinstance(batch, int):
        return None
    reference = benchmark.reference(batch)
    if reference is None:
        return None
    # Readers convert epochs to samples by the log's train_samples; bert's epoch_num is already in samples.
    epoch = as_number(run.hyperparameters.get("train_samples"))
    in_epochs = benchmark.progress == "epoch_num" and reference.mean < batch and epoch
    return seconds * max(1.0, reference.mean / (samples / epoch if in_epochs and epoch else samples))


RETRIED = (
    "flaky", "infrastructure", "preempted", "host memory", "displaced", "capacity",
    "held", "drained", "clock", "foreign", "unknown",
)  # fmt: skip
"""Failure classes that say nothing about the parameters: a new attempt is made, and the search does not learn of it."""

OF_SETUP = (
    *(kind for kind in RETRIED if kind != "unknown"), "configuration", "unsatisfiable", "unread", "mismatch",
)  # fmt: skip
"""Failure classes that a user can fix without changing the trial, which is then run again."""


UNTRIED = (FailureKind.DISPLACED, FailureKind.CAPACITY)
"""Failure classes of attempts that never got a machine; they do not count."""


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


def conclude(
    study: Study,
    attempts: Sequence[Attempt],
    status: JobStatus,
    run: RunLog,
    diagnosis: Diagnosis,
    *,
    trial: Trial,
    node_at_fault: bool = False,
    far_over_memory: bool = False,
) -> Finish | Retry:
    """The conclusion about a trial whose job has ended, from its log and the driver's own stops.

    far_over_memory: by its layout it needs far more memory than a GPU has. node_at_fault: its failure may be its
    node's, whatever its class (``node_faults.may_be_the_nodes``).

    The log decides, not the exit code: a target in the log is success whatever the code, and a clean exit without
    evals is a failure.
    """
    attempt = attempts[-1]
    if far_over_memory and diagnosis.kind is FailureKind.INFEASIBLE:
        diagnosis = replace(diagnosis, certain=True)
    if trial.probe and probed(run):
        timing = curves.timing(run)
        speed = f"{timing.samples_per_second:.4g} {study.progress_unit}/s, {timing.seconds_per_eval:.3g} s an eval"
        return Finish(Verdict.CENSORED, f"a probe of the layout: {speed}")
    whole = not diagnosis.kind and status.state is JobState.ENDED and not status.exit_code
    if measured := _measured(study, trial, attempt, run, whole=whole):
        stop = objective_of(study).stop(run)
        if stop is not None and not math.isfinite(stop.seconds):  # a full disk, a truncated file
            truncated = "the log shows the target and not when the run began: lines of it are lost"
            return _after_failure(study, attempts, status, Diagnosis(FailureKind.UNKNOWN, truncated), node_at_fault)
        return Finish(Verdict.REACHED, measured)
    if stopped := _stopped(attempt, status, diagnosis):
        return stopped
    if run.evals and diagnosis.kind in _LIMITED and (limit := _time_limit(attempt, status, diagnosis)):
        return Finish(Verdict.CENSORED, f"{limit}; {_last_eval(study, run)}")
    if whole and run.evals:
        return Finish(Verdict.CENSORED, _last_eval(study, run))
    return _after_failure(study, attempts, status, diagnosis, node_at_fault)


def _measured(study: Study, trial: Trial, attempt: Attempt, run: RunLog, *, whole: bool) -> str:
    """A sentence on what the run measured; "" if nothing, or if it was stopped before.

    whole: whether the job ended by itself without a failure.
    """
    objective = objective_of(study)
    ended_by_itself = whole and attempt.stop in (StopKind.NONE, StopKind.REACHED)
    measured = objective.measured(trial, run, ended=ended_by_itself)
    cut_short = not objective.has_target and attempt.stop in (StopKind.PRUNED, StopKind.CAPPED)
    return "" if cut_short else measured


def _stopped(attempt: Attempt, status: JobStatus, diagnosis: Diagnosis) -> Finish | None:
    """The verdict of a trial that the driver or a user stopped; None otherwise."""
    if attempt.stop is StopKind.PRUNED:
        return Finish(Verdict.PRUNED, attempt.stop_sentence)
    if attempt.stop is StopKind.CAPPED:
        return Finish(Verdict.CAPPED, attempt.stop_sentence)
    if attempt.stop is StopKind.USER:
        return Finish(Verdict.CANCELLED, attempt.stop_sentence or "cancelled by the user")
    explained = status.by_cluster or diagnosis.specific or diagnosis.by_scheduler
    if status.state is JobState.CANCELLED and attempt.stop is StopKind.NONE and not explained:
        return Finish(Verdict.CANCELLED, "somebody cancelled its job, outside the sweep (scancel)")
    return None


def of_training(status: JobStatus, run: RunLog) -> JobStatus:
    """The status without the exit code of another job step, if the log states the run's end.

    ``mlperf-sysjson.sh`` fails in many a healthy job, and Slurm reports the worst code of all steps.
    """
    return replace(status, exit_code=0) if status.step_failed and run.run_stop_ms is not None and run.evals else status


PLAUSIBLE_VERDICTS = (Verdict.REACHED, Verdict.CENSORED, Verdict.PRUNED, Verdict.CAPPED)
"""Verdicts that say something about the trial's parameters."""


def refuse(study: Study, attempts: Sequence[Attempt], untrue: Diagnosis) -> Finish | Retry:
    """The conclusion for an impossible result: a new attempt if that may help, else a failure."""
    if untrue.kind not in RETRIED:
        return Finish(Verdict.FAILED, f"{untrue.kind}: {untrue.sentence}")
    if counted_attempts(attempts) >= study.budget.attempts:
        return Finish(Verdict.FAILED, f"{untrue.kind}, {len(attempts)} attempts: {untrue.sentence}")
    return Retry(f"{untrue.kind}: {untrue.sentence}")


def counted_attempts(attempts: Sequence[Attempt]) -> int:
    """The number of attempts that count: those that got a machine, and whose fault has not been fixed since."""
    return sum(attempt.failure not in UNTRIED and attempt.fixed_at is None for attempt in attempts)


_LIMITED = (FailureKind.NONE, FailureKind.CONFIGURATION)
"""Diagnoses of a run ended only by its time limit; any other class was present before."""


def _time_limit(attempt: Attempt, status: JobStatus, diagnosis: Diagnosis) -> str:
    """The time limit that ended the job: the driver's, the job's, or that of a step in it; "" for none."""
    if attempt.stop is StopKind.TIME_LIMIT:
        return attempt.stop_sentence
    if status.state is JobState.TIME_LIMIT:
        return "ran into the job's time limit"
    return "ran into its step's time limit" if "DUE TO TIME LIMIT" in diagnosis.line else ""


def _after_failure(
    study: Study, attempts: Sequence[Attempt], status: JobStatus, diagnosis: Diagnosis, node_at_fault: bool
) -> Finish | Retry:
    attempt = attempts[-1]
    kind = diagnosis.kind or "unknown"
    what = attempt.stop_sentence or diagnosis.sentence or f"job {status.state.value}, exit code {status.exit_code}"
    if kind == "infeasible":
        before = any(a.failure == "infeasible" for a in attempts[:-1])
        last = diagnosis.certain or before or counted_attempts(attempts) >= study.budget.attempts
        if last or launcher_kind(study.site).one_machine:
            return Finish(Verdict.INFEASIBLE, what)
        return Retry(f"{what}; once more on another node, since memory failures can be flaky", status.nodes)
    if kind == "diverged":
        return Finish(Verdict.PRUNED, what)
    spent = kind not in UNTRIED and counted_attempts(attempts) >= study.budget.attempts
    if kind == FailureKind.CAPACITY and (
        waited := limits.without_nodes(study, [*attempts[:-1], replace(attempt, failure=kind)])
    ):
        return Finish(Verdict.FAILED, f"{kind}: {waited}: {what}")
    if kind not in RETRIED:
        elsewhere = node_at_fault and not (diagnosis.certain or spent or _by_limit(attempt, status, diagnosis))
        if elsewhere and not launcher_kind(study.site).one_machine:
            nodes = status.nodes or attempt.nodes
            return Retry(f"{kind}: {what}; once more on another node than {', '.join(nodes)}", nodes)
        return Finish(Verdict.FAILED, f"{kind}: {what}")
    if spent:
        tried = f", {counted_attempts(attempts)} attempts" if counted_attempts(attempts) > 1 else ""
        return Finish(Verdict.FAILED, f"{kind}{tried}: {what}")
    return Retry(f"{kind}: {what}", status.nodes if kind in ("infrastructure", "flaky", "unknown") else ())


def _by_limit(attempt: Attempt, status: JobStatus, diagnosis: Diagnosis) -> bool:
    """Whether a limit of time or of the queue ended it, which another node does not change."""
    return attempt.stop is StopKind.QUEUE or bool(_time_limit(attempt, status, diagnosis))


def _last_eval(study: Study, run: RunLog) -> str:
    target = study.objective.target
    return study.eval_text(run.evals[-1]) + ("" if target is None else f", target {target:g}")


def cause(attempt: Attempt, status: JobStatus, diagnosis: Diagnosis, *, log_cut: bool = False) -> Diagnosis:
    """Why an attempt failed: by its log and the cluster (``diagnosis``), or by the reason for giving it up.

    A job that was given up always shows as cancelled; only a more specific cause in its log overrides that, and other
    findings in the log are added. If the log was cut while the job ran (``log_cut``), its end with the cause is
    missing, so the rest never fails a trial permanently.
    """
    if log_cut and diagnosis.specific and diagnosis.kind in (FailureKind.CONFIGURATION, FailureKind.INFEASIBLE):
        remedy = "its log was cut or replaced while it ran, so the cause is unknown; the trial is run again"
        diagnosis = replace(diagnosis, kind=FailureKind.INFRASTRUCTURE, remedy=remedy, certain=False)
    certain, also = attempt.stop is StopKind.UNREAD, diagnosis.line if diagnosis.specific else diagnosis.also
    final = Diagnosis(FailureKind(attempt.failure), attempt.line, attempt.remedy, certain, also)
    if attempt.stop in (StopKind.QUEUE, StopKind.TIME_LIMIT, StopKind.UNREAD):
        return final
    little = (
        diagnosis.kind in (FailureKind.NONE, FailureKind.UNKNOWN, FailureKind.INFRASTRUCTURE) and not diagnosis.specific
    )
    if attempt.stop is StopKind.SILENT and little and status.state is not JobState.NODE_FAILED:
        return final
    return diagnosis
