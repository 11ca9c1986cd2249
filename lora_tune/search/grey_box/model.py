"""The grey-box model: samples to the target, speed and memory learned apart, put together into a score.

``score = seconds(samples, samples/s, eval seconds)``: convergence is noisy and belongs to learning rate, batch and
schedule; speed is nearly exact and belongs to the layout. Each is a small Gaussian process with a trend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lora_tune.curves import Schedule
from lora_tune.search.fits_in_memory import Needs
from lora_tune.search.grey_box.features import Coordinates, trend
from lora_tune.search.grey_box.gaussian import HERE, Array, Joint, Posterior, condition
from lora_tune.search.grey_box.memory_risk import MemoryRisk, learn_memory
from lora_tune.search.grey_box.objective import HALF, Goal
from lora_tune.search.grey_box.scales import GreyBoxScales, first_scales, fitted
from lora_tune.search.grey_box.training_data import (
    convergence_data,
    pick,
    speed_data,
    with_expected,
    with_expected_speed,
)
from lora_tune.search.observations import Observation, Reading, readings

USUAL_EVAL_SAMPLES = 384.0
"""Samples between evals where neither a study nor a trial says it: those of MLPerf's LoRA."""
INIT_SECONDS = 90.0
"""Start-up of a job before anything of this study was seen (public runs: 43 to 380 s, median 74)."""
OVERSHOOT_WEIGHT = 10.0
"""Runs that the belief in an overshoot of half an interval is worth."""
SPEED_NOISE, EVAL_NOISE = 0.003, 0.01
"""Relative noise of a measured throughput and of measured eval seconds (public runs: 0.14% between runs)."""


@dataclass(frozen=True, kw_only=True)
class SearchModel:
    """Everything believed about a study. Build with :func:`learn`.

    measured: convergence, speed and evals without what is expected of running trials.
    """

    coordinates: Coordinates
    goal: Goal
    observations: tuple[Observation, ...]
    convergence: Posterior
    speed: Posterior
    evals: Posterior
    memory: MemoryRisk
    scales: GreyBoxScales
    init_seconds: float
    curved: tuple[int, ...]
    schedules: Mapping[float, Schedule]
    measured: tuple[Posterior, Posterior, Posterior]

    @property
    def target_known(self) -> bool:
        """Whether a run has reached the target, here or at a source that is believed."""
        return any(math.isfinite(o.reached) for o in self.observations if self.scales.trusted or not o.source)

    def predict_ln_samples(self, values: Sequence[Mapping[str, Any]]) -> tuple[Array, Array]:
        """Mean (n) and covariance (n, n) of ln(mean samples to the target) of configurations."""
        joint = self.ln_samples(values)
        return joint.mean, joint.covariance()

    def ln_samples(self, values: Sequence[Mapping[str, Any]]) -> Joint:
        """The same belief, whose covariances are worked out where they are asked for."""
        x = np.array([self.coordinates.convergence_features(v) for v in values])
        return self.convergence.joint(x, trend(x, self.curved))

    def predict_speed(self, values: Sequence[Mapping[str, Any]]) -> tuple[Array, Array, Array, Array]:
        """ln samples/s and ln eval seconds of configurations: mean (n) and covariance (n, n), first then second."""
        x = np.array([self.coordinates.speed_features(v) for v in values])
        basis = trend(x, ())
        (speed, first), (evals, second) = self.speed.predict(x, basis), self.evals.predict(x, basis)
        return speed, first, evals, second

    def schedule(self, batch: float) -> Schedule:
        """The eval schedule at a batch: the study's rule, or as seen in trials of the same or the nearest batch."""
        if self.goal.schedule is not None and math.isfinite(batch):
            return self.goal.schedule(batch)
        if not self.schedules:
            interval = self.coordinates.eval_interval
            return Schedule(interval, interval) if interval > 0 else Schedule(1.0, 1.0)
        nearest = min(self.schedules, key=lambda b: abs(b - batch) if math.isfinite(b - batch) else 0.0)
        return self.schedules[nearest]

    def block_samples(self, batch: float) -> float:
        """Samples between evals at a batch; the closed division's where neither the study nor a trial says it."""
        if self.goal.schedule is None and not self.schedules and not self.coordinates.eval_interval > 0:
            return USUAL_EVAL_SAMPLES
        return self.schedule(batch).interval_samples


def learn(
    coordinates: Coordinates, goal: Goal, observations: Sequence[Observation], scales: GreyBoxScales | None = None,
    *, needs: Needs | None = None,
) -> SearchModel:  # fmt: skip
    """The model after ``observations``; running trials count as measured with the result expected of them.

    scales: as fitted before; they are fitted anew when readings of ended trials grew by a tenth, at the latest.
    needs: of GPU memory, by physics.
    """
    rate = () if coordinates.rate_feature is None else (coordinates.rate_feature,)
    curved = (*rate, *coordinates.other_features)
    seen = [o for o in observations if _complete(coordinates, o)]
    totals = [coordinates.total_samples(o.values) for o in seen]
    by_run = readings(seen, goal.target, totals, [goal.family(coordinates.batch(o.values)) for o in seen])
    goal = replace(goal, overshoot=_overshoot(seen, by_run))
    base = min((r.ln_samples for r in by_run.values() if not r.below), default=math.log(coordinates.reference_samples))
    here = [o for o in seen if not o.source]
    rates = [(o, o.samples_per_second, o.seconds_per_eval) for o in seen if o.samples_per_second > 0]
    if scales is None:
        scales = first_scales(coordinates, base, [speed for _, speed, _ in rates])
    due = sum(not (seen[at].source or seen[at].open) for at in by_run) + len(rates)
    data = convergence_data(coordinates, curved, seen, by_run)
    speeds = speed_data(coordinates, [(o, s) for o, s, _ in rates], SPEED_NOISE)
    eval_data = speed_data(coordinates, [(o, e) for o, _, e in rates if e > 0], EVAL_NOISE)
    if due > 0 and due > 1.1 * scales.fitted_at:
        scales = fitted(coordinates, base, (data, speeds, eval_data), due)
    if not scales.trusted:
        data = pick(data, np.flatnonzero(data.source == HERE))
    goal = replace(goal, noise=scales.convergence.noise_scale)
    convergence, speed, evals = measured = (
        condition(data, scales.convergence), condition(speeds, scales.speed), condition(eval_data, scales.evals)
    )  # fmt: skip
    if waiting := [o for o in here if o.open]:
        convergence = with_expected(coordinates, curved, convergence, [o for o in waiting if not o.probe])
        speed = with_expected_speed(coordinates, speed, waiting, SPEED_NOISE)
        evals = with_expected_speed(coordinates, evals, waiting, EVAL_NOISE)
    inits = [o.init_seconds for o in here if o.init_seconds > 0]
    return SearchModel(
        coordinates=coordinates, goal=goal, observations=tuple(observations), convergence=convergence, speed=speed,
        evals=evals, memory=learn_memory(coordinates, here, needs), scales=scales,
        init_seconds=float(np.median(inits)) if inits else INIT_SECONDS, curved=curved,
        schedules=_schedules_seen(coordinates, here), measured=measured,
    )  # fmt: skip


def _overshoot(observations: Sequence[Observation], by_run: Mapping[int, Reading]) -> float:
    """Mean eval intervals from the crossing that a run's reading names to the eval that stopped it, here so far.

    Evals are noisy and the first one at the target stops a run, so curves that end there are read as crossing earlier
    than they do, by a percent or so: nothing between configurations, but much against a reference in samples.
    """
    late = []
    for at, r in by_run.items():
        o = observations[at]
        step = o.evals[1].samples - o.evals[0].samples if len(o.evals) > 1 else 0.0
        if step > 0 and math.isfinite(o.reached) and not (r.below or o.source):
            # A reading far from its stop follows a spike or another shape; readings by a family keep to this range.
            late.append(min(3.0, max(-1.0, (o.reached - math.exp(r.ln_samples)) / step)))
    return (OVERSHOOT_WEIGHT * HALF + sum(late)) / (OVERSHOOT_WEIGHT + len(late))


def _complete(coordinates: Coordinates, o: Observation) -> bool:
    """Another source may lack parameters of this study; what concerns convergence must be there."""
    return all(n in o.values for n in coordinates.convergence_names) and (
        not o.source or math.isfinite(coordinates.batch(o.values)) or not coordinates.batches_by_layout
    )


def _schedules_seen(coordinates: Coordinates, own: Sequence[Observation]) -> dict[float, Schedule]:
    """First eval and interval by batch, from the newest curve of each."""
    schedules: dict[float, Schedule] = {}
    for o in own:
        if len(o.evals) >= 2 and not o.probe:
            batch = coordinates.batch(o.values)
            schedules[batch if math.isfinite(batch) else 0.0] = Schedule(
                o.evals[0].samples, o.evals[1].samples - o.evals[0].samples
            )
    return schedules


def as_known(model: SearchModel) -> SearchModel:
    """The same model with nothing expected of running trials beyond what they are now, for recommendations."""
    ended = tuple(o for o in model.observations if not o.open)
    convergence, speed, evals = model.measured
    return replace(model, observations=ended, convergence=convergence, speed=speed, evals=evals)
