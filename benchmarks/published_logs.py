"""Write the tables of published results of benchmarks other than LoRA: ``lora_tune/search/data/BENCHMARK.csv``.

``python -m benchmarks.published_logs`` reads the logs of the public MLPerf results (``LORA_TUNE_MLPERF``,
``more_logs``). A benchmark gets a table if there are at least eight submissions, its logs count samples and the newest
two rounds still have it. One row per submission, only figures: hyperparameters as announced in its logs, and mean and
standard deviation of the samples at which its runs stopped. For some submissions not all runs are available.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from benchmarks.public_runs import folder
from benchmarks.statistics.by_benchmark import read
from lora_tune.logs.run import RunLog
from lora_tune.mlperf.benchmark import LORA
from lora_tune.mlperf.rulesets import benchmarks_of, rulesets

OUTPUT = Path(__file__).resolve().parent.parent / "lora_tune" / "search" / "data"
FEWEST = 8
COLUMNS = ("round", "submitter", "system", "GBS", "LR", "WARMUP_STEPS", "mean_samples", "sd_samples", "runs")
LR, WARMUP = "opt_base_learning_rate", "opt_learning_rate_warmup_steps"


@dataclass(frozen=True, slots=True)
class Stop:
    """One run that reached its target: its batch size, its log, and the samples at which it stopped."""

    batch: int
    run: RunLog
    samples: float


def main() -> None:
    """Write a table for each benchmark with enough submissions."""
    wanted = sorted({name for ruleset in rulesets()[-2:] for name in benchmarks_of(ruleset)} - {LORA})
    for name in wanted:
        submissions: dict[tuple[str, str, str], list[Stop]] = defaultdict(list)
        for path in sorted((folder() / "more_logs").glob(f"*/*/*/{name}/result_*.txt.gz")):
            found = read(path)
            if found is not None and found[0].progress == "samples_count":
                hit = found[2].run.reached(found[2].target)
                assert hit is not None, "what did not reach its target is not read"
                submitted = (path.parts[-5], path.parts[-4], path.parts[-3])
                submissions[submitted].append(Stop(found[1], found[2].run, hit.samples))
        rows = [row for who, stops in sorted(submissions.items()) if (row := _row(who, stops))]
        if len(rows) >= FEWEST:
            _write(name, rows)
        elif rows:
            print(f"{name}: {len(rows)} submissions are too few")


def _row(who: tuple[str, str, str], stops: list[Stop]) -> tuple[object, ...] | None:
    """A submission's row; None if its runs differ in their hyperparameters, or do not state them."""
    said = {(stop.batch, stop.run.hyperparameters.get(LR), stop.run.hyperparameters.get(WARMUP)) for stop in stops}
    if len(said) != 1 or None in (values := said.pop()):
        return None
    samples = [stop.samples for stop in stops]
    spread = round(stdev(samples), 1) if len(samples) > 1 else ""
    return (*who, *values, round(mean(samples), 1), spread, len(samples))


def _write(name: str, rows: list[tuple[object, ...]]) -> None:
    path = OUTPUT / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        rounds = sorted({str(row[0]) for row in rows})
        file.write(f"# MLPerf Training {name}, closed division, {' and '.join(rounds)} (MLCommons, Apache-2.0); ")
        file.write("made by python -m benchmarks.published_logs\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    print(f"{name}: {len(rows)} submissions -> {path}")


if __name__ == "__main__":
    main()
