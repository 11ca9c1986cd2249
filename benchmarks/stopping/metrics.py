"""Metrics and ways of logging that the rule was not built on, by count of references and stated rate.

Steps, few examples, subsets by turns, restarts, evals ever sparser or whenever there was time. Every draw has runs of
its own (pace and fault as in ``unseen``). With no references only divergence and arithmetic stop a run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from benchmarks.stopping.unseen import TARGET, Maker, Run, fate, run_of, smooth
from lora_tune.curves.conformal import FEWEST, allowed, supported
from lora_tune.curves.overlay import ComparedRun, course
from lora_tune.curves.stopping import Evidence, verdict

DRAWS, EACH, MOST = 10, 8, 50
BESIDE, SETS = 20, 4
CASES = ((0, 0.1), (3, 0.1), (8, 0.1), (20, 0.05), (20, 0.1), (50, 0.01), (50, 0.05), (50, 0.1))
"""References and stated rate; other rates support the same."""


def main() -> None:
    """Print good runs stopped with 90% intervals over the draws, and bad ones caught."""
    heads = [f"{n}: {supported(rate, n):.1%}" if n else "0" for n, rate in CASES]
    print(f"\n{DRAWS} draws, {EACH} good and {EACH} bad runs in each; good stopped, bad caught; references: supported")
    print(f"| metric | {' | '.join(heads)} |\n|---|{'---|' * len(CASES)}")
    totals = []
    for name, make in METRICS.items():
        rows = np.array([_draw(make, seed) for seed in range(DRAWS)])
        totals.append(rows)
        print(f"| {name} | {' | '.join(_cell(rows[:, i]) for i in range(len(CASES)))} |", flush=True)
    together = np.concatenate(totals)
    print(f"| all | {' | '.join(_cell(together[:, i]) for i in range(len(CASES)))} |")
    print(
        f"\nOf {BESIDE + 1} good runs, each beside the others, the most outside in {SETS} sets, at a stated 5% and 10%:"
    )
    for name, make in METRICS.items():
        most = (max(outside(make, seed, rate) for seed in range(SETS)) for rate in (0.05, 0.1))
        print(f"{name}: {', '.join(map(str, most))}", flush=True)
    print(f"allowed: {allowed(0.05, BESIDE)}, {allowed(0.1, BESIDE)}")


def _cell(rows: np.ndarray) -> str:
    half = 1.645 * rows[:, 0].std() / math.sqrt(len(rows))
    return f"{rows[:, 0].mean():.1%} ± {half:.1%}, {rows[:, 1].mean():.0%}"


def _draw(make: Maker, seed: int) -> list[tuple[float, float]]:
    """By case: the share of good runs stopped and of bad ones caught."""
    rng = np.random.default_rng(5000 + seed)
    good: list[Run] = []
    bad: list[Run] = []
    while len(good) < MOST + EACH or len(bad) < EACH:
        run = make(rng)
        (good if _good(run) else bad).append(run)
    references = [course(r.evals, length=_known(r.length)) for r in good[:MOST]]
    return [
        (_share(good[MOST:][:EACH], references[:count], rate), _share(bad[:EACH], references[:count], rate))
        for count, rate in CASES
    ]


def outside(make: Maker, seed: int, rate: float, beside: int = BESIDE) -> int:
    """How many of ``beside + 1`` good runs the others stop: what the promise rests on, and no luck of a draw."""
    rng = np.random.default_rng(9000 + seed)
    runs = list(itertools.islice((r for r in iter(lambda: make(rng), None) if _good(r)), beside + 1))
    known = [course(r.evals, length=_known(r.length)) for r in runs]
    others = (Evidence(references=known[:i] + known[i + 1 :], rate=rate, fewest=FEWEST) for i in range(len(runs)))
    return sum(map(_stopped, runs, others))


def _good(run: Run) -> bool:
    return any(e.loss <= TARGET for e in run.evals)


def _share(runs: Sequence[Run], references: Sequence[ComparedRun], rate: float) -> float:
    """The share of the runs that is stopped."""
    return float(np.mean([_stopped(run, Evidence(references=references, rate=rate, fewest=FEWEST)) for run in runs]))


def _stopped(run: Run, evidence: Evidence) -> bool:
    """Whether the run is stopped, asked about after each eval.

    Where evals lie on one grid a comparison says of a run what it will say later: the last is asked.
    """
    length, steps = _known(run.length), np.diff([e.samples for e in run.evals])
    before = next((i for i, e in enumerate(run.evals) if e.loss <= TARGET), len(run.evals))
    evenly = len(steps) and np.allclose(steps, steps[0])
    first = before if evenly and len(evidence.references) >= FEWEST else 1
    lives = (run.evals[:n] for n in range(max(1, first), before + 1))
    return any(verdict(life, TARGET, evidence, length=length).stop for life in lives)


def _known(length: float) -> float | None:
    return length if math.isfinite(length) else None


def every(step: float) -> np.ndarray:
    """Shares of training at which a run is evaluated."""
    return np.arange(step, 1.0, step)


def tasks_solved(rng: np.random.Generator) -> Run:
    """A policy that solves none to five tasks, each from some time on; nothing in between."""
    pace, stuck = fate(rng)
    solved = np.sort(rng.uniform(0.1, 0.9, 5)) / pace
    if stuck:
        solved[rng.integers(1, 4) :] = 2.0
    return run_of(u := every(0.04), 1 - (u[:, None] > solved).sum(axis=1) / 5)


def succeeded_or_not(rng: np.random.Generator) -> Run:
    """Of ten episodes each succeeds or does not, with a chance that rises from 0 to 1 late and fast."""
    pace, stuck = fate(rng)
    u = every(0.03)
    chance = np.minimum(1 / (1 + np.exp(-25 * (u * pace - 0.6))), 1 - stuck)
    return run_of(u, 1 - rng.binomial(10, chance) / 10)


def fifty_examples(rng: np.random.Generator) -> Run:
    """The accuracy on fifty examples."""
    u = every(0.025)
    return run_of(u, 1 - rng.binomial(50, np.clip(1 - smooth(u, *fate(rng), rng), 0, 1)) / 50)


def by_turns(rng: np.random.Generator) -> Run:
    """Three subsets of unlike difficulty, evaluated by turns; each run begins with any of them."""
    u = every(0.03)
    harder = np.array([0.0, 0.12, 0.3])[(np.arange(len(u)) + rng.integers(3)) % 3]
    return run_of(u, smooth(u, *fate(rng), rng) + harder + rng.normal(0, 0.01, len(u)))


def whenever(rng: np.random.Generator) -> Run:
    """Evals when the machine had time: gaps from a thousandth to a third of training."""
    u = np.cumsum(np.exp(rng.normal(-4, 1.3, 200)))
    return run_of(u := u[u < 1], smooth(u, *fate(rng), rng) + rng.normal(0, 0.01, len(u)))


def ever_sparser(rng: np.random.Generator) -> Run:
    """Each eval after 1.2 to 1.5 times the samples of the one before, by run."""
    u = 0.002 * rng.uniform(1.2, 1.5) ** np.arange(40)
    return run_of(u := np.append(u[u < 0.99], 0.995), smooth(u, *fate(rng), rng) + rng.normal(0, 0.01, len(u)))


def without_length(rng: np.random.Generator) -> Run:
    """The same, and nobody knows how long training is: the samples are compared."""
    run = ever_sparser(rng)
    return Run(run.evals, math.inf)


def ever_longer_cycles(rng: np.random.Generator) -> Run:
    """Cosine with warm restarts, each cycle twice as long; within a cycle the loss falls by up to 0.3."""
    pace, stuck = fate(rng)
    u = every(0.02)
    begin = np.select([u < 1 / 7, u < 3 / 7], [0.0, 1 / 7], 3 / 7)
    cycle = (u - begin) / np.select([u < 1 / 7, u < 3 / 7], [1 / 7, 2 / 7], 4 / 7)
    level = (1 + 30 * u * pace) ** -0.6 + 0.15 * (1 + np.cos(np.pi * cycle)) * (1 + 30 * begin) ** -0.3
    return run_of(u, np.maximum(level, stuck) + rng.normal(0, 0.01, len(u)))


def fast_or_slow(rng: np.random.Generator) -> Run:
    """One good run in eight takes another way: a plateau first, and a fall at its end."""
    pace, stuck = fate(rng)
    u = every(0.03)
    slow = np.maximum(np.where(u < 0.85, 0.6, 0.15), stuck)
    loss = slow if rng.random() < 1 / 8 else smooth(u, pace, stuck, rng)
    return run_of(u, loss + rng.normal(0, 0.01, len(u)))


def correlated_noise(rng: np.random.Generator) -> Run:
    """Noise that wanders: an eval set in the order of training."""
    u = every(0.02)
    wander = np.zeros(len(u))
    for i in range(1, len(u)):
        wander[i] = 0.9 * wander[i - 1] + rng.normal(0, 0.03)
    return run_of(u, smooth(u, *fate(rng), rng) + wander)


METRICS: dict[str, Maker] = {
    "tasks solved of five": tasks_solved,
    "ten episodes": succeeded_or_not,
    "accuracy on 50": fifty_examples,
    "three subsets by turns": by_turns,
    "evals whenever": whenever,
    "evals ever sparser": ever_sparser,
    "ever sparser, no length": without_length,
    "ever longer cycles": ever_longer_cycles,
    "a second way": fast_or_slow,
    "wandering noise": correlated_noise,
}
