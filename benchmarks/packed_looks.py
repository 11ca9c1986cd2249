"""When a race of leaders in a pack should look: ``python -m benchmarks.packed_looks``.

Simulated: three leaders, noise of 5% between seeds, up to ten seeds of each (``lora_tune.confirm``'s limits, 90%), the
first look after so many runs of each and further ones after so many more. Side by side k runs take k/G times as long as
one, and never less than one: G is what a pack gains. Printed: how often the best was found, runs, rounds, and the
GPU's time in runs of a trial alone, start-ups left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from lora_tune.search.contenders import RunSummary
from lora_tune.search.racing import Decided, RaceSettings, plan

NOISE = 0.05
FIELDS = {
    "2% apart": (0.0, 0.02, 0.02),
    "5% apart": (0.0, 0.05, 0.05),
    "10% apart": (0.0, 0.1, 0.1),
    "equal": (0.0,) * 3,
}
LOOKS = ((3, 1), (3, 3), (5, 5), (10, 10))
"""Runs of each before the first look, and between two."""
GAINS = (12, 3, 1)
"""Of a pack of a 23.5 M base on an H200, of a 1.1 B, and of none."""


def race(offsets: Sequence[float], settings: RaceSettings, rng: np.random.Generator) -> tuple[bool, list[int]]:
    """Whether the first one won, and the runs of each round. offsets: ln of how much slower each truly is."""
    results: dict[str, list[RunSummary]] = {str(i): [] for i in range(len(offsets))}
    rounds: list[int] = []
    while True:
        stands, before = plan(results, settings, together=True), sum(map(len, results.values()))
        for name, wanted in stands.wanted.items():
            while len(results[name]) < wanted:
                seconds = np.exp(7.4 + offsets[int(name)] + rng.normal(0, NOISE))
                results[name].append(RunSummary(float(seconds)))
        new = sum(map(len, results.values())) - before
        if not new:
            return isinstance(stands.verdict, Decided) and stands.verdict.winner == "0", rounds
        rounds.append(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--races", type=int, default=60, help="default %(default)s")
    options = parser.parse_args()
    for field, offsets in FIELDS.items():
        for fewest, batch in LOOKS:
            settings, rng = RaceSettings(fewest=fewest, batch=batch), np.random.default_rng(1)
            ends = [race(offsets, settings, rng) for _ in range(options.races)]
            rounds = [of for _, of in ends]
            costs = [np.mean([sum(max(1.0, runs / gain) for runs in of) for of in rounds]) for gain in GAINS]
            won = np.mean([first for first, _ in ends])
            print(
                f"{field:>9}, first look after {fewest:2} each, then {batch:2}: best found {won:4.0%}, "
                f"{np.mean([sum(of) for of in rounds]):4.1f} runs, {np.mean([len(of) for of in rounds]):4.1f} rounds; "
                + ", ".join(f"G {gain}: {cost:4.1f}" for gain, cost in zip(GAINS, costs, strict=True)),
                flush=True,
            )


if __name__ == "__main__":
    main()
