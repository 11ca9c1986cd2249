"""Speed and memory of a parallel layout on H100, H200 and GB200 systems: data, then assumption.

Data (``figures.json``): samples/s per GPU and seconds per eval round by TP and CP, as log-linear regressions over the
public submissions. Layouts seen there: TP4, TP4 CP2 and TP4 PP2 on H100; TP1 CP2, TP2 and TP4 on H200; TP1 with CP 1, 2
and 8 on Blackwell.

Assumption: the same per-doubling cost for degrees not seen; PP costs 5% a doubling beside its bubble
(PP - 1) / microbatches; TP beyond 4 another 6%; MBS 2 and more gain 1%; each layout departs from the regression by
a fixed 2% (its own kernels).
Memory: 70 GB of FP8 weights over TP x PP, activations of 99 GB x MBS over TP x CP^0.8, 8 GB besides, from three B200
readings (168.8 GB at TP1 CP1, 134 at CP2, 82 at CP8, met within 8 GB); close to the limit OOM is a matter of luck.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lora_tune.launchers.simulated.convergence import FIGURES

EVAL_SEQUENCES = 173
"""Validation sequences of the GovReport split."""
MEMORY_SPREAD_GB = 1.2
"""Scale of the logistic by which OOM sets in (assumption)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """A layout as the trial reads it."""

    tp: int
    pp: int
    cp: int
    minibs: int
    mbs: int = 1

    @classmethod
    def of(cls, parameters: Mapping[str, object]) -> Degrees:
        """From TP, PP, CP, MINIBS and MBS; absent ones are 1."""
        return cls(**{k: int(str(parameters.get(k.upper(), 1))) for k in ("tp", "pp", "cp", "minibs", "mbs")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs of one kind and how fast they are.

    family, accelerator: which regression. memory_gb: usable memory of one GPU. speed, eval_speed, memory_offset_gb:
    how this site departs from the public average. quirks: which draw of the layouts' own departures.
    """

    family: str
    accelerator: str
    gpus: int
    nodes: int
    memory_gb: float
    speed: float = 1.0
    eval_speed: float = 1.0
    memory_offset_gb: float = 0.0
    quirks: int = 0
    init_median: float = field(default=FIGURES["initialisation"]["median_seconds"])

    def gbs(self, layout: Degrees) -> int:
        """Global batch size: MINIBS * DP."""
        return layout.minibs * self.gpus // (layout.tp * layout.pp * layout.cp)

    def samples_per_second(self, layout: Degrees) -> float:
        """Warm training throughput of the whole job."""
        fit: dict[str, float] = FIGURES[self.family]["ln_samples_per_second_per_gpu"]
        micro = max(1, layout.minibs // layout.mbs)
        ln = (
            fit[self.accelerator]
            + fit["log2_tp"] * math.log2(layout.tp)
            + fit["log2_cp"] * math.log2(layout.cp)
            + fit["log2_nodes"] * math.log2(self.nodes)
            - 0.05 * math.log2(layout.pp)
            - math.log1p((layout.pp - 1) / micro)
            - 0.06 * max(0.0, math.log2(layout.tp) - 2)
            + 0.01 * min(1.0, math.log2(layout.mbs))
            + 0.02 * self._quirk("train", layout)
        )
        return self.gpus * math.exp(ln) * self.speed

    def cold_seconds(self) -> float:
        """What the first block takes longer than a warm one, by nodes."""
        table = FIGURES[self.family]["cold_seconds_by_nodes"]
        return float(np.interp(self.nodes, [int(n) for n in table], list(table.values())))

    def seconds_per_eval(self, layout: Degrees) -> float:
        """One pass over the validation sequences: rounds of one sequence per data-parallel rank."""
        fit: dict[str, float] = FIGURES[self.family]["ln_seconds_per_eval_round"]
        dp = self.gpus // (layout.tp * layout.pp * layout.cp)
        ln = (
            fit[self.accelerator]
            + fit["log2_tp"] * math.log2(layout.tp)
            + fit["log2_cp"] * math.log2(layout.cp)
            + fit["log2_nodes"] * math.log2(self.nodes)
            + 0.03 * self._quirk("eval", layout)
        )
        return math.ceil(EVAL_SEQUENCES / dp) * math.exp(ln) / self.eval_speed

    def memory(self, layout: Degrees) -> float:
        """Peak GB of one GPU."""
        weights = 70 / (layout.tp * layout.pp)
        activations = 99 * layout.mbs / (layout.tp * math.pow(layout.cp, 0.8))
        return weights + activations + 8 + self.memory_offset_gb

    def oom_probability(self, layout: Degrees) -> float:
        """Chance that a run dies for memory."""
        over = (self.memory(layout) - self.memory_gb) / MEMORY_SPREAD_GB
        return 1 / (1 + math.exp(min(60.0, -over)))

    def elsewhere(self, number: int, speed: float, evals: float, memory: float, init: float) -> Machine:
        """This machine at site ``number``, from four standard normal draws.

        Speed (sd 4%) and eval speed (5%) vary as between public submissions; that memory differs by 1.5 GB, start-up
        by 30% and that layouts have other kernels is assumption.
        """
        return replace(
            self,
            speed=self.speed * math.exp(0.04 * speed),
            eval_speed=self.eval_speed * math.exp(0.05 * evals),
            memory_offset_gb=1.5 * memory,
            quirks=number,
            init_median=self.init_median * math.exp(0.3 * init),
        )

    def _quirk(self, effect: str, layout: Degrees) -> float:
        # Kernels depend on the degrees, not on how many micro-batches follow one another.
        key = f"{self.quirks} {effect} {layout.tp} {layout.pp} {layout.cp} {layout.mbs}"
        return float(np.random.default_rng(zlib.crc32(key.encode())).normal())
