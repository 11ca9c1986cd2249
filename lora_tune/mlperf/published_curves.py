"""The shipped families: Llama-2-70B LoRA on GovReport (MLPerf), calibrated on public runs, by global batch size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lora_tune.curves.family import Family
from lora_tune.curves.stall import Envelope

CALIBRATION = Path(__file__).resolve().parent / "data" / "llama2_70b_lora.json"

SMALLEST_GBS, LARGEST_GBS = 8, 128
"""Between these the public runs say something."""


@cache
def published(gbs: float) -> Envelope | None:
    """The median curve and envelope of good MLPerf Llama-2-70B LoRA runs at ``gbs``; None outside 8 to 128.

    The shape serves any target near 0.925. Figures, method and the runs behind them: docs/statistics.md.
    """
    return envelope(json.loads(CALIBRATION.read_text()), gbs)


@cache
def crossing_family(gbs: float) -> Family | None:
    """The family of :func:`published` at a batch size where enough submissions calibrate it for estimates; else None.

    Elsewhere the shape is interpolated between batch sizes: good enough to tell bad runs, and 1 to 3% early where
    crossings were estimated by it.
    """
    calibration = json.loads(CALIBRATION.read_text())
    curve = published(gbs)
    return curve.family if curve is not None and gbs in calibration["estimated_at"] else None


def envelope(calibration: Mapping[str, Any], gbs: float) -> Envelope | None:
    """The envelope that a calibration (the JSON of ``benchmarks.calibrate_curves``) gives for ``gbs``.

    ``loss = target + slope(gbs) * ln(samples / crossing(gbs))`` with ``slope`` linear and ``ln(crossing)`` quadratic
    in ``g = ln(gbs / 8)``, valid from ``ln(samples / crossing) = noise.at[0]`` on.
    """
    if not SMALLEST_GBS <= gbs <= LARGEST_GBS:
        return None
    g = math.log(gbs / 8)
    slope = calibration["slope"][0] + calibration["slope"][1] * g
    crossing = sum(c * g**power for power, c in enumerate(calibration["log_crossing"]))
    at = calibration["noise"]["at"]
    persistent = math.exp(calibration["seed_gbs_power"] * g)
    family = Family(
        log_samples=tuple(crossing + x for x in at),
        loss=tuple(calibration["target"] + slope * x for x in at),
        noise=tuple(sd * math.exp(calibration["noise"]["gbs_power"] * g) for sd in calibration["noise"]["sd"]),
        seed=calibration["seed"] * persistent, wander=calibration["wander"] * persistent,
        spread=calibration["spread"], drift=0.0, huber_above=calibration["huber_above"],
        name=f"public runs, GBS {gbs:g}",
    )  # fmt: skip
    return Envelope(family=family, thresholds=tuple((rate, excess) for rate, excess in calibration["thresholds"]))
