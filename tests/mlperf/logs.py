"""Result folders for tests: logs as a trial would print them, with times and samples of the test's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from lora_tune.mlperf.benchmark import Benchmark
from lora_tune.mlperf.gate import header
from lora_tune.mlperf.rules import reaching


def line(ms: float, key: str, value: object = None, **metadata: object) -> str:
    """One MLLOG line."""
    record = {"namespace": "", "time_ms": ms, "event_type": "POINT_IN_TIME", "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**record, "metadata": {"file": "t.py", "lineno": 1, **metadata}})


def run_log(
    benchmark: Benchmark,
    announced: Mapping[str, object],
    *,
    seconds: float = 1500,
    progress: float = 3456,
    loss: float | None = None,
) -> str:
    """The log of one run that stops after ``seconds`` at ``progress``, with ``loss`` or the target at its last eval."""
    metric = benchmark.metrics[0]
    value = reaching(metric) if loss is None else loss
    status = "success" if metric.reached(value) else "aborted"
    at = {benchmark.progress: progress}
    lines = [
        line(0, "init_start"),
        *(line(1, key, value) for key, value in header(benchmark, announced).items()),
        line(2, "init_stop"),
        line(1_000, "run_start"),
        line(1_000, "block_start", epoch_count=1, first_epoch_num=0, samples_count=0),
        line(500_000, "block_stop", first_epoch_num=0, samples_count=0),
        line(500_000, "eval_start", **at),
        line(501_000, "eval_accuracy", value, **at),
        line(501_000, "eval_stop", **at),
        line(1_000 + 1_000 * seconds, "run_stop", status=status),
    ]
    return "\n".join(lines) + "\n"


def result_folder(folder: Path, logs: list[str]) -> Path:
    """``result_0.txt`` and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, log in enumerate(logs):
        (folder / f"result_{number}.txt").write_text(log)
    return folder
