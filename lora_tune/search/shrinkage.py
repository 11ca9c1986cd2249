"""What the results of any search say of its configurations: means of repeats, shrunk towards their neighbours.

A Gaussian process over the space's parameters, on ln(objective), or on the objective itself where results have either
sign, one row a run. A configuration that did well while its neighbours did not was lucky, mostly. Two things keep luck
out of what is said of the best: the run for which a leader was run again is left out, since it was picked for being
fast (``search.noise``), and what a best of so many would gain by luck alone is taken back, by simulation. Noise and
the differences between configurations are not known but believed on a grid, each point by its evidence. No sampler is
asked, so it serves each of them.
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
"""Runs by which the scales are fitted, and by which neighbours are judged: the work grows with their cube."""

WIDER = 1.0
"""By how much the interval of the best is wider than the belief in any one: surfaces are no draws of the process. The
 intervals of simulated sweeps hold the truth in 85 to 95% so (``benchmarks.statistics --part coverage``)."""

NOISES = np.linspace(-2.7, 2.7, 11)
"""Grid of ln(noise) about what repeats say, in standard deviations of that belief."""

MOST_DOUBT = 0.7
"""Standard deviation of ln(noise) beyond which the grid is no wider."""

AMPLITUDES, LENGTHS = (0.5, 1.0, 2.0), (0.6, 1.2, 2.5)
"""Grids of how far configurations differ, in the spread of their means, and of over what distance, relative to 0.6
sqrt(features)."""

LEAST_WEIGHT = 2e-3
"""Points of the grid that are believed less than this beside the likeliest are left out."""

RERUN_MARGIN = 0.5
"""Standard deviations by which what ran once has to look better than what was run again."""

DRAWS = 200
"""Simulated sweeps by which the luck of the best is told."""

LEAST_AMPLITUDE = 0.01
"""The least by which configurations are taken to differ before their results say more, in ln(objective)."""

MISSED = (Verdict.CENSORED, Verdict.PRUNED, Verdict.INFEASIBLE)
"""Ends that speak against a configuration that reached the target at another time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PosteriorEstimate:
    """What a search believes of a configuration.

    tuned: its values. objective: the mean of further runs of it, in the objective's unit. low, high: 90% interval of
    that mean. trial: one that ran it as a whole, None where none did. why: on what that rests, a clause.
    """

    tuned: Mapping[str, Value]
    objective: float
    low: float
    high: float
    trial: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Axis:
    """On which results are compared: their logarithm, or their value in units of the usual size, negated where more is
    better."""

    scale: ResultScale
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
    """The runs of one configuration that reached the target: the place of each, the lower the better.

    places: of those that count, which are all but the one that was picked for being good and run again. again: it was.
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
    """The configuration of the lowest expected objective among those that ran; None where no result can be compared.

    One that missed the target as often as it reached it is left out while there is another. One that ran once takes
    the place of one that was run again only where it is better by more than the doubt in it.
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
    for c in outside:  # the machine's own config, say: no point of the space, so it has no neighbours
        precision = len(c.places) / sd**2 + 1 / spread**2
        means = np.append(means, (c.mean * len(c.places) / sd**2 + level / spread**2) / precision)
        variances, handicap = np.append(variances, 1 / precision), np.append(handicap, 0.0)
    at = int(np.argmin(means + 0.5 * variances + handicap))
    best, half = [*inside, *outside][at], WIDER * Z90 * math.sqrt(float(variances[at]))
    # The mean of further runs: of a time that scatters by a factor it lies above the middle one.
    above = 0.5 * sd**2 * (-1 if axis.scale.maximise else 1) if axis.scale.relative else 0.0
    value, low, high = axis.results(float(means[at]) + above, half)
    why = _why(study, axis, best, sd)
    return PosteriorEstimate(
        tuned=best.trial.tuned, objective=value, low=low, high=high, trial=best.trial.number, why=why
    )


def _why(study: Study, axis: _Axis, best: _Runs, sd: float) -> str:
    """On what the belief in the best rests, as somebody may check it."""
    runs = f"{best.runs} runs of it average" if best.runs > 1 else "its one run took"
    value = axis.results(best.every, 0.0)[0]
    differ = f"{100 * sd:.2g}%" if axis.scale.relative else f"{sd * axis.unit:.3g}"
    picked = ", the first of which was picked for being good" if best.reran else ""
    return f"{runs} {objective_of(study).text(value)}{picked}; one run differs from the next by about {differ}"


def _noise(study: Study, axis: _Axis, configs: Sequence[_Runs]) -> Noise:
    """What is known of the noise on the axis by all runs."""
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
    """Median of the configurations' means and their spread."""
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
    """What the runs of configurations say: a mixture of posteriors over noise and the scales of the surface.

    weights, posteriors, noises: of the mixture (k). means, variances: of the configurations' truths (n). rows: of the
    configurations (n, d). counts: runs of each that count.
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
        """Sd of single runs, as believed."""
        return math.sqrt(float(self.weights @ self.noises**2))

    def predicted(self, x: Array) -> tuple[Array, Array]:
        """Mean and variance (n) at feature rows."""
        return _mixed(self.posteriors, self.weights, x)

    def luck(self, handicap: Array, once: npt.NDArray[np.bool_]) -> float:
        """By how much the best of so many looks better than it is, were the surface as it is believed.

        Runs are simulated about it at the likeliest scales, smoothed as the real ones are, and the best is picked by
        the same rule. handicap: what is added to each before the best is picked. once: those that were not run
        again; the best of the others is known by runs that nobody picked.
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
    """What the runs of configurations within the space say of ln(objective) over it.

    noise: by all runs. What the rows of the process say of it themselves is taken out of it.
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
    """Add to ``mean`` and ``variance`` (n) what runs that were left out of ``data`` say of their own rows."""
    known = {row.tobytes() for row in data.x}
    for at, c in enumerate(configurations):
        if x[at].tobytes() not in known:
            precision = 1 / variance[at] + len(c.places) / noise**2
            mean[at] = (mean[at] / variance[at] + sum(c.places) / noise**2) / precision
            variance[at] = 1 / precision
