"""Which model to believe, by what each forecast of this study's runs before they began. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr

GREY_BOX, WHOLE = "grey_box", "whole"
PRIOR_ODDS = 3.0
"""ln of the odds for the grey box before any run, where there is a layout or something published: 20 to one."""
OUTLIER, OUTLIER_SD = 0.1, 1.5
"""Share of runs that no forecast is held to, and how far they lie: one freak run must not settle the matter."""
NEWEST = 16
"""Forecasts that count: models learn, and what they said long ago says little of them."""
INSURANCE, DOUBTFUL = 0.1, 0.4
"""TPE's share of what the grey box does not get: while the whole model forecasts better than the study's own average,
and while it does not."""
FEW = 5
"""Forecasts before the whole model is doubted, and TPE, which draws at random until then, gets a share."""


@dataclass(frozen=True, slots=True)
class ScoreForecast:
    """Of ln(score) of one run: mean and sd."""

    mean: float
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An ended run with what was forecast of it. ln_score: what came, or what it exceeds where it did not arrive."""

    ln_score: float
    reached: bool
    forecasts: Mapping[str, ScoreForecast]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Shares of the next trials. What is left of ``grey_box`` and ``tpe`` is the whole model's."""

    grey_box: float
    tpe: float

    @property
    def believes_grey_box(self) -> bool:
        """Whether the grey box is the likelier of the two models."""
        return self.grey_box >= 0.5


def trust(scored: Sequence[Told], *, grey_box: bool) -> Trust:
    """Shares after these runs, the newest ``NEWEST`` in their order; grey_box: whether there is such an arm."""
    share = 0.0
    if grey_box:
        odds = PRIOR_ODDS + sum(_density(t, GREY_BOX) - _density(t, WHOLE) for t in scored if GREY_BOX in t.forecasts)
        share = 1 / (1 + math.exp(-min(60.0, max(-60.0, odds))))
    insured = 0.0 if len(scored) < FEW else DOUBTFUL if _no_better_than_average(scored) else INSURANCE
    return Trust(grey_box=share, tpe=(1 - share) * insured)


def _density(t: Told, model: str) -> float:
    """ln of the density that a model gave to what came; of the chance, where only a bound is known."""
    return _log_density(t, t.forecasts[model])


def _log_density(t: Told, f: ScoreForecast) -> float:
    usual = _gaussian(t, f.mean, f.sd)
    freak = _gaussian(t, f.mean, math.hypot(OUTLIER_SD, f.sd))
    return float(np.logaddexp(math.log1p(-OUTLIER) + usual, math.log(OUTLIER) + freak))


def _gaussian(t: Told, mean: float, sd: float) -> float:
    z = (t.ln_score - mean) / sd
    if not t.reached:
        return float(log_ndtr(-z))
    return -0.5 * z * z - math.log(sd) - 0.5 * math.log(2 * math.pi)


def _no_better_than_average(scored: Sequence[Told]) -> bool:
    """Whether the whole model's forecasts were no better than the mean and spread of the runs before each."""
    gain, before, counted = 0.0, [t.ln_score for t in scored[:2]], 0
    for t in scored[2:]:
        if WHOLE in t.forecasts:
            naive = ScoreForecast(float(np.mean(before)), max(0.1, float(np.std(before))))
            gain += _density(t, WHOLE) - _log_density(t, naive)
            counted += 1
        before.append(t.ln_score)
    return counted >= FEW and gain < 0
