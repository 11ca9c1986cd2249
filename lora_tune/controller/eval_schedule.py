"""The eval schedule of a trial in the open division, chosen by the cost of an eval and of detecting a crossing late.

Pure: from the study and its records, when a trial is proposed. The choice is stored in the trial's parameters, so that
an interruption does not change it and the exported config contains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.curves.family import Z90
from lora_tune.mlperf.benchmark import LORA
from lora_tune.mlperf.gate import INTERVAL_NAMES, SKIP_NAMES
from lora_tune.search.grey_box.objective import closed_schedule
from lora_tune.search.objectives import objective_of
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, Value, Verdict

FREE = ("mlperf", "surface")
"""Workload kinds that read VAL_CHECK_INTERVAL and SKIP_EVALS and have no schedule of their own."""

FEWEST = 4
"""Fewest trials that reached the target with the same global batch size to choose a schedule by."""

LATEST = 0.8
"""Share of the trial's training within which the first eval must lie, so that a slow run is detected before its end."""

LAYOUT = ("TP", "PP", "VP", "CP", "EP", "SP", "MBS", "MINIBS")


def chosen(study: Study, sweep: StudyRecords, parameters: Mapping[str, Value]) -> tuple[dict[str, Value], str]:
    """VAL_CHECK_INTERVAL and SKIP_EVALS for a new trial, and why in a sentence; empty and "" if they stay.

    They stay in the closed division, if the study sets or tunes them, and until ``FEWEST`` trials with this global
    batch size have reached the target, whose crossings predict the new trial's.
    """
    batch = parameters.get("GBS")
    if not _free(study) or not isinstance(batch, int):
        return {}, ""
    same = [t for t in sweep.trials.values() if t.verdict is Verdict.REACHED and t.parameters.get("GBS") == batch]
    alike = [(t, samples) for t in same if (samples := t.metrics.crossing_samples or 0.0) > 0]
    if len(alike) < FEWEST:
        return {}, ""
    plan = curves.choose_schedule(
        _expected([samples for _, samples in alike]),
        _timing([trial for trial, _ in alike], parameters),
        step=batch,
        current=closed_schedule(batch),
        whole=True,
    )
    schedule, steps = plan.schedule, parameters.get("MAX_STEPS")
    late = isinstance(steps, int | float) and schedule.first_samples > LATEST * steps * batch
    if late or not plan.saved_seconds > 0:
        return {}, ""
    skipped = round(schedule.first_samples / schedule.interval_samples) - 1
    return {"VAL_CHECK_INTERVAL": int(schedule.interval_samples), "SKIP_EVALS": skipped}, plan.sentence


def _free(study: Study) -> bool:
    """Whether nothing else sets the eval schedule."""
    settings = study.workload.model_extra or {}
    named = {name.upper() for name in study.space} & {*INTERVAL_NAMES, *SKIP_NAMES}
    exported = {"first_eval", "eval_every"} & settings.keys() or settings.get("benchmark", LORA) != LORA
    return (
        study.division == "open"
        and study.workload.kind in FREE
        and objective_of(study).has_target
        and not (named or exported)
    )


def _expected(crossings: Sequence[float]) -> curves.Crossing:
    """The next trial's crossing: log-normal with the mean and spread of earlier ones."""
    logs = [math.log(samples) for samples in crossings]
    middle, width = fmean(logs), Z90 * stdev(logs) * math.sqrt(1 + 1 / len(logs))
    return curves.Crossing(
        samples=math.exp(middle), low=math.exp(middle - width), high=math.exp(middle + width),
        stop_samples=None, stop_seconds=None, censored=False, method="earlier trials",
    )  # fmt: skip


def _timing(alike: Sequence[Trial], parameters: Mapping[str, Value]) -> curves.Timing:
    """Speed and eval seconds of earlier trials with the new one's layout; of all of them if it is new."""
    layout = {name: parameters.get(name) for name in LAYOUT}
    same = [t for t in alike if {name: t.parameters.get(name) for name in LAYOUT} == layout] or alike

    def middle(metric: Callable[[TrialMetrics], float | None]) -> float:
        known = [value for t in same if (value := metric(t.metrics)) is not None]
        return median(known) if known else math.nan

    healed = curves.Healed(
        middle(lambda m: m.healing_samples),
        middle(lambda m: m.healed_samples_per_second),
        middle(lambda m: m.healed_seconds_per_eval),
        middle(lambda m: m.switch_seconds),
    )
    known = math.isfinite(healed.samples_per_second) and math.isfinite(healed.seconds_per_eval)
    speed, per_eval = middle(lambda m: m.samples_per_second), middle(lambda m: m.seconds_per_eval)
    return curves.Timing(speed, per_eval, healed=healed if known else None)
