"""What the results of any search say of its configurations: means of repeats, shrunk towards their neighbours.

A Gaussian process over the space's parameters, on ln(objective), or on the objective itself where results have either
sign, one row a run. A configuration that did well while its
neighbours did not was lucky, mostly: by how much follows from the noise between seeds, which repeats and the smoothness
of the results tell, starting from what is usual. No sampler is asked, so it serves each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from optuna.distributions import BaseDistribution

from lora_tune.config.study import Study
from lora_tune.curves.crossing import Z90
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.gaussian import (
    HERE,
    Array,
    Data,
    Posterior,
    Prior,
    condition,
    fit,
    log_evidence,
    repeated_noise,
)
from lora_tune.search.grey_box.training_data import thinned
from lora_tune.search.race_scale import RaceScale, scale_of, seed_spread
from lora_tune.search.recommendation import Belief, best_run
from lora_tune.search.recorded import fitting
from lora_tune.store.records import StudyRecords, Trial, Value, Verdict

FITTED, LEARNED = 120, 400
"""Runs by which the scales are fitted, and by which neighbours are judged: the work grows with their cube."""

WIDER = 1.4
"""By how much the interval of the best is wider than the belief in any one: its scales are estimates, and the
 best was chosen. On smooth surfaces with 7 to 20% of noise 72% of the intervals would hold the truth without it."""

LEAST_AMPLITUDE = 0.01
"""The least by which configurations are taken to differ before their results say more, in ln(objective)."""

MISSED = (Verdict.CENSORED, Verdict.PRUNED, Verdict.INFEASIBLE)
"""Ends that speak against a configuration that reached the target at another time."""

Key = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class _Axis:
    """On which results are compared: their logarithm, or their value in units of the usual size, negated where more is
    better."""

    scale: RaceScale
    unit: float = 1.0

    def place(self, trial: Trial) -> float | None:
        """Where a trial's result lies; None where it has none."""
        value = trial.metrics.objective
        at = None if value is None else self.scale.inward(value)
        return None if at is None else at / self.unit

    def results(self, mean: float, half: float) -> tuple[float, float, float]:
        """(middle, low, high) as results, of a place and a half-width."""
        return self.scale.interval(mean * self.unit, half * self.unit)


def _axis(study: Study, sweep: StudyRecords) -> _Axis:
    """Logarithms while every result has one; a metric that is minimised may well be best below zero."""
    values = [v for t in sweep.reached() if (v := t.metrics.objective) is not None and math.isfinite(v)]
    scale = scale_of(study)
    if scale.relative or all(v > 0 for v in values):
        return _Axis(replace(scale, relative=True))
    return _Axis(scale, float(np.median([abs(v) for v in values if v])) if any(values) else 1.0)


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of one configuration that reached the target: the place of each, the lower the better."""

    trial: Trial
    places: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.places))


def believes(study: Study, sweep: StudyRecords) -> Belief:
    """The configuration of the lowest expected objective among those that ran; one run at least must have reached.

    One that missed the target as often as it reached it is left out while there is another.
    """
    axis = _axis(study, sweep)
    configs = _configurations(axis, sweep)
    if not configs:  # a time or a speed that is not positive has no place among the others
        luckiest = best_run(study, sweep)
        assert luckiest is not None, "asked before a trial reached the target"
        value = luckiest.objective
        return Belief(tuned=luckiest.tuned, objective=value, low=value, high=value, trial=luckiest.number)
    space, fits = study.search_space.distributions(), fitting(study)
    inside = [c for c in configs if fits(c.trial)]
    outside = [c for c in configs if not fits(c.trial)]
    sd = seed_spread(study)
    means, variances = _posterior(study, space, inside, sd)
    level, spread = _level(configs)
    for c in outside:  # the machine's own config, say: no point of the space, so it has no neighbours
        precision = len(c.places) / sd**2 + 1 / spread**2
        means = np.append(means, (c.mean * len(c.places) / sd**2 + level / spread**2) / precision)
        variances = np.append(variances, 1 / precision)
    at = int(np.argmin(means + 0.5 * variances))
    value, low, high = axis.results(float(means[at]), WIDER * Z90 * math.sqrt(float(variances[at])))
    best = [*inside, *outside][at].trial
    return Belief(tuned=best.tuned, objective=value, low=low, high=high, trial=best.number)


def _configurations(axis: _Axis, sweep: StudyRecords) -> list[_Runs]:
    """Every configuration with its runs; its trial is the one nearest to their mean."""
    reached: dict[Key, list[Trial]] = {}
    missed: dict[Key, int] = {}
    for trial in sweep.trials.values():
        key = tuple(sorted(trial.parameters.items()))
        if trial.verdict in MISSED and not trial.probe:
            missed[key] = missed.get(key, 0) + 1
        elif _counts(axis, trial):
            reached.setdefault(key, []).append(trial)
    sound = {key: trials for key, trials in reached.items() if missed.get(key, 0) < len(trials)} or reached
    return [_runs(axis, trials) for trials in sound.values()]


def _counts(axis: _Axis, trial: Trial) -> bool:
    """Whether it reached the target, and no race has found its configuration worse."""
    return trial.verdict is Verdict.REACHED and not trial.passed_over and axis.place(trial) is not None


def _runs(axis: _Axis, trials: Sequence[Trial]) -> _Runs:
    places = [at for t in trials if (at := axis.place(t)) is not None]
    middle = float(np.mean(places))
    nearest = min(zip(places, trials, strict=True), key=lambda pair: abs(pair[0] - middle))[1]
    return _Runs(nearest, tuple(places))


def _level(configs: Sequence[_Runs]) -> tuple[float, float]:
    """Median of the configurations' means and their spread."""
    means = np.array([c.mean for c in configs])
    return float(np.median(means)), max(float(means.std()), LEAST_AMPLITUDE)


def half_width(study: Study, sweep: StudyRecords, tuned: Mapping[str, Value]) -> float:
    """Half of the 90% interval of ln(objective) at ``tuned``, run or not, by the results alone."""
    space, fits = study.search_space.distributions(), fitting(study)
    inside = [c for c in _configurations(_axis(study, sweep), sweep) if fits(c.trial)]
    if not inside:
        return WIDER * Z90 * seed_spread(study)
    posterior, coordinates = _learned(study, space, inside, seed_spread(study))
    x = np.array([coordinates.speed_features(tuned)])
    _, covariance = posterior.predict(x, np.ones((1, 1)))
    return WIDER * Z90 * math.sqrt(float(covariance[0, 0]))


def _posterior(
    study: Study, space: Mapping[str, BaseDistribution], configurations: Sequence[_Runs], sd: float
) -> tuple[Array, Array]:
    """Mean and variance of each configuration's ln(objective) (n)."""
    if not configurations:
        return np.empty(0), np.empty(0)
    posterior, coordinates = _learned(study, space, configurations, sd)
    x = np.array([coordinates.speed_features(c.trial.tuned) for c in configurations])
    mean, variance = posterior.predict_each(x, np.ones((len(x), 1)))
    if len(posterior.data.y) < sum(len(c.places) for c in configurations):
        _with_own_runs(posterior, configurations, x, mean, variance)
    return mean, variance


def _learned(
    study: Study, space: Mapping[str, BaseDistribution], configurations: Sequence[_Runs], sd: float
) -> tuple[Posterior, Coordinates]:
    """What the runs of configurations within the space say of ln(objective) over it. sd: of seeds, as is usual."""
    coordinates = Coordinates(
        distributions=space, gpus=study.search_space.gpus, roles=dict.fromkeys(space, "speed"),
        conditions=study.search_space.conditions,
    )  # fmt: skip
    x = np.array([coordinates.speed_features(c.trial.tuned) for c in configurations])
    counts = [len(c.places) for c in configurations]
    data = _data(np.repeat(x, counts, axis=0), np.concatenate([c.places for c in configurations]), sd)
    level, spread = _level(configurations)
    start = Prior(
        mean=np.array([level]), sd=np.array([spread + 0.1]), amplitude=spread, length=0.6 * math.sqrt(x.shape[1]),
        shift=0.01 * LEAST_AMPLITUDE, departure=0.01 * LEAST_AMPLITUDE, noise_scale=repeated_noise(data),
        weights=np.ones(x.shape[1]),
    )  # fmt: skip
    prior = _fitted(thinned(data, FITTED), start) if len(data.y) > 2 else start
    return condition(thinned(data, LEARNED), prior), coordinates


def _fitted(data: Data, start: Prior) -> Prior:
    """The scales of the best evidence, looked for from two sides: configurations differ, or seeds do."""
    believed = _belief(start)
    noisy = replace(start, amplitude=0.3 * start.amplitude, noise_scale=start.amplitude / float(data.sd[0]))
    priors = [fit(data, begin, believed) for begin in (start, noisy)]
    return max(priors, key=lambda prior: log_evidence(data, prior) + believed(prior))


def _with_own_runs(
    posterior: Posterior, configurations: Sequence[_Runs], x: Array, mean: Array, variance: Array
) -> None:
    """Add to ``mean`` and ``variance`` (n) what runs that were left out of the posterior say of their own rows."""
    known = {row.tobytes() for row in posterior.data.x}
    noise = (posterior.prior.noise_scale * float(posterior.data.sd[0])) ** 2
    for at, c in enumerate(configurations):
        if x[at].tobytes() not in known:
            precision = 1 / variance[at] + len(c.places) / noise
            mean[at] = (mean[at] / variance[at] + sum(c.places) / noise) / precision
            variance[at] = 1 / precision


def _data(x: Array, y: Array, sd: float) -> Data:
    n = len(y)
    return Data(
        x=x, basis=np.ones((n, 1)), y=y, sd=np.full(n, sd), source=np.full(n, HERE, dtype=np.int64),
        below=np.zeros(n, dtype=np.bool_), extended=np.zeros(n),
    )  # fmt: skip


_WIDTHS = {"amplitude": 1.0, "length": 0.7, "shift": 0.1, "departure": 0.1, "noise_scale": 0.8}
"""Sd of ln(scale) about where it starts: the usual noise between seeds is that of our benchmarks, and a script may be
far quieter."""


def _belief(start: Prior) -> Callable[[Prior], float]:
    def log_belief(prior: Prior) -> float:
        return -0.5 * sum((math.log(getattr(prior, n) / getattr(start, n)) / w) ** 2 for n, w in _WIDTHS.items())

    return log_belief
