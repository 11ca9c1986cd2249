"""The open division's chosen eval schedule against the closed division's, on test runs at GBS 8.

Each test submission stands for a study: some of its runs say where to evaluate, the others are then timed under both
schedules, with their own speed, eval seconds and estimated crossing. What a run saw between two evals is not known, so
a run stops at the first eval behind its estimated crossing, under either schedule.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.public_runs import TARGET, by_submission, is_test, load
from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.controller import eval_schedule as open_schedule
from lora_tune.mlperf import convergence
from lora_tune.search.grey_box.objective import closed_schedule
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict

GBS = 8
STUDY = {
    "name": "opened", "division": "open", "workload": {"kind": "mlperf"}, "space": {}, "budget": {"trials": 1},
}  # fmt: skip


def main() -> None:
    study = Study.model_validate(STUDY)
    family, rule = convergence.published(GBS).family, closed_schedule(GBS)
    groups = {n: g for n, g in by_submission(load()).items() if is_test(n) and g[0].gbs == GBS and len(g) >= 8}
    print(f"{len(groups)} test submissions at GBS {GBS}; seconds a run, mean over the runs that chose nothing")
    for known in (4, 6):
        before, after, intervals = [], [], []
        for group in groups.values():
            crossings = [curves.estimate(r.run, TARGET, family=family).samples for r in group]
            timings = [curves.timing(r.run) for r in group]
            values, _ = open_schedule.chosen(
                study, earlier(crossings[:known], timings[:known]), {"GBS": GBS, "MAX_STEPS": group[0].max_steps}
            )
            chosen = rule
            if values:
                every = float(values["VAL_CHECK_INTERVAL"])
                chosen = curves.Schedule((int(values["SKIP_EVALS"]) + 1) * every, every)
                intervals.append(every)
            for crossing, timing in zip(crossings[known:], timings[known:], strict=True):
                if math.isfinite(timing.seconds_per_eval):
                    before.append(seconds(rule, crossing, timing))
                    after.append(seconds(chosen, crossing, timing))
        saved = 1 - np.sum(after) / np.sum(before)
        worse = np.mean(np.array(after) > np.array(before))
        print(
            f"after {known} runs: {np.mean(before):.0f} s -> {np.mean(after):.0f} s, {saved:.1%} less; {worse:.0%} of "
            f"{len(after)} runs longer; a schedule was chosen in {len(intervals)}, "
            f"median interval {np.median(intervals):.0f}"
        )


def earlier(crossings: list[float], timings: list[curves.Timing]) -> StudyRecords:
    """A sweep whose trials are these runs."""
    trials = {
        i: Trial(
            number=i, seed=i, tuned={}, parameters={"GBS": GBS}, state=TrialState.FINISHED, verdict=Verdict.REACHED,
            metrics=TrialMetrics(
                crossing_samples=samples, samples_per_second=t.samples_per_second, seconds_per_eval=t.seconds_per_eval
            ),
        )
        for i, (samples, t) in enumerate(zip(crossings, timings, strict=True))
    }  # fmt: skip
    return StudyRecords(name="opened", digest="", study_toml="", began_at=0.0, trials=trials)


def evals_until(schedule: curves.Schedule, samples: float) -> int:
    """Evals made up to and including the one that can see a crossing at ``samples`` (at least 1)."""
    if not schedule.interval_samples > 0 or not math.isfinite(samples):
        return 1
    return 1 + max(0, math.ceil((samples - schedule.first_samples) / schedule.interval_samples - 1e-9))


def seconds(schedule: curves.Schedule, crossing: float, timing: curves.Timing) -> float:
    """From run_start to the end of the first eval behind the crossing."""
    evals = evals_until(schedule, crossing)
    stop = schedule.first_samples + (evals - 1) * max(0.0, schedule.interval_samples)
    return stop / timing.samples_per_second + evals * timing.seconds_per_eval
