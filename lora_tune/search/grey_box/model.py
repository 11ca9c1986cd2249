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
import numpy.typing as npt

from lora_tune.curves import Schedule
from lora_tune.search.grey_box import memory
from lora_tune.search.grey_box.features import Coordinates, trend
from lora_tune.search.grey_box.gaussian import HERE, Array, Data, Posterior, Prior, condition, fit, repeated_noise
from lora_tune.search.grey_box.memory import MemoryModel
from lora_tune.search.grey_box.objective import HALF, Goal
from lora_tune.search.grey_box.weak_priors import convergence_prior, eval_prior, scale_belief, speed_prior
from lora_tune.search.observations import SEED_SD, Observation, Reading, readings

USUAL_EVAL_SAMPLES = 384.0
"""Samples between evals where neither a study nor a trial says it: those of MLPerf's LoRA."""
INIT_SECONDS = 90.0
"""Start-up of a job before anything of this study was seen (public runs: 43 to 380 s, median 74)."""
DOUBT = 3.0
"""ln of the odds by which other sources are believed before anything was seen: 20 to 1."""
FEWEST = 3
"""This study's own readings before other sources may be set aside: one unlucky run is no evidence against a hundred."""
OVERSHOOT_WEIGHT = 10.0
"""Runs that the belief in an overshoot of half an interval is worth."""
LARGEST = 400
"""Readings that a model keeps; beyond, an even choice of them."""
GOLDEN = 0.5 * (math.sqrt(5) - 1)
SPEED_NOISE, EVAL_NOISE = 0.003, 0.01
"""Relative noise of a measured throughput and of measured eval seconds (public runs: 0.14% between runs)."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Scales of the three models after fitting, kept between asks so that they are fitted rarely.

    trusted: whether other sources' readings are used; they are set aside once they contradict this study's own.
    """

    convergence: Prior
    speed: Prior
    evals: Prior
    trusted: bool = True
    fitted_at: int = -1


@dataclass(frozen=True, kw_only=True)
class SearchModel:
    """Everything believed about a study. Build with :func:`learn`."""

    coordinates: Coordinates
    goal: Goal
    observations: tuple[Observation, ...]
    convergence: Posterior
    speed: Posterior
    evals: Posterior
    memory: MemoryModel
    scales: Scales
    init_seconds: float
    curved: tuple[int, ...]
    schedules: Mapping[float, Schedule]

    @property
    def target_known(self) -> bool:
        """Whether a run has reached the target, here or at a source that is believed."""
        return any(math.isfinite(o.reached) for o in self.observations if self.scales.trusted or not o.source)

    def predict_ln_samples(self, values: Sequence[Mapping[str, Any]]) -> tuple[Array, Array]:
        """Mean (n) and covariance (n, n) of ln(mean samples to the target) of configurations."""
        x = np.array([self.coordinates.convergence_features(v) for v in values])
        return self.convergence.predict(x, trend(x, self.curved))

    def predict_speed(self, values: Sequence[Mapping[str, Any]]) -> tuple[Array, Array, Array, Array]:
        """ln samples/s and ln eval seconds of configurations: mean (n) and covariance (n, n), first then second."""
        x = np.array([self.coordinates.speed_features(v) for v in values])
        basis = trend(x, ())
        (speed, first), (evals, second) = self.speed.predict(x, basis), self.evals.predict(x, basis)
        return speed, first, evals, second

    def draw_deaths(self, values: Sequence[Mapping[str, Any]], rng: np.random.Generator, draws: int) -> Array:
        """Death rates of configurations (n, draws) as the belief has them, jointly."""
        return self.memory.draws(np.array([self.coordinates.memory_features(v) for v in values]), rng, draws)

    def oom_probability(self, values: Sequence[Mapping[str, Any]]) -> tuple[Array, Array]:
        """Chance that each configuration dies of memory, now and after one survival."""
        x = np.array([self.coordinates.memory_features(v) for v in values])
        p, weight = self.memory.probability(x), self.memory.weight(x)
        return p, p * weight / (weight + 1)

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
    coordinates: Coordinates, goal: Goal, observations: Sequence[Observation], scales: Scales | None = None,
    *, ahead: bool = True,
) -> SearchModel:  # fmt: skip
    """The model after ``observations``.

    scales: as fitted before; they are fitted anew when readings of ended trials grew by a tenth, at the latest.
    ahead: running trials count as measured with the result expected of them, too.
    """
    rate = () if coordinates.rate_feature is None else (coordinates.rate_feature,)
    curved = (*rate, *coordinates.other_features)
    seen = [o for o in observations if _complete(coordinates, o)]
    totals = [coordinates.total_samples(o.values) for o in seen]
    found = readings(seen, goal.target, totals, [goal.family(coordinates.batch(o.values)) for o in seen])
    goal = replace(goal, overshoot=_overshoot(seen, found))
    base = min((r.ln_samples for r in found.values() if not r.below), default=math.log(coordinates.reference_samples))
    labels = coordinates.speed_labels
    here = [o for o in seen if not o.source]
    rates = [(o, o.samples_per_second, o.seconds_per_eval) for o in seen if o.samples_per_second > 0]
    if scales is None:
        level = float(np.median([math.log(s) for _, s, _ in rates])) if rates else 0.0
        scales = Scales(
            convergence=convergence_prior(coordinates, base),
            speed=speed_prior(labels, level),
            evals=eval_prior(labels, level),
        )
    due = sum(not (seen[at].source or seen[at].open) for at in found) + len(rates)
    data = _convergence_data(coordinates, curved, seen, found)
    speed_data = _speed_data(coordinates, [(o, s) for o, s, _ in rates], SPEED_NOISE)
    eval_data = _speed_data(coordinates, [(o, e) for o, _, e in rates if e > 0], EVAL_NOISE)
    if due > 0 and due > 1.1 * scales.fitted_at:
        scales = _fitted(coordinates, base, (data, speed_data, eval_data), due)
    if not scales.trusted:
        data = _pick(data, np.flatnonzero(data.source == HERE))
    goal = replace(goal, noise=scales.convergence.noise_scale)
    convergence, speed, evals = (
        condition(data, scales.convergence), condition(speed_data, scales.speed), condition(eval_data, scales.evals)
    )  # fmt: skip
    waiting = [o for o in here if o.open] if ahead else []
    if waiting:
        convergence = _with_expected(coordinates, curved, convergence, [o for o in waiting if not o.probe])
        speed = _with_expected_speed(coordinates, speed, waiting, SPEED_NOISE)
        evals = _with_expected_speed(coordinates, evals, waiting, EVAL_NOISE)
    tested = [o for o in here if o.ran or o.infeasible]
    names = coordinates.memory_labels
    x = np.array([coordinates.memory_features(o.values) for o in tested]).reshape(len(tested), len(names))
    inits = [o.init_seconds for o in here if o.init_seconds > 0]
    return SearchModel(
        coordinates=coordinates, goal=goal, observations=tuple(observations), convergence=convergence, speed=speed,
        evals=evals, memory=memory.fit(x, [o.infeasible for o in tested], names), scales=scales,
        init_seconds=float(np.median(inits)) if inits else INIT_SECONDS, curved=curved,
        schedules=_schedules_seen(coordinates, here),
    )  # fmt: skip


def _overshoot(seen: Sequence[Observation], found: Mapping[int, Reading]) -> float:
    """Mean eval intervals from the crossing that a run's reading names to the eval that stopped it, here so far.

    Evals are noisy and the first one at the target stops a run, so curves that end there are read as crossing earlier
    than they do, by a percent or so: nothing between configurations, but much against a reference in samples.
    """
    late = []
    for at, r in found.items():
        o = seen[at]
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


def _fitted(coordinates: Coordinates, base: float, data: tuple[Data, Data, Data], due: int) -> Scales:
    labels = coordinates.speed_labels
    _, speed_data, eval_data = data
    level, eval_level = (float(np.median(d.y)) if len(d.y) else 0.0 for d in (speed_data, eval_data))
    starts = (
        convergence_prior(coordinates, base),
        speed_prior(labels, level),
        eval_prior(labels, eval_level),
    )
    starts = (replace(starts[0], noise_scale=repeated_noise(data[0])), *starts[1:])
    moved = [fit(thinned(d, 120), s, scale_belief(s)) if len(d.y) > 2 else s for d, s in zip(data, starts, strict=True)]
    convergence, trusted = _weighed(thinned(data[0], 120), moved[0], starts[0])
    return Scales(convergence=convergence, speed=moved[1], evals=moved[2], trusted=trusted, fitted_at=due)


def _weighed(data: Data, together: Prior, start: Prior) -> tuple[Prior, bool]:
    """The prior to use, and whether other sources are: by the Bayes factor for this study's readings given theirs.

    ln p(own | others) = ln p(own, others) - ln p(others) against ln p(own); they are believed unless that is worse by
    more than ``DOUBT``.
    """
    own, others = np.flatnonzero(data.source == HERE), np.flatnonzero(data.source != HERE)
    if len(own) < FEWEST or not len(others):
        return together, True
    alone = fit(_pick(data, own), start, scale_belief(start))
    believed = scale_belief(start)
    apart = condition(_pick(data, own), alone).log_evidence + believed(alone)
    joint = condition(data, together).log_evidence + believed(together)
    joint -= condition(_pick(data, others), together).log_evidence
    return (together, True) if joint > apart - DOUBT else (alone, False)


def _convergence_data(
    coordinates: Coordinates, curved: tuple[int, ...], seen: Sequence[Observation], found: Mapping[int, Reading]
) -> Data:
    width = coordinates.convergence_width
    x = np.array([coordinates.convergence_features(seen[at].values) for at in found]).reshape(len(found), width)
    numbers = {name: n for n, name in enumerate(dict.fromkeys(["", *(o.source for o in seen)]))}
    data = Data(
        x=x, basis=trend(x, curved),
        y=np.array([r.ln_samples for r in found.values()]), sd=np.array([r.sd for r in found.values()]),
        source=np.array([numbers[seen[at].source] for at in found], dtype=np.int64),
        below=np.array([r.below for r in found.values()], dtype=np.bool_),
        extended=np.array([r.extended for r in found.values()]),
    )  # fmt: skip
    return thinned(data, LARGEST)


def _speed_data(coordinates: Coordinates, pairs: Sequence[tuple[Observation, float]], noise: float) -> Data:
    """ln of a speed per distinct layout: the median of its readings."""
    by_row: dict[tuple[float, ...], list[float]] = {}
    for o, value in pairs:
        if not o.source and all(n in o.values for n in coordinates.speed_names):
            by_row.setdefault(tuple(coordinates.speed_features(o.values)), []).append(math.log(value))
    x = np.array(list(by_row)).reshape(len(by_row), len(coordinates.speed_labels))
    return Data(
        x=x, basis=trend(x, ()), y=np.array([float(np.median(v)) for v in by_row.values()]),
        sd=np.full(len(by_row), noise), source=np.full(len(by_row), HERE, dtype=np.int64),
        below=np.zeros(len(by_row), dtype=np.bool_), extended=np.zeros(len(by_row)),
    )  # fmt: skip


def _pick(data: Data, keep: npt.NDArray[np.int64]) -> Data:
    """Some rows."""
    return Data(
        x=data.x[keep], basis=data.basis[keep], y=data.y[keep], sd=data.sd[keep], source=data.source[keep],
        below=data.below[keep], extended=data.extended[keep],
    )  # fmt: skip


def thinned(data: Data, largest: int) -> Data:
    """At most ``largest`` rows: this study's first, and half of them where other sources have as many to give.

    Never chosen by ``y``: the lowest readings of a noisy quantity are its luckiest, agree with one another, and make
    the noise seem small. Multiples of the golden section spread over the rows evenly, and as rows are added most stay.
    """
    if len(data.y) <= largest:
        return data
    own, others = np.flatnonzero(data.source == HERE), np.flatnonzero(data.source != HERE)
    share = max(largest - len(others), largest // 2)
    own = own[np.argsort(np.arange(len(own)) * GOLDEN % 1)[:share]]
    others = others[np.argsort(np.arange(len(others)) * GOLDEN % 1)[: largest - len(own)]]
    return _pick(data, np.sort(np.r_[own, others]))


def _with_expected(
    coordinates: Coordinates, curved: tuple[int, ...], posterior: Posterior, waiting: Sequence[Observation]
) -> Posterior:
    if not waiting:
        return posterior
    x = np.array([coordinates.convergence_features(o.values) for o in waiting])
    return _as_if_measured(posterior, x, trend(x, curved), SEED_SD)


def _with_expected_speed(
    coordinates: Coordinates, posterior: Posterior, waiting: Sequence[Observation], noise: float
) -> Posterior:
    rows = list(dict.fromkeys(tuple(coordinates.speed_features(o.values)) for o in waiting))
    return _as_if_measured(posterior, np.array(rows), trend(np.array(rows), ()), noise)


def _as_if_measured(posterior: Posterior, x: Array, basis: Array, sd: float) -> Posterior:
    """The posterior as if ``x`` had been measured with the mean outcome: less is to be learned there."""
    mean, _ = posterior.predict(x, basis)
    old = posterior.data
    data = Data(
        x=np.r_[old.x, x], basis=np.r_[old.basis, basis], y=np.r_[old.y, mean], sd=np.r_[old.sd, np.full(len(x), sd)],
        source=np.r_[old.source, np.full(len(x), HERE, dtype=np.int64)],
        below=np.r_[old.below, np.zeros(len(x), dtype=np.bool_)],
        extended=np.r_[old.extended, np.zeros(len(x))],
    )  # fmt: skip
    return condition(data, posterior.prior)


def _schedules_seen(coordinates: Coordinates, here: Sequence[Observation]) -> dict[float, Schedule]:
    """First eval and interval by batch, from the newest curve of each."""
    found: dict[float, Schedule] = {}
    for o in here:
        if len(o.evals) >= 2 and not o.probe:
            batch = coordinates.batch(o.values)
            found[batch if math.isfinite(batch) else 0.0] = Schedule(
                o.evals[0].samples, o.evals[1].samples - o.evals[0].samples
            )
    return found


def as_known(model: SearchModel) -> SearchModel:
    """The same model with nothing expected of running trials beyond what they are now, for recommendations."""
    ended = tuple(o for o in model.observations if not o.open)
    if len(ended) == len(model.observations):
        return model
    now = learn(model.coordinates, model.goal, model.observations, model.scales, ahead=False)
    return replace(now, observations=ended)
