"""The score of runs of one configuration, as MLPerf counts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune.mlperf.benchmark import Benchmark


def olympic_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest; a run that did not converge counts as infinite and is the largest.

    Raises ValueError with fewer than three values.
    """
    if len(values) < 3:
        raise ValueError(f"an olympic mean needs at least 3 runs, got {len(values)}")
    kept = sorted(values)[1:-1]
    return math.fsum(kept) / len(kept)


@dataclass(frozen=True, slots=True)
class Score:
    """A result as MLPerf counts it.

    olympic_minutes: mean minutes without the fastest and the slowest run. factor: RCP normalisation, at least 1.
    minutes: their product. passes: False where the RCP check refuses the convergence, or there is no RCP.
    """

    olympic_minutes: float
    factor: float
    minutes: float
    passes: bool
    sentence: str


def score(benchmark: Benchmark, minutes: Sequence[float], progress: Sequence[float], batch: int) -> Score:
    """The score of runs of one configuration: minutes and convergence of each, infinite where not converged.

    progress: where each run converged, in the benchmark's unit. ``score = olympic_mean(minutes) * max(1, RCP_mean /
    olympic_mean(progress))``. Raises ValueError with fewer than three runs or lists of different lengths.
    """
    if len(minutes) != len(progress):
        raise ValueError(f"{len(minutes)} times came with {len(progress)} counts of progress")
    time, mean = olympic_mean(minutes), olympic_mean(progress)
    against = benchmark.reference(batch)
    if against is None:
        sentence = f"no reference convergence point at or above GBS {batch}: the RCP check fails"
        return Score(time, 1.0, time, False, sentence)
    factor = max(1.0, against.mean / mean)
    passes = mean >= against.fastest and math.isfinite(time)
    if not passes:
        sentence = f"converging at {mean:.6g} is outside what the RCP check accepts (at least {against.fastest:.6g})"
    elif factor > 1:
        sentence = f"faster convergence is taken back (x{factor:.4f}): at {mean:.6g}, RCP mean {against.mean:.6g}"
    else:
        sentence = f"no RCP scaling: converging at {mean:.6g}, RCP mean {against.mean:.6g}"
    return Score(time, factor, time * factor, passes, sentence)
