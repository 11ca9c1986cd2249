"""The stall test on real curves of the tiny study, whose learning rates run from far too low to far too high.

The curves are shipped (``tiny_curves.npz``); to make them again:
``python -m lora_tune.recipes.many_adapters --grid benchmarks/statistics/tiny_grid.json --out benchmarks/statistics/tiny_curves.npz``
"""  # noqa: E501

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lora_tune import curves
from lora_tune.logs.mllog import Eval

CURVES = Path(__file__).parent / "tiny_curves.npz"
TARGET = 1.68
EARLY = 0.6
Run = tuple[float, list[Eval]]


def main() -> None:
    runs = load()
    good = [r for r in runs if reached(r[1])]
    print(f"\nTiny study, target {TARGET}: {len(runs)} whole PEFT curves, {len(good)} reach it. Each is judged")
    print("with the other runs that reached it as references, and with none. Stopped: before 60% of the end.")
    by_rate: dict[float, list[tuple[bool, bool, bool]]] = defaultdict(list)
    for rate, evals in runs:
        references = [e for r, e in good if e is not evals]
        by_rate[rate].append((reached(evals), judged(evals, references), judged(evals, [])))
    print(f"{'LR':>8} {'runs':>5} {'reach it':>8} {'with references':>16} {'without':>8}")
    for rate, rows in sorted(by_rate.items()):
        hits, told, alone = np.array(rows).T
        print(f"{rate:8g} {len(rows):5} {hits.sum():8} {told.sum():16} {alone.sum():8}")
    everything = np.array([row for rows in by_rate.values() for row in rows])
    bad, fine = everything[~everything[:, 0]], everything[everything[:, 0]]
    print(f"never reach it: {len(bad)}, stopped {bad[:, 1].mean():.1%} with references, {bad[:, 2].mean():.1%} without")
    print(f"reach it: {len(fine)}, killed {fine[:, 1].mean():.1%} with references, {fine[:, 2].mean():.1%} without")


def load() -> list[Run]:
    """(learning rate, whole curve) of each trial; a NaN loss with samples is a diverged eval."""
    table = np.load(CURVES)
    rows = zip(table["LR"], table["samples"], table["eval_loss"], strict=True)
    return [
        (float(lr), [Eval(float(s), float(v), float(s)) for s, v in zip(at, loss, strict=True) if s > 0])
        for lr, at, loss in rows
    ]


def reached(evals: Sequence[Eval]) -> bool:
    return any(e.loss <= TARGET for e in evals)


def judged(evals: Sequence[Eval], references: Sequence[Sequence[Eval]]) -> bool:
    """Whether a run is stopped: before the target, or before ``EARLY`` of its end when it never gets there."""
    end = evals[-1].samples
    settings = curves.StallSettings(max_samples=end)
    for i, e in enumerate(evals):
        if e.loss <= TARGET or (not reached(evals) and e.samples >= EARLY * end):
            return False
        if curves.verdict(evals[: i + 1], TARGET, references, settings).stop:
            return True
    return False
