"""Published results as observations of other sources: figures of the MLPerf submissions v4.0 to v5.0."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from lora_tune.search.observations import Observation

HALF_AN_INTERVAL = 192
"""The table's mean stops lie half an eval interval (384 samples) after the crossing."""

CLOSED_DIVISION: Mapping[str, float] = {
    "WEIGHT_DECAY": 1e-4, "GRADIENT_CLIP_VAL": 0.3, "GRADIENT_CLIP_NORM": 0.3, "MAX_GRAD_NORM": 0.3, "CLIP": 0.3,
    "LORA_RANK": 16, "LORA_DIM": 16, "LORA_R": 16, "ADAPTER_DIM": 16, "LORA_ALPHA": 32, "LORA_DROPOUT": 0.1,
    "DROPOUT": 0.1, "BETA1": 0.9, "BETA2": 0.999,
}  # fmt: skip
"""What every one of these submissions trained with, since the closed division allows nothing else (the reference
implementation's values), by the names under which studies tune it."""


@cache
def llama2_70b_lora() -> tuple[Observation, ...]:
    """One observation a submission, with its own source, so that no site's level is taken for this one's."""
    text = files("lora_tune.search").joinpath("published.csv").read_text(encoding="utf-8")
    found = []
    for number, row in enumerate(csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))):
        steps = float(row["MAX_STEPS"])
        values = {
            "LR": float(row["LR"]),
            "MAX_STEPS": steps,
            "WARMUP_STEPS": round(float(row["warmup_ratio"] or 0) * steps),
            "GBS": float(row["GBS"]),
        }
        mean = float(row["mean_samples"])
        found.append(
            Observation(
                number=-1 - number,
                values=values,
                source=f"{row['round']} {row['submitter']} {row['system']}",
                reached=mean,
                attributes={"crossing_samples": mean - HALF_AN_INTERVAL, "runs": int(row["runs"])},
            )
        )
    return tuple(found)
