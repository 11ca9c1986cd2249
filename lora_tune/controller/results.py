"""What a finished trial is remembered by: numbers and words by name, read from its log and its attempts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.controller import healing, pruning
from lora_tune.logs.run import RunLog, as_number
from lora_tune.mlperf import convergence
from lora_tune.search.objectives import objective_of, objectives_of
from lora_tune.search.objectives.base import Finished
from lora_tune.store.metrics import RunMetrics, TrialMetrics
from lora_tune.store.records import Attempt, Trial


def measured(study: Study, trial: Trial, attempts: Sequence[Attempt], run: RunLog, now: float) -> TrialMetrics:
    """What a finished trial's log and attempts say of it.

    ``objective`` (see ``lora_tune.search.objectives``) is there only when the target was reached, or where there is
    none.
    Unknown numbers are None, never zero or infinite.
    """
    change = healing.healing_samples(trial, run)
    timing = curves.timing(run, change)
    unlike = change or (math.inf if healing.own_shape(trial, run) else 0.0)
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
    """The shape of public curves, where the study compares with them and the trial's has it."""
    if pruning.envelope(study, trial) is None:
        return None
    return convergence.crossing_family(float(trial.parameters["GBS"]))


def _valued(study: Study, done: Finished) -> TrialMetrics:
    """The metrics of a run that is over, with the value of each of the study's objectives."""
    first, second = (*(_known(o.value(done)) for o in objectives_of(study)), None)[:2]
    return replace(done.metrics, objective=first, second_objective=second)


def _known(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _second_phase(healed: curves.Healed) -> TrialMetrics:
    """What a change of precision did to the trial's pace."""
    return TrialMetrics(
        healing_samples=healed.samples,
        healed_samples_per_second=healed.samples_per_second,
        healed_seconds_per_eval=healed.seconds_per_eval,
        switch_seconds=healed.switch_seconds,
    )


def estimate_words(metrics: TrialMetrics) -> str:
    """What of a trial's time is an estimate, for people; "" for a time that was measured."""
    estimated = metrics.estimated_seconds
    return f"{estimated:.3g} s of it are estimated: its log was not being read then" if estimated else ""


def pause_words(metrics: TrialMetrics) -> str:
    """What was left out of a trial's time, for people; "" where nothing was."""
    paused = metrics.paused_seconds
    return f"its job stood still for {paused:.3g} s beside, which do not count" if paused else ""


def _announced_seed(run: RunLog) -> int | None:
    """The seed that the log states: some launch scripts draw their own, whatever they are given."""
    seed = run.hyperparameters.get("seed")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def several(study: Study, trial: Trial, runs: Sequence[RunLog]) -> tuple[RunMetrics, ...]:
    """What each run of a job that made several has shown, oldest first.

    A run that was cut short says nothing and is left out.
    """
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
    """Seconds and samples at which a run of this configuration is expected to stop.

    The run's own clock, corrected for its luck by the fitted crossing under the run's own eval schedule; references
    of convergence are means of stops, half an eval interval after crossings.
    """
    schedule = curves.Schedule(run.evals[0].samples, run.evals[1].samples - run.evals[0].samples)
    seconds = curves.clock_seconds(crossing, timing, schedule)
    assert seconds is not None, "asked of runs that reached the target"
    return seconds, max(schedule.first_samples, crossing.samples + schedule.interval_samples / 2)


def _mlperf_seconds(study: Study, trial: Trial, run: RunLog, seconds: float, samples: float) -> float | None:
    """``seconds`` after RCP normalisation: a run that converges faster than the reference is scaled back to it.

    None where the study is of no benchmark of MLPerf, or its batch size has no reference.
    """
    batch = trial.parameters.get("GBS")
    benchmark = study.benchmark
    if benchmark is None or not isinstance(batch, int):
        return None
    reference = benchmark.reference(batch)
    if reference is None:
        return None
    # Readers turn epochs into samples by the log's train_samples; bert's epoch_num is samples already.
    epoch = as_number(run.hyperparameters.get("train_samples"))
    in_epochs = benchmark.progress == "epoch_num" and reference.mean < batch and epoch
    return seconds * max(1.0, reference.mean / (samples / epoch if in_epochs and epoch else samples))
