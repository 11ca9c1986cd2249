"""What a machine that changes does to the recommendation: ``python -m benchmarks.pace [--sweeps 30]``.

Simulated sweeps of 20 random trials over a learning rate, with the luck of seeds, on machines that drift, alternate, or
have slow nodes. Prints the regret of what is recommended by the clock and at the reference pace, and how many trials
were taken for slowed by mistake.
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
[objective]
target = 1.0
[search]
sampler = "random"
[budget]
trials = 20
"""

TRIALS, SEED_SD, PACE_SD = 20, 0.045, 0.01

Machine = tuple[Callable[[int], float], int]
"""How many times slower it is for a trial by its number, and how many nodes take turns."""

MACHINES: dict[str, Machine] = {
    "quiet": (lambda _: 1.0, 1),
    "1.2 times slower from trial 7 on": (lambda n: 1.2 if n > 6 else 1.0, 1),
    "twice as slow from trial 7 on": (lambda n: 2.0 if n > 6 else 1.0, 1),
    "8 times slower from trial 7 on": (lambda n: 8.0 if n > 6 else 1.0, 1),
    "alternating, twice as slow": (lambda n: 1.0 + n % 2, 1),
    "one node of four a fifth slower": (lambda n: 1.2 if n % 4 == 3 else 1.0, 4),
    "one node of two 2.5 times slower": (lambda n: 2.5 if n % 2 else 1.0, 2),
}


def true_seconds(rate: float) -> float:
    """Of a usual run at the reference pace."""
    return 60.0 * (1 + 0.3 * math.log10(rate / 1e-3) ** 2)


def simulated(machine: Machine, rng: np.random.Generator) -> StudyRecords:
    """A sweep by the clock."""
    slower, nodes = machine
    trials, attempts, evals = {}, {}, {}
    for n in range(TRIALS):
        rate = float(10 ** rng.uniform(-4, -2))
        samples = 10 * true_seconds(rate) * math.exp(rng.normal(0, SEED_SD))
        seconds = samples / 10 * slower(n) * math.exp(rng.normal(0, PACE_SD))
        trials[n] = Trial(
            number=n, seed=n, tuned={"LR": rate}, parameters={"LR": rate}, seconds=seconds, samples=samples,
            metrics=TrialMetrics(objective=seconds), state=TrialState.FINISHED, verdict=Verdict.REACHED,
            proposed_at=1000.0 * n, finished_at=1000.0 * n + 999,
        )  # fmt: skip
        node = (f"n{n % nodes}",)
        attempts[n, 0] = Attempt(trial=n, number=0, job_name=f"p{n}", folder="", nodes=node, started_at=1000.0 * n)
        evals[n, 0] = tuple(Eval(samples * k / 10, 2 - 0.1 * k, seconds * k / 10) for k in range(1, 11))
    return StudyRecords(
        name="pace", digest="d", study_toml=STUDY, began_at=0.0, trials=trials, attempts=attempts, evals=evals
    )


def at_pace(study: Study, sweep: StudyRecords) -> StudyRecords:
    """The sweep as its driver writes it."""
    return replace(sweep, trials={**sweep.trials, **{t.number: t for t in at_reference_pace(study, sweep)}})


def regret(study: Study, sweep: StudyRecords) -> float:
    """By how much what is recommended is truly slower than the best there is; NaN where nothing is."""
    config = recommend(study, sweep)
    return math.nan if config is None else true_seconds(float(config.trial.tuned["LR"])) / true_seconds(1e-3) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=30)
    sweeps = parser.parse_args().sweeps
    study = parse_study(STUDY, Path("pace.toml"))
    print(f"{date.today()}, {platform.machine()}, {sweeps} sweeps of {TRIALS} trials a row; regret, 95% interval")
    print(f"{'machine':<36}{'by the clock':>16}{'at one pace':>16}{'wrongly slow':>14}{'missed':>8}")
    for name, machine in MACHINES.items():
        rows: list[tuple[float, float]] = []
        wrong = missed = 0
        for seed in range(sweeps):
            clock = simulated(machine, np.random.default_rng(seed))
            paced = at_pace(study, clock)
            slow = {n for n, t in paced.trials.items() if t.metrics.slower is not None}
            true = {n for n in clock.trials if machine[0](n) > 1}
            wrong, missed = wrong + len(slow - true), missed + len(true - slow)
            rows.append((regret(study, clock), regret(study, paced)))
        cells = [f"{100 * m:.2f} +- {100 * h:.2f}%" for m, h in map(_mean, zip(*rows, strict=True))]
        print(f"{name:<36}{cells[0]:>16}{cells[1]:>16}{wrong:>14}{missed:>8}", flush=True)


def _mean(values: tuple[float, ...]) -> tuple[float, float]:
    known = np.array([v for v in values if math.isfinite(v)])
    return float(known.mean()), float(1.96 * known.std() / math.sqrt(len(known)))


if __name__ == "__main__":
    main()
