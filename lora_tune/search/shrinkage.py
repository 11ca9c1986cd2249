"""Recommendation from results alone: means of repeats, shrunk towards neighbours by a Gaussian process.

The process models ln(objective) over the space's parameters, or the objective itself if results have either sign; each
run is an observation. A good result among bad neighbours was probably luck. Two corrections keep luck out of the
estimate of the best: the run that made a leader to be repeated is excluded, since it was selected (``search.noise``),
and the expected selection bias of the best is subtracted, by simulation. Noise and scales of the surface are
marginalised over a grid weighted by evidence. It works with any sampler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lora_tune.config.study import Study
from lora_tune.curves.family import Z90
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.gaussian import (
    Array,
    Data,
    Posterior,
    Prior,
    condition,
    log_evidence,
    matern,
    solved,
)
from lora_tune.search.grey_box.model import thinned
from lora_tune.search.noise import WHY, Noise, ResultScale, noise_before, noise_of, scale_of, settings
from lora_tune.search.objectives import objective_of
from lora_tune.search.recorded import fitting
from lora_tune.store.records import StudyRecords, Trial, Value, Verdict

FITTED, LEARNED = 120, 400
"""Maximum runs for fitting the scales and for the posterior, whose cost is cubic."""

WIDER = 1.0
"""Factor of the interval's width, to allow for surfaces that are no draws of the process. With it intervals of
simulated sweeps contain the truth in 85 to 95% of cases (``benchmarks.statistics --part coverage``)."""

NOISES = np.linspace(-2.7, 2.7, 11)
"""Grid of ln(noise) about the estimate from repeats, in its standard deviations."""

MOST_DOUBT = 0.7
"""Maximum standard deviation of ln(noise) for the grid's width."""

AMPLITUDES, LENGTHS = (0.5, 1.0, 2.0), (0.6, 1.2, 2.5)
"""Grids of the amplitude, relative to the spread of the configurations' means, and of the lengthscale, relative to 0.6
sqrt(features)."""

LEAST_WEIGHT = 2e-3
"""Grid points with less posterior weight than this, relative to the best, are dropped."""

RERUN_MARGIN = 0.5
"""Posterior standard deviations by which a configuration with one run must look better than a repeated one."""

DRAWS = 200
"""Simulated sweeps for the selection bias of the best."""

LEAST_AMPLITUDE = 0.01
"""Least prior amplitude of differences between configurations, in ln(objective)."""

MISSED = (Verdict.CENSORED, Verdict.PRUNED, Verdict.INFEASIBLE)
"""Verdicts that count against a configuration that reached the target in another trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PosteriorEstimate:
    """Posterior of a configuration's mean.

    tuned: its values. objective: mean of further runs, in the objective's unit. low, high: 90% interval of that mean.
    trial: one that ran it as a whole, None without any. why: the evidence, a clause.
    """

    tuned: Mapping[str, Value]
    objective: float
    low: float
    high: float
    trial: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Axis:
    """Scale of the process: logarithm of the results, or their value in units of the usual size, negated if larger is
    better."""

    scale: ResultScale
    unit: float = 1.0

    def place(self, trial: Trial) -> float | None:
        """A trial's result on the scale; None without one."""
        value = trial.metrics.objective
        at = None if value is None else self.scale.inward(value)
        return None if at is None else at / self.unit

    def results(self, mean: float, half: float) -> tuple[float, float, float]:
        """(middle, low, high) as results, for a centre and a half-width on the scale."""
        return self.scale.interval(mean * self.unit, half * self.unit)


def _axis(study: Study, sweep: StudyRecords) -> _Axis:
    """Logarithmic if all results are positive; a minimised metric may be negative."""
    values = [v for t in sweep.reached() if (v := t.metrics.objective) is not None and math.isfinite(v)]
    scale = scale_of(study)
    if scale.relative or all(v > 0 for v in values):
        return _Axis(replace(scale, relative=True))
    return _Axis(scale, float(np.median([abs(v) for v in values if v])) if any(values) else 1.0)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of one configuration that reached the target, on the scale; lower is better.

    places: those that count, all except a run that was selected and then repeated. reran: it was repeated.
    """

    trial: Trial
    places: tuple[float, ...]
    all_places: tuple[float, ...] = ()
    reran: bool = False

    @property
    def mean(self) -> float:
        return float(np.mean(self.places))

    @property
    def every(self) -> float:
        """Mean of all runs."""
        return float(np.mean(self.all_places))

    @property
    def runs(self) -> int:
        return len(self.all_places)


def shrunken_recommendation(study: Study, sweep: StudyRecords) -> PosteriorEstimate | None:
    """The configuration with the lowest expected objective among those that ran; None without a usable result.

    A configuration that missed the target as often as it reached it is excluded if there is another. One with a single
    run replaces a repeated one only if it is better by ``RERUN_MARGIN`` standard deviations.
    """
    axis = _axis(study, sweep)
    configs = _configurations(axis, sweep)
    if not configs:
        return None
    fits = fitting(study)
    inside = [c for c in configs if fits(c.trial)]
    outside = [c for c in configs if not fits(c.trial)]
    noise = _noise(study, axis, configs)
    if inside:
        learned = _learned(study, inside, noise)
        means, variances = learned.means, learned.variances
        reran = np.array([c.reran for c in inside])
        handicap = np.where(reran, 0.0, RERUN_MARGIN * np.sqrt(variances)) if reran.any() else np.zeros(len(inside))
        if not reran[int(np.argmin(means + 0.5 * variances + handicap))]:
            means = means + learned.luck(handicap, once=~reran)
        sd = learned.noise
    else:
        means = variances = handicap = np.empty(0)
        sd = noise.sd
    level, spread = _level(configs)
    for c in outside:  # such as the machine's own config: outside the space it has no neighbours
        precision = len(c.places) / sd**2 + 1 / spread**2
        means = np.append(means, (c.mean * len(c.places) / sd**2 + level / spread**2) / precision)
        variances, handicap = np.append(variances, 1 / precision), np.append(handicap, 0.0)
    at = int(np.argmin(means + 0.5 * variances + handicap))
    best, half = [*inside, *outside][at], WIDER * Z90 * math.sqrt(float(variances[at]))
    # Mean of further runs: the mean of a log-normal exceeds its median.
    above = 0.5 * sd**2 * (-1 if axis.scale.maximise else 1) if axis.scale.relative else 0.0
    value, low, high = axis.results(float(means[at]) + above, half)
    why = _why(study, axis, best, sd)
    return PosteriorEstimate(
        tuned=best.trial.tuned, objective=value, low=low, high=high, trial=best.trial.number, why=why
    )


def _why(study: Study, axis: _Axis, best: _Runs, sd: float) -> str:
    """The evidence for the best, in a form that can be checked."""
    runs = f"{best.runs} runs of it average" if best.runs > 1 else "its one run took"
    value = axis.results(best.every, 0.0)[0]
    differ = f"{100 * sd:.2g}%" if axis.scale.relative else f"{sd * axis.unit:.3g}"
    picked = ", the first of which was picked for being good" if best.reran else ""
    return f"{runs} {objective_of(study).text(value)}{picked}; one run differs from the next by about {differ}"


def _noise(study: Study, axis: _Axis, configs: Sequence[_Runs]) -> Noise:
    """Noise on the scale from all runs."""
    return noise_before(study, axis.scale, [c.mean for c in configs]).after(c.all_places for c in configs)


def _configurations(axis: _Axis, sweep: StudyRecords) -> list[_Runs]:
    """Every configuration with its runs; its trial is the one nearest to their mean."""
    reached: dict[object, list[Trial]] = {}
    missed: dict[object, int] = {}
    for trial in sweep.trials.values():
        key = settings(trial)
        if trial.verdict in MISSED and not trial.probe:
            missed[key] = missed.get(key, 0) + 1
        elif trial.verdict is Verdict.REACHED and not trial.passed_over and axis.place(trial) is not None:
            reached.setdefault(key, []).append(trial)
    sound = {key: trials for key, trials in reached.items() if missed.get(key, 0) < len(trials)} or reached
    return [_runs(axis, trials) for trials in sound.values()]


def _runs(axis: _Axis, trials: Sequence[Trial]) -> _Runs:
    ordered = sorted(trials, key=lambda t: t.number)
    places = [at for t in ordered if (at := axis.place(t)) is not None]
    reran = len(ordered) > 1 and any(t.why == WHY for t in ordered[1:])
    middle = float(np.mean(places))
    nearest = min(zip(places, ordered, strict=True), key=lambda pair: abs(pair[0] - middle))[1]
    return _Runs(nearest, tuple(places[1:] if reran else places), tuple(places), reran)


def _level(configs: Sequence[_Runs]) -> tuple[float, float]:
    """Median of the configurations' means, and their spread."""
    means = np.array([c.mean for c in configs])
    return float(np.median(means)), max(float(means.std()), LEAST_AMPLITUDE)


def half_width(study: Study, sweep: StudyRecords, tuned: Mapping[str, Value]) -> float:
    """Half of the 90% interval of ln(objective) at ``tuned``, run or not, by the results alone."""
    fits, axis = fitting(study), _axis(study, sweep)
    inside = [c for c in _configurations(axis, sweep) if fits(c.trial)]
    if not inside:
        return WIDER * Z90 * noise_of(study, sweep).sd
    learned = _learned(study, inside, _noise(study, axis, inside))
    _, variance = learned.predicted(np.array([learned.coordinates.speed_features(tuned)]))
    return WIDER * Z90 * math.sqrt(float(variance[0]))


@dataclass(frozen=True, slots=True)
class _Learned:
    """Mixture of posteriors over the noise and the scales of the surface.

    weights, posteriors, noises: of the mixture (k). means, variances: of the configurations' true values (n). rows:
    features of the configurations (n, d).
    """

    coordinates: Coordinates
    weights: Array
    posteriors: Sequence[Posterior]
    noises: Array
    rows: Array
    configurations: Sequence[_Runs]
    means: Array
    variances: Array

    @property
    def noise(self) -> float:
        """Posterior sd of single runs."""
        return math.sqrt(float(self.weights @ self.noises**2))

    def predicted(self, x: Array) -> tuple[Array, Array]:
        """Mean and variance (n) at feature rows."""
        return _mixed(self.posteriors, self.weights, x)

    def luck(self, handicap: Array, once: npt.NDArray[np.bool_]) -> float:
        """Selection bias: how much better the best looks than it is, if the posterior mean is the true surface.

        Runs are simulated at the most likely scales and smoothed like the real ones, and the best is selected by the
        same rule. handicap: added to each before the selection. once: configurations without repeats; the others are
        estimated from runs that were not selected.
        """
        at = int(np.argmax(self.weights))
        posterior, noise = self.posteriors[at], float(self.noises[at])
        prior, data = posterior.prior, posterior.data
        trend = float(prior.sd[0]) ** 2
        kernel = (prior.amplitude**2 + prior.departure**2) * matern(self.rows, data.x, prior.length)
        smoother = solved(posterior.factor, (kernel + prior.departure**2 + trend).T).T
        place = {row.tobytes(): n for n, row in enumerate(self.rows)}
        truths = self.means[[place[row.tobytes()] for row in data.x]]
        runs = truths[:, None] + noise * np.random.default_rng(0).standard_normal((len(data.y), DRAWS))
        shown = prior.mean[0] + smoother @ (runs - prior.mean[0])
        picked = np.argmin(shown + handicap[:, None], axis=0)
        gained = (self.means[picked] - shown[picked, np.arange(DRAWS)])[once[picked]]
        return max(0.0, float(gained.mean())) if len(gained) else 0.0


def _learned(study: Study, configurations: Sequence[_Runs], noise: Noise) -> _Learned:
    """Posterior of ln(objective) over the space from the runs of configurations.

    noise: from all runs. The part that the process's own data imply is removed from it, to count it once.
    """
    space = study.search_space
    coordinates = Coordinates(
        distributions=space.distributions(), gpus=space.gpus, roles=dict.fromkeys(space.distributions(), "speed"),
        conditions=space.conditions,
    )  # fmt: skip
    rows = np.array([coordinates.speed_features(c.trial.tuned) for c in configurations])
    counts = [len(c.places) for c in configurations]
    x = np.repeat(rows, counts, axis=0)
    data = Data.local(x, np.ones((len(x), 1)), np.concatenate([c.places for c in configurations]), noise.usual)
    in_rows = Noise(noise.usual).after(c.places for c in configurations)
    left = max(0.0, noise.squares - in_rows.squares)
    noise_prior = replace(noise, squares=left, repeats=noise.repeats - in_rows.repeats)
    level, spread = _level(configurations)
    fitted = thinned(data, FITTED)
    points = []
    for length in LENGTHS:
        for amplitude in AMPLITUDES:
            for step in NOISES * min(noise.doubt, MOST_DOUBT):
                sd = noise.sd * math.exp(step)
                prior = Prior(
                    mean=np.array([level]), sd=np.array([spread + 0.1]), amplitude=amplitude * spread,
                    length=0.6 * length * math.sqrt(rows.shape[1]), shift=0.01 * LEAST_AMPLITUDE,
                    departure=0.01 * LEAST_AMPLITUDE, noise_scale=sd / noise.usual, weights=np.ones(rows.shape[1]),
                )  # fmt: skip
                scales = -0.5 * (math.log(amplitude) ** 2 + (math.log(length) / 0.7) ** 2)
                points.append((log_evidence(fitted, prior) + noise_prior.log_density(sd) + scales, prior, sd))
    highest = max(value for value, _, _ in points)
    points = [point for point in points if point[0] > highest + math.log(LEAST_WEIGHT)]
    weights = np.exp(np.array([value for value, _, _ in points]) - highest)
    weights /= weights.sum()
    most = thinned(data, LEARNED)
    posteriors = [condition(most, prior) for _, prior, _ in points]
    means, variances = _mixed(posteriors, weights, rows)
    sds = np.array([sd for _, _, sd in points])
    if len(most.y) < len(data.y):
        _with_row_runs(most, float(weights @ sds), configurations, rows, means, variances)
    return _Learned(coordinates, weights, posteriors, sds, rows, configurations, means, variances)


def _mixed(posteriors: Sequence[Posterior], weights: Array, x: Array) -> tuple[Array, Array]:
    """Mean and variance of a mixture at feature rows."""
    each = [posterior.joint(x, np.ones((len(x), 1))) for posterior in posteriors]
    means, variances = np.array([joint.mean for joint in each]), np.array([joint.variance for joint in each])
    middle = weights @ means
    return middle, weights @ (variances + (means - middle) ** 2)


def _with_row_runs(
    data: Data, noise: float, configurations: Sequence[_Runs], x: Array, mean: Array, variance: Array
) -> None:
    """Update ``mean`` and ``variance`` (n) in place with runs omitted from ``data``, each at its own row."""
    known = {row.tobytes() for row in data.x}
    for at, c in enumerate(configurations):
        if x[at].tobytes() not in known:
            precision = 1 / variance[at] + len(c.places) / noise**2
            mean[at] = (mean[at] / variance[at] + sum(c.places) / noise**2) / precision
            variance[at] = 1 / precision
