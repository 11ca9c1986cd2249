"""The 8x H100 problem where a belief of the search is wrong, and with ten parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.laboratory.made import Array, MadeSurface, Physics, late_drop
from benchmarks.laboratory.problem import Problem
from benchmarks.laboratory.problems import PUBLISHED_H100, h100_layouts, h100_wide, hyperparameters
from lora_tune.config.parameters import CategoricalParameter, FloatParameter, IntParameter, Parameter
from lora_tune.config.space import Space
from lora_tune.launchers.simulated import convergence
from lora_tune.launchers.simulated.convergence import SiteEffect
from lora_tune.launchers.simulated.h100 import function as h100
from lora_tune.launchers.simulated.machine import Degrees, Machine
from lora_tune.launchers.simulated.simulated_run import RunOutcome, SimulatedRun, eval_samples

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bent:
    """A simulated run whose site depends on the parameters: ``bend`` gives what is added to the site's own."""

    base: SimulatedRun
    bend: Callable[[Values], SiteEffect]

    @property
    def score(self) -> str:
        """What ``expected_score`` means."""
        return self.base.score

    def at(self, parameters: Values) -> SimulatedRun:
        """The simulated run with the site that these parameters have."""
        site, more = self.base.site, self.bend(parameters)
        bent = replace(
            site, level=site.level + more.level, gbs=site.gbs + more.gbs, steps=site.steps + more.steps,
            learning_rate=site.learning_rate + more.learning_rate,
        )  # fmt: skip
        return replace(self.base, site=bent)

    def outcome(self, parameters: Values, seed: int) -> RunOutcome:
        """One run."""
        return self.at(parameters).outcome(parameters, seed)

    def expected_score(self, parameters: Values) -> float:
        """The truth."""
        return self.at(parameters).expected_score(parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSpeeds(Machine):
    """A machine on which splitting within a layer is free, and between sequences and stages is dear."""

    def samples_per_second(self, layout: Degrees) -> float:
        """Warm training throughput of the whole job."""
        usual = Machine.samples_per_second(self, layout)
        tp, cp, pp = (math.log2(n) for n in (layout.tp, layout.cp, layout.pp))
        return usual * math.exp(0.22 * tp - 0.25 * cp - 0.2 * pp)


@dataclass(frozen=True, kw_only=True)
class ClosedDivision(MadeSurface):
    """A made surface that evaluates when MLPerf's closed division does."""

    gbs: Callable[[Values], int]

    def evals(self, parameters: Values, p: Physics) -> Array:
        """Samples at which a run evaluates."""
        return eval_samples(parameters, self.gbs(parameters), int(p.total))


def _wide(name: str, surface: Any) -> Problem:
    return replace(h100_wide(0), name=name, surface=surface)


def wrong_rate(variant: int) -> Problem:
    """Everything happens at four times the published learning rates."""
    run = h100.variant(variant)
    site = replace(run.site, learning_rate=run.site.learning_rate + math.log(4))
    return _wide("h100_rate", replace(run, site=site))


def wrong_level(variant: int) -> Problem:
    """Other data: 1.6 times the published samples, most of it saved by longer schedules."""
    run = h100.variant(variant)
    site = replace(run.site, level=run.site.level + 0.45, steps=run.site.steps - 0.25)
    return _wide("h100_level", replace(run, site=site))


def wrong_speed(variant: int) -> Problem:
    """A machine whose layouts rank otherwise than published."""
    run = h100.variant(variant)
    known = {n: getattr(run.machine, n) for n in Machine.__dataclass_fields__}
    return _wide("h100_speed", replace(run, machine=OtherSpeeds(**known)))


def little_memory(variant: int) -> Problem:
    """A GPU of 56 GB and micro-batches of up to eight sequences: nine layouts in ten run out of memory."""
    run = h100.variant(variant)
    problem = _wide("h100_memory", replace(run, machine=replace(run.machine, memory_gb=56.0)))
    layouts = h100_layouts().model_copy(update={"mbs": (1, 2, 4, 8)})
    return replace(problem, space=Space({**hyperparameters(), "layout": layouts}, nodes=1, gpus_per_node=8))


def coupled(variant: int) -> Problem:
    """The layout drives convergence too: splitting layers costs samples, micro-batches of two save some."""

    def bend(v: Values) -> SiteEffect:
        tp, pp, mbs = (math.log2(int(v.get(n, 1))) for n in ("TP", "PP", "MBS"))
        return SiteEffect(level=0.2 * (tp - 2) + 0.1 * pp - 0.1 * mbs, learning_rate=0.25 * (2 - tp))

    return _wide("h100_coupled", Bent(base=h100.variant(variant), bend=bend))


def other_shapes(variant: int) -> Problem:
    """Seeds scatter two and a half times as far, and curves stay level and then drop."""
    run = h100.variant(variant)

    def physics(v: Values) -> Physics:
        recipe, layout = run.recipe(v), Degrees.of(v)
        return Physics(
            samples=math.exp(convergence.ln_samples(recipe, run.site)),
            samples_per_second=run.machine.samples_per_second(layout),
            seconds_per_eval=run.machine.seconds_per_eval(layout),
            total=recipe.total_samples, seed_sd=0.11,
            diverges=convergence.divergence_probability(recipe, run.site), dies=run.machine.oom_probability(layout),
        )  # fmt: skip

    surface = ClosedDivision(
        physics=physics, interval=384.0, shape=late_drop, scale=0.1, eval_sd=0.03, target=0.925, init_seconds=90.0,
        gbs=lambda v: run.recipe(v).gbs,
    )  # fmt: skip
    return _wide("h100_shapes", surface)


def _more_knobs() -> dict[str, Parameter]:
    return {
        "WEIGHT_DECAY": FloatParameter(type="float", low=1e-5, high=1e-1, log=True),
        "BETA2": FloatParameter(type="float", low=0.9, high=0.9999),
        "CLIP": FloatParameter(type="float", low=0.05, high=5.0, log=True),
        "LORA_RANK": IntParameter(type="int", low=4, high=64),
        "LORA_ALPHA": CategoricalParameter(type="categorical", choices=(8, 16, 32, 64)),
        "DROPOUT": FloatParameter(type="float", low=0.0, high=0.3),
    }


def ten_parameters(variant: int) -> Problem:
    """Six knobs of the open division more; the published defaults are good, not best."""
    draws = np.random.default_rng([variant, 41]).normal(size=6).tolist()

    def bend(v: Values) -> SiteEffect:
        decay = 0.02 * (math.log10(v["WEIGHT_DECAY"]) + 3.2 - 0.4 * draws[0]) ** 2
        beta = 0.06 * (math.log10(1 - v["BETA2"]) + 2.0 - 0.3 * draws[1]) ** 2
        clip = 0.04 * (math.log(v["CLIP"] / 0.5) - 0.5 * draws[2]) ** 2
        rank = 0.05 * (math.log2(v["LORA_RANK"] / 24) - 0.3 * draws[3]) ** 2
        drop = 1.2 * (v["DROPOUT"] - 0.06 - 0.02 * draws[4]) ** 2
        scale = math.log(v["LORA_ALPHA"] / v["LORA_RANK"] / 2)
        return SiteEffect(level=decay + beta + clip + rank + drop - 0.05, learning_rate=-0.5 * scale)

    space = Space({**hyperparameters(), **_more_knobs(), "layout": h100_layouts()}, nodes=1, gpus_per_node=8)
    defaults = {"WEIGHT_DECAY": 1e-4, "BETA2": 0.999, "CLIP": 0.3, "LORA_RANK": 16, "LORA_ALPHA": 32, "DROPOUT": 0.1}
    return Problem("h100_ten", Bent(base=h100.variant(variant), bend=bend), space, start={**PUBLISHED_H100, **defaults})


FAMILIES: dict[str, Callable[[int], Problem]] = {
    "h100_rate": wrong_rate,
    "h100_level": wrong_level,
    "h100_speed": wrong_speed,
    "h100_memory": little_memory,
    "h100_coupled": coupled,
    "h100_shapes": other_shapes,
    "h100_ten": ten_parameters,
}
"""Name -> the problem at site ``variant``."""
