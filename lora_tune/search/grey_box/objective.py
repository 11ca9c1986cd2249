"""What a study wants, as arithmetic on the pieces: seconds to the target from samples, speed, evals and the rules."""

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
    from lora_tune.search.grey_box.gaussian import Array  # scipy is loaded when a search begins, not with every command


def closed_schedule(batch: float, benchmark: Benchmark | None = None) -> Schedule:
    """The closed division's eval schedule at a global batch size; of llama2_70b_lora where no benchmark is given.

    Raises ValueError for a benchmark without an eval grid.
    """
    known = benchmark or find_benchmark(LORA)
    schedule = known.eval_schedule(round(batch))
    if schedule is None:
        raise ValueError(f"{known.name} has no eval grid in ruleset {known.ruleset}")
    return schedule


def rcp_mean(batch: float, benchmark: Benchmark | None = None) -> float:
    """Mean samples of the reference convergence point at a global batch size; 0 where there is none."""
    point = (benchmark or find_benchmark(LORA)).reference(round(batch))
    return point.mean if point else 0.0


def no_reference(_batch: float) -> float:
    """No reference convergence point: nothing is taken back for converging early."""
    return 0.0


def no_family(_batch: float) -> Family | None:
    """No published curves."""
    return None


def public_family(batch: float) -> Family | None:
    """The shape of MLPerf Llama-2-70B LoRA curves at a global batch size; None where none was published."""
    envelope = published(batch)
    return envelope.family if envelope else None


HALF = 0.5
"""Eval intervals by which an eval overshoots the crossing on average, were curves and their readings exact."""

WINDOW = 6
"""Evals on either side of the crossing at which a run may pass or miss: six standard deviations of an interval each."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is wanted of a run, and what a run may cost.

    target: eval loss. schedule: evals by global batch size; None: learned from the trials. reference_samples: RCP mean
    by batch, 0 for none (then the score is plain time to target). family: the published shape of curves by batch.
    nodes: of one trial. limit_seconds: after which a trial is stopped. run_sd: spread of ln(samples) between seeds, for
    the risk of not finishing, as usual; noise: how many times as far they scatter in this study.
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
        """ln of the expected seconds from run_start to the stop of runs whose readings scatter about ``ln_samples``.

        Shapes broadcast.
        """
        stop = self.expected_stop(ln_samples, schedule)
        evals = 1.0 + (stop - schedule.first_samples) / max(schedule.interval_samples, 1e-9)
        return np.asarray(np.log(stop / speed + evals * eval_seconds))

    def expected_stop(self, ln_samples: Array, schedule: Schedule) -> Array:
        """Expected samples at the eval that stops a run: the chance to pass at each eval decides.

        A run stops at the first eval after its crossing, and crossings scatter by ``run_sd`` from seed to seed. So
        stop = first + interval * sum over evals k = 0, 1, ... of P(not passed at k), with
        P(not passed at k) = Phi((crossing - first - k interval) / sd). A miss costs a whole interval. Where seeds
        scatter by an interval or more this is the crossing and half an interval.
        """
        from scipy.special import ndtr

        interval = max(schedule.interval_samples, 1e-9)
        crossing = np.exp(np.minimum(ln_samples, 60.0))
        sd = np.maximum(crossing * self.run_sd * self.noise / interval, 1e-3)
        missed = (crossing - schedule.first_samples) / interval
        whole = np.maximum(0.0, np.floor(missed) - WINDOW)  # evals that are as good as surely missed
        half = missed + HALF
        smooth = half * ndtr(half / sd) + sd * np.exp(-0.5 * (half / sd) ** 2) / math.sqrt(2 * math.pi)
        after = missed[..., None] - whole[..., None] - np.arange(2 * WINDOW + 1)
        summed = whole + ndtr(after / sd[..., None]).sum(axis=-1)
        return np.asarray(schedule.first_samples + interval * np.where(sd < 1.0, summed, smooth))

    def ln_reference(self, batch: float, schedule: Schedule) -> float:
        """ln of the reference mean as a crossing, half an eval interval before; -inf where there is none."""
        reference = self.reference_samples(batch) if math.isfinite(batch) else 0.0
        reference -= HALF * schedule.interval_samples
        return math.log(reference) if reference > 0 else -math.inf

    def scored_ln_samples(self, mean: Array, sd: Array, batch: float, schedule: Schedule) -> Array:
        """Expected ln of the samples that the score counts, for a belief N(mean, sd) of ln(mean samples).

        With a reference, converging below its mean R is taken back, so samples below R count as R:
        E max(x, ln R) = ln R + (mean - ln R) Phi(d) + sd phi(d), d = (mean - ln R) / sd. The reference is a mean of
        stops, half an eval interval after the crossings that the belief is about.
        """
        reference = self.ln_reference(batch, schedule)
        if not math.isfinite(reference):
            return mean
        from lora_tune.search.grey_box.gaussian import positive_part

        return reference + positive_part(mean - reference, sd)

    def log_risk(self, mean: Array, sd: Array, total: Array, schedule: Schedule) -> Array:
        """ln of the factor that unfinished runs cost: 1 / p, p from :meth:`finish_probability`; at most ln(50)."""
        return np.asarray(-np.log(np.maximum(self.finish_probability(mean, sd, total, schedule), 0.02)))

    def finish_probability(self, mean: Array, sd: Array, total: Array, schedule: Schedule) -> Array:
        """Chance that a run crosses before its training ends after ``total`` samples (infinite: unknown)."""
        from scipy.special import ndtr

        # Quieter seeds than usual are no reason to cut schedules finer: what a late end costs is a whole run.
        spread = np.hypot(sd, self.run_sd * max(1.0, self.noise))
        interval = max(schedule.interval_samples, 1e-9)
        evals = np.floor((total - schedule.first_samples) / interval + 1e-9)  # of which the last is the last chance
        usable = np.maximum(schedule.first_samples + evals * interval, 1e-9)
        p = ndtr((np.log(usable) - mean) / spread)
        return np.where(total < schedule.first_samples, 0.0, p)
