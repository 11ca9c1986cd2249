"""Whether the public runs of a benchmark other than llama2_70b_lora suffice for an envelope and a curve of its own.

``python -m benchmarks.statistics.envelopes [BENCHMARK...]`` (by default those that the newest two rounds have and whose
logs count samples). At each batch size with three or more submissions, each in turn is left out: the others' runs give
the median curve (``curves.learn_family``) and the thresholds of an envelope, at the smallest rate that so many runs
support with 90% confidence; then its own runs are judged eval by eval, and their crossings estimated by that curve.
All of them reached the target: every stop is a false one. A stated 1% needs 230 runs, of whatever spread.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv

from benchmarks.calibrate_curves import CONFIDENCE, FEWEST_SUBMISSIONS, worst_pair
from benchmarks.public_runs import folder
from benchmarks.statistics.by_benchmark import PublicRun, read, scatter
from lora_tune import curves
from lora_tune.curves.forecast import expected_stop
from lora_tune.curves.learn import before_target, learn_family
from lora_tune.curves.points import Points
from lora_tune.curves.stall import Envelope, outside
from lora_tune.curves.timing import Schedule
from lora_tune.mlperf.benchmark import LORA
from lora_tune.mlperf.rulesets import benchmarks_of, rulesets

FEWEST_RUNS = 5
"""Of a submission, for its scatter."""


def supported_rate(runs: int) -> float:
    """The smallest rate of which so many runs, none of them outside, are evidence with 90% confidence."""
    return float(betaincinv(1, runs, CONFIDENCE))


def envelope_of(runs: Sequence[PublicRun]) -> Envelope | None:
    """The envelope that holds all of these runs; None where they share no falling curve."""
    target = runs[0].target
    family = learn_family([r.run for r in runs], target)
    if family is None:
        return None
    widest = max(worst_pair(r.run.evals, target, family) for r in runs)
    return Envelope(family=family, thresholds=((supported_rate(len(runs)), widest),)) if widest > -math.inf else None


def stopped(run: PublicRun, envelope: Envelope) -> bool:
    """Whether the run lies outside at any eval before its target."""
    curve, rate = before_target(run.run.evals, run.target), envelope.thresholds[0][0]
    return any(
        outside(Points(curve.samples[:n], curve.loss[:n]), run.target, envelope, rate).stop
        for n in range(2, len(curve.samples))
    )


def grid(run: PublicRun) -> Schedule:
    """Where the run evaluated."""
    first, second = run.run.evals[:2]
    return Schedule(first.samples, second.samples - first.samples)


def row(submissions: Sequence[Sequence[PublicRun]]) -> str:
    """What becomes of the runs of each submission in turn, judged and estimated by all others of its batch size."""
    counted, wrong, hit, rates = 0, 0, 0, []
    stops, crossings, bias = [], [], []
    for i, own in enumerate(submissions):
        others = [r for j, runs in enumerate(submissions) if j != i for r in runs]
        envelope = envelope_of(others)
        if envelope is None:
            continue
        outside_it = [stopped(run, envelope) for run in own]
        counted, wrong, hit = counted + len(own), wrong + sum(outside_it), hit + any(outside_it)
        rates.append(envelope.thresholds[0][0])
        if len(own) >= FEWEST_RUNS:
            ends = [end.samples for r in own if (end := r.run.reached(r.target)) is not None]
            by_shape = [curves.estimate(r.run, r.target, family=envelope.family).samples for r in own]
            expected = [expected_stop(c, envelope.family, grid(r)) for c, r in zip(by_shape, own, strict=True)]
            bias.append(np.mean(expected) / np.mean(ends) - 1)
            if min(np.std(ends), np.std(by_shape)) > 0:
                stops.append(scatter(ends))
                crossings.append(scatter(by_shape))
    if not counted:
        return "they share no falling curve"
    words = f"support {min(rates):.1%} at best; left out {wrong} of {counted} ({wrong / counted:.1%}) of {hit} stopped"
    if stops:
        words += f"; scatter of stops {np.mean(stops):.1%}, of crossings by the others' shape {np.mean(crossings):.1%}"
        words += f", bias {np.mean(bias):+.1%} ({min(bias):+.1%} to {max(bias):+.1%} in {len(bias)} submissions)"
    return words


def main() -> None:
    """Print one row a benchmark and batch size."""
    newest = {name for ruleset in rulesets()[-2:] for name in benchmarks_of(ruleset)} - {LORA}
    for name in sys.argv[1:] or sorted(newest):
        groups: dict[int, dict[str, list[PublicRun]]] = defaultdict(lambda: defaultdict(list))
        for path in sorted((folder() / "more_logs").glob(f"*/*/*/{name}/result_*.txt.gz")):
            found = read(path)
            if found is not None and found[0].progress == "samples_count":
                groups[found[1]][found[2].submission].append(found[2])
        if not groups:
            print(f"{name:16} no public run that counts samples")
        for batch, submissions in sorted(groups.items()):
            runs = sum(map(len, submissions.values()))
            words = row(list(submissions.values())) if len(submissions) >= FEWEST_SUBMISSIONS else "too few submissions"
            print(f"{name:16} GBS {batch:5}  {runs:3} runs of {len(submissions):2}  {words}", flush=True)


if __name__ == "__main__":
    main()
