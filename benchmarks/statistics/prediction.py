"""How often the 90% interval of ``mlperf.predict`` holds a submission's score, from the first of its runs on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.public_runs import PublicRun, by_submission, load
from lora_tune.mlperf.benchmark import read_benchmark
from lora_tune.mlperf.score import predict, score

KNOWN = (1, 3, 5)
REPEATS = 5
FEWEST = 8


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
