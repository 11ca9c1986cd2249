"""Find the best of a few configurations with equally many seeds each: a t-test whose error is shared by all looks.

A pure function of the runs so far: :func:`plan` returns how many runs each configuration needs next, or the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lora_tune.base.scatter import STOP_SD
from lora_tune.base.text import counted
from lora_tune.search.noise import LARGEST, NO_WIDTH, TIMES, Noise, ResultScale

LAST_LOOK = 0.8
"""Share of the error for the last look; earlier looks share the rest in proportion to the cube of their runs."""

UNSOUND_FROM = 2
"""Runs without a result after which a configuration is excluded: MLPerf allows one of ten."""

CLOSEST = 1e-3
"""Least difference of means, relative to the spread between seeds; equal means would need infinitely many runs."""

POWER = 0.8
"""Power of the forecast "N more runs"."""

SAME_COST = 0.02
"""Relative difference in node-hours per run below which costs count as equal."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of a configuration: its result (infinite if it has none) and its node-hours."""

    result: float
    node_hours: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRules:
    """confidence: that the winner is the best, over all looks. fewest: runs of each before the first look; batch: runs
    of each between two looks; most: runs of each at the last look. scale: of the results. noise: prior of the noise;
    None: the usual one for relative results, and for other metrics one from the spread of the results."""

    confidence: float = 0.95
    fewest: int = 3
    most: int = 10
    batch: int = 1
    scale: ResultScale = TIMES
    noise: Noise | None = None

    def looks(self) -> dict[int, float]:
        """Error that may be spent at each look, by runs per configuration; the sum is 1 - confidence.

        A union bound (Bonferroni), which needs no model of the dependence between looks.
        """
        counts = [*range(min(self.fewest, self.most), self.most, self.batch), self.most]
        early = [count**3 for count in counts[:-1]]
        shares = [(1 - LAST_LOOK) * (now - before) / early[-1] for before, now in zip([0, *early], early, strict=False)]
        error = 1 - self.confidence
        return {count: error * share for count, share in zip(counts, [*shares, 1 - sum(shares)], strict=True)}


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration: its results on the scale, how many runs have none, and its node-hours per run."""

    name: str
    places: tuple[float, ...]
    failures: int
    node_hours: float
    scale: ResultScale = TIMES

    @property
    def runs(self) -> int:
        return len(self.places) + self.failures

    @property
    def mean(self) -> float:
        """Arithmetic mean of its results on the scale; infinite without one."""
        results = [self.scale.outward(place) for place in self.places]
        place = self.scale.inward(math.fsum(results) / len(results)) if results else None
        return math.inf if place is None else place


@dataclass(frozen=True, slots=True)
class Decided:
    """``winner`` is better than all others with the confidence of the rules."""

    winner: str
    sentence: str


@dataclass(frozen=True, slots=True)
class CannotSeparate:
    """The leaders are too close. difference, margin: of the second to the first, on the scale (90% half-width).

    more_runs, node_hours: total needed to separate them; 0 for equal means. seeds: then needed of each. recommended:
    the choice meanwhile.
    """

    leaders: tuple[str, str]
    difference: float
    margin: float
    more_runs: int
    node_hours: float
    seeds: int
    recommended: str
    sentence: str


Verdict = Decided | CannotSeparate


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """wanted: total runs that each configuration needs up to the next look or, after the verdict, for the score of the
    recommended one. verdict: None if none is due yet; later runs do not change it."""

    required: Mapping[str, int]
    verdict: Verdict | None = None


def plan(results: Mapping[str, Sequence[RunSummary]], rules: ComparisonRules | None = None) -> ComparisonPlan:
    """Replay all looks: returns the runs needed next, or the verdict.

    results: all finished runs by configuration, in the order in which they count. A configuration that is beaten, or
    has two runs without a result, gets no further runs. If all others are excluded, the remaining one is the best: an
    error would mean that it beat the best one. After the verdict the chosen configuration is run up to ``rules.most``
    times, if it ever had a result. Raises ValueError without a configuration.
    """
    rules = rules or ComparisonRules()
    if not results:
        raise ValueError("no configuration was given; give at least one")
    counts = dict.fromkeys(results, 0)
    left = list(results)
    for count, error in rules.looks().items():
        counts |= dict.fromkeys(left, count)
        if any(len(results[name]) < count for name in left):
            return ComparisonPlan(dict.fromkeys(left, count))
        field = {name: _contender(name, runs[: counts[name]], rules.scale) for name, runs in results.items()}
        verdict, left = _look(field, left, error, count, rules)
        if verdict is not None:
            break
    assert verdict is not None, "the last look decides"
    chosen = verdict.winner if isinstance(verdict, Decided) else verdict.recommended
    return ComparisonPlan({chosen: rules.most} if field[chosen].places else {}, verdict)


def _look(
    field: Mapping[str, Contender], left: Sequence[str], error: float, count: int, rules: ComparisonRules
) -> tuple[Verdict | None, list[str]]:
    """(the verdict or None, names that may still be the best)."""
    configs, scale = list(field.values()), rules.scale
    known = [config for config in configs if config.places]
    sound = [config for config in known if config.failures < UNSOUND_FROM]
    sound = [config for config in sound if config.name in left] or sound or known
    if not sound:
        return Decided(configs[0].name, f"no run of any configuration {scale.got}; nothing to choose"), []
    sd, freedom = _spread(configs, rules)
    leader = min(sound, key=lambda c: c.mean)
    rivals = [c for c in sound if c is not leader and not _beats(leader, c, sd, freedom, error)]
    if not rivals:
        return Decided(leader.name, _why_decided(leader, configs, rules)), []
    if count < rules.most:
        return None, [c.name for c in (leader, *rivals)]
    return _cannot_separate(leader, sorted(rivals, key=lambda c: c.mean), sd, freedom, rules), []


def _beats(leader: Contender, rival: Contender, sd: float, freedom: float, error: float) -> bool:
    """Whether a two-sided t-test at level ``error`` finds the leader better."""
    from scipy.special import stdtr

    statistic = (rival.mean - leader.mean) / (sd * math.sqrt(1 / len(leader.places) + 1 / len(rival.places)))
    return 2 * float(stdtr(freedom, -statistic)) < error


def _spread(configs: Sequence[Contender], rules: ComparisonRules) -> tuple[float, float]:
    """Sd of single runs and its degrees of freedom, from the prior noise and the spread within configurations."""
    every = [place for c in configs for place in c.places]
    least = rules.scale.least_sd(every)
    noise = (rules.noise or Noise(STOP_SD)).after(c.places for c in configs)
    if rules.noise is None and not rules.scale.relative:
        shown = math.sqrt(noise.squares / noise.repeats) if noise.repeats else float(np.std(every or [0.0]))
        noise = replace(noise, usual=max(shown, least, 1 / LARGEST), width=NO_WIDTH)
    scale, freedom = noise.student
    return max(scale, least), freedom


def means(
    results: Mapping[str, Sequence[RunSummary]], rules: ComparisonRules | None = None
) -> dict[str, tuple[float, float, float]]:
    """Arithmetic mean of each configuration with results, with Student's 90% interval on the scale (mean, low, high).

    The spread between seeds is pooled over all configurations.
    """
    from scipy.special import stdtrit

    rules = rules or ComparisonRules()
    configs = [_contender(name, runs, rules.scale) for name, runs in results.items()]
    sd, freedom = _spread(configs, rules)
    width = float(stdtrit(freedom, 0.95)) * sd
    return {c.name: rules.scale.interval(c.mean, width / math.sqrt(len(c.places))) for c in configs if c.places}


def _contender(name: str, runs: Sequence[RunSummary], scale: ResultScale) -> Contender:
    places = tuple(place for r in runs if (place := scale.inward(r.result)) is not None)
    hours = [r.node_hours for r in runs if math.isfinite(r.node_hours)]
    return Contender(name, places, len(runs) - len(places), float(np.mean(hours)) if hours else 0.0, scale)


def _why_decided(leader: Contender, configs: Sequence[Contender], rules: ComparisonRules) -> str:
    others = sorted((c for c in configs if c is not leader and c.places), key=lambda c: c.mean)
    if len(configs) == 1:
        return f"{leader.name} ran alone: there is nothing to compare it with"
    if not others:
        return f"{leader.name} is the only configuration that {rules.scale.got}"
    second, scale = others[0], rules.scale
    lead = scale.text(scale.difference(second.mean - leader.mean))
    reason = f"{leader.name} is better than {second.name} by {lead} with {rules.confidence:.0%} confidence"
    if second.failures >= UNSOUND_FROM:
        reason = f"{second.name} {scale.missed} in {second.failures} of {second.runs} runs; {leader.name} is left"
    return f"{reason}, after {counted(sum(c.runs for c in configs), 'runs')}"


def _cannot_separate(
    leader: Contender, rivals: Sequence[Contender], sd: float, freedom: float, rules: ComparisonRules
) -> CannotSeparate:
    """Verdict for leaders that are too close, with the runs needed to separate them."""
    from scipy.special import ndtri, stdtrit

    second, scale = rivals[0], rules.scale
    lead = second.mean - leader.mean
    margin = float(stdtrit(freedom, 0.95)) * sd * math.sqrt(1 / len(leader.places) + 1 / len(second.places))
    quantiles = float(ndtri((1 + rules.confidence) / 2)) + float(ndtri(POWER))
    needed = math.ceil(2 * (quantiles * sd / max(lead, CLOSEST * sd)) ** 2)
    alike = lead < scale.least_sd([*leader.places, *second.places])  # then the number of runs needed is undefined
    seeds = rules.most if alike else max(needed, rules.most + 1)
    more = [seeds - c.runs for c in (leader, *rivals)]
    hours = sum(n * c.node_hours for n, c in zip(more, (leader, *rivals), strict=True))
    recommended, why = _recommend(leader, second, scale, alike=alike)
    difference, half = scale.difference(lead), scale.difference(margin)
    outcome = f"cannot be separated: difference {scale.text(difference)} +/- {scale.text(half)}; "
    outcome += "" if alike else f"{counted(sum(more), 'more runs')} = {scale.spent(hours)}; "
    sentence = f"{leader.name} and {second.name} {outcome}take {recommended}, {why}"
    return CannotSeparate(
        (leader.name, second.name), difference, half, sum(more), hours, seeds, recommended, sentence
    )  # fmt: skip


def _recommend(leader: Contender, second: Contender, scale: ResultScale, *, alike: bool) -> tuple[str, str]:
    """The one with fewer failures, else the clearly cheaper by node-hours per run, else the currently better."""
    if leader.failures != second.failures:
        best = min((leader, second), key=lambda c: c.failures)
        return best.name, f"{'more' if best.failures else 'all'} of whose runs {scale.got}"
    if abs(leader.node_hours - second.node_hours) > SAME_COST * max(leader.node_hours, second.node_hours):
        return min((leader, second), key=lambda c: c.node_hours).name, "the cheaper a run"
    return leader.name, "as good as the other so far" if alike else f"the {scale.better} so far"
