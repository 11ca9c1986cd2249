"""How often the 90% interval of ``mlperf.predict`` holds a submission's score: from the first of its runs on, and from
the runs of other submitters with its hyperparameters beside the pace of three of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from benchmarks.public_runs import PublicRun, by_submission, is_test, load
from lora_tune.mlperf.benchmark import read_benchmark
from lora_tune.mlperf.score import predict, score

KNOWN = (1, 3, 5)
REPEATS = 5
FEWEST = 8
PACED, OTHERS = 3, 4
"""Runs of its own that state a submission's pace, and other submitters' that predict it, of each submission."""


def main() -> None:
    print(
        f"Submissions with {FEWEST} runs or more; {REPEATS} random choices of the known runs each. 90% interval of the"
    )
    print("score of all the submission's runs, and its width relative to the score.")
    heads = f"{'known runs':>10} {'submissions':>11} {'covered':>8} {'95% interval':>16}"
    print(f"{heads} {'below':>6} {'above':>6} {'width':>6}")
    groups = [g for g in by_submission(load()).values() if len(g) >= FEWEST]
    for known in KNOWN:
        print(row(groups, known))
    print(borrowed({n: g for n, g in by_submission(load()).items() if len(g) >= FEWEST}))


def borrowed(groups: dict[str, Sequence[PublicRun]]) -> str:
    """Submissions of the test half, each left out of what predicts it, with its submitter's others."""
    alike: dict[tuple[int, float, int], list[str]] = defaultdict(list)
    for name, group in groups.items():
        alike[group[0].gbs, group[0].learning_rate, group[0].max_steps].append(name)
    rng, benchmark = np.random.default_rng(0), read_benchmark("llama2_70b_lora")
    held, widths = [], []
    for name in (n for names in alike.values() if len(names) > 1 for n in names if is_test(n)):
        own = groups[name]
        key = own[0].gbs, own[0].learning_rate, own[0].max_steps
        others = [groups[n] for n in alike[key] if n.split("/")[1] != name.split("/")[1]]
        truth = score(benchmark, [r.minutes for r in own], [r.stop for r in own], own[0].gbs).minutes
        pace = [own[i] for i in rng.choice(len(own), PACED, replace=False)]
        inside = []
        for at in rng.permutation(len(others))[:OTHERS]:
            found = predict(
                benchmark, [r.minutes for r in pace], [r.stop for r in pace], own[0].gbs,
                borrowed=[r.stop for r in others[at]],
            )  # fmt: skip
            inside.append(found.low <= truth <= found.high)
            widths.append((found.high - found.low) / truth)
        if inside:
            held.append(np.mean(inside))
    share, error = np.mean(held), np.std(held) / np.sqrt(len(held))
    return (
        f"by another submitter's runs of the same hyperparameters: {len(held)} submissions of the test half, covered "
        f"{share:.1%} ({share - 1.96 * error:.1%} to {share + 1.96 * error:.1%}), width {np.median(widths):.2%}"
    )


def row(groups: Sequence[Sequence[PublicRun]], known: int) -> str:
    """Coverage over submissions, each counted by its mean over the choices."""
    rng = np.random.default_rng(1)
    held, below, above, widths = [], [], [], []
    for group in groups:
        benchmark = read_benchmark("llama2_70b_lora")
        minutes, samples = [r.minutes for r in group], [r.stop for r in group]
        truth = score(benchmark, minutes, samples, group[0].gbs).minutes
        low, high = [], []
        for _ in range(REPEATS):
            chosen = rng.choice(len(group), known, replace=False)
            found = predict(benchmark, [minutes[i] for i in chosen], [samples[i] for i in chosen], group[0].gbs)
            low.append(found.low <= truth)
            high.append(truth <= found.high)
            widths.append((found.high - found.low) / truth)
        held.append(np.mean(np.array(low) & np.array(high)))
        below.append(1 - np.mean(low))
        above.append(1 - np.mean(high))
    share, error = np.mean(held), np.std(held) / np.sqrt(len(held))
    interval = f"{share - 1.96 * error:.1%} to {share + 1.96 * error:.1%}"
    ends = f"{np.mean(below):6.1%} {np.mean(above):6.1%}"
    return f"{known:>10} {len(groups):>11} {share:8.1%} {interval:>16} {ends} {np.median(widths):6.2%}"


if __name__ == "__main__":
    main()
