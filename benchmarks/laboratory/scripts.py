"""Eight problems of users' own scripts: no layouts, nothing published, the script's own defaults as the start.

Each site draws where its best point lies, how fast its machine is and how much its seeds scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.laboratory.made import MadeSurface, Physics, exponential, late_drop, power, two_steps
from benchmarks.laboratory.problem import Problem
from lora_tune.config.parameters import (
    CategoricalParameter,
    DerivedParameter,
    FixedParameter,
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
        interval=surface.interval, rungs=(int(SAMPLES / 2), int(2 * SAMPLES)), start=start, joint=True,
    )  # fmt: skip


def model_size(variant: int) -> Problem:
    """Width and depth drive speed and convergence, and move the best learning rate."""
    shift, knee, speed = np.random.default_rng([variant, 31]).normal(size=3)

    def physics(v: Values) -> Physics:
        size = math.log(v["HIDDEN"] / 256)
        depth = math.log(v["LAYERS"] / 4)
        best = math.log(2e-3) + 0.3 * shift - 0.8 * size
        off = math.log(v["LR"]) - best
        ln = math.log(SAMPLES) + 0.6 * math.exp(-1.4 * (size + 0.15 * knee) - 0.7 * depth) - 0.3 + valley(off, 0.8)
        rate = 240 * math.exp(-0.9 * size - 0.8 * depth + 0.1 * speed) / (1 + math.exp(-2 * (size + 0.5)))
        return Physics(samples=math.exp(ln), samples_per_second=rate, seconds_per_eval=100 / rate, total=8 * SAMPLES,
                       diverges=too_high(off - 1.5))  # fmt: skip

    space = {"LR": _rate(1e-5, 1e-1), "HIDDEN": _whole(64, 1024, log=True), "LAYERS": _whole(1, 12)}
    return _problem(
        "own_size", space, {"LR": 1e-3, "HIDDEN": 512, "LAYERS": 6}, MadeSurface(physics=physics, interval=INTERVAL)
    )


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


def optimizer(variant: int) -> Problem:
    """Each optimizer has its own best rate, and costs its own time a step."""
    draws = np.random.default_rng([variant, 33]).normal(size=6)
    table = {"sgd": (0.2, 1.6, 1.0), "adamw": (1e-3, 1.05, 0.9), "lion": (1e-4, 1.0, 0.95), "shampoo": (3e-3, 0.8, 0.6)}

    def physics(v: Values) -> Physics:
        best, level, pace = table[v["OPTIMIZER"]]
        at = list(table).index(v["OPTIMIZER"])
        off = math.log(v["LR"] / best) - 0.4 * draws[at]
        beta = 0.15 * ((v["BETA2"] - 0.97) / 0.03) ** 2 * (v["OPTIMIZER"] != "sgd")
        ln = math.log(SAMPLES) + math.log(level) + 0.1 * draws[4] + valley(off, 0.8) + beta
        return Physics(samples=math.exp(ln), samples_per_second=160 * pace * math.exp(0.1 * draws[5]),
                       seconds_per_eval=1.5, total=10 * SAMPLES, diverges=too_high(off - 1.2))  # fmt: skip

    space = {"OPTIMIZER": _choice(*table), "LR": _rate(1e-5, 3.0),
             "BETA2": FloatParameter(type="float", low=0.9, high=0.9999)}  # fmt: skip
    return _problem(
        "own_optimizer", space, {"OPTIMIZER": "adamw", "LR": 5e-4, "BETA2": 0.999},
        MadeSurface(physics=physics, interval=INTERVAL),
    )  # fmt: skip


def adapter(variant: int) -> Problem:
    """Rank, alpha and rate act through their product; dropout helps a little; rank costs speed and memory."""
    shift, need, speed = np.random.default_rng([variant, 34]).normal(size=3)

    def physics(v: Values) -> Physics:
        rank, scale = float(v["LORA_RANK"]), v["LORA_ALPHA"] / v["LORA_RANK"]
        off = math.log(v["LR"] * scale) - math.log(6e-4) - 0.3 * shift
        short = 0.5 * math.exp(-math.log2(rank / 8) - 0.3 * need)
        ln = math.log(SAMPLES) + valley(off, 0.8) + short + 3 * (v["DROPOUT"] - 0.05) ** 2 / 0.05
        rate = 160 * math.exp(0.1 * speed) / (1 + rank / 128)
        return Physics(samples=math.exp(ln), samples_per_second=rate, seconds_per_eval=2.5, total=8 * SAMPLES,
                       diverges=too_high(off - 1.4), dies=float(rank > 96))  # fmt: skip

    space = {"LR": _rate(1e-6, 1e-2), "LORA_RANK": _choice(2, 4, 8, 16, 32, 64, 128),
             "LORA_ALPHA": _choice(4, 8, 16, 32, 64),
             "DROPOUT": FloatParameter(type="float", low=0.0, high=0.3)}  # fmt: skip
    return _problem(
        "own_adapter", space, {"LR": 3e-4, "LORA_RANK": 16, "LORA_ALPHA": 16, "DROPOUT": 0.1},
        MadeSurface(physics=physics, interval=INTERVAL),
    )  # fmt: skip


def warm_up(variant: int) -> Problem:
    """A step decay: the curve stays level and drops late; warm-up allows higher rates and costs its own samples."""
    shift, speed = np.random.default_rng([variant, 35]).normal(size=2)

    def physics(v: Values) -> Physics:
        total, warm = v["EPOCHS"] * 4_000.0, min(v["WARMUP"], 0.5)
        off = math.log(v["LR"]) - math.log(3e-3) - 0.3 * shift - 1.2 * warm
        ln = math.log(0.35 * SAMPLES + 0.25 * total) + valley(off, 0.7) + 0.4 * warm - 0.35 * min(1.0, 4 * warm)
        return Physics(samples=math.exp(ln), samples_per_second=160 * math.exp(0.1 * speed), seconds_per_eval=1.5,
                       total=total, diverges=too_high(off - 0.9))  # fmt: skip

    space = {"LR": _rate(1e-5, 1e-1), "EPOCHS": _whole(2, 40), "WARMUP": FloatParameter(type="float", low=0, high=0.5)}
    surface = MadeSurface(physics=physics, interval=INTERVAL, shape=two_steps, eval_sd=0.02)
    return _problem("own_decay", space, {"LR": 2e-3, "EPOCHS": 24, "WARMUP": 0.05}, surface)


def noisy(variant: int) -> Problem:
    """A reward: seeds scatter by a fifth, evals by a tenth, and the curve drops at once."""
    shift, speed, gain = np.random.default_rng([variant, 36]).normal(size=3)

    def physics(v: Values) -> Physics:
        off = math.log(v["LR"]) - math.log(3e-4) - 0.4 * shift
        entropy = 0.08 * (math.log10(v["ENTROPY"]) + 2) ** 2
        discount = 0.3 * abs(math.log10(1 - v["GAMMA"]) + 2 + 0.2 * gain)
        ln = math.log(SAMPLES) + valley(off, 0.9) + entropy + discount + 0.1 * abs(math.log2(v["ENVS"] / 32))
        rate = 240 * math.exp(0.1 * speed) * v["ENVS"] / (v["ENVS"] + 30)
        return Physics(samples=math.exp(ln), samples_per_second=rate, seconds_per_eval=1.2, total=10 * SAMPLES,
                       seed_sd=0.2, diverges=too_high(off - 1.6))  # fmt: skip

    space = {"LR": _rate(1e-6, 1e-1), "ENTROPY": _rate(1e-5, 1.0), "ENVS": _choice(4, 8, 16, 32, 64, 128),
             "GAMMA": FloatParameter(type="float", low=0.9, high=0.9995)}  # fmt: skip
    surface = MadeSurface(physics=physics, interval=INTERVAL, shape=late_drop, eval_sd=0.05)
    return _problem("own_reward", space, {"LR": 1.5e-4, "ENTROPY": 0.003, "ENVS": 16, "GAMMA": 0.99}, surface)


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


def table(variant: int) -> Problem:
    """The measured trials of a 23.5 M Llama, with the batch size as an ordinary number and no layouts."""
    from lora_tune.launchers.simulated.lora_tables import fewest_samples, small

    surface = small.variant(variant)
    # A small model: its trials are as short as those of the other scripts.
    fast = replace(surface.machine, speed=8 * surface.machine.speed, eval_speed=8 * surface.machine.eval_speed)
    surface = replace(surface, machine=fast)
    axes = surface.table.axes
    steps = [int(n) for n in axes["MAX_STEPS"]]
    space: dict[str, Parameter] = {
        "LR": _rate(axes["LR"][0], axes["LR"][-1]),
        "MAX_STEPS": _whole(steps[0], steps[-1]),
        "WARMUP_STEPS": _whole(0, int(axes["WARMUP_STEPS"][-1])),
        "BATCH_SIZE": _choice(*map(int, axes["GBS"])),
        "MINIBS": DerivedParameter(type="derived", formula="BATCH_SIZE"),
        "TP": FixedParameter(type="fixed", value=8),
    }
    good = fewest_samples(surface.table, surface.target)
    start = {"LR": math.sqrt(axes["LR"][0] * axes["LR"][-1]), "MAX_STEPS": steps[-1], "WARMUP_STEPS": 0,
             "BATCH_SIZE": int(axes["GBS"][0])}  # fmt: skip
    return Problem(
        "own_table", surface, Space(space, nodes=1, gpus_per_node=8), target=surface.target,
        interval=surface.table.interval, rungs=(round(good / 2), round(2 * good)), start=start, joint=True,
        trial_minutes=20.0,
    )  # fmt: skip


SCRIPTS: dict[str, Callable[[int], Problem]] = {
    "own_size": model_size,
    "own_batch": batch,
    "own_optimizer": optimizer,
    "own_adapter": adapter,
    "own_decay": warm_up,
    "own_reward": noisy,
    "own_switches": switches,
    "own_table": table,
}
"""Name -> the problem at site ``variant``."""
