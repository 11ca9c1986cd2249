"""How a race can end, and what is said of it: which configuration to take, why, and what more runs would tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune.base.format import counted
from lora_tune.search.contenders import Contender
from lora_tune.search.race_scale import RaceScale

CLOSEST = 1e-3
"""The least lead that is counted with, relative to the spread between seeds: equal means need no infinity of runs."""

POWER = 0.8
"""Power at which "N more runs" would separate two configurations."""


@dataclass(frozen=True, slots=True)
class Decided:
    """``winner`` is better than all others with the asked confidence."""

    winner: str
    sentence: str


@dataclass(frozen=True, slots=True)
class CannotSeparate:
    """The leaders are too close. difference, margin: of the second to the first, by the scale (90% half-width).

    more_runs, node_hours: to separate them, in all; 0 of equal means. recommended: the one to take meanwhile.
    """

    leaders: tuple[str, str]
    difference: float
    margin: float
    more_runs: int
    node_hours: float
    recommended: str
    sentence: str


RaceVerdict = Decided | CannotSeparate


def why_decided(leader: Contender, configs: Sequence[Contender], confidence: float, scale: RaceScale) -> str:
    """Why a leader has won against all others, in words."""
    others = sorted((c for c in configs if c is not leader and c.places), key=lambda c: c.mean)
    if len(configs) == 1:
        return f"{leader.name} ran alone: there is nothing to compare it with"
    if not others:
        return f"{leader.name} is the only configuration that {scale.got}"
    second = others[0]
    lead = scale.words(scale.difference(second.mean - leader.mean))
    reason = f"{leader.name} is better than {second.name} by {lead} with {confidence:.0%} confidence"
    if second.failures >= 2:
        reason = f"{second.name} {scale.missed} in {second.failures} of {second.runs} runs; {leader.name} is left"
    return f"{reason}, after {counted(sum(c.runs for c in configs), 'runs')}"


def cannot_separate(
    leader: Contender, second: Contender, sd: float, freedom: float, confidence: float, scale: RaceScale
) -> CannotSeparate:
    """The verdict on two that are too close, with what it would take to separate them.

    sd, freedom: the spread between seeds, on the scale, and its degrees of freedom.
    """
    from scipy.special import ndtri, stdtrit

    level, lead = 1 - confidence, second.mean - leader.mean
    margin = float(stdtrit(freedom, 0.95)) * sd * math.sqrt(1 / len(leader.places) + 1 / len(second.places))
    needed = 2 * ((float(ndtri(1 - level / 2)) + float(ndtri(POWER))) * sd / max(lead, CLOSEST * sd)) ** 2
    alike = lead < scale.least_sd([*leader.places, *second.places])  # then nobody can say what would tell them apart
    missing = [0 if alike else max(0, math.ceil(needed) - len(c.places)) for c in (leader, second)]
    more, hours = sum(missing), sum(n * c.node_hours for n, c in zip(missing, (leader, second), strict=True))
    recommended, why = _recommend(leader, second, scale, alike=alike)
    difference, half = scale.difference(lead), scale.difference(margin)
    said = f"cannot be separated: difference {scale.words(difference)} +/- {scale.words(half)}; "
    said += "" if alike else f"{counted(more, 'more runs')} = {scale.spent(hours)}; "
    sentence = f"{leader.name} and {second.name} {said}take {recommended}, {why}"
    return CannotSeparate((leader.name, second.name), difference, half, more, hours, recommended, sentence)


def _recommend(leader: Contender, second: Contender, scale: RaceScale, *, alike: bool) -> tuple[str, str]:
    """The one with fewer failures, then the clearly cheaper (2% of node-hours a run), then the better so far."""
    if leader.failures != second.failures:
        best = min((leader, second), key=lambda c: c.failures)
        return best.name, f"{'more' if best.failures else 'all'} of whose runs {scale.got}"
    if abs(leader.node_hours - second.node_hours) > 0.02 * max(leader.node_hours, second.node_hours):
        return min((leader, second), key=lambda c: c.node_hours).name, "the cheaper a run"
    return leader.name, "as good as the other so far" if alike else f"the {scale.better} so far"
