"""The log that a trial of a benchmark would print, before it runs: its header as announced, and one run that succeeds.

Whatever is not announced is what the rules demand, or something that they accept: so what the compliance checker says
against such a log is about what was announced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from lora_tune.mlperf.benchmark import Benchmark
from lora_tune.mlperf.rules import reaching, read_rules

CLOSED: Mapping[str, object] = {
    "submission_org": "lora_tune",
    "submission_platform": "proposal",
    "submission_division": "closed",
    "submission_status": "onprem",
    "cache_clear": True,
    "seed": 1,
}
"""What a header says beside hyperparameters, whatever the benchmark."""

READ_BY_OTHERS = ("global_batch_size", "opt_learning_rate_warmup_steps")
"""Keys that rules of other keys read, in the order in which a log must have them."""

_EVENTS = frozenset({
    "init_start", "init_stop", "run_start", "run_stop", "block_start", "block_stop", "epoch_start", "epoch_stop",
    "eval_start", "eval_stop", "eval_accuracy", "aggregated_eval_accuracy",
})  # fmt: skip


def header(benchmark: Benchmark, announced: Mapping[str, object]) -> dict[str, object]:
    """Every key of a compliant header in the order of the rules; values in ``announced`` stand as they are.

    announced: values by MLLOG key, ``global_batch_size`` among them.
    """
    logged = {**CLOSED, "submission_benchmark": benchmark.name, **announced}
    for part in (benchmark.rules, read_rules(benchmark.ruleset, "common")):
        accepted = part.accepted({**benchmark.by_text(logged), **logged})
        logged |= {key: value for key, value in accepted.items() if key not in logged and key not in _EVENTS}
    # The rules of a key may read what another key left behind, and run in the order of the log.
    first = {key: logged[key] for key in READ_BY_OTHERS if key in logged}
    return first | logged


def log_lines(
    benchmark: Benchmark, announced: Mapping[str, object], readings: Mapping[str, float] | None = None
) -> list[str]:
    """``:::MLLOG`` lines of a whole run with that header, which reaches the target at its first evals.

    readings: what its evals read instead, by the metric's name.
    """
    lines = [_line(0, "init_start")]
    lines += [_line(1, key, value) for key, value in header(benchmark, announced).items()]
    lines += [_line(2, "init_stop"), _line(3, "run_start")]
    lines += list(_evals(benchmark, announced.get("global_batch_size"), readings or {}))
    return [*lines, _line(9, "run_stop", status="success")]


def _evals(benchmark: Benchmark, batch: object, readings: Mapping[str, float]) -> Iterator[str]:
    """The first two blocks and evals of a run, on the rules' grid."""
    whole = batch if isinstance(batch, int) and batch >= 1 else 1
    schedule = benchmark.eval_schedule(whole)
    first, interval = (schedule.first_samples, schedule.interval_samples) if schedule else (whole, whole)
    for samples in (first, first + interval):
        at: dict[str, object] = {benchmark.progress: int(samples) if float(samples).is_integer() else samples}
        block = {"samples_count": 0} if benchmark.progress == "samples_count" else {"first_epoch_num": 0}
        yield _line(4, "block_start", **block, **({} if "samples_count" in block else {"epoch_count": 1}))
        yield _line(5, "block_stop", **at, **({} if "samples_count" in block else block))
        yield _line(6, "eval_start", **at)
        for metric in benchmark.metrics:
            named = {"metric": metric.name} if metric.name else {}
            yield _line(7, "eval_accuracy", readings.get(metric.name, reaching(metric)), **at, **named)
        yield _line(8, "eval_stop", **at)


def _line(seconds: float, key: str, value: object = None, **metadata: object) -> str:
    kind = "INTERVAL_START" if key.endswith("start") else "INTERVAL_END" if key.endswith("stop") else "POINT_IN_TIME"
    record = {"namespace": "", "time_ms": 1_000 * seconds, "event_type": kind, "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**record, "metadata": {"file": "header", "lineno": 1, **metadata}})
