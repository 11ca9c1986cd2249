"""The study's goal: seconds to the target from samples, speed, evals and the rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lora_tune.base.scatter import STOP_SD
from lora_tune.curves import Family, Schedule
from lora_tune.mlperf.benchmark import LORA, Benchmark, find_benchmark
from lora_tune.mlperf.convergence import published

if TYPE_CHECKING:
    from lora_tune.search.grey_box.gaussian import Array  # imports scipy, which only searches need


def closed_schedule(batch: float, benchmark: Benchmark | None = None) -> Schedule:
    """The closed division's eval schedule at a global batch size; by default of llama2_70b_lora.

    Raises ValueError for a benchmark without an eval grid.
    """
    known = benchmark or find_benchmark(LORA)
    schedule = known.eval_schedule(round(batch))
    if schedule is None:
        raise ValueError(f"{known.name} has no eval grid in ruleset {known.ruleset}")
    return schedule


def rcp_mean(batch: float, benchmark: Benchmark | None = None) -> float:
    """Mean samples of the reference convergence point at a global batch size; 0 without one."""
    point = (benchmark or find_benchmark(LORA)).reference(round(batch))
    return point.mean if point else 0.0


def no_reference(_batch: float) -> float:
    """No reference convergence point, so no normalisation."""
    return 0.0


def no_family(_batch: float) -> Family | None:
    """No published curves."""
    return None


def public_family(batch: float) -> Family | None:
    """Shape of MLPerf Llama-2-70B LoRA curves at a global batch size; None if none was published."""
    envelope = published(batch)
    return envelope.family if envelope else None


HALF = 0.5
"""Mean distance in eval intervals from the crossing to the next eval, for exact curves and readings."""

WINDOW = 6
"""Evals on either side of the crossing at which a run may pass or miss: six standard deviations of an interval each."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal of a run, and its limits.

    target: eval loss. schedule: evals by global batch size; None: learned from the trials. reference_samples: RCP mean
    by batch, 0 for none (the score is then the time to the target). family: published shape of curves by batch. nodes:
    per trial. limit_seconds: time limit of a trial. run_sd: usual sd of ln(samples) between seeds, for the risk of not
    finishing; noise: factor on it in this study.
    """

    target: float = 0.925
    schedule: Callable[[float], Schedule] | None = None
    reference_samples: Callable[[float], float] = no_reference
    family: Callable[[float], Family | None] = no_family
    nodes: int = 1
    limit_seconds: float = math.inf
    run_sd: float = STOP_SD
    noise: float = 1.0

    def log_seconds(self, ln_samples: Array, speed: Array, eval_seconds: Array, schedule: Schedule) -> Array:
        """ln of the expected seconds from run_start to the stop, for crossings distributed about ``ln_samples``.

        Shapes broadcast.
        """
        stop = self.expected_stop(ln_samples, schedule)
        evals = 1.0 + (stop - schedule.first_samples) / max(schedule.interval_samples, 1e-9)
        return np.asarray(np.log(stop / speed + evals * eval_seconds))

    def expected_stop(self, ln_samples: Array, schedule: Schedule) -> Array:
        """Expected samples at the eval that stops a run.

        A run stops at the first eval after its crossing, which varies by ``run_sd`` between seeds. So stop = first +
        interval * sum over evals k = 0, 1, ... of P(not passed at k), with P(not passed at k) = Phi((crossing - first -
        k interval) / sd). A miss costs a whole interval. If the sd is an interval or more, this is the crossing plus
        half an interval.
        """
        from scipy.special import ndtr

        interval = max(schedule.interval_samples, 1e-9)
        crossing = np.exp(np.minimum(ln_samples, 60.0))
        sd = np.maximum(crossing * self.run_sd * self.noise / interval, 1e-3)
        missed = (crossing - schedule.first_samples) / interval
        whole = np.maximum(0.0, np.floor(missed) - WINDOW)  # evals that are missed almost surely
        half = missed + HALF
        smooth = half * ndtr(half / sd) + sd * np.exp(-0.5 * (half / sd) ** 2) / math.sqrt(2 * math.pi)
        after = missed[..., None] - whole[..., None] - np.arange(2 * WINDOW + 1)
        summed = whole + ndtr(after / sd[..., None]).sum(axis=-1)
        return np.asarray(schedule.first_samples + interval * np.where(sd < 1.0, summed, smooth))

    def ln_reference(self, batch: float, schedule: Schedule) -> float:
        """ln of the crossing of the reference mean, half an eval interval before it; -inf without a reference."""
        reference = self.reference_samples(batch) if math.isfinite(batch) else 0.0
        reference -= HALF * schedule.interval_samples
        return math.log(reference) if reference > 0 else -math.inf

    def scored_ln_samples(self, mean: Array, sd: Array, batch: float, schedule: Schedule) -> Array:
        """Expected ln of the scored samples, for ln(mean samples) ~ N(mean, sd^2).

        With a reference R, converging faster is normalised, so samples below R count as R: E max(x, ln R) = ln R +
        (mean - ln R) Phi(d) + sd phi(d), d = (mean - ln R) / sd. The reference is a mean of stops, half an eval
        interval after the crossings that ``mean`` refers to.
        """
        reference = self.ln_reference(batch, schedule)
        if not math.isfinite(reference):
            return mean
        from lora_tune.search.grey_box.gaussian import positive_part

        return reference + positive_part(mean - reference, sd)

    def log_risk(self, mean: Array, sd: Array, total: Array, schedule: Schedule) -> Array:
        """ln of the cost factor of unfinished runs: 1 / p, p from :meth:`finish_probability`; at most ln(50)."""
        return np.asarray(-np.log(np.maximum(self.finish_probability(mean, sd, total, schedule), 0.02)))

    def finish_probability(self, mean: Array, sd: Array, total: Array, schedule: Schedule) -> Array:
        """Probability that a run crosses before its training ends after ``total`` samples (infinite: unknown)."""
        from scipy.special import ndtr

        # Less noise than usual does not justify shorter schedules, since ending too early costs a whole run.
        spread = np.hypot(sd, self.run_sd * max(1.0, self.noise))
        interval = max(schedule.interval_samples, 1e-9)
        evals = np.floor((total - schedule.first_samples) / interval + 1e-9)  # the last of them is the last chance
        usable = np.maximum(schedule.first_samples + evals * interval, 1e-9)
        p = ndtr((np.log(usable) - mean) / spread)
        return np.where(total < schedule.first_samples, 0.0, p)
