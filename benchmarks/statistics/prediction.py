"""How often the 90% interval of ``mlperf.predict`` holds a submission's score: from the first of its runs on, and from
the runs of other submitters with its hyperparameters beside the pace of three of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np

from benchmarks.public_runs import PublicRun, by_submission, load
from lora_tune.mlperf import score as scoring
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


SPREADS = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08)
"""Values of ``SUBMITTER_CV`` from which each submitter's is picked, on all others."""
STATED = 0.9

Pairs = dict[tuple[str, str], tuple[bool, float]]
"""(predicted submission, the one whose runs predicted it) -> whether the interval held the score, its width."""


def submitter(name: str) -> str:
    return name.split("/")[1]


def pairs(groups: dict[str, Sequence[PublicRun]], spread: float) -> Pairs:
    """Every submission, predicted from up to ``OTHERS`` of other submitters with its hyperparameters."""
    alike: dict[tuple[int, float, int], list[str]] = defaultdict(list)
    for name, group in groups.items():
        alike[group[0].gbs, group[0].learning_rate, group[0].max_steps].append(name)
    rng, benchmark, found = np.random.default_rng(0), read_benchmark("llama2_70b_lora"), {}
    for name in (n for names in alike.values() if len(names) > 1 for n in names):
        own = groups[name]
        key = own[0].gbs, own[0].learning_rate, own[0].max_steps
        others = [n for n in alike[key] if submitter(n) != submitter(name)]
        truth = score(benchmark, [r.minutes for r in own], [r.stop for r in own], own[0].gbs).minutes
        pace = [own[i] for i in rng.choice(len(own), PACED, replace=False)]
        for other in (others[at] for at in rng.permutation(len(others))[:OTHERS]):
            with patch.object(scoring, "SUBMITTER_CV", spread):
                said = predict(
                    benchmark, [r.minutes for r in pace], [r.stop for r in pace], own[0].gbs,
                    borrowed=[r.stop for r in groups[other]],
                )  # fmt: skip
            found[name, other] = (said.low <= truth <= said.high, (said.high - said.low) / truth)
    return found


def by_target(found: Pairs) -> dict[str, float]:
    """Coverage of each predicted submission, over those that predict it."""
    held: dict[str, list[bool]] = defaultdict(list)
    for (name, _), (inside, _) in found.items():
        held[name].append(inside)
    return {name: float(np.mean(values)) for name, values in held.items()}


def borrowed(groups: dict[str, Sequence[PublicRun]]) -> str:
    """Nested: of each submitter's submissions with the spread that covers ``STATED`` of all other submitters', in whose
    pairs it has no part."""
    tables = {spread: pairs(groups, spread) for spread in SPREADS}
    covered, widths, picked = {}, [], []
    for left in sorted({submitter(name) for name, _ in tables[0.0]}):
        rest = {
            spread: by_target({k: v for k, v in found.items() if left not in map(submitter, k)})
            for spread, found in tables.items()
        }
        fits = [s for s, held in rest.items() if np.mean(list(held.values())) >= STATED]
        picked.append(fits[0] if fits else SPREADS[-1])
        own = {k: v for k, v in tables[picked[-1]].items() if submitter(k[0]) == left}
        covered |= by_target(own)
        widths += [width for _, width in own.values()]
    shares = np.array(list(covered.values()))
    error = shares.std() / np.sqrt(len(shares))
    return (
        f"by another submitter's runs of the same hyperparameters, {len(picked)} submitters left out in turn, the "
        f"spread picked on the others ({min(picked):g} to {max(picked):g}): {len(shares)} submissions, covered "
        f"{shares.mean():.1%} ({shares.mean() - 1.96 * error:.1%} to {shares.mean() + 1.96 * error:.1%}), "
        f"width {np.median(widths):.2%}"
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
