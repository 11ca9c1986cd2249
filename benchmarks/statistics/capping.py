"""Capping in simulated sweeps over public configurations: time saved, and how often the true best was killed.

A sweep tries twelve configurations, one run each, in random order on one node (2.16 samples/s, 37 s an eval: the
best published 8x H100 layout). Nine are test submissions at GBS 8 and give one of their own ten runs; three are
simulated with a learning rate too low or too high. The incumbent is the fastest run so far. The true best is the
submission with the lowest mean time over its ten runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.calibrate_curves import is_good
from benchmarks.public_runs import TARGET, by_submission, is_test, load
from benchmarks.statistics import perturbed
from benchmarks.statistics.crossing import real_noise
from lora_tune import curves
from lora_tune.base.scatter import STOP_SD
from lora_tune.logs.run import Eval
from lora_tune.mlperf import convergence
from lora_tune.search.capping import Incumbent, cap
from lora_tune.search.noise import KNOWN_WIDTH, Noise

NOISE = Noise(STOP_SD, KNOWN_WIDTH)
SWEEPS = 1000
GOOD, BAD = 9, 3
SPEED = curves.Timing(2.16, 37.0)
RISKS = (0.01, 0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Config:
    """name; the runs to draw from, on the common clock; mean seconds (infinite for a simulated bad one)."""

    name: str
    runs: list[list[Eval]]
    mean: float


def main() -> None:
    groups = {s: g for s, g in by_submission(load()).items() if g[0].gbs == 8 and is_good(g)}
    noise = real_noise(convergence.published(8).family, [g for s, g in groups.items() if not is_test(s)])
    good = [_config(s, [_clocked(r.run.evals) for r in g]) for s, g in groups.items() if is_test(s)]
    bad = [
        Config(f"bad {i}", [_clocked(run)], float("inf"))
        for seed, shape in enumerate((perturbed.too_low, perturbed.too_high))
        for i, run in enumerate(perturbed.simulate(shape, noise, 100, seed))
    ]
    print(
        f"{SWEEPS} sweeps of {GOOD} good and {BAD} bad configurations. Killed: the true best's only run was capped; the"
    )
    print("share of all good runs that were capped beside it. Saved: node-hours, against running all to the end.")
    print("stated risk  best killed  good capped  bad capped   saved  of bad runs")
    for risk in RISKS:
        print(_row(risk, good, bad))


def _clocked(evals: Sequence[Eval]) -> list[Eval]:
    """The same evals on the common clock."""
    speed, pause = SPEED.samples_per_second, SPEED.seconds_per_eval
    return [Eval(e.samples, e.loss, e.samples / speed + pause * (i + 1)) for i, e in enumerate(evals)]


def _config(name: str, runs: list[list[Eval]]) -> Config:
    return Config(name, runs, float(np.mean([run[-1].seconds for run in runs])))


def _row(risk: float, good: Sequence[Config], bad: Sequence[Config]) -> str:
    rng = np.random.default_rng(3)
    killed, capped_good, capped_bad = [], [], []
    spent, full, spent_bad, full_bad = 0.0, 0.0, 0.0, 0.0
    for _ in range(SWEEPS):
        chosen = [good[i] for i in rng.choice(len(good), GOOD, replace=False)]
        best = min(chosen, key=lambda c: c.mean)
        sweep = [*chosen, *(bad[i] for i in rng.choice(len(bad), BAD, replace=False))]
        incumbent = Incumbent("the incumbent", (), NOISE)
        for i in rng.permutation(len(sweep)):
            config = sweep[i]
            run = config.runs[rng.integers(len(config.runs))]
            end, capped = _ended(run, incumbent, risk)
            spent, full = spent + end, full + run[-1].seconds
            if np.isfinite(config.mean):
                capped_good.append(capped)
                killed += [capped] if config is best else []
            else:
                capped_bad.append(capped)
                spent_bad, full_bad = spent_bad + end, full_bad + run[-1].seconds
            reached = not capped and run[-1].loss <= TARGET
            if reached and end < min(incumbent.seconds, default=np.inf):
                incumbent = Incumbent("the incumbent", (end,), NOISE)
    return (
        f"{risk:11.0%} {np.mean(killed):12.1%} {np.mean(capped_good):12.1%} {np.mean(capped_bad):11.1%} "
        f"{1 - spent / full:7.1%} {1 - spent_bad / full_bad:12.1%}"
    )


def _ended(run: Sequence[Eval], incumbent: Incumbent, risk: float) -> tuple[float, bool]:
    """Seconds that the run used, and whether it was capped: by the clock at any time, by the forecast at an eval."""
    limit = incumbent.upper_quantile(1 - risk / 2)
    family = convergence.published(8).family
    for i, e in enumerate(run):
        if e.seconds > limit:
            return limit, True
        seen = run[: i + 1]
        if cap(seen, SPEED, incumbent, e.seconds, risk, target=TARGET, family=family, quantum=384).stop:
            return e.seconds, True
    return run[-1].seconds, False
