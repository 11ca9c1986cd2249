"""``python -m benchmarks.parse_agreement [FOLDER]``: our reader against mlperf_logging's parser on every public log.

Compared to the last digit: run_start, run_stop and its status, every eval's value, time and progress of each metric,
and every number and text in the header.
"""

from __future__ import annotations

import gzip
import io
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.public_runs import folder as public_folder
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog
from lora_tune.mlperf.log_check import ParsedLog, parse
from lora_tune.mlperf.rulesets import rulesets

EVENTS = ("eval_accuracy", "eval_error", "tracked_stats", "train_loss", "reduced_train_loss")


def differences(data: bytes) -> tuple[str, list[str]]:
    """A log's benchmark, and the differences of our values from mlperf_logging's."""
    reader = MllogReader()
    reader.feed(data)
    run = reader.run()
    theirs = parse(io.TextIOWrapper(io.BytesIO(data), encoding="latin-1"), rulesets()[-1])
    found = []
    times = theirs.times()
    if times != (run.run_start_ms, run.run_stop_ms) and times is not None:
        found.append(f"times {times} and {(run.run_start_ms, run.run_stop_ms)}")
    found += _evals(run, theirs)
    for key, value in _header(theirs).items():
        if key in run.hyperparameters and run.hyperparameters[key] != value:
            found.append(f"{key}: {value!r} and {run.hyperparameters[key]!r}")
    return str(theirs.first("submission_benchmark")), found


def _evals(run: RunLog, theirs: ParsedLog) -> list[str]:
    wanted: dict[str, list[tuple[Any, Any, float]]] = {}
    for line in theirs.lines:
        if line.key == "eval_accuracy":
            metadata = line.value["metadata"]
            progress = metadata.get("samples_count", metadata.get("epoch_num"))
            wanted.setdefault(metadata.get("metric", ""), []).append((progress, line.value["value"], line.timestamp))
    found = []
    for metric, evals in wanted.items():
        ours = run.evals_of(metric)
        unique = {progress: (value, at) for progress, value, at in reversed(evals)}
        expected = [(float(value), at) for _, (value, at) in sorted(unique.items())]
        got = [(e.loss, None if run.run_start_ms is None else run.run_start_ms + 1000 * e.seconds) for e in ours]
        same = len(expected) == len(got) and all(
            a == c and (d is None or abs(b - d) < 1e-3) for (a, b), (c, d) in zip(expected, got, strict=True)
        )
        scale = {e.samples / progress for e, progress in zip(ours, sorted(unique), strict=False) if progress}
        if not same or max(scale, default=1.0) > min(scale, default=1.0) * (1 + 1e-12):
            found.append(f"evals {metric}: {expected[:3]} and {got[:3]}, progress scaled by {sorted(scale)[:3]}")
    return found


def _header(theirs: ParsedLog) -> dict[str, object]:
    """The first announced value of each key, as plain data."""
    first: dict[str, object] = {}
    for line in theirs.lines:
        value = line.value["value"]
        if line.key not in EVENTS and isinstance(value, int | float | str) and value != "":
            first.setdefault(line.key, value)
    return first


def main() -> int:
    """Compare all; return 1 if any log differs."""
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else public_folder()
    same, differing = Counter[tuple[str, str]](), 0
    for path in sorted(data.glob("*logs/**/result_*.txt.gz")):
        benchmark, found = differences(gzip.decompress(path.read_bytes()))
        round_ = next(part for part in path.parts if part.startswith("v"))
        if found:
            differing += 1
            print(f"DIFFERS {path}: {'; '.join(found)[:400]}")
        else:
            same[round_, benchmark] += 1
    for (round_, benchmark), count in sorted(same.items()):
        print(f"{round_}  {benchmark:20} {count:5} logs equal")
    print(f"{same.total()} equal, {differing} differ")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
