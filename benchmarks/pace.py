"""Effect of changes in machine speed on the recommendation: ``python -m benchmarks.pace [--sweeps 30]``.

Simulated sweeps of 20 random trials over a learning rate and, in some, a batch size that changes the cost of a sample,
with seed noise. ``MACHINES`` change as ``search/pace.py`` assumes: between trials, by node. ``OTHERS`` do not: within
runs, by day and night, in bursts, with heavy tails; the estimate was not built on them. Prints the regret of the
recommendation by the clock and at the reference pace, how many trials were wrongly judged slowed (within 5% of the
fastest), and how many that took over 1.3 times as long were missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import platform
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from lora_tune.config.study import Study, parse_study
from lora_tune.logs.run import Eval
from lora_tune.search.pace import at_reference_pace
from lora_tune.search.recommendation import recommend
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict

STUDY = """
description = "a learning rate on a machine that changes"
[workload]
kind = "command"
argv = ["true"]
[site]
system = "SIMULATED"
[space]
LR = { type = "float", low = 1e-4, high = 1e-2, log = true }
BATCH = { type = "categorical", choices = [8, 16, 32] }
[objective]
target = 1.0
[search]
sampler = "random"
[budget]
trials = 20
"""

TRIALS, SEED_SD, PACE_SD = 20, 0.045, 0.01

Factor = Callable[[float, int], float]
"""Slowdown of the machine by time in trials (1.5: the middle of the second) and a sweep's seed."""

MACHINES: dict[str, tuple[Factor, int]] = {
    "quiet": (lambda *_: 1.0, 1),
    "1.2 times slower from trial 7 on": (lambda t, _: 1.2 if t >= 7 else 1.0, 1),
    "twice as slow from trial 7 on": (lambda t, _: 2.0 if t >= 7 else 1.0, 1),
    "8 times slower from trial 7 on": (lambda t, _: 8.0 if t >= 7 else 1.0, 1),
    "alternating, twice as slow": (lambda t, _: 1.0 + int(t) % 2, 1),
    "one node of four a fifth slower": (lambda t, _: 1.2 if int(t) % 4 == 3 else 1.0, 4),
    "one node of two 2.5 times slower": (lambda t, _: 2.5 if int(t) % 2 else 1.0, 2),
}
"""Machines as the estimate assumes them, and how many nodes alternate."""

OTHERS: dict[str, tuple[Factor, int]] = {
    "3% slower with every trial": (lambda t, _: 1 + 0.03 * t, 1),
    "day and night, up to 1.4 times": (lambda t, _: 1.2 - 0.2 * math.cos(2 * math.pi * t / 9), 1),
    "twice as slow from the middle of trial 7": (lambda t, _: 2.0 if t >= 7.5 else 1.0, 1),
    "twice as slow for 0.7 of each 1.4 trials": (lambda t, _: 1.0 + int(t / 0.7) % 2, 1),
    "bursts, three times as slow, 15% of the time": (lambda t, seed: 3.0 if _chance(t, seed) < 0.15 else 1.0, 1),
    "the first fifth of each run 15% faster": (lambda t, _: 0.85 if t % 1 < 0.2 else 1.0, 1),
    "a scatter of 3% with three degrees of freedom": (lambda t, seed: math.exp(0.03 * _heavy(t, seed)), 1),
    "four nodes, 0, 5, 10, 40% slower, drifting": (lambda t, _: (1, 1.05, 1.1, 1.4)[int(t) % 4] * (1 + 0.01 * t), 4),
}
"""Other machines, none of which was used to design ``search/pace.py``."""


def _chance(t: float, seed: int) -> float:
    """Uniform random number, a new one for each third of a trial."""
    return float(np.random.default_rng((seed, int(3 * t))).uniform())


def _heavy(t: float, seed: int) -> float:
    return float(np.random.default_rng((seed, int(t), 3)).standard_t(3))


def true_seconds(rate: float, batch: int = 8) -> float:
    """Seconds of a typical run at the reference pace."""
    return 60.0 * (1 + 0.3 * math.log10(rate / 1e-3) ** 2) * _COST[batch]


_COST = {8: 1.0, 16: 1.08, 32: 1.25}
"""Seconds per sample by batch size, relative to those at 8."""


def simulated(factor: Factor, nodes: int, seed: int, *, batches: bool) -> tuple[StudyRecords, list[float]]:
    """A sweep by the clock, and the slowdown of the machine in each of its trials."""
    rng = np.random.default_rng(seed)
    trials, attempts, evals, slower = {}, {}, {}, []
    for n in range(TRIALS):
        rate, batch = float(10 ** rng.uniform(-4, -2)), int(rng.choice(list(_COST))) if batches else 8
        samples = 10 * true_seconds(rate) * math.exp(rng.normal(0, SEED_SD))
        parts = np.array([factor(n + (k + 0.5) / 10, seed) for k in range(10)])
        by_eval = np.cumsum(parts) * samples / 100 * _COST[batch] * math.exp(rng.normal(0, PACE_SD))
        slower.append(float(parts.mean()))
        tuned = {"LR": rate, "BATCH": batch}
        trials[n] = Trial(
            number=n, seed=n, tuned=tuned, parameters=tuned, seconds=float(by_eval[-1]), samples=samples,
            metrics=TrialMetrics(objective=float(by_eval[-1])), state=TrialState.FINISHED, verdict=Verdict.REACHED,
            proposed_at=1000.0 * n, finished_at=1000.0 * n + 999,
        )  # fmt: skip
        node = (f"n{n % nodes}",)
        attempts[n, 0] = Attempt(trial=n, number=0, job_name=f"p{n}", folder="", nodes=node, started_at=1000.0 * n)
        evals[n, 0] = tuple(Eval(samples * k / 10, 2 - 0.1 * k, float(by_eval[k - 1])) for k in range(1, 11))
    return StudyRecords(
        name="pace", digest="d", study_toml=STUDY, began_at=0.0, trials=trials, attempts=attempts, evals=evals
    ), slower


def at_pace(study: Study, sweep: StudyRecords) -> StudyRecords:
    """The sweep as its driver records it."""
    return replace(sweep, trials={**sweep.trials, **{t.number: t for t in at_reference_pace(study, sweep)}})


def regret(study: Study, sweep: StudyRecords) -> float:
    """Relative excess of the recommendation's true time over the best; NaN without a recommendation."""
    config = recommend(study, sweep)
    if config is None:
        return math.nan
    return true_seconds(float(config.trial.tuned["LR"]), int(config.trial.tuned["BATCH"])) / true_seconds(1e-3) - 1


def row(name: str, factor: Factor, nodes: int, *, sweeps: int, batches: bool) -> None:
    """Print the results of one machine."""
    study = parse_study(STUDY, Path("pace.toml"))
    regrets: list[tuple[float, float]] = []
    wrong = missed = 0
    for seed in range(sweeps):
        clock, slower = simulated(factor, nodes, seed, batches=batches)
        paced, least = at_pace(study, clock), min(slower)
        slow = {n for n, t in paced.trials.items() if (t.metrics.slower or 1.0) > 1}
        wrong += sum(slower[n] <= 1.05 * least for n in slow)
        missed += sum(value > 1.3 * least and n not in slow for n, value in enumerate(slower))
        regrets.append((regret(study, clock), regret(study, paced)))
    cells = [f"{100 * m:.2f} +- {100 * h:.2f}%" for m, h in map(_mean, zip(*regrets, strict=True))]
    print(f"{name:<46}{cells[0]:>16}{cells[1]:>16}{wrong:>14}{missed:>8}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=30)
    sweeps = parser.parse_args().sweeps
    print(f"{date.today()}, {platform.machine()}, {sweeps} sweeps of {TRIALS} trials a row; regret, 95% interval")
    for batches in (False, True):
        for title, machines in (("assumed", MACHINES), ("not built on", OTHERS)):
            head = f"{title}, {'three batch sizes' if batches else 'one batch size'}"
            print(f"{head:<46}{'by the clock':>16}{'at one pace':>16}{'wrongly slow':>14}{'missed':>8}")
            for name, (factor, nodes) in machines.items():
                row(name, factor, nodes, sweeps=sweeps, batches=batches)


def _mean(values: tuple[float, ...]) -> tuple[float, float]:
    known = np.array([v for v in values if math.isfinite(v)])
    return float(known.mean()), float(1.96 * known.std() / math.sqrt(len(known)))


if __name__ == "__main__":
    main()
