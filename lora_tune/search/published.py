"""Published results as observations of other sources: MLPerf submissions v4.0 to v6.0."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from lora_tune.mlperf.benchmark import read_benchmark
from lora_tune.search.observations import Observation
from lora_tune.search.usual_names import ALPHA, CLIP, DECAY, DROPOUT, RANK

HALF_AN_INTERVAL = 192
"""Half an eval interval (384 samples), by which the table's mean stops exceed the crossing."""

CLOSED_DIVISION: Mapping[str, float] = {
    **dict.fromkeys(DECAY, 1e-4), **dict.fromkeys(CLIP, 0.3), **dict.fromkeys(RANK, 16), **dict.fromkeys(ALPHA, 32),
    **dict.fromkeys(DROPOUT, 0.1), "BETA1": 0.9, "BETA2": 0.999,
}  # fmt: skip
"""Values of all these submissions, fixed by the closed division (the reference implementation's), by the names under
which studies tune them."""


@cache
def llama2_70b_lora() -> tuple[Observation, ...]:
    """One observation per submission, each a separate source, so that its offset is not applied to this study."""
    submissions = []
    for number, row in enumerate(_rows("published.csv")):
        steps = float(row["MAX_STEPS"])
        values = {
            "LR": float(row["LR"]),
            "MAX_STEPS": steps,
            "WARMUP_STEPS": round(float(row["warmup_ratio"] or 0) * steps),
            "GBS": float(row["GBS"]),
        }
        if row["HEALING_ITER"]:
            values["HEALING_ITER"] = float(row["HEALING_ITER"])
        mean = float(row["mean_samples"])
        submissions.append(
            Observation(
                number=-1 - number,
                values=values,
                source=f"{row['round']} {row['submitter']} {row['system']}",
                reached=mean,
                attributes={"crossing_samples": mean - HALF_AN_INTERVAL, "runs": int(row["runs"])},
            )
        )
    return tuple(submissions)


@cache
def of_benchmark(name: str) -> tuple[Observation, ...]:
    """One observation per submission of a benchmark with a table, each a separate source; else empty.

    name: MLPerf's name. ``python -m benchmarks.published_logs`` writes the tables (``search/data``). The crossing is
    taken half an eval interval before the mean stop, on the eval grid of its round.
    """
    return tuple(_submission(name, -1 - number, row) for number, row in enumerate(_rows(f"data/{name}.csv")))


def _rows(name: str) -> Sequence[Mapping[str, str]]:
    """Rows of a table in this package; empty if it does not exist."""
    table = files("lora_tune.search").joinpath(name)
    lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _submission(name: str, number: int, row: Mapping[str, str]) -> Observation:
    batch, rate, mean = int(row["GBS"]), float(row["LR"]), float(row["mean_samples"])
    schedule = read_benchmark(name, row["round"]).eval_schedule(batch)
    half = schedule.interval_samples / 2 if schedule is not None else 0.0
    return Observation(
        number=number,
        values={"LR": rate, "LEARNING_RATE": rate, "WARMUP_STEPS": float(row["WARMUP_STEPS"]), "GBS": batch},
        source=f"{row['round']} {row['submitter']} {row['system']}",
        reached=mean,
        attributes={"crossing_samples": mean - half, "runs": int(row["runs"])},
    )
