"""Switches of a simulated site: what each setting of them makes of speed, evals, samples to the target and survival.

All is assumption, but for the sizes: public sites with equal layouts differ by up to 13%, each switch here by 0 to 6%.
Of a site's draws some interact in pairs, one level does not run, and one switch of the arithmetic is fast and costs
samples. What a trial does not set is as in the published configuration, which is neither.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lora_tune.launchers.simulated.simulated_run import DRAWS, RunOutcome, SimulatedRun

LEVELS: Mapping[str, tuple[object, ...]] = {
    "VBOOST_VALUE": (1, 0),
    "TP_COMM_OVERLAP": (1, 0),
    "MC_TP_OVERLAP_RS_DGRAD": ("False", "True"),
    "LAYER_CUDA_GRAPH": (0, 1),
    "MCORE_CUDA_GRAPH": (0, 1),
    "NCCL_MIN_CTAS": (32, 16, 8),
    "NCCL_NVLS_ENABLE": (0, 1),
    "NUM_WORKERS": (8, 4, 2),
    "DDP_OVERLAP_GRAD_REDUCE": ("False", "True"),
    "DDP_OVERLAP_PARAM_GATHER": ("False", "True"),
    "VAL_MBS": (1, 2, 4),
    "FP8_DPA": (1, 0),
    "NVTE_FP8_DPA_BWD": (1, 0),
    "FP8_ACT": (0, 1),
    "FP8_AMAX_ALGO": ("max", "most_recent"),
    "FP8_AMAX_HISTORY": (32, 4),
}
"""The switches and their values, the published configuration's first."""
ARITHMETIC = ("FP8_DPA", "NVTE_FP8_DPA_BWD", "FP8_ACT", "FP8_AMAX_ALGO", "FP8_AMAX_HISTORY")
"""Those that change arithmetic."""
OF_EVALS = ("VAL_MBS",)
"""Those that change the seconds of evals alone, eight times as much: evals are an eighth of a run."""

LARGEST = 0.06
"""The largest effect of a level on ln(seconds of a run); drawn evenly from 0 on, either way as often."""
PAIRS, INTERACTION_SD = 5, 0.012
"""How many pairs of levels do more or less together than each alone, and by how much."""
COSTS_SAMPLES = (0.05, 0.15)
"""What the one dear arithmetic adds to ln(samples); it saves 2 to 6% of the seconds."""
HARMLESS_SD = 0.008
"""The same of the other arithmetics, around nothing."""
STARTS_IN = 40.0
"""Seconds after which a level that does not run has died."""
REFUSAL = "AssertionError: this configuration is not supported by the installed version of Transformer Engine"

Level = tuple[str, str]
"""A switch and one of its values, as text."""


@dataclass(frozen=True, kw_only=True)
class SiteSwitches:
    """What the switches of one site do, drawn by its number."""

    number: int

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Every value beside the published ones."""
        return tuple((name, str(value)) for name, values in LEVELS.items() for value in values[1:])

    @cached_property
    def _drawn(self) -> tuple[dict[Level, float], dict[tuple[Level, Level], float], dict[Level, float], Level]:
        """ln(seconds) of levels and of pairs of them, ln(samples) of levels, and the level that does not run."""
        rng = np.random.default_rng([self.number, 32])
        effects = {at: float(rng.uniform(0, LARGEST) * rng.choice([-1, 1])) for at in self.levels}
        arithmetic = [at for at in self.levels if at[0] in ARITHMETIC]
        dear = arithmetic[int(rng.integers(len(arithmetic)))]
        effects[dear] = -float(rng.uniform(0.02, LARGEST))
        samples = {at: float(rng.normal(0, HARMLESS_SD)) for at in arithmetic}
        samples[dear] = float(rng.uniform(*COSTS_SAMPLES))
        others = [at for at in self.levels if at != dear]
        dead = others[int(rng.integers(len(others)))]
        couples = [pair for pair in itertools.combinations(self.levels, 2) if pair[0][0] != pair[1][0]]
        chosen = rng.choice(len(couples), PAIRS, replace=False)
        return effects, {couples[i]: float(rng.normal(0, INTERACTION_SD)) for i in chosen}, samples, dead

    def changed(self, parameters: Mapping[str, object]) -> frozenset[Level]:
        """The levels that a trial sets otherwise than published."""
        stated = ((name, parameters.get(name, values[0]), values[0]) for name, values in LEVELS.items())
        return frozenset((name, str(value)) for name, value, usual in stated if str(value) != str(usual))

    def runs(self, levels: frozenset[Level]) -> bool:
        """Whether a trial with these levels gets as far as training."""
        return self._drawn[3] not in levels

    def applied(self, run: SimulatedRun, levels: frozenset[Level]) -> SimulatedRun:
        """The site with these levels."""
        effects, pairs, samples, _ = self._drawn
        of_both = [seconds for at in levels if at[0] not in OF_EVALS for seconds in [effects.get(at, 0.0)]]
        together = sum(seconds for (a, b), seconds in pairs.items() if a in levels and b in levels)
        of_evals = 8 * sum(effects.get(at, 0.0) for at in levels if at[0] in OF_EVALS)
        seconds = sum(of_both) + together
        machine = replace(
            run.machine,
            speed=run.machine.speed * math.exp(-seconds),
            eval_speed=run.machine.eval_speed * math.exp(-seconds - of_evals),
        )
        more = sum(samples.get(at, 0.0) for at in levels)
        return replace(run, machine=machine, site=replace(run.site, level=run.site.level + more))


@dataclass(frozen=True, kw_only=True)
class SwitchedRun:
    """A surface with switches: parameters of ``run``, and those of ``LEVELS``."""

    run: SimulatedRun
    switches: SiteSwitches

    def __call__(self, parameters: Mapping[str, object], seed: int) -> Iterator[tuple[float, str]]:
        """The job's log: (virtual seconds since its start, line)."""
        levels = self.switches.changed(parameters)
        lines = self.switches.applied(self.run, levels)(parameters, seed)
        if self.switches.runs(levels):
            yield from lines
            return
        yield next(lines)
        yield STARTS_IN, REFUSAL

    def variant(self, number: int) -> SwitchedRun:
        """Another site: its machine, its convergence, and its switches."""
        return replace(self, run=self.run.variant(number), switches=SiteSwitches(number=number))

    def outcome(self, parameters: Mapping[str, object], seed: int) -> RunOutcome:
        """One run, with this seed's luck."""
        levels = self.switches.changed(parameters)
        made = self.switches.applied(self.run, levels).outcome(parameters, seed)
        if self.switches.runs(levels):
            return made
        return replace(made, evals=(), train=(), end="oom", end_seconds=STARTS_IN)

    def expected_score(self, parameters: Mapping[str, object], draws: int = DRAWS) -> float:
        """The truth, as of :meth:`SimulatedRun.expected_score`; infinite where it does not run."""
        levels = self.switches.changed(parameters)
        if not self.switches.runs(levels):
            return math.inf
        return self.switches.applied(self.run, levels).expected_score(parameters, draws)
