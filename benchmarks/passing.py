"""Calibration of the chance to pass at each eval, on public runs: ``python -m benchmarks.passing``

For every run of a public llama2_70b_lora submission (v4.0 to v5.1) with at least eight runs, the crossings of the other
runs, interpolated between evals, predict where this one crosses. With the usual seed spread this gives the chance to
have passed by each eval (:meth:`lora_tune.search.grey_box.objective.Goal.expected_stop`). Prints chances against the
shares of runs that had passed; the expected stop and the former estimate, half an interval after the crossing, against
the mean stop of the runs; and the difference of the two for a smaller seed spread.
"""

from __future__ import annotations

import datetime
import math
import os
from collections import defaultdict
from statistics import mean

import numpy as np

from benchmarks.public_runs import TARGET, PublicRun, by_submission, load
from lora_tune.curves import Schedule
from lora_tune.search.grey_box.objective import HALF, Goal, closed_schedule

ENOUGH = 8
BINS = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)


def crossing(run: PublicRun, schedule: Schedule) -> float:
    """Samples where the line of the last two evals crosses the target; for one eval, half an interval before it."""
    *_, last = run.run.evals
    before = run.run.evals[-2] if len(run.run.evals) > 1 else None
    if before is None or not before.loss > max(TARGET, last.loss):
        return last.samples - HALF * schedule.interval_samples
    share = (before.loss - TARGET) / (before.loss - last.loss)
    return before.samples + share * (last.samples - before.samples)


def main() -> None:
    from scipy.special import ndtr

    goal = Goal()
    counted: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    former, now, stops, submissions = [], [], [], 0
    for runs in by_submission(load()).values():
        if len(runs) < ENOUGH:
            continue
        submissions += 1
        schedule = closed_schedule(runs[0].gbs)
        crossings = [crossing(run, schedule) for run in runs]
        for at, run in enumerate(runs):
            centre = mean(crossings[:at] + crossings[at + 1 :])
            former.append(max(schedule.first_samples, centre + HALF * schedule.interval_samples) / run.stop)
            now.append(float(goal.expected_stop(np.log(np.array([centre])), schedule)[0]) / run.stop)
            stops.append(run.stop)
            for k in range(12):
                samples = schedule.first_samples + k * schedule.interval_samples
                chance = float(ndtr(math.log(samples / centre) / goal.run_sd))
                counted[int(np.digitize(chance, BINS[1:-1]))].append((chance, run.stop <= samples))
    print(f"{len(stops)} runs of {submissions} submissions, {datetime.date.today()}, {os.cpu_count()} cores")
    for at, rows in sorted(counted.items()):
        chance, passed = mean(c for c, _ in rows), mean(p for _, p in rows)
        ends = f"{BINS[at]:.2f} to {BINS[at + 1]:.2f}"
        print(f"  chance to have passed {ends}: {chance:.3f} said, {passed:.3f} had ({len(rows)})")
    for name, ratios in (("half an interval after the crossing", former), ("the sum over evals", now)):
        error = math.sqrt(mean(math.log(r) ** 2 for r in ratios))
        print(f"  stop by {name}: {100 * (mean(ratios) - 1):+.2f}% on average, {100 * error:.2f}% a run")
    schedule = closed_schedule(8)
    centres = np.linspace(2500, 3500, 401)
    for sd in (goal.run_sd, 0.05, 0.03, 0.015):
        stop = Goal(run_sd=sd).expected_stop(np.log(centres), schedule)
        apart = np.abs(stop / (centres + HALF * schedule.interval_samples) - 1)
        print(f"  seeds scatter by {100 * sd:.1f}% at GBS 8: the two lie {100 * apart.max():.2f}% apart at most")


if __name__ == "__main__":
    main()
