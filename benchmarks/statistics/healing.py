"""FP4 submissions with a healing phase: estimates beside the raw stop, and how configurations rank by the objective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.calibrate_curves import is_good
from benchmarks.public_runs import TARGET, PublicRun, by_submission, load
from lora_tune import curves
from lora_tune.mlperf.convergence import crossing_family, published

STEPS = 350
"""HEALING_ITER of every public FP4 configuration of v5.1."""


def main() -> None:
    groups = by_submission(load())
    healed = {s: g for s, g in groups.items() if curves.recognised([r.run for r in g])}
    alone = [r.submission in healed for g in groups.values() for r in g if curves.recognised([r.run])]
    runs = sum(map(len, groups.values()))
    print(f"{len(groups)} submissions, {runs} runs. Recognised as changing precision, by curves and pace alone:")
    print(f"{', '.join(healed)}; by one run alone {sum(alone)} runs of these, {len(alone) - sum(alone)} of others.")
    print("\nEstimates of the crossing: variance within the submission over the raw stop's, bias of the expected stop,")
    print("share of runs that count by the clock.")
    print(f"{'submission':34} {'what is known':14} {'runs':>4} {'variance':>9} {'bias':>7} {'clock':>6}")
    for name, group in healed.items():
        for known, change in (("nothing", 0.0), ("healing step", STEPS * group[0].gbs)):
            print(_estimates(name, known, group, change))
    print("\nMean seconds of submissions whose batch size has a fixed shape: objective (nothing declared), clock")
    shaped = [g for s, g in groups.items() if crossing_family(g[0].gbs) and (is_good(g) or s in healed)]
    objective, clock = np.array([_means(g) for g in shaped]).T
    ranks = [np.argsort(np.argsort(values)) for values in (objective, clock)]
    print(f"{len(shaped)} submissions: ratio {np.mean(objective / clock):.4f}, worst {_worst(objective / clock):+.2%};")
    print(f"rank correlation {np.corrcoef(*ranks)[0, 1]:.4f}; FP4: {', '.join(_fp4(g) for g in healed.values())}")


def _estimates(name: str, known: str, group: Sequence[PublicRun], change: float) -> str:
    family = published(group[0].gbs).family
    found = [curves.estimate(r.run, TARGET, family=family, healing=change) for r in group]
    stops = np.array([r.stop for r in group])
    step = group[0].run.evals[1].samples - group[0].run.evals[0].samples
    variance = np.var([f.samples for f in found]) / np.var(stops)
    bias = np.mean([f.samples + step / 2 for f in found]) / stops.mean() - 1
    by_stop = np.mean([f.by_stop for f in found])
    return f"{name.split('/', 1)[1]:34} {known:14} {len(group):>4} {variance:9.2f} {bias:+7.2%} {by_stop:6.0%}"


def objective(run: PublicRun) -> float:
    """Seconds as a study of the public benchmark counts them, nothing declared."""
    evals = run.run.evals
    crossing = curves.estimate(run.run, TARGET, family=crossing_family(run.gbs))
    schedule = curves.Schedule(evals[0].samples, evals[1].samples - evals[0].samples) if len(evals) > 1 else None
    if schedule is None:
        return evals[-1].seconds
    found = curves.clock_seconds(crossing, curves.timing(run.run), schedule)
    assert found is not None, "every published run reached the target"
    return found


def _means(group: Sequence[PublicRun]) -> tuple[float, float]:
    return float(np.mean([objective(r) for r in group])), float(np.mean([r.run.evals[-1].seconds for r in group]))


def _fp4(group: Sequence[PublicRun]) -> str:
    ours, clock = _means(group)
    return f"{ours:.0f} s by {clock:.0f} s"


def _worst(ratios: np.ndarray) -> float:
    return float(ratios[np.argmax(np.abs(ratios - 1))] - 1)


if __name__ == "__main__":
    main()
