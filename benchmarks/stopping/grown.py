"""Good runs stopped as a study grows by what the rule itself let through.

Each study has a few references that nothing could have stopped, and goes on with good runs of the same shape, judged
one after another: what is stopped is no reference, what is let through is one for those after it. Printed beside the
rate that the free ones support: what is stopped with the free ones alone, as the rule does it (the others only widen
the band), and where all count as free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.stopping.shapes import SHAPES, TARGET, shape_table
from benchmarks.stopping.tables import seen
from lora_tune.curves.conformal import compare, supported
from lora_tune.curves.overlay import ComparedRun

STUDIES, GROWTH, RATE = 12, 5, 0.1
FREE = (4, 8)
References = Callable[[Sequence[ComparedRun], Sequence[ComparedRun]], Sequence[ComparedRun]]
"""Of the free runs and those that were let through: whom a run is compared with."""

WAYS: dict[str, References] = {
    "free alone": lambda free, _: free,
    "as shipped": lambda free, through: [*free, *(replace(run, free=False) for run in through)],
    "all as free": lambda free, through: [*free, *through],
}


def main() -> None:
    """Print the shares with 90% intervals over studies."""
    print(
        f"\n{STUDIES} studies of each of {len(SHAPES)} shapes, grown {GROWTH}fold; good runs stopped, stated {RATE:.0%}"
    )
    print(f"| free references | supported | {' | '.join(WAYS)} |\n|---|---|{'---|' * len(WAYS)}")
    for count in FREE:
        cells = []
        for references in WAYS.values():
            shares = [_stopped(name, seed, count, references) for name in SHAPES for seed in range(STUDIES)]
            cells.append(f"{np.mean(shares):.1%} ± {1.645 * np.std(shares) / len(shares) ** 0.5:.1%}")
        print(f"| {count} | {supported(RATE, count):.1%} | {' | '.join(cells)} |", flush=True)


def _stopped(name: str, seed: int, count: int, references: References) -> float:
    """The share of the good runs after the free ones that is stopped in one study."""
    good = shape_table(name, seed=3000 + seed, runs=3 * GROWTH * count).good[: GROWTH * count]
    free, through, stopped = good[:count], list[ComparedRun](), 0
    for run in good[count:]:
        if compare(seen(run, TARGET), references(free, through), target=TARGET, rate=RATE).outside:
            stopped += 1
        else:
            through.append(run)
    return stopped / len(good[count:])
