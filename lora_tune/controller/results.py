"""What a finished trial is remembered by: numbers and words by name, read from its log and its attempts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.controller import pruning
from lora_tune.logs.mllog import RunLog
from lora_tune.store.records import Attempt, Trial


def facts(study: Study, trial: Trial, attempts: Sequence[Attempt], run: RunLog, now: float) -> dict[str, float | str]:
    """What a finished trial is remembered by, as flat name -> number or words.

    ``objective`` (seconds, or samples/s) is there only when the target was reached or throughput measured.
    Unknown numbers are left out, never zero.
    """
    timing = curves.timing(run)
    known = pruning.envelope(study, trial)
    crossing = curves.estimate(run, study.objective.target, family=known.family if known else None)
    stop = None if study.maximise else run.reached(study.objective.target)
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


def several(study: Study, trial: Trial, runs: Sequence[RunLog]) -> list[dict[str, Any]]:
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


def _curve_seconds(crossing: curves.Crossing, timing: curves.Timing, run: RunLog) -> float | None:
    """The predicted time of the fitted crossing under the run's own eval schedule; None when it cannot be told."""
    if len(run.evals) < 2:
        return None
    schedule = curves.Schedule(run.evals[0].samples, run.evals[1].samples - run.evals[0].samples)
    return curves.predicted_seconds(crossing.samples, timing, schedule)


def _mlperf_seconds(study: Study, trial: Trial, seconds: float, samples: float) -> float | None:
    """``seconds`` after RCP normalisation: a run that converges faster than the reference is scaled back to it.

    None where the study is not of llama2_70b_lora, or its batch size has no reference.
    """
    batch = trial.parameters.get("GBS")
    if study.objective.curves != "llama2_70b_lora" or not isinstance(batch, int):
        return None
    from lora_tune import mlperf

    reference = mlperf.reference(batch)
    return None if reference is None else seconds * max(1.0, reference.mean / samples)
