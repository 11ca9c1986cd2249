"""The crossing estimate on the public runs of every benchmark but llama2_70b_lora.

``python -m benchmarks.statistics.by_benchmark``: how far the crossings of a submission's runs scatter beside their raw
stops, the mean over the submissions of a benchmark and batch size.
"""

from __future__ import annotations

import gzip
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.public_runs import folder
from lora_tune import curves
from lora_tune.base.errors import InputError
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog
from lora_tune.mlperf.benchmark import LORA, Benchmark, find_benchmark


@dataclass(frozen=True, slots=True)
class PublicRun:
    """One run: its submission, its log, and the loss (or what the share lacks of 1) that ends it."""

    submission: str
    run: RunLog
    target: float


def read(path: Path) -> tuple[Benchmark, int, PublicRun] | None:
    """Benchmark, batch size and run of one log; None where it is of no benchmark or did not reach its target."""
    name = path.parent.name
    try:
        benchmark = find_benchmark(name)
    except InputError:
        return None
    reader = MllogReader()
    rising = benchmark.direction == "maximize"
    if rising:
        reader.read_shortfall(1.0)
    reader.feed(gzip.decompress(path.read_bytes()))
    run = reader.run()
    target = 1.0 - benchmark.target if rising else benchmark.target
    batch = run.hyperparameters.get("global_batch_size")
    if len(benchmark.metrics) > 1 or not isinstance(batch, int) or run.reached(target) is None:
        return None
    return benchmark, batch, PublicRun(str(path.parent), run, target)


def scatter(values: Sequence[float]) -> float:
    """Relative standard deviation."""
    return float(np.std(values, ddof=1) / np.mean(values))


def main() -> None:
    """Print one row a benchmark and batch size."""
    groups: dict[tuple[str, int], list[PublicRun]] = defaultdict(list)
    for path in sorted((folder() / "more_logs").glob("*/*/*/*/result_*.txt.gz")):
        found = read(path) if path.parent.name != LORA else None
        if found is not None:
            groups[found[0].name, found[1]].append(found[2])
    for (name, batch), runs in sorted(groups.items()):
        by_submission: dict[str, list[PublicRun]] = defaultdict(list)
        for run in runs:
            by_submission[run.submission].append(run)
        print(
            f"{name:16} GBS {batch:7}  {len(runs):4} runs of {len(by_submission):2}  {row(by_submission)}", flush=True
        )


def row(groups: dict[str, list[PublicRun]]) -> str:
    """Evals and crossings of one batch size."""
    raw, estimated, evals = [], [], []
    for own in groups.values():
        stops = [hit.samples for r in own if (hit := r.run.reached(r.target)) is not None]
        evals += [len(r.run.evals) for r in own]
        crossings = [curves.estimate(r.run, r.target).samples for r in own]
        if len(stops) >= 5 and all(math.isfinite(c) for c in crossings) and min(np.std(stops), np.std(crossings)) > 0:
            raw.append(scatter(stops))
            estimated.append(scatter(crossings))
    words = f"{np.median(evals):.0f} evals a run"
    if raw:
        words += f"; scatter of stops {100 * np.mean(raw):.1f}%, of crossings {100 * np.mean(estimated):.1f}%"
    return words


if __name__ == "__main__":
    main()
