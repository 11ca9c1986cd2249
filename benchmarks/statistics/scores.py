"""Olympic mean, RCP factor and score of every row of ``submissions.csv``, from the raw logs."""

from __future__ import annotations

import csv
import gzip
import math
from pathlib import Path

from benchmarks.public_runs import TARGET, by_submission, folder, load
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog
from lora_tune.mlperf.benchmark import LORA, find_benchmark
from lora_tune.mlperf.score import Score, score
from lora_tune.mlperf.submission import passes, read_submission, sentences

Times = tuple[list[float], list[float]]


def main() -> None:
    root = folder()
    rows = list(csv.DictReader((root / "submissions.csv").open()))
    from_logs, twins, official, differing = 0, 0, 0, []
    groups = by_submission(load(root))
    known = {name: ([r.minutes for r in g], [r.stop for r in g]) for name, g in groups.items()}
    for row in rows:
        name = "/".join((row["round"], row["submitter"], row["system"]))
        logs = root / "logs" / name
        if logs.is_dir():
            times = from_folder(logs)
            from_logs += 1
        else:
            times = known.get(name) or twin(row, known)
            twins += 1
        scored = score(find_benchmark(LORA), *times, int(row["gbs"]))
        official += math.isclose(scored.olympic_minutes, summarized(times[0]), rel_tol=1e-12)
        if not agrees(row, scored):
            differing.append((name, row, scored, times))
    scaled = sum(float(r["rcp_scaling"] or 1) > 1 for r in rows)
    print(
        f"{len(rows)} submissions ({scaled} scaled by their RCP): {from_logs} read from raw logs, {twins} with the logs"
    )
    print(f"of another submission. Olympic minutes, factor and score reproduced: {len(rows) - len(differing)}.")
    print(f"mlperf_logging's own result_summarizer gives the same olympic mean of the same runs: {official}.")
    print(
        "Agreement: minutes and score to the table's 3 decimals, the factor to 12. The table multiplies minutes already"
    )
    print("rounded by the factor, and so does this comparison.")
    compliance(root, rows)
    for name, row, scored, (minutes, _) in differing:
        done = sorted(m for m in minutes if math.isfinite(m))
        inner = sum(done[1:-1]) / (len(done) - 2)
        print(f"  {name}: table {row['time_min']} min, by the rule {scored.olympic_minutes:.3f} min; {len(done)} of")
        print(f"    {len(minutes)} runs finished, and the table drops the slowest of those too: that gives {inner:.3f}")


def summarized(minutes: list[float]) -> float:
    """The olympic mean by MLPerf's own summarizer: an unfinished run is the slow one that is dropped."""
    from mlperf_logging.result_summarizer.result_summarizer import _compute_olympic_average

    finished = [m for m in minutes if math.isfinite(m)]
    found: float = _compute_olympic_average(finished, len(minutes) - len(finished), 1)
    return found


def compliance(root: Path, rows: list[dict[str, str]]) -> None:
    """mlperf_logging's checkers, as ``python -m lora_tune.score`` runs them, on every folder of logs."""
    passing, agreeing, refused = 0, 0, []
    for row in rows:
        logs = root / "logs" / row["round"] / row["submitter"] / row["system"]
        if not logs.is_dir():
            continue
        found = read_submission(logs, f"{row['round'][1:]}.0")
        passing += passes(found)
        agreeing += math.isclose(found.factor, float(row["rcp_scaling"] or 1), rel_tol=1e-12)
        refused += (
            [] if passes(found) else [f"  refused: {logs.relative_to(root / 'logs')}: {'; '.join(sentences(found))}"]
        )
    print(f"mlperf_logging's checkers on the raw logs: {passing} pass, factor as in the table in {agreeing}.")
    for line in refused:
        print(line)


def from_folder(logs: Path) -> Times:
    """Minutes and samples to target of each ``result_*.txt.gz``; infinite where the target was not reached."""
    runs = [_read(path) for path in sorted(logs.glob("result_*.txt.gz"))]
    hits = [run.reached(TARGET) for run in runs]
    minutes = [_minutes(run) if hit else math.inf for run, hit in zip(runs, hits, strict=True)]
    return minutes, [hit.samples if hit else math.inf for hit in hits]


def twin(row: dict[str, str], known: dict[str, Times]) -> Times:
    """The runs of the submission with the same fastest and slowest run: some were submitted twice."""
    for times in known.values():
        if (
            f"{min(times[0]):.3f}" == f"{float(row['time_best']):.3f}"
            and f"{max(times[0]):.3f}" == f"{float(row['time_worst']):.3f}"
        ):
            return times
    raise LookupError(f"no runs for {row['submitter']}/{row['system']}")


def agrees(row: dict[str, str], score: Score) -> bool:
    minutes = round(score.olympic_minutes, 3)
    return (
        minutes == float(row["time_min"])
        and math.isclose(score.factor, float(row["rcp_scaling"] or 1), rel_tol=1e-12)
        and round(minutes * score.factor, 3) == float(row["score_min"])
    )


def _read(path: Path) -> RunLog:
    reader = MllogReader()
    with gzip.open(path) as log:
        reader.feed(log.read())
    return reader.run()


def _minutes(run: RunLog) -> float:
    return (
        math.inf
        if run.run_stop_ms is None or run.run_start_ms is None
        else (run.run_stop_ms - run.run_start_ms) / 60_000
    )
