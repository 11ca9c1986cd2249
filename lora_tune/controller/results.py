"""What a finished trial is remembered by: numbers and words by name, read from its log and its attempts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.controller import healing, pruning
from lora_tune.logs.mllog import RunLog
from lora_tune.logs.run import as_number
from lora_tune.mlperf import published_curves
from lora_tune.store.records import Attempt, Trial


def facts(study: Study, trial: Trial, attempts: Sequence[Attempt], run: RunLog, now: float) -> dict[str, Any]:
    """What a finished trial is remembered by, as flat name -> number or words.

    ``objective`` (seconds, or samples/s) is there only when the target was reached or throughput measured.
    Unknown numbers are left out, never zero.
    """
    change = healing.healing_samples(trial, run)
    timing = curves.timing(run, change)
    unlike = change or (math.inf if healing.own_shape(trial, run) else 0.0)
    family = None
    if not unlike and pruning.envelope(study, trial) is not None:
        family = published_curves.crossing_family(float(trial.parameters["GBS"]))
    crossing = curves.estimate(run, study.target, family=family, healing=unlike)
    stop = None if study.maximise else run.reached(study.target)
    speed: float | None = timing.samples_per_second
    if study.maximise:
        speed = curves.measured_throughput(run) or curves.fastest_pace(run, 0.0)
    numbers: dict[str, float | None] = {
        "samples_per_second": speed,
        "seconds_per_eval": timing.seconds_per_eval,
        "crossing_samples": crossing.samples,
        "crossing_low": crossing.low,
        "crossing_high": crossing.high,
        "eval_samples": curves.samples_between_evals(run),
        "pace_spread": curves.pace_spread(run),
        "init_seconds": run.init_seconds,
        "packed_seconds": run.packed_seconds,
        "evals": float(len(run.evals)),
        "last_loss": run.evals[-1].loss if run.evals else None,
        "last_samples": run.evals[-1].samples if run.evals else None,
        "node_hours": sum(a.node_hours(now) for a in attempts),
    }
    if stop is not None:
        numbers |= {"stop_samples": stop.samples, "stop_seconds": stop.seconds}
        seconds, samples = stop.seconds, stop.samples
        if study.objective.estimator == "curve" and len(run.evals) > 1 and not crossing.by_stop:
            seconds, samples = _by_curve(crossing, timing, run)
        numbers["mlperf_score"] = _mlperf_seconds(study, trial, run, seconds, samples)
        wanted = numbers["mlperf_score"] if study.objective.score == "mlperf_score" else None
        numbers["objective"] = seconds if wanted is None else wanted
    elif study.maximise:
        numbers["objective"] = speed
    found: dict[str, float | str] = {k: v for k, v in numbers.items() if v is not None and math.isfinite(v)}
    if timing.healed is not None and math.isfinite(change):
        found |= _second_phase(timing.healed)
    if run.evals:
        found["crossing_method"] = crossing.method
    if (seed := _announced_seed(run)) not in (None, trial.seed):
        found["seed"] = seed
    return found


def _second_phase(healed: curves.Healed) -> dict[str, float]:
    """What a change of precision did to the trial's pace."""
    return {
        "healing_samples": healed.samples,
        "healed_samples_per_second": healed.samples_per_second,
        "healed_seconds_per_eval": healed.seconds_per_eval,
        "switch_seconds": healed.switch_seconds,
    }


def estimate_words(facts: Mapping[str, Any]) -> str:
    """What of a trial's time is an estimate, for people; "" for a time that was measured."""
    estimated = facts.get("estimated_seconds", 0.0)
    return f"{estimated:.3g} s of it are estimated, nobody read its log then" if estimated else ""


def _announced_seed(run: RunLog) -> int | None:
    """The seed that the log states: some launch scripts draw their own, whatever they are given."""
    seed = run.hyperparameters.get("seed")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def several(study: Study, trial: Trial, runs: Sequence[RunLog]) -> list[dict[str, Any]]:
    """The facts of each run of a job that made several, oldest first, with its ``seed``, ``seconds`` and ``samples``.

    ``seconds`` and ``samples`` are None for a run that came to its own end without reaching the target. A run that was
    cut short says nothing and is left out.
    """
    found: list[dict[str, Any]] = []
    begun = [run for run in runs if run.run_start_ms is not None]
    for i, run in enumerate(begun):
        stop = run.reached(study.target)
        if stop is None and (run.run_stop_ms is None or not run.evals):
            continue
        known = {k: v for k, v in facts(study, trial, (), run, 0.0).items() if k != "node_hours"}
        ends = {"seconds": stop.seconds if stop else None, "samples": stop.samples if stop else None}
        found.append({**known, **ends, "seed": _announced_seed(run) or trial.seed + i, "position": i})
    return found


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
