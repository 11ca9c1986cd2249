"""Two problems of users' own scripts: no layouts, nothing published, the script's own defaults as the start.

Each site draws where its best point lies, how fast its machine is and how much its seeds scatter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.laboratory.made import MadeSurface, Physics, exponential, power
from benchmarks.laboratory.problem import Problem
from lora_tune.config.parameters import (
    CategoricalParameter,
    FloatParameter,
    IntParameter,
    Parameter,
)
from lora_tune.config.space import Space

Values = Mapping[str, Any]
SAMPLES = 20_000.0
"""Samples of a good run."""
INTERVAL = 1_000.0


def _rate(low: float, high: float) -> FloatParameter:
    return FloatParameter(type="float", low=low, high=high, log=True)


def _whole(low: int, high: int, *, log: bool = False) -> IntParameter:
    return IntParameter(type="int", low=low, high=high, log=log)


def _choice(*values: Any) -> CategoricalParameter:
    return CategoricalParameter(type="categorical", choices=values)


def valley(ln_distance: float, width: float) -> float:
    """Excess of ln(samples) at a distance in ln from the best rate: quadratic near it, linear far away."""
    z = abs(ln_distance) / width
    return 0.5 * z * z if z < 2 else 2 * z - 2


def too_high(ln_excess: float) -> float:
    """Chance that a run diverges at a rate this far above the edge."""
    return 1 / (1 + math.exp(min(60.0, -ln_excess / 0.15)))


def _problem(
    name: str, space: Mapping[str, Parameter], start: Values, surface: MadeSurface, minutes: float = 20.0
) -> Problem:
    return Problem(
        name, surface, Space(dict(space), nodes=1, gpus_per_node=1), target=surface.target, trial_minutes=minutes,
        interval=surface.interval, start=start, joint=True,
    )  # fmt: skip


def batch(variant: int) -> Problem:
    """Batch size drives speed up to a limit and samples beyond the critical batch; weight decay matters a little."""
    shift, critical, speed = np.random.default_rng([variant, 32]).normal(size=3)

    def physics(v: Values) -> Physics:
        b, limit = float(v["BATCH_SIZE"]), 96 * math.exp(0.3 * critical)
        best = math.log(0.05) + 0.3 * shift + 0.5 * math.log(b / 64) - 0.25 * math.log1p(b / limit)
        off = math.log(v["LR"]) - best
        decay = 0.05 * (math.log10(v["WEIGHT_DECAY"]) + 3) ** 2
        ln = math.log(SAMPLES / 2) + math.log1p(b / limit) + valley(off, 0.9) + decay
        rate = 320 * math.exp(0.1 * speed) * b / (b + 60)
        return Physics(samples=math.exp(ln), samples_per_second=rate, seconds_per_eval=2.0, total=8 * SAMPLES,
                       diverges=too_high(off - 1.3), dies=float(b > 700))  # fmt: skip

    space = {"LR": _rate(1e-4, 3.0), "BATCH_SIZE": _whole(8, 1024, log=True), "WEIGHT_DECAY": _rate(1e-6, 1e-1)}
    surface = MadeSurface(physics=physics, interval=INTERVAL, shape=exponential, scale=0.1)
    return _problem("own_batch", space, {"LR": 0.05, "BATCH_SIZE": 32, "WEIGHT_DECAY": 1e-4}, surface)


def switches(variant: int) -> Problem:
    """Switches of speed beside the learning rate: workers, compilation, precision; one precision needs more samples."""
    shift, speed, extra = np.random.default_rng([variant, 37]).normal(size=3)

    def physics(v: Values) -> Physics:
        off = math.log(v["LR"]) - math.log(1e-3) - 0.3 * shift
        precision = {"fp32": (0.0, 1.0), "bf16": (0.02, 1.9), "fp8": (0.15 + 0.05 * abs(extra), 2.3)}[v["PRECISION"]]
        ln = math.log(SAMPLES) + valley(off, 0.8) + precision[0] + 0.1 * abs(math.log2(v["CLIP"]))
        feed = 100 * v["NUM_WORKERS"] + 20
        compute = 88 * math.exp(0.1 * speed) * precision[1] * (1.25 if v["COMPILE"] else 1.0)
        rate = 1 / (1 / feed**4 + 1 / compute**4) ** 0.25
        return Physics(samples=math.exp(ln), samples_per_second=rate, seconds_per_eval=1.5, total=8 * SAMPLES,
                       diverges=too_high(off - 1.3))  # fmt: skip

    space = {"LR": _rate(1e-5, 1e-1), "PRECISION": _choice("fp32", "bf16", "fp8"), "COMPILE": _choice(0, 1),
             "NUM_WORKERS": _whole(0, 8), "CLIP": _rate(0.05, 20.0)}  # fmt: skip
    start = {"LR": 5e-4, "PRECISION": "fp32", "COMPILE": 0, "NUM_WORKERS": 2, "CLIP": 1.0}
    return _problem("own_switches", space, start, MadeSurface(physics=physics, interval=INTERVAL, shape=power))
