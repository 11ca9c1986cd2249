"""Good runs stopped where each draw simulates runs of its own: a table's few hundred, drawn again, are one sample.

And the promise without chance: of n + 1 good runs, each beside the n others, at most k may be outside, in every draw.
"""

from __future__ import annotations

import numpy as np

from benchmarks.stopping.shapes import SHAPES, TARGET, shape_table
from benchmarks.stopping.tables import seen
from lora_tune.curves.conformal import allowed, compare, supported

DRAWS, EACH = 60, 10
CASES = ((20, 0.1), (50, 0.01), (50, 0.1))
"""References and stated rate."""
BESIDE, SETS = 50, 5


def main() -> None:
    """Print the shares with 90% intervals over the draws."""
    print(f"\n{DRAWS} draws of new runs, {EACH} judged in each")
    for name in SHAPES:
        cells = []
        for count, rate in CASES:
            shares = [share for seed in range(DRAWS) if (share := _stopped(name, count, rate, seed)) is not None]
            half = 1.645 * np.std(shares) / len(shares) ** 0.5
            cells.append(f"{count}, {supported(rate, count):.1%}: {np.mean(shares):.1%} +/- {half:.1%}")
        print(f"{name:16} {'; '.join(cells)}", flush=True)
    print(f"\nOf {BESIDE + 1} good runs of one table, each beside the others, the most outside in {SETS} sets:")
    for name in SHAPES:
        most = max(_outside(name, seed) for seed in range(SETS))
        print(f"{name:16} {most}, allowed {allowed(CASES[1][1], BESIDE)}", flush=True)


def _stopped(name: str, count: int, rate: float, seed: int) -> float | None:
    """The share of good runs that is stopped; None where too few are good."""
    good = shape_table(name, seed=1000 + seed, runs=2 * (count + EACH)).good
    if len(good) < count + EACH:
        return None
    judged = (compare(seen(c, TARGET), good[:count], target=TARGET, rate=rate) for c in good[count : count + EACH])
    return float(np.mean([found.outside for found in judged]))


def _outside(name: str, seed: int) -> int:
    """How many of ``BESIDE + 1`` good runs are outside beside the others."""
    runs = shape_table(name, seed=2000 + seed, runs=4 * BESIDE).good[: BESIDE + 1]
    rate = CASES[1][1]
    beside = ((run, [other for other in runs if other is not run]) for run in runs)
    return sum(compare(seen(run, TARGET), others, target=TARGET, rate=rate).outside for run, others in beside)
