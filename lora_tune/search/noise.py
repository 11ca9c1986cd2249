"""Noise between runs of one configuration, with its uncertainty; the scale of results; and repeats of the leader.

The noise is estimated from repeats, i.e. runs with equal parameters, and a prior with the usual noise of such results.
Differences between configurations are not used: with one run each, a rough surface cannot be distinguished from noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lora_tune.base.scatter import CURVE_SECONDS_SD, SPEED_SD, STOP_SD
from lora_tune.base.text import counted
from lora_tune.config.spent import counts_node_hours, spent_phrase
from lora_tune.config.study import Study
from lora_tune.curves.family import LARGEST_EXPONENT
from lora_tune.mlperf.benchmark import LORA, STOP_CV
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import StudyRecords, Trial, TrialState, Value

LEAST_SD = 1e-4
"""Relative spread below which runs are no evidence: clocks have milliseconds, and scripts print four digits."""

LARGEST = 1e100
"""Larger values count as missing: the run diverged, and their squares overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultScale:
    """Maps results to a scale on which smaller is better and differences are comparable everywhere.

    Parameters
    ----------
    relative : bool
        Use logarithms, so that differences are shares; else the values, which may have either sign.
    maximise : bool
        A larger result is better.
    timed : bool
        The result is a time, so better means faster.
    got, missed : str
        Phrases for a run with a result and for one without.
    machine_time : bool
        Report cost as machine time instead of node-hours.
    """

    relative: bool = True
    maximise: bool = False
    timed: bool = True
    got: str = "reached the target"
    missed: str = "did not reach the target"
    machine_time: bool = False

    @property
    def better(self) -> str:
        """Word for the better one in messages."""
        return "faster" if self.relative and self.timed else "better"

    def inward(self, result: float) -> float | None:
        """Result on the scale; None if it is missing or unusable."""
        if not abs(result) <= LARGEST or (self.relative and result <= 0):
            return None
        return self._sign * (math.log(result) if self.relative else result)

    def order(self, result: float | None) -> float:
        """Sort key, best first; missing results last."""
        place = None if result is None else self.inward(result)
        return math.inf if place is None else place

    def outward(self, x: float) -> float:
        """Inverse of :meth:`inward`, limited to a double's range."""
        return bounded_exp(self._sign * x) if self.relative else self._sign * x + 0.0  # + 0.0 avoids "-0"

    def interval(self, middle: float, half: float) -> tuple[float, float, float]:
        """(middle, low, high) as results, for a centre and a half-width on this scale."""
        low, high = sorted((self.outward(middle - half), self.outward(middle + half)))
        return self.outward(middle), low, high

    def difference(self, x: float) -> float:
        """Difference of two results: a share, or in the metric's unit."""
        return bounded_exp(x) - 1 if self.relative else x

    def text(self, difference: float) -> str:
        """A :meth:`difference` for people."""
        return f"{100 * difference:.1f}%" if self.relative else f"{difference:.3g}"

    def spent(self, node_hours: float) -> str:
        """Cost of runs, for people."""
        return spent_phrase(node_hours, machine_time=self.machine_time)

    def least_sd(self, places: Sequence[float]) -> float:
        """Spread below which runs are no evidence. places: of all runs on the scale."""
        size = 1.0 if self.relative else max(map(abs, places), default=1.0)
        return LEAST_SD * (size or 1.0)

    @property
    def _sign(self) -> float:
        return -1.0 if self.maximise else 1.0


TIMES = ResultScale()
"""Scale of times to a target."""


def scale_of(study: Study) -> ResultScale:
    """Scale on which the runs of a study are compared."""
    objective, by_machine_time = objective_of(study), not counts_node_hours(study)
    if objective.has_target:
        return ResultScale(timed=objective.timed, machine_time=by_machine_time)
    return ResultScale(
        relative=not objective.judges_evals, maximise=objective.maximise, got="measured a value",
        missed="measured no value", machine_time=by_machine_time,
    )  # fmt: skip


def bounded_exp(x: float) -> float:
    """exp(x), limited to a double's range."""
    return math.exp(max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, x)))


# The noise: its prior, and its posterior after repeats.


KNOWN_WIDTH, UNKNOWN_WIDTH, NO_WIDTH = 0.35, 0.9, 1.5
"""Prior sd of ln(noise): KNOWN_WIDTH if the noise was measured on public runs of the same workload, equivalent to four
repeats; UNKNOWN_WIDTH for other scripts, equivalent to less than one; NO_WIDTH if only the spread of results is
known."""

LEAST_FREEDOM = 2.0
"""Least degrees of freedom for a bound; with fewer it would be useless."""

POINTS = 61
"""Points of the grid of ln(noise), which spans six standard deviations on each side."""


@dataclass(frozen=True)
class Noise:
    """Posterior of the sd of single runs of one configuration, in ln(result) or in the metric's unit.

    usual, width: prior median, and prior sd of its logarithm. squares, repeats: sum of squares of runs about the means
    of their configurations, and its degrees of freedom.
    """

    usual: float
    width: float = UNKNOWN_WIDTH
    squares: float = 0.0
    repeats: int = 0

    def after(self, groups: Iterable[Sequence[float]]) -> Noise:
        """Update with more repeats. groups: results of each configuration on the scale; single runs are ignored."""
        squares, repeats = self.squares, self.repeats
        for places in groups:
            if len(places) > 1:
                squares += float(((np.asarray(places) - np.mean(places)) ** 2).sum())
                repeats += len(places) - 1
        return replace(self, squares=squares, repeats=repeats)

    def log_density(self, sd: float) -> float:
        """Log posterior density of ln(sd), up to a constant."""
        doubt = math.log(sd / self.usual) / self.width
        return -0.5 * doubt**2 - self.repeats * math.log(sd) - 0.5 * self.squares / sd**2

    @cached_property
    def _moments(self) -> tuple[float, float]:
        """Posterior mean and variance of ln(sd), by a grid around the single mode."""
        peak = self._peak()
        sharp = self.width**-2 + 2 * self.squares * bounded_exp(-2 * peak)  # minus the second derivative
        logs = peak + np.linspace(-6, 6, POINTS) / math.sqrt(sharp)
        density = np.array([self.log_density(math.exp(at)) for at in logs])
        weights = np.exp(density - density.max())
        weights /= weights.sum()
        mean = float(weights @ logs)
        return mean, float(weights @ (logs - mean) ** 2)

    def _peak(self) -> float:
        """ln(sd) at the mode, which lies between the prior median and the estimate from repeats alone."""
        usual, lowest = math.log(self.usual), math.log(self.usual) - self.repeats * self.width**2
        shown = max(lowest, 0.5 * math.log(self.squares / self.repeats)) if self.squares and self.repeats else lowest
        low, high = sorted((usual, shown))
        for _ in range(50):
            middle = (low + high) / 2
            slope = (usual - middle) / self.width**2 - self.repeats + self.squares * bounded_exp(-2 * middle)
            low, high = (middle, high) if slope > 0 else (low, middle)
        return (low + high) / 2

    @property
    def sd(self) -> float:
        """Posterior median of the sd (exp of the mean of ln sd)."""
        return math.exp(self._moments[0])

    @property
    def doubt(self) -> float:
        """Posterior sd of ln(sd)."""
        return math.sqrt(self._moments[1])

    @property
    def student(self) -> tuple[float, float]:
        """Scale and degrees of freedom of Student's distribution of one further run about a known mean.

        They match the posterior mean and variance of ln(sd). The variance is trigamma(freedom / 2) / 4, inverted by the
        expansion 1 / x + 1 / (2 x^2) (Abramowitz and Stegun 1964, 6.4.12).
        """
        from scipy.special import digamma

        mean, variance = self._moments
        half = max(LEAST_FREEDOM / 2, (1 + math.sqrt(1 + 8 * variance)) / (8 * variance))
        return math.exp(mean - 0.5 * (math.log(half) - float(digamma(half)))), 2 * half

    @property
    def sentence(self) -> str:
        """For people, if results are logarithms."""
        base = counted(self.repeats, "repeats") if self.repeats else "usual for such runs, no repeat yet"
        return f"runs of one configuration differ by about {100 * self.sd:.2g}% ({base})"


def usual_noise(study: Study, *, clock: bool = False) -> Noise:
    """Prior of the noise of ln(seconds), or of another relative result.

    Public runs give it for a study that keeps its benchmark's rules and target, or uses public curves. clock: for
    elapsed seconds, where the study compares seconds from the fitted curve.
    """
    settings, benchmark = study.objective, study.benchmark
    if settings.score == "throughput":
        return Noise(SPEED_SD)
    like = settings.curves == LORA
    closed = study.division == "closed" and benchmark is not None and settings.target == benchmark.target
    if benchmark is not None and closed and not like and benchmark.name in STOP_CV:
        return Noise(benchmark.stop_cv, KNOWN_WIDTH)
    by_curve = settings.estimator == "curve" and not clock
    return Noise(CURVE_SECONDS_SD if by_curve else STOP_SD, KNOWN_WIDTH if like else UNKNOWN_WIDTH)


def noise_of(study: Study, sweep: StudyRecords) -> Noise:
    """Noise of a study's results, from the repeats of its trials."""
    return sweep.once(("noise", study.digest), lambda: _noise_of(study, sweep))


def _noise_of(study: Study, sweep: StudyRecords) -> Noise:
    scale = scale_of(study)
    groups = [[at for v in values if (at := scale.inward(v)) is not None] for values in repeats_of(sweep).values()]
    return noise_before(study, scale, [float(np.mean(places)) for places in groups if places]).after(groups)


def noise_before(study: Study, scale: ResultScale, means: Sequence[float]) -> Noise:
    """Noise before repeats. means: of configurations, on the scale.

    For a metric in its own unit the prior median is a third of the spread of the results.
    """
    objective = objective_of(study)
    if objective.has_target or not objective.judges_evals:
        return usual_noise(study)
    apart = float(np.std(means)) / 3 if means else 0.0
    return Noise(max(apart, scale.least_sd(means), 1 / LARGEST), NO_WIDTH)


def clock_noise(study: Study, sweep: StudyRecords) -> Noise:
    """Noise of ln(elapsed seconds to the target) at the reference pace."""
    return sweep.once(("noise of the clock", study.digest), lambda: _clock_noise(study, sweep))


def _clock_noise(study: Study, sweep: StudyRecords) -> Noise:
    logarithms = ([math.log(s) for s in runs if 0 < s < math.inf] for runs in seconds_of(sweep).values())
    return usual_noise(study, clock=True).after(logarithms)


def settings(trial: Trial) -> object:
    """Key shared by runs of one configuration."""
    return tuple(sorted((name, str(value)) for name, value in trial.parameters.items()))


def repeats_of(sweep: StudyRecords) -> dict[object, list[float]]:
    """Results of trials that have one, by configuration."""
    return sweep.once("results by configuration", lambda: _grouped(sweep, lambda t: t.metrics.objective))


def seconds_of(sweep: StudyRecords) -> dict[object, list[float]]:
    """Seconds to the target at the reference pace, of trials that reached it, by configuration."""
    return sweep.once("seconds by configuration", lambda: _grouped(sweep, lambda t: t.reference_seconds))


def _grouped(sweep: StudyRecords, result: Callable[[Trial], float | None]) -> dict[object, list[float]]:
    runs: dict[object, list[float]] = {}
    for trial in sweep.reached():
        if (value := result(trial)) is not None:
            runs.setdefault(settings(trial), []).append(value)
    return runs


# The leader is repeated until it has run three times. Its first run was selected for its result, by luck as much as by
# merit; the second and third were not, so they estimate its mean and the noise without bias.


WHY = "the leader is run again: one run leads by luck as much as by merit"
"""Reason recorded for such a trial."""

RUNS = 3
"""Runs of the leader, including its first one."""

FIRST = 5
"""Results required before a leader is repeated."""

SHARE = 0.25
"""Maximum share of repeats in a sweep. Regret of 30 trials with and without them: 1.4 and 1.5% at 5% noise, 3.2 and
2.8% at 10%, 5.8 and 5.1% at 20% (``benchmarks.statistics --part coverage``, 2026-11-26)."""

EARLY = 2
"""Repeats allowed beyond the share of the trials so far, so that the first leader is repeated early."""


def next_repeat(study: Study, sweep: StudyRecords) -> Mapping[str, Value] | None:
    """Tuned values of the leader if it should be repeated now. None if it has enough runs, the share is used up, or the
    noise is negligible."""
    done = [t for t in sweep.reached() if t.tuned and not t.probe and t.has_value]
    planned = study.budget.trials or math.inf
    repeated = sum(t.why == WHY for t in sweep.trials.values())
    if len(done) < FIRST or repeated + 1 > min(SHARE * planned, EARLY + SHARE * len(sweep.trials)):
        return None
    if (leading := leader(study, sweep, done)) is None:
        return None
    key = settings(leading)
    runs = [t for t in sweep.trials.values() if settings(t) == key and _may_count(t)]
    return leading.tuned if len(runs) < RUNS else None


def leader(study: Study, sweep: StudyRecords, done: list[Trial]) -> Trial | None:
    """The trial with the lowest mean, each mean shrunk towards the overall level by its number of runs.

    None if repeats have shown no noise: another repeat would give the same result.
    """
    scale, noise = scale_of(study), noise_of(study, sweep)
    runs: dict[object, list[tuple[float, Trial]]] = {}
    for trial in done:
        if (place := scale.inward(trial.objective)) is not None:
            runs.setdefault(settings(trial), []).append((place, trial))
    if not runs:
        return None
    every = [place for of_run in runs.values() for place, _ in of_run]
    repeated = [of_run for of_run in runs.values() if len(of_run) > 1]
    if repeated and all(abs(p - of_run[0][0]) < scale.least_sd(every) for of_run in repeated for p, _ in of_run):
        return None
    means = np.array([np.mean([place for place, _ in of_run]) for of_run in runs.values()])
    counts = np.array([len(of_run) for of_run in runs.values()])
    apart = max(float(means.var()) - noise.sd**2, 0.25 * noise.sd**2)
    level = float(np.median(means))
    shrunk = (means * counts / noise.sd**2 + level / apart) / (counts / noise.sd**2 + 1 / apart)
    return list(runs.values())[int(np.argmin(shrunk))][0][1]


def _may_count(trial: Trial) -> bool:
    """Whether a trial has ended with evidence on its configuration, or may still do so."""
    return trial.state is not TrialState.FINISHED or trial.verdict is not None
