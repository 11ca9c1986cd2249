"""Comparing configurations with known true differences: wrong verdicts, right ones, runs used."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lora_tune.search.comparison import ComparisonRules, Decided, RunSummary, plan

FIELDS: dict[str, tuple[float, ...]] = {
    "two equal": (0.0, 0.0),
    "three equal": (0.0, 0.0, 0.0),
    "two equal, one 30% worse": (0.0, 0.0, 0.3),
    "one of two 5% better": (0.0, 0.05),
    "one of two 10% better": (0.0, 0.1),
    "one of three 5% better": (0.0, 0.05, 0.05),
    "one of three 10% better": (0.0, 0.1, 0.1),
}
NOISES = (0.05, 0.1)
CAMPAIGNS = 1000
RULES = ComparisonRules()


def main() -> None:
    print(f"{CAMPAIGNS} fields each, 95% confidence: the best one decided for, another one or a tie decided, runs")
    for noise in NOISES:
        print(f"noise {noise:.0%}, at most {RULES.most} of each")
        for name, offsets in FIELDS.items():
            rng = np.random.default_rng(7)
            ends = [compared(offsets, noise, RULES, rng) for _ in range(CAMPAIGNS)]
            best = 0 if offsets.count(0.0) == 1 else None
            right = np.mean([won is not None and won == best for won, _ in ends])
            wrong = np.mean([won is not None and won != best for won, _ in ends])
            print(f"  {name:26} {right:6.1%} {wrong:6.1%} {np.mean([runs for _, runs in ends]):6.1f}", flush=True)


def compared(
    offsets: Sequence[float], noise: float, rules: ComparisonRules, rng: np.random.Generator
) -> tuple[int | None, int]:
    """(who was decided for or None, runs until then). offsets: how much slower each truly is."""
    results: dict[str, list[RunSummary]] = {str(at): [] for at in range(len(offsets))}
    while (stands := plan(results, rules)).verdict is None:
        for name, wanted in stands.required.items():
            while len(results[name]) < wanted:
                seconds = 1800 * (1 + offsets[int(name)]) * math.exp(rng.normal(0, noise))
                results[name].append(RunSummary(seconds))
    winner = int(stands.verdict.winner) if isinstance(stands.verdict, Decided) else None
    return winner, sum(map(len, results.values()))
