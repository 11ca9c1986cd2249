"""Racing: which of a few configurations is best, with as few seeds as the asked confidence allows.

A pure state machine: give it the results so far, do what it says, ask again. Comparisons are group-sequential t-tests
on ln(seconds): looking after every run costs no error, because the limits are computed for all the looks together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from lora_tune.curves.family import LARGEST_EXPONENT

PRIOR_SD = 0.05
"""Sd of ln(seconds) between seeds where the runs do not say and seconds are those of the fitted curve: 4.7% of samples
on the public runs, plus eval steps."""

RAW_SD = 0.068
"""The same where seconds are those of the raw stop: that within public test submissions at GBS 8."""

PRIOR_RUNS = 4
"""Weight of ``PRIOR_SD`` beside the runs' own spread, in degrees of freedom."""

POWER = 0.8
"""Power at which "N more runs" would separate two configurations."""

FLATNESS = 0.25
"""Delta of the Wang-Tsiatis family of limits: 0.5 is Pocock's, 0 O'Brien and Fleming's (Wang and Tsiatis 1987)."""

PATHS = 40_000


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of a configuration: seconds to target (infinite when it did not get there) and its node-hours."""

    seconds: float
    node_hours: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSettings:
    """confidence: of the winner's being better than each other. fewest, most: runs of a configuration.

    batch: runs that one action asks for (seeds of one allocation). futility: a comparison whose chance of being
    decided by ``most`` runs is below this is given up. prior_sd: of ln(seconds) between seeds, where the runs say
    little: ``PRIOR_SD`` or ``RAW_SD``.
    """

    confidence: float = 0.9
    futility: float = 0.1
    fewest: int = 3
    most: int = 10
    batch: int = 1
    prior_sd: float = PRIOR_SD


@dataclass(frozen=True, slots=True)
class RunMore:
    """Start ``runs`` more seeds of ``config``."""

    config: str
    runs: int


@dataclass(frozen=True, slots=True)
class Decided:
    """``winner`` is better than all others with the asked confidence."""

    winner: str
    sentence: str


@dataclass(frozen=True, slots=True)
class CannotSeparate:
    """The leaders are too close. difference, margin: of the second to the first, relative (90% interval half-width).

    more_runs, node_hours: what separating them would take in all. recommended: the one to take meanwhile.
    """

    leaders: tuple[str, str]
    difference: float
    margin: float
    more_runs: int
    node_hours: float
    recommended: str
    sentence: str


RaceVerdict = Decided | CannotSeparate
Action = RunMore | RaceVerdict


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a race stands.

    wanted: runs that each configuration needs in all, up to the next look or, after the verdict, for the score of the
    recommended one. verdict: None while the race is on; it stays whatever runs are added afterwards.
    """

    wanted: Mapping[str, int]
    verdict: RaceVerdict | None = None


@dataclass(frozen=True, slots=True)
class _Config:
    name: str
    logs: tuple[float, ...]
    failures: int
    node_hours: float

    @property
    def runs(self) -> int:
        return len(self.logs) + self.failures

    @property
    def mean(self) -> float:
        return float(np.mean(self.logs)) if self.logs else math.inf


def next_action(results: Mapping[str, Sequence[RunSummary]], settings: RaceSettings | None = None) -> Action:
    """What to do next, from all finished runs of all racing configurations (at least one; name -> runs, may be empty).

    A configuration leaves the race when the leader is better with ``1 - (1 - confidence) / (rivals)``, or when a
    second of its runs did not converge: MLPerf allows one of ten. Raises ValueError without a configuration.
    """
    settings = settings or RaceSettings()
    found = _standing(results, settings)
    if not isinstance(found, list):
        return found
    config = found[0]
    until = settings.fewest if config.runs < settings.fewest else settings.most
    return RunMore(config.name, min(settings.batch, until - config.runs))


def plan(results: Mapping[str, Sequence[RunSummary]], settings: RaceSettings, *, together: bool = False) -> Plan:
    """Replay the race from its first run on: which runs it wants next, or its verdict.

    results: all finished runs, in the order in which they count. The looks depend on the results alone, so the answer
    is the same after an interruption, and runs that came on top do not change a verdict. together: between two looks
    every open configuration runs, not only the one with the fewest runs; fewer looks than the limits allow for. After
    the verdict the recommended configuration is wanted up to ``settings.most`` runs, if it ever reached the target.
    """
    counts = dict.fromkeys(results, settings.fewest)
    while all(counts[name] <= len(runs) for name, runs in results.items()):
        found = _standing({name: runs[: counts[name]] for name, runs in results.items()}, settings)
        if not isinstance(found, list):
            chosen = found.winner if isinstance(found, Decided) else found.recommended
            converges = any(math.isfinite(run.seconds) for run in results[chosen])
            return Plan({chosen: settings.most} if converges else {}, found)
        least = found[0].runs
        for config in found if together else found[:1]:
            counts[config.name] = min(settings.most, max(counts[config.name], least + settings.batch))
    return Plan(counts)


def _standing(results: Mapping[str, Sequence[RunSummary]], settings: RaceSettings) -> list[_Config] | RaceVerdict:
    """The verdict, or who should run on, the one with the fewest runs first."""
    if not results:
        raise ValueError("no configuration came; give at least one")
    configs = [_config(name, runs) for name, runs in results.items()]
    if short := [c for c in configs if c.runs < settings.fewest]:
        return short
    sound = [c for c in configs if c.failures < 2 and c.logs] or [c for c in configs if c.logs]
    if not sound:
        return Decided(configs[0].name, "no run of any configuration reached the target; nothing to choose")
    leader = min(sound, key=lambda c: c.mean)
    sd, freedom = pooled_sd(configs, settings.prior_sd)
    level = (1 - settings.confidence) / max(1, len(configs) - 1)
    rivals = [c for c in sound if c is not leader and not _beaten(leader, c, sd, freedom, level, settings)]
    if not rivals:
        return Decided(leader.name, _decided(leader, configs, settings))
    hopeful = [c for c in rivals if _chance(leader, c, sd, level, settings) >= settings.futility]
    open_ones = [c for c in (leader, *hopeful) if c.runs < settings.most] if hopeful else []
    if open_ones:
        return sorted(open_ones, key=lambda c: c.runs)
    return _cannot_separate(leader, min(rivals, key=lambda c: c.mean), sd, freedom, level)


def pooled_sd(configs: Sequence[_Config], prior_sd: float) -> tuple[float, float]:
    """Sd of ln(seconds) within configurations and its degrees of freedom, shrunk towards ``prior_sd``."""
    squares = PRIOR_RUNS * prior_sd**2 + sum(float(((np.array(c.logs) - c.mean) ** 2).sum()) for c in configs if c.logs)
    freedom = PRIOR_RUNS + sum(max(0, len(c.logs) - 1) for c in configs)
    return math.sqrt(squares / freedom), freedom


def means(
    results: Mapping[str, Sequence[RunSummary]], prior_sd: float = PRIOR_SD
) -> dict[str, tuple[float, float, float]]:
    """Mean seconds (geometric) of each configuration that reached the target, with its 90% interval, low and high.

    Student's interval on ln(seconds), with the spread between seeds that all configurations share.
    """
    from scipy.special import stdtrit

    configs = [_config(name, runs) for name, runs in results.items()]
    sd, freedom = pooled_sd(configs, prior_sd)
    width = float(stdtrit(freedom, 0.95)) * sd
    reached = [(c, width / math.sqrt(len(c.logs))) for c in configs if c.logs]
    return {c.name: (_exp(c.mean), _exp(c.mean - half), _exp(c.mean + half)) for c, half in reached}


def _exp(x: float) -> float:
    """exp(x), held within a double's range."""
    return math.exp(max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, x)))


def _config(name: str, runs: Sequence[RunSummary]) -> _Config:
    logs = tuple(math.log(r.seconds) for r in runs if 0 < r.seconds < math.inf)
    hours = [r.node_hours for r in runs if math.isfinite(r.node_hours)]
    return _Config(name, logs, len(runs) - len(logs), float(np.mean(hours)) if hours else 0.0)


def _beaten(leader: _Config, rival: _Config, sd: float, freedom: float, level: float, settings: RaceSettings) -> bool:
    """Whether the leader's lead is beyond the sequential limit at this look."""
    from scipy.special import ndtri, stdtr

    error = sd * math.sqrt(1 / len(leader.logs) + 1 / len(rival.logs))
    tail = float(stdtr(freedom, -(rival.mean - leader.mean) / error))
    share = min(1.0, _pairs(leader, rival) / settings.most)
    limit = limit_constant(level, settings.fewest, settings.most) * math.pow(share, FLATNESS - 0.5)
    return -float(ndtri(max(tail, 1e-300))) >= limit


def _chance(leader: _Config, rival: _Config, sd: float, level: float, settings: RaceSettings) -> float:
    """Predictive power: the chance that the comparison is decided, either way, at ``most`` runs of both.

    Given a lead d after n pairs, the lead after N is normal about d with variance ``2 sd^2 (1/n - 1/N)``.
    """
    from scipy.special import ndtr

    n, most = _pairs(leader, rival), settings.most
    limit = limit_constant(level, settings.fewest, most) * sd * math.sqrt(2 / most)
    ahead = sd * math.sqrt(2 * max(0.0, 1 / n - 1 / most))
    lead = rival.mean - leader.mean
    if ahead == 0:
        return 0.0
    return float(ndtr((lead - limit) / ahead) + ndtr((-lead - limit) / ahead))


def _pairs(leader: _Config, rival: _Config) -> float:
    """Pairs of runs that are worth as much as these unequal numbers: their harmonic mean."""
    return 2 / (1 / len(leader.logs) + 1 / len(rival.logs))


@cache
def limit_constant(level: float, fewest: int, most: int) -> float:
    """c such that equal configurations cross ``+-c * (n / most)^(FLATNESS - 1/2)`` at some look with chance ``level``.

    z statistics are looked at after every run, alternately of the one and the other, from ``fewest`` to ``most`` of
    both; n is the harmonic mean of their numbers. Limits of Wang and Tsiatis (1987); the constant by simulation of
    ``PATHS`` races with a fixed seed (standard error about 0.01).
    """
    rng = np.random.default_rng(20261121)
    sums = rng.standard_normal((2, PATHS)) * math.sqrt(fewest)
    counts = [fewest, fewest]
    worst = np.zeros(PATHS)
    while True:
        pairs = 2 / (1 / counts[0] + 1 / counts[1])
        z = np.abs(sums[0] / counts[0] - sums[1] / counts[1]) * math.sqrt(pairs / 2)
        worst = np.maximum(worst, z * (pairs / most) ** (0.5 - FLATNESS))
        if counts[1] >= most:
            return float(np.quantile(worst, 1 - level))
        side = 0 if counts[0] == counts[1] else 1
        sums[side] += rng.standard_normal(PATHS)
        counts[side] += 1


def _decided(leader: _Config, configs: Sequence[_Config], settings: RaceSettings) -> str:
    others = sorted((c for c in configs if c is not leader and c.logs), key=lambda c: c.mean)
    if len(configs) == 1:
        return f"{leader.name} ran alone: there is nothing to compare it with"
    if not others:
        return f"{leader.name} is the only configuration that reached the target"
    second = others[0]
    lead = _exp(second.mean - leader.mean) - 1
    words = f"{leader.name} is better than {second.name} by {100 * lead:.1f}% with {settings.confidence:.0%} confidence"
    if second.failures >= 2:
        words = f"{second.name} did not converge in {second.failures} of {second.runs} runs; {leader.name} is left"
    return f"{words}, after {sum(c.runs for c in configs)} runs"


def _cannot_separate(leader: _Config, second: _Config, sd: float, freedom: float, level: float) -> CannotSeparate:
    from scipy.special import ndtri, stdtrit

    lead = second.mean - leader.mean
    error = sd * math.sqrt(1 / len(leader.logs) + 1 / len(second.logs))
    margin = float(stdtrit(freedom, 0.95)) * error
    needed = 2 * ((float(ndtri(1 - level / 2)) + float(ndtri(POWER))) * sd / max(lead, 1e-4)) ** 2
    more = sum(max(0, math.ceil(needed) - len(c.logs)) for c in (leader, second))
    hours = sum(max(0, math.ceil(needed) - len(c.logs)) * c.node_hours for c in (leader, second))
    recommended, why = _recommend(leader, second)
    difference, half = _exp(lead) - 1, _exp(margin) - 1
    sentence = (
        f"{leader.name} and {second.name} cannot be separated: "
        f"difference {100 * difference:.1f}% +/- {100 * half:.1f}%; "
        f"{more} more runs = {hours:.3g} node-hours; take {recommended}, {why}"
    )
    return CannotSeparate((leader.name, second.name), difference, half, more, hours, recommended, sentence)


def _recommend(leader: _Config, second: _Config) -> tuple[str, str]:
    """The one with fewer failures, then the clearly cheaper (2% of node-hours a run), then the steadier."""
    if leader.failures != second.failures:
        best = min((leader, second), key=lambda c: c.failures)
        return best.name, "all of whose runs converged" if not best.failures else "of whose runs more converged"
    if abs(leader.node_hours - second.node_hours) > 0.02 * max(leader.node_hours, second.node_hours):
        return min((leader, second), key=lambda c: c.node_hours).name, "the cheaper by node-hours a run"
    return min((leader, second), key=lambda c: float(np.std(c.logs))).name, "the steadier from seed to seed"
