"""Reference convergence points and the score, through ``mlperf_logging``.

The package is imported only when something is asked: that takes about a second. Batch sizes are global, in samples
per step; every function takes the version of the rules (``ruleset``), the newest that the public results use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

BENCHMARK = "llama2_70b_lora"
RULESET = "5.1.0"

RUNS = 10
"""Runs of a submission; one of them may fail to converge."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a batch size is compared with, in samples to target.

    mean: faster submissions are scaled back to it. fastest: mean samples below this fail the check (5% one-sided
    t-test against the reference runs). words: how the checker found it.
    """

    mean: float
    fastest: float
    words: str


@cache
def reference(gbs: int, ruleset: str = RULESET) -> Reference | None:
    """The reference convergence of a batch size by ``mlperf_logging``'s pruned RCPs; None above the largest one."""
    checker = _checker(ruleset)
    record: Any = checker._find_rcp(gbs, "pruned_rcps")
    words = "RCP found"
    if record is None:
        low = checker._find_top_min_rcp(gbs, "pruned_rcps")
        high = checker._find_bottom_max_rcp(gbs, "pruned_rcps")
        if high is None:
            return None
        if low is None:
            record, words = checker._find_min_rcp("pruned_rcps"), "below the smallest RCP, compared with it"
        else:
            record, words = checker._create_interp_rcp(gbs, low, high)[1], "interpolated between RCPs"
    return Reference(float(record["RCP Mean"]), float(record["RCP Mean"] / record["Max Speedup"]), words)


@cache
def largest_rcp(ruleset: str = RULESET) -> int:
    """The largest global batch size that has a reference convergence point."""
    return max(int(record["BS"]) for record in _checker(ruleset).rcp_data.values())


@cache
def _checker(ruleset: str) -> RCP_Checker:
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

    return RCP_Checker("training", ruleset, BENCHMARK, verbose=False)


def olympic_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest; a run that did not converge counts as infinite and is the largest.

    Raises ValueError with fewer than three values.
    """
    if len(values) < 3:
        raise ValueError(f"an olympic mean needs at least 3 runs, {len(values)} came")
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


def score(minutes: Sequence[float], samples: Sequence[float], gbs: int, ruleset: str = RULESET) -> Score:
    """The score of runs of one configuration: minutes and samples to target of each, infinite where not converged.

    ``score = olympic_mean(minutes) * max(1, RCP_mean / olympic_mean(samples))``. Raises ValueError with fewer than
    three runs or lists of different lengths.
    """
    if len(minutes) != len(samples):
        raise ValueError(f"{len(minutes)} times came with {len(samples)} sample counts")
    time, mean = olympic_mean(minutes), olympic_mean(samples)
    against = reference(gbs, ruleset)
    if against is None:
        words = f"no reference convergence point at or above GBS {gbs}: the RCP check fails"
        return Score(time, 1.0, time, False, words)
    factor = max(1.0, against.mean / mean)
    passes = mean >= against.fastest and math.isfinite(time)
    if not passes:
        words = (
            f"mean {mean:.0f} samples to target is outside what the RCP check accepts (at least {against.fastest:.0f})"
        )
    elif factor > 1:
        words = f"faster convergence is taken back (x{factor:.4f}): {mean:.0f} samples, RCP mean {against.mean:.0f}"
    else:
        words = f"no RCP scaling: {mean:.0f} samples, RCP mean {against.mean:.0f}"
    return Score(time, factor, time * factor, passes, words)
