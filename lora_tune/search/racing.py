"""Racing: which of a few configurations is best, with as few seeds as the asked confidence allows.

A pure state machine: give it the results so far, do what it says, ask again. Comparisons are group-sequential t-tests
on a :class:`Scale`: looking after every run costs no error, because the limits are computed for all looks together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.search.contenders import Contender, RunSummary, contender, pairs_of, pooled_sd
from lora_tune.search.race_limits import LimitShape, limit_constant
from lora_tune.search.race_scale import TIMES, RaceScale
from lora_tune.search.race_verdicts import Decided, RaceVerdict, cannot_separate, why_decided

MANY = 3
"""Configurations from which on a race looks for the best of many: runs go to the leader and its nearest rivals."""

RUNS_OF_MANY = 1.2
"""Runs of many together, relative to what they would have with ``most`` of each."""

LONGEST_OF_MANY = 2
"""Runs that one of many may have, relative to ``most``."""

PAIRS_OF_MANY = 1.5
"""Pairs, relative to ``most``, from which on the limits of many stay: the leader's and one last rival's runs."""

FLATNESS = 0.25
"""Flatness of the limits of two (``LimitShape``)."""

FLATNESS_OF_MANY = 0.0
"""O'Brien and Fleming's: a best one of many is seldom found early, so what may be wrong is kept for the end."""

LEVEL_OF_MANY = 0.9
"""What the limits may be wrong, relative to what the race may. Simulated with two equal ones and one or three worse, 6
and 9.5% of races at 90% confidence separate the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSettings:
    """confidence: of the winner's being the best. fewest, most: runs of a configuration.

    Of three or more configurations one may have twice the most, within the most of all together: runs go where they
    tell. batch: runs that one action asks for (seeds of one allocation). futility: a race of two whose chance of being
    decided by ``most`` runs is below this is given up; of many, whose runs go elsewhere, none is: the best one was
    found in 63% instead of 58% of races so. scale: what runs are compared on, with the spread between seeds where
    they say little.
    """

    confidence: float = 0.9
    futility: float = 0.1
    fewest: int = 3
    most: int = 10
    batch: int = 1
    scale: RaceScale = TIMES

    def longest(self, configurations: int) -> int:
        """Most runs of one configuration in a race of so many."""
        return self.most if configurations < MANY else LONGEST_OF_MANY * self.most

    def total(self, configurations: int) -> int:
        """Most runs of all configurations together."""
        return configurations * (int(RUNS_OF_MANY * self.most) if configurations >= MANY else self.most)


@dataclass(frozen=True, slots=True)
class RunMore:
    """Start more seeds. runs: how many, by configuration, the one whose run tells most first."""

    runs: Mapping[str, int]


Action = RunMore | RaceVerdict


@dataclass(frozen=True, slots=True)
class RacePlan:
    """Where a race stands.

    wanted: runs that each configuration needs in all, up to the next look or, after the verdict, for the score of the
    recommended one. verdict: None while the race is on; it stays whatever runs are added afterwards.
    """

    wanted: Mapping[str, int]
    verdict: RaceVerdict | None = None


def next_action(
    results: Mapping[str, Sequence[RunSummary]], settings: RaceSettings | None = None, *, together: bool = False
) -> Action:
    """What to do next, from all finished runs of all racing configurations (at least one; name -> runs, may be empty).

    The leader wins when it is better than each other one at the stated confidence: to be wrong, it must have passed
    the best one too, so one pair's limit holds for all. A configuration leaves the race when a second of its runs did
    not converge: MLPerf allows one of ten. together: every open configuration runs, not only the one whose run tells
    most. Raises ValueError without a configuration.
    """
    settings = settings or RaceSettings()
    standing = _standing(results, settings)
    if not isinstance(standing, list):
        return standing
    least = min(c.runs for c in standing)
    if least < settings.fewest:
        return RunMore({standing[0].name: min(settings.batch, settings.fewest - standing[0].runs)})
    left, longest = settings.total(len(results)) - sum(map(len, results.values())), settings.longest(len(results))
    runs: dict[str, int] = {}
    for config in standing if together else standing[:1]:
        wanted = (config.runs if len(results) >= MANY else least) + settings.batch
        runs[config.name] = max(0, min(min(longest, wanted) - config.runs, left))
        left -= runs[config.name]
    return RunMore(runs)


def plan(results: Mapping[str, Sequence[RunSummary]], settings: RaceSettings, *, together: bool = False) -> RacePlan:
    """Replay the race from its first run on: which runs it wants next, or its verdict.

    results: all finished runs, in the order in which they count. The looks depend on the results alone, so the answer
    is the same after an interruption, and runs that came on top do not change a verdict. together: between two looks
    every open configuration runs, not only the one whose run tells most; fewer looks than the limits allow for. After
    the verdict the recommended configuration is wanted up to ``settings.most`` runs, if it ever reached the target.
    """
    counts = dict.fromkeys(results, settings.fewest)
    while all(counts[name] <= len(runs) for name, runs in results.items()):
        so_far = {name: runs[: counts[name]] for name, runs in results.items()}
        action = next_action(so_far, settings, together=together)
        if not isinstance(action, RunMore):
            chosen = action.winner if isinstance(action, Decided) else action.recommended
            converges = any(settings.scale.inward(run.result) is not None for run in results[chosen])
            return RacePlan({chosen: settings.most} if converges else {}, action)
        for name, more in action.runs.items():
            counts[name] += more
    return RacePlan(counts)


def _standing(results: Mapping[str, Sequence[RunSummary]], settings: RaceSettings) -> list[Contender] | RaceVerdict:
    """The verdict, or who should run on, the one whose run tells most first."""
    if not results:
        raise ValueError("no configuration was given; give at least one")
    configs = [contender(name, runs, settings.scale) for name, runs in results.items()]
    if short := [c for c in configs if c.runs < settings.fewest]:
        return short
    sound = [c for c in configs if c.failures < 2 and c.places] or [c for c in configs if c.places]
    if not sound:
        return Decided(configs[0].name, f"no run of any configuration {settings.scale.got}; nothing to choose")
    leader = min(sound, key=lambda c: c.mean)
    race = _Race(*pooled_sd(configs, settings.scale), settings, len(configs))
    rivals = [c for c in sound if c is not leader and not race.beats(leader, c)]
    if not rivals:
        return Decided(leader.name, why_decided(leader, configs, settings.confidence, settings.scale))
    spent = sum(c.runs for c in configs) >= settings.total(len(configs))
    least = settings.futility if len(configs) < MANY else 0.0
    hopeful = [] if spent else [c for c in rivals if race.chance(leader, c) >= least]
    if running := [c for c in (leader, *hopeful) if c.runs < settings.longest(len(configs)) and hopeful]:
        return _most_telling_first(leader, running)
    second = min(rivals, key=lambda c: c.mean)
    return cannot_separate(leader, second, race.sd, race.freedom, settings.confidence, settings.scale)


def _most_telling_first(leader: Contender, running: Sequence[Contender]) -> list[Contender]:
    """The leader while it has fewer than sqrt(rivals) times its nearest rival's runs; then the nearest rivals first.

    With several rivals the leader is in every comparison: that share makes their errors least in all (Dunnett 1955).
    """
    rivals = [c for c in running if c is not leader]
    nearest = sorted(rivals, key=lambda c: (c.mean - leader.mean) * math.sqrt(len(c.places)))
    if leader not in running:
        return nearest
    if not nearest or leader.runs < math.sqrt(len(nearest)) * nearest[0].runs:
        return [leader, *nearest]
    return [nearest[0], leader, *nearest[1:]]


@dataclass(frozen=True, slots=True)
class _Race:
    """The spread between seeds with its degrees of freedom, and the rules of the race."""

    sd: float
    freedom: float
    settings: RaceSettings
    configurations: int

    @property
    def shape(self) -> LimitShape:
        many = self.configurations >= MANY
        return (
            LimitShape(PAIRS_OF_MANY * self.settings.most, FLATNESS_OF_MANY)
            if many
            else LimitShape(self.settings.most, FLATNESS)
        )

    def limit(self, pairs: float) -> float:
        """The normal quantile that a lead must exceed after so many pairs of runs."""
        level = (1 - self.settings.confidence) * (LEVEL_OF_MANY if self.configurations >= MANY else 1.0)
        longest = self.settings.longest(self.configurations)
        known = self.settings.scale.prior_freedom
        return limit_constant(level, self.settings.fewest, longest, self.shape, known) * self.shape.at(pairs)

    def beats(self, leader: Contender, rival: Contender) -> bool:
        """Whether the leader's lead was beyond the sequential limit at a look since the rival stopped running.

        The limits hold for all looks together, so a rival once beaten by a configuration stays beaten by it.
        """
        from scipy.special import ndtri, stdtr

        own = len(rival.places)
        counts = np.arange(min(own, len(leader.places)), len(leader.places) + 1, dtype=np.float64)
        means = np.cumsum(leader.places)[counts.astype(int) - 1] / counts
        error = self.sd * np.sqrt(1 / counts + 1 / own)
        tails = np.maximum(stdtr(self.freedom, -(rival.mean - means) / error), 1e-300)
        limits = [self.limit(2 / (1 / count + 1 / own)) for count in counts]
        return bool((-ndtri(tails) >= limits).any())

    def chance(self, leader: Contender, rival: Contender) -> float:
        """Predictive power: the chance that the comparison is decided, either way, at the most runs of both.

        Given a lead d after n pairs, the lead after N is normal about d with variance ``2 sd^2 (1/n - 1/N)``.
        """
        from scipy.special import ndtr

        n, most = pairs_of(leader, rival), self.shape.pairs
        limit = self.limit(most) * self.sd * math.sqrt(2 / most)
        ahead = self.sd * math.sqrt(2 * max(0.0, 1 / n - 1 / most))
        lead = rival.mean - leader.mean
        if ahead == 0:
            return 0.0
        return float(ndtr((lead - limit) / ahead) + ndtr((-lead - limit) / ahead))
