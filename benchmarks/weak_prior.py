"""What ``search.full_fine_tuning_lr`` is worth on recorded trainings: ``python -m benchmarks.weak_prior [SEARCHES]``.

SEARCHES sweeps (6) of the grey box on the recorded table of the tiny task are told nothing, a tenth of LoRA's best rate
there, and a third and three times of it: the mean regret of what they would hand over, at most 100% each, after shares
of the node-hours of eight good trials.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from benchmarks.laboratory.arena import play
from benchmarks.laboratory.ours import GreyBox
from benchmarks.laboratory.problems import PROBLEMS
from lora_tune.launchers.simulated.lora_tables import tiny
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.grey_box.weak_priors import LORA_RATE

SCHEDULE = {"MAX_STEPS": 80, "WARMUP_STEPS": 20, "MINIBS": 8}
TRIALS = 8
"""Good trials that a sweep's node-hours pay for."""

LOOKS = (0.25, 0.5, 1.0)


def lora_losses() -> dict[float, float]:
    """Rate -> mean over seeds of lowest eval loss, by the schedule ``SCHEDULE``."""
    fixed = {**SCHEDULE, "TP": 8, "PP": 1, "CP": 1, "MBS": 1, "GBS": SCHEDULE["MINIBS"]}
    rates = tiny.table.axes["LR"]
    return {r: float(np.mean(tiny.curves({**fixed, "LR": r})[1].min(axis=1))) for r in rates}


def regrets(stated: float | None, searches: int) -> np.ndarray:
    """Mean regret of the recommendation after each share of the budget in ``LOOKS``."""

    class Told(GreyBoxSampler):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options, full_fine_tuning_lr=stated)

    found = []
    for seed in range(searches):
        problem = PROBLEMS["lora_tiny"](0)
        budget = TRIALS * problem.best / 3600
        points = play(problem, GreyBox(problem, seed, sampler=Told), slots=1, budget=budget, seed=seed).points
        found.append([
            next((regret for hours, regret in reversed(points) if hours <= share * budget), 1.0) for share in LOOKS
        ])  # fmt: skip
    return np.mean(np.minimum(found, 1.0), axis=0)


def main() -> None:
    """Print a row for each thing that the sweeps are told."""
    searches = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    losses = lora_losses()
    right = min(losses, key=lambda rate: losses[rate]) / LORA_RATE
    told = {"nothing": None, "a tenth of LoRA's best": right, "a third of that": right / 3, "three times": 3 * right}
    for words, stated in told.items():
        after = ", ".join(f"{r:.1%}" for r in regrets(stated, searches))
        print(f"told {words}: regret {after} after {', '.join(f'{s:.0%}' for s in LOOKS)} of the hours", flush=True)


if __name__ == "__main__":
    main()
