"""Good runs stopped and bad ones caught where each draw simulates runs of its own: a table drawn again is one sample.

And the promise without chance: of n + 1 good runs, each beside the n others, at most k may be outside, in every draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.stopping.shapes import SHAPES, TARGET, shape_table
from benchmarks.stopping.tables import seen
from lora_tune.curves.conformal import allowed, compare, supported
from lora_tune.curves.overlay import ComparedRun

DRAWS, EACH = 40, 10
BESIDE, SETS = 50, 5
CASES = ((3, 0.1), (8, 0.1), (20, 0.05), (20, 0.1), (BESIDE, 0.01), (BESIDE, 0.05), (BESIDE, 0.1))
"""References and stated rate; other rates support the same."""


def main() -> None:
    """Print the shares, those of good runs with 90% intervals over the draws."""
    print(f"\n{DRAWS} draws of new runs, {EACH} good and {EACH} bad judged in each; good stopped, bad caught")
    print(
        f"| shape | {' | '.join(f'{n}: {supported(rate, n):.1%}' for n, rate in CASES)} |\n|---|{'---|' * len(CASES)}"
    )
    for name in SHAPES:
        rows = np.array([_shares(name, seed) for seed in range(DRAWS)])
        print(f"| {name} | {' | '.join(_cell(rows[:, i]) for i in range(len(CASES)))} |", flush=True)
    print(f"\nOf {BESIDE + 1} good runs of one table, each beside the others, the most outside in {SETS} sets:")
    for name in SHAPES:
        most = max(_outside(name, seed) for seed in range(SETS))
        print(f"{name:16} {most}, allowed {allowed(0.01, BESIDE)}", flush=True)


def _cell(rows: np.ndarray) -> str:
    half = 1.645 * rows[:, 0].std() / math.sqrt(len(rows))
    return f"{rows[:, 0].mean():.1%} ± {half:.1%}, {rows[:, 1].mean():.0%}"


def _shares(name: str, seed: int) -> list[tuple[float, float]]:
    """By case: the shares of good and of bad runs that one draw's references stop."""
    table = shape_table(name, seed=1000 + seed, runs=4 * (BESIDE + EACH))
    good, bad = table.good[BESIDE:][:EACH], table.bad[:EACH]
    assert len(good) == len(bad) == EACH, "too few runs of one kind"
    return [
        (_stopped(good, table.good[:count], rate), _stopped(bad, table.good[:count], rate)) for count, rate in CASES
    ]


def _stopped(runs: Sequence[ComparedRun], references: Sequence[ComparedRun], rate: float) -> float:
    judged = (compare(seen(run, TARGET), references, target=TARGET, rate=rate) for run in runs)
    return float(np.mean([found.outside for found in judged]))


def _outside(name: str, seed: int) -> int:
    """How many of ``BESIDE + 1`` good runs are outside beside the others."""
    runs = shape_table(name, seed=2000 + seed, runs=4 * BESIDE).good[: BESIDE + 1]
    beside = ((run, [other for other in runs if other is not run]) for run in runs)
    return sum(compare(seen(run, TARGET), others, target=TARGET, rate=0.01).outside for run, others in beside)
