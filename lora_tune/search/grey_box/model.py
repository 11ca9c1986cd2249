"""The grey-box model: separate models of samples to the target, speed and memory, combined into a score.

``score = seconds(samples, samples/s, eval seconds)``. Convergence is noisy and depends on learning rate, batch and
schedule; speed has almost no noise and depends on the layout. Each is a small Gaussian process with a trend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from lora_tune.base.scatter import SEED_SD
from lora_tune.curves import Schedule
from lora_tune.search.grey_box.features import (
    LONGEST_WARMUP,
    Coordinates,
    alike_once,
    from_unit,
    has_feature,
    trend,
    unit,
)
from lora_tune.search.grey_box.gaussian import (
    THIS_STUDY,
    Array,
    Data,
    Joint,
    Posterior,
    Prior,
    condition,
    log_evidence,
    repeated_noise,
)
from lora_tune.search.grey_box.memory import MemoryPhysics, MemoryRisk, learn_memory
from lora_tune.search.grey_box.objective import Goal
from lora_tune.search.observations import Observation, Reading, readings
from lora_tune.search.usual_names import BATCH, RATE, STEPS

# Training data of the three Gaussian processes: feature rows with their readings.


LARGEST = 400
"""Maximum number of readings in a model; beyond, an even subset."""
GOLDEN = 0.5 * (math.sqrt(5) - 1)


def convergence_data(
    coordinates: Coordinates,
    curved: tuple[int, ...],
    observations: Sequence[Observation],
    readings: Mapping[int, Reading],
) -> Data:
    """One row per reading in ``readings``, which is keyed by position in ``observations``."""
    numbers = {name: n for n, name in enumerate(dict.fromkeys(["", *(o.source for o in observations)]))}
    places = list(readings)
    source = np.array([numbers[observations[at].source] for at in places], dtype=np.int64)
    keep = chosen(source, LARGEST)
    kept = [readings[places[row]] for row in keep]
    x = np.array([coordinates.convergence_features(observations[places[row]].values) for row in keep]).reshape(
        len(keep), coordinates.convergence_width
    )
    return Data(
        x=x, basis=trend(x, curved), y=np.array([r.ln_samples for r in kept]), sd=np.array([r.sd for r in kept]),
        source=source[keep], below=np.array([r.below for r in kept], dtype=np.bool_),
        extended=np.array([r.extended for r in kept]),
    )  # fmt: skip


def speed_data(coordinates: Coordinates, pairs: Sequence[tuple[Observation, float]], noise: float) -> Data:
    """ln of a speed per distinct layout: the median of its readings."""
    by_row: dict[tuple[float, ...], list[float]] = {}
    names = frozenset(coordinates.speed_names)
    local = [(o.values, value) for o, value in pairs if not o.source and names <= o.values.keys()]
    rows = alike_once(coordinates, coordinates.speed_features, [values for values, _ in local])
    for row, (_, value) in zip(rows, local, strict=True):
        by_row.setdefault(tuple(row), []).append(math.log(value))
    x = np.array(list(by_row)).reshape(len(by_row), len(coordinates.speed_labels))
    y = np.array([float(np.median(v)) for v in by_row.values()])
    return Data.local(x, trend(x, ()), y, noise)


def thinned(data: Data, largest: int) -> Data:
    """At most ``largest`` rows of ``data``, selected by :func:`chosen`."""
    return data if len(data.y) <= largest else data.rows(chosen(data.source, largest))


def chosen(source: npt.NDArray[np.int64], largest: int) -> npt.NDArray[np.int64]:
    """Indices of at most ``largest`` rows with these sources (n): this study's first, but at most half if others have
    enough.

    Never selected by ``y``: the lowest of noisy readings are the luckiest, agree with one another, and make the noise
    look small. Multiples of the golden ratio spread the selection evenly and keep most of it as rows are added.
    """
    if len(source) <= largest:
        return np.arange(len(source))
    local, others = np.flatnonzero(source == THIS_STUDY), np.flatnonzero(source != THIS_STUDY)
    share = max(largest - len(others), largest // 2)
    local = local[np.argsort(np.arange(len(local)) * GOLDEN % 1)[:share]]
    others = others[np.argsort(np.arange(len(others)) * GOLDEN % 1)[: largest - len(local)]]
    return np.sort(np.r_[local, others])


def with_fantasies(
    coordinates: Coordinates, curved: tuple[int, ...], posterior: Posterior, waiting: Sequence[Observation]
) -> Posterior:
    """The convergence posterior with running trials at their expected results."""
    if not waiting:
        return posterior
    x = np.array([coordinates.convergence_features(o.values) for o in waiting])
    return _as_if_measured(posterior, x, trend(x, curved), SEED_SD)


def with_expected_speed(
    coordinates: Coordinates, posterior: Posterior, waiting: Sequence[Observation], noise: float
) -> Posterior:
    """The posterior of a speed with running trials at their expected speed and this relative ``noise``."""
    rows = list(dict.fromkeys(tuple(coordinates.speed_features(o.values)) for o in waiting))
    return _as_if_measured(posterior, np.array(rows), trend(np.array(rows), ()), noise)


def _as_if_measured(posterior: Posterior, x: Array, basis: Array, sd: float) -> Posterior:
    """The posterior with ``x`` observed at its mean, which reduces the variance there."""
    expected = Data.local(x, basis, posterior.joint(x, basis).mean, sd)
    return condition(posterior.data.beside(expected), posterior.prior)


# Parameters that other sources do not state.


ASSUMED_SD = 0.1
"""Sd in ln(samples) per unstated parameter of a source."""

DESCRIBED = (*RATE, *STEPS, "WARMUP_STEPS", *BATCH)
"""Parameters that a source must state, since their effect is too large to be assumed."""


def filled_in(o: Observation, deciding: Mapping[str, BaseDistribution], defaults: Mapping[str, Any]) -> Observation:
    """A source's observation with unstated parameters at ``defaults``, else at the middle of a range or the first
    category.

    deciding: parameters that affect convergence. Each assumed value adds to the reading's sd (attribute
    ``assumed_sd``). A category that this study does not offer counts as unstated.
    """
    values = {n: v for n, v in o.values.items() if n not in deciding or has_feature(deciding[n], v)}
    missing = {n: d for n, d in deciding.items() if n not in values and n.upper() not in DESCRIBED}
    if not missing:
        return replace(o, values=values)
    known = {n: defaults[n] for n in missing if n in defaults}
    assumed = {
        n: d.choices[0] if isinstance(d, CategoricalDistribution) else from_unit(d, 0.0)
        for n, d in missing.items()
        if n not in known
    }
    sd = {"assumed_sd": ASSUMED_SD * math.sqrt(len(assumed))}
    return replace(o, values={**values, **known, **assumed}, attributes={**o.attributes, **sd})


# Priors of samples to the target and of speed, and their smoothness.


OCTAVES = math.log(4)
"""Unit of learning rate, batch and schedule in the smooth residual: two octaves."""
WARMUP_COST = 0.35
"""Prior delay of the crossing, as a share of the warm-up samples, with an equal sd: in three tables of real trials 0.3
to 0.45 at every batch, warm-up and schedule (``python -m benchmarks.tables``)."""
MOST_WARMUP_COST = 1.0
"""Maximum prior ln(samples) per unit of the warm-up feature, for schedules far longer than runs."""

BEND, BEND_SD, SLOPE_SD = 0.08, 0.08, 0.15
"""Prior ln(samples) that other numbers (weight decay, betas, rank, dropout) cost at half a range from the best value,
its sd, and the sd of the slope, i.e. of the best value."""
SMOOTH = 0.35
"""Relevance of such a number in the smooth residual: at 1, with six of them, every new point would be unknown."""

LORA_RATE = 10.0
"""Ratio of LoRA's best learning rate to that of full fine-tuning, nearly independent of rank, adapters on all linear
layers: Schulman et al., LoRA Without Regret (thinkingmachines.ai/blog/lora, 2025)."""
RATE_SD = math.log(3)
"""Sd of its logarithm: short runs there gave about 15, and the rate of full fine-tuning is known only roughly."""

_SPEED_PRIOR: Mapping[str, tuple[float, float]] = {
    "tp": (-0.12, 0.12), "cp": (-0.12, 0.12), "pp": (-0.08, 0.12), "mbs": (0.02, 0.05), "vp": (0.0, 0.05),
    "bubble": (-1.0, 0.3), "micro": (0.0, 0.1), "sp": (0.02, 0.05), "FP8": (0.15, 0.1), "TP_COMM_OVERLAP": (0.03, 0.05),
    "FP8_PARAMS": (0.0, 0.03), "FP8_ACT": (0.0, 0.03), "RECOMPUTE_GRANULARITY=full": (-0.2, 0.15),
    "nodes": (0.62, 0.15),
}  # fmt: skip
"""Prior of ln samples/s per feature, mean and sd: cost of model parallelism (public H100 figures: -0.18 per doubling of
TP or CP).

Twice the nodes are 1.6 to 2.1 times as fast. Switches are at -1 and 1: FP8 at the 70B shape takes 0.7 of the time of
bf16 on four H200, recomputation costs up to a third of the time (the forward pass again), overlap gave 2 and 15%
(sweeps/records).
"""
_EVAL_PRIOR: Mapping[str, tuple[float, float]] = {
    "tp": (0.3, 0.3), "cp": (0.4, 0.3), "pp": (0.6, 0.4), "mbs": (0.0, 0.1), "vp": (0.0, 0.1),
    "bubble": (0.0, 0.3), "micro": (0.0, 0.1), "sp": (0.0, 0.1),
}  # fmt: skip


def convergence_prior(coordinates: Coordinates, base_level: float) -> Prior:
    """Weak prior of ln(samples): a valley over the learning rate, more samples for larger batches and warm-up."""
    rate = coordinates.rate_feature
    width = coordinates.convergence_width
    mean, sd = np.zeros(1 + width), np.full(1 + width, 0.4)
    mean[0], sd[0] = base_level, 1.0
    mean[-1], sd[-1] = 0.5, 0.5  # per two doublings of the batch; public: 0.4
    if (warmup := coordinates.warmup_feature) is not None:
        per_unit = 0.5 * LONGEST_WARMUP * coordinates.reference_samples / math.exp(base_level)
        warmup_cost = min(MOST_WARMUP_COST, WARMUP_COST * per_unit)
        mean[0] += warmup_cost  # the feature is -1 without warm-up
        mean[1 + warmup], sd[1 + warmup] = warmup_cost, warmup_cost
    curve_mean, curve_sd = [], []
    if rate is not None:
        half = _half_range(coordinates)
        # Curvature 0.5 +- 0.2 per squared e-fold: samples double at 1.7 e-folds from the best rate.
        curve_mean, curve_sd = [0.25 * half**2], [0.1 * half**2]
        place, slope_sd = _best_rate(coordinates, half)
        mean[0] += curve_mean[0] * place**2
        mean[1 + rate], sd[1 + rate] = -2 * curve_mean[0] * place, slope_sd
    weights = np.ones(width)
    weights[-1] = 0.7
    if rate is not None:
        # In units of two octaves, like batch and schedule, so that the smoothness does not depend on the searched
        # range. In half a three-decade range the residual could not bend within a factor of eight.
        weights[rate] = _half_range(coordinates) / OCTAVES
    for column, centre in coordinates.other_features.items():
        # BEND (x - centre)^2 as linear and quadratic terms: the values of the user or the published results are good
        # ones.
        mean[0] += BEND * centre**2
        mean[1 + column], sd[1 + column] = -2 * BEND * centre, SLOPE_SD
        curve_mean.append(BEND)
        curve_sd.append(BEND_SD)
        weights[column] = SMOOTH
    return Prior(
        mean=np.r_[mean, curve_mean],
        sd=np.r_[sd, curve_sd],
        amplitude=0.15,
        length=0.6,
        shift=0.1,
        departure=0.06,
        weights=weights,
    )


def _best_rate(coordinates: Coordinates, half: float) -> tuple[float, float]:
    """Prior location of the best rate in its range, from -1 to 1, and the sd of the slope.

    half: of the range in e-folds. Without a stated rate one sd is half a range to either side of the middle.
    """
    anywhere, stated, rates = max(0.3, 0.25 * half**2), coordinates.full_fine_tuning_lr, _rates(coordinates)
    if stated is None or rates is None:
        return 0.0, anywhere
    expected = min(max(LORA_RATE * stated, rates.low), rates.high)
    return unit(rates, expected), min(anywhere, 0.5 * half * RATE_SD)


def _half_range(coordinates: Coordinates) -> float:
    """Half of the learning rate's range in e-folds."""
    rates = _rates(coordinates)
    return 1.0 if rates is None or not rates.low > 0 else max(0.05, 0.5 * math.log(rates.high / rates.low))


def _rates(coordinates: Coordinates) -> FloatDistribution | None:
    spread = (d for name, d in coordinates.distributions.items() if name.upper() in RATE)
    return next((d for d in spread if isinstance(d, FloatDistribution)), None)


def speed_prior(labels: Sequence[str], level: float) -> Prior:
    """Prior of ln(samples/s) over speed features with these labels; ``level``: of an average layout."""
    return _by_label(labels, _SPEED_PRIOR, level)


def eval_prior(labels: Sequence[str], level: float) -> Prior:
    """The same for ln(seconds per eval)."""
    return _by_label(labels, _EVAL_PRIOR, level)


def _by_label(labels: Sequence[str], beliefs: Mapping[str, tuple[float, float]], level: float) -> Prior:
    pairs = [beliefs.get(label, (0.0, 0.2)) for label in labels]
    return Prior(
        mean=np.array([level, *(m for m, _ in pairs)]), sd=np.array([1.5, *(s for _, s in pairs)]),
        amplitude=0.04, length=1.5, shift=0.03, departure=0.03, weights=np.ones(len(labels)),
    )  # fmt: skip


CONTRADICTION = 3.0
"""ln of the prior odds that other sources are consistent with this study: 20 to 1."""
FEWEST = 3
"""This study's readings required before other sources may be dropped: one unlucky run does not outweigh a hundred."""


def _others_agree(data: Data, prior: Prior) -> bool:
    """Whether other sources are used, by the Bayes factor of this study's readings with and without theirs.

    ln p(own | others) = ln p(own, others) - ln p(others) against ln p(own); dropped if it is lower by more than
    ``CONTRADICTION``.
    """
    local, others = np.flatnonzero(data.source == THIS_STUDY), np.flatnonzero(data.source != THIS_STUDY)
    if len(local) < FEWEST or not len(others):
        return True
    joint = log_evidence(data, prior) - log_evidence(data.rows(others), prior)
    return joint > log_evidence(data.rows(local), prior) - CONTRADICTION


USUAL_EVAL_SAMPLES = 384.0
"""Default samples between evals: those of MLPerf's LoRA."""
INIT_SECONDS = 90.0
"""Start-up of a job before this study has measured it (public runs: 43 to 380 s, median 74)."""
SPEED_NOISE, EVAL_NOISE = 0.003, 0.01
"""Relative noise of a measured throughput and of measured eval seconds (public runs: 0.14% between runs)."""


@dataclass(frozen=True, kw_only=True)
class SearchModel:
    """The complete model of a study. Build with :func:`learn`.

    trusted: whether other sources' readings are used; they are dropped once they contradict this study's own. measured:
    convergence, speed and evals without expected results of running trials.
    """

    coordinates: Coordinates
    goal: Goal
    observations: tuple[Observation, ...]
    convergence: Posterior
    speed: Posterior
    evals: Posterior
    memory: MemoryRisk
    trusted: bool
    init_seconds: float
    curved: tuple[int, ...]
    schedules: Mapping[float, Schedule]
    measured: tuple[Posterior, Posterior, Posterior]

    @property
    def target_known(self) -> bool:
        """Whether a run has reached the target, here or at a trusted source."""
        return any(math.isfinite(o.reached) for o in self.observations if self.trusted or not o.source)

    def predict_ln_samples(self, values: Sequence[Mapping[str, Any]]) -> tuple[Array, Array]:
        """Mean (n) and covariance (n, n) of ln(mean samples to the target) of configurations."""
        joint = self.ln_samples(values)
        return joint.mean, joint.covariance()

    def ln_samples(self, values: Sequence[Mapping[str, Any]]) -> Joint:
        """The same posterior with covariances on demand."""
        x = np.array([self.coordinates.convergence_features(v) for v in values])
        return self.convergence.joint(x, trend(x, self.curved))

    def predict_speed(self, values: Sequence[Mapping[str, Any]]) -> tuple[Array, Array, Array, Array]:
        """ln samples/s, then ln eval seconds, of configurations: mean (n) and covariance (n, n) each."""
        x = np.array([self.coordinates.speed_features(v) for v in values])
        basis = trend(x, ())
        (speed, first), (evals, second) = self.speed.predict(x, basis), self.evals.predict(x, basis)
        return speed, first, evals, second

    def schedule(self, batch: float) -> Schedule:
        """The eval schedule at a batch: the study's rule, or that of trials with the same or the nearest batch."""
        if self.goal.schedule is not None and math.isfinite(batch):
            return self.goal.schedule(batch)
        if not self.schedules:
            interval = self.coordinates.eval_interval
            return Schedule(interval, interval) if interval > 0 else Schedule(1.0, 1.0)
        nearest = min(self.schedules, key=lambda b: abs(b - batch) if math.isfinite(b - batch) else 0.0)
        return self.schedules[nearest]

    def block_samples(self, batch: float) -> float:
        """Samples between evals at a batch; by default the closed division's."""
        if self.goal.schedule is None and not self.schedules and not self.coordinates.eval_interval > 0:
            return USUAL_EVAL_SAMPLES
        return self.schedule(batch).interval_samples


def learn(
    coordinates: Coordinates, goal: Goal, observations: Sequence[Observation], *, needs: MemoryPhysics | None = None
) -> SearchModel:
    """Fit the model to ``observations``; running trials count with their expected result.

    needs: memory model.
    """
    rate = () if coordinates.rate_feature is None else (coordinates.rate_feature,)
    curved = (*rate, *coordinates.other_features)
    usable = [o for o in observations if _complete(coordinates, o)]
    totals = [coordinates.total_samples(o.values) for o in usable]
    by_run = readings(usable, goal.target, totals, [goal.family(coordinates.batch(o.values)) for o in usable])
    base = min((r.ln_samples for r in by_run.values() if not r.below), default=math.log(coordinates.reference_samples))
    local = [o for o in usable if not o.source]
    rates = [(o, o.samples_per_second, o.seconds_per_eval) for o in usable if o.samples_per_second > 0]
    data = convergence_data(coordinates, curved, usable, by_run)
    speeds = speed_data(coordinates, [(o, s) for o, s, _ in rates], SPEED_NOISE)
    eval_data = speed_data(coordinates, [(o, e) for o, _, e in rates if e > 0], EVAL_NOISE)
    prior = replace(convergence_prior(coordinates, base), noise_scale=repeated_noise(data))
    if not (trusted := _others_agree(thinned(data, 120), prior)):
        data = data.rows(np.flatnonzero(data.source == THIS_STUDY))
    goal = replace(goal, noise=prior.noise_scale)
    level, eval_level = (float(np.median(d.y)) if len(d.y) else 0.0 for d in (speeds, eval_data))
    labels = coordinates.speed_labels
    convergence, speed, evals = measured = (
        condition(data, prior),
        condition(speeds, speed_prior(labels, level)),
        condition(eval_data, eval_prior(labels, eval_level)),
    )
    if waiting := [o for o in local if o.open]:
        convergence = with_fantasies(coordinates, curved, convergence, [o for o in waiting if not o.probe])
        speed = with_expected_speed(coordinates, speed, waiting, SPEED_NOISE)
        evals = with_expected_speed(coordinates, evals, waiting, EVAL_NOISE)
    inits = [o.init_seconds for o in local if o.init_seconds > 0]
    return SearchModel(
        coordinates=coordinates, goal=goal, observations=tuple(observations), convergence=convergence, speed=speed,
        evals=evals, memory=learn_memory(coordinates, local, needs), trusted=trusted,
        init_seconds=float(np.median(inits)) if inits else INIT_SECONDS, curved=curved,
        schedules=_schedules(coordinates, local), measured=measured,
    )  # fmt: skip


def _complete(coordinates: Coordinates, o: Observation) -> bool:
    """Whether an observation has the required parameters: other sources may lack speed parameters, not those of
    convergence."""
    return all(n in o.values for n in coordinates.convergence_names) and (
        not o.source or math.isfinite(coordinates.batch(o.values)) or not coordinates.batches_by_layout
    )


def _schedules(coordinates: Coordinates, local: Sequence[Observation]) -> dict[float, Schedule]:
    """First eval and interval by batch, from the newest curve of each."""
    schedules: dict[float, Schedule] = {}
    for o in local:
        if len(o.evals) >= 2 and not o.probe:
            batch = coordinates.batch(o.values)
            schedules[batch if math.isfinite(batch) else 0.0] = Schedule(
                o.evals[0].samples, o.evals[1].samples - o.evals[0].samples
            )
    return schedules


def without_pending(model: SearchModel) -> SearchModel:
    """The model without expected results of running trials, for recommendations."""
    ended = tuple(o for o in model.observations if not o.open)
    convergence, speed, evals = model.measured
    return replace(model, observations=ended, convergence=convergence, speed=speed, evals=evals)
