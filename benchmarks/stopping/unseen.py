"""Curves that the rule was not built on, each run on a grid of evals of its own, asked about after each eval.

u is the share of training; the target is 0.2, as in ``shapes``. Each run draws a pace (log-normal, sd 0.2) and, with
probability 0.4, a fault: too slow, or stuck above the target. Evals lie every 1 to 6% of training, scattered by a third
of that, and one in ten is missing. Every draw has runs of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lora_tune.curves.conformal import supported
from lora_tune.curves.overlay import ComparedRun, course
from lora_tune.curves.stopping import Evidence, verdict
from lora_tune.logs.run import Eval

DRAWS, EACH = 4, 6
REFERENCES, RATE = 20, 0.05
TARGET, LENGTH = 0.2, 10_000.0

Curve = Callable[[np.ndarray, float, float, np.random.Generator], np.ndarray]
"""Losses of one run at shares u, in the order in which they are read, for a pace and a stuck level (0: none)."""


class Run(NamedTuple):
    """A whole run; task: its batch."""

    evals: Sequence[Eval]
    length: float = LENGTH
    task: int = 0


Maker = Callable[[np.random.Generator], Run]


def main() -> None:
    """Print the kinds of curves below."""
    show(CURVES)


def show(kinds: Mapping[str, Maker]) -> None:
    """Print the shares of good runs stopped with 90% intervals over the draws, and the bad ones caught."""
    kept = supported(RATE, REFERENCES)
    print(
        f"\n{REFERENCES} references support {kept:.1%}; {DRAWS} draws of new runs, {EACH} good and {EACH} bad in each"
    )
    print("| curves | good stopped (90%) | bad caught | used |\n|---|---|---|---|")
    shares = []
    for name, make in kinds.items():
        rows = np.array([draw(make, seed) for seed in range(DRAWS)])
        shares.append(rows[:, 0])
        print(f"| {name} | {_interval(rows[:, 0])} | {rows[:, 1].mean():.0%} | {rows[:, 2].mean():.0%} |", flush=True)
    print(f"| all | {_interval(np.concatenate(shares))} | | |")


def _interval(shares: np.ndarray) -> str:
    return f"{shares.mean():.1%} ± {1.645 * shares.std() / math.sqrt(len(shares)):.1%}"


def draw(make: Maker, seed: int) -> tuple[float, float, float]:
    """Good runs stopped, bad ones caught, and the share of their training that these used, in one draw."""
    rng = np.random.default_rng(seed)
    good: list[Run] = []
    bad: list[Run] = []
    while len(good) < REFERENCES + EACH or len(bad) < EACH:
        run = make(rng)
        (good if any(e.loss <= TARGET for e in run.evals) else bad).append(run)
    references = [course(r.evals, length=r.length, task=r.task) for r in good[:REFERENCES]]
    killed = [_stopped(run, references) is not None for run in good[REFERENCES:][:EACH]]
    ends = [(_stopped(run, references), run.length) for run in bad[:EACH]]
    used = [1.0 if end is None else end / length for end, length in ends]
    return float(np.mean(killed)), float(np.mean([end is not None for end, _ in ends])), float(np.mean(used))


def _stopped(run: Run, references: Sequence[ComparedRun]) -> float | None:
    """Samples at which the rule stops a run, asked after each eval; None where it never does."""
    evidence = Evidence(references=references, rate=RATE)
    for i, e in enumerate(run.evals):
        if verdict(run.evals[: i + 1], TARGET, evidence, length=run.length, task=run.task).stop:
            return e.samples
    return None


def on_a_grid(curve: Curve) -> Maker:
    """Runs of a curve on a scattered grid each."""

    def make(rng: np.random.Generator) -> Run:
        step = rng.uniform(0.01, 0.06)
        u = np.arange(step, 1.0, step) + rng.uniform(-step / 3, step / 3, len(np.arange(step, 1.0, step)))
        u = np.sort(u[rng.random(len(u)) > 0.1])
        loss = curve(u, *fate(rng), rng) + rng.normal(0, 0.01, len(u))
        return run_of(u, loss)

    return make


def run_of(u: np.ndarray, loss: np.ndarray, length: float = LENGTH, task: int = 0) -> Run:
    """The run with these losses at shares u."""
    rows = zip(u * length, loss, strict=True)
    return Run([Eval(float(s), float(v), float(s)) for s, v in rows], length, task)


def fate(rng: np.random.Generator) -> tuple[float, float]:
    """Pace and stuck level."""
    pace = float(np.exp(rng.normal(0.1, 0.2)))
    if rng.random() < 0.6:
        return pace, 0.0
    return (pace * rng.uniform(0.1, 0.6), 0.0) if rng.random() < 0.5 else (pace, rng.uniform(0.25, 0.6))


def smooth(u: np.ndarray, pace: float, stuck: float, _: np.random.Generator) -> np.ndarray:
    return np.maximum((1 + 30 * u * pace) ** -0.6, stuck)


def plateau_then_drop(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """A plateau whose end each run draws."""
    end = rng.uniform(0.3, 0.8) / pace
    return np.maximum(0.55 + 0.45 * np.exp(-20 * u) - 0.5 * (u > end), stuck)


def steps_at_random(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """Four falls of a quarter at places of each run's own."""
    places = np.sort(rng.uniform(0, 0.9, 4)) / pace
    return np.maximum(1 - 0.225 * (u[:, None] > places).sum(axis=1), stuck)


def noise_burst(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """A tenth of training with thirty times the noise."""
    begin = rng.uniform(0, 0.9)
    burst = (u > begin) & (u < begin + 0.1)
    return smooth(u, pace, stuck, rng) + np.where(burst, rng.normal(0, 0.3, len(u)), 0)


def noise_by_run(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """Noise whose size differs between runs by a factor of e."""
    return smooth(u, pace, stuck, rng) + rng.normal(0, 0.02 * np.exp(rng.normal(0, 1)), len(u))


def heavy_tails(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    return smooth(u, pace, stuck, rng) + 0.01 * rng.standard_t(1.5, len(u))


def late_rise(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """A second descent after a rise to above the beginning, of each run's own height."""
    height = rng.uniform(0.2, 1.0)
    return np.maximum(smooth(u, pace, 0, rng) + height * np.exp(-(((u * pace - 0.3) / 0.08) ** 2)), stuck)


def restarted(rng: np.random.Generator) -> Run:
    """Runs that go back to a checkpoint once and read some evals again, with other values."""
    evals = on_a_grid(smooth)(rng).evals
    end = int(rng.integers(2, max(3, len(evals))))
    back = max(0, end - int(rng.integers(1, 4)))
    again = [Eval(e.samples, e.loss + float(rng.normal(0, 0.03)), e.seconds) for e in evals[back:end]]
    return Run([*evals[:end], *again, *evals[end:]])


def sparse_and_dense(rng: np.random.Generator) -> Run:
    """Runs that evaluate every 1% of training or every 12%."""
    step = float(rng.choice([0.01, 0.03, 0.12]))
    u = np.arange(step, 1.0, step)
    loss = smooth(u, *fate(rng), rng) + rng.normal(0, 0.02, len(u))
    return run_of(u, loss)


def denser_towards_the_end(rng: np.random.Generator) -> Run:
    """Runs whose evals come ever closer."""
    count = int(rng.integers(15, 50))
    u = np.sort(1 - (1 - np.arange(1, count) / count) ** 2)
    loss = smooth(u, *fate(rng), rng) + rng.normal(0, 0.02, len(u))
    return run_of(u, loss)


CURVES: dict[str, Maker] = {
    "smooth, irregular evals": on_a_grid(smooth),
    "plateau, then a drop": on_a_grid(plateau_then_drop),
    "steps at random places": on_a_grid(steps_at_random),
    "bursts of noise": on_a_grid(noise_burst),
    "noise that differs by run": on_a_grid(noise_by_run),
    "heavy tails": on_a_grid(heavy_tails),
    "a rise before the fall": on_a_grid(late_rise),
    "restarts from a checkpoint": restarted,
    "sparse and dense evals": sparse_and_dense,
    "evals ever closer": denser_towards_the_end,
}
