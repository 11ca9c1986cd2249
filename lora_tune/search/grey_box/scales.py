"""Scales of the three models: as believed at first, fitted to data, and whether other sources agree with this study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.gaussian import HERE, Data, Prior, fit, log_evidence, repeated_noise
from lora_tune.search.grey_box.training_data import pick, thinned
from lora_tune.search.grey_box.weak_priors import convergence_prior, eval_prior, scale_belief, speed_prior

DOUBT = 3.0
"""ln of the odds by which other sources are believed before anything was seen: 20 to 1."""
FEWEST = 3
"""This study's own readings before other sources may be set aside: one unlucky run is no evidence against a hundred."""


@dataclass(frozen=True, kw_only=True)
class GreyBoxScales:
    """Scales of the three models after fitting, kept between asks so that they are fitted rarely.

    trusted: whether other sources' readings are used; they are set aside once they contradict this study's own.
    """

    convergence: Prior
    speed: Prior
    evals: Prior
    trusted: bool = True
    fitted_at: int = -1


def first_scales(coordinates: Coordinates, base: float, speeds: Sequence[float]) -> GreyBoxScales:
    """Before anything is fitted. base: ln(samples to the target) at best so far. speeds: samples/s seen."""
    level = float(np.median([math.log(speed) for speed in speeds])) if speeds else 0.0
    labels = coordinates.speed_labels
    return GreyBoxScales(
        convergence=convergence_prior(coordinates, base),
        speed=speed_prior(labels, level),
        evals=eval_prior(labels, level),
    )


def fitted(coordinates: Coordinates, base: float, data: tuple[Data, Data, Data], due: int) -> GreyBoxScales:
    """Scales of the three models fitted to their data; ``due``: readings that they are fitted to."""
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
    return GreyBoxScales(convergence=convergence, speed=moved[1], evals=moved[2], trusted=trusted, fitted_at=due)


def _weighed(data: Data, together: Prior, start: Prior) -> tuple[Prior, bool]:
    """The prior to use, and whether other sources are: by the Bayes factor for this study's readings given theirs.

    ln p(own | others) = ln p(own, others) - ln p(others) against ln p(own); they are believed unless that is worse by
    more than ``DOUBT``.
    """
    own, others = np.flatnonzero(data.source == HERE), np.flatnonzero(data.source != HERE)
    if len(own) < FEWEST or not len(others):
        return together, True
    alone = fit(pick(data, own), start, scale_belief(start))
    believed = scale_belief(start)
    apart = log_evidence(pick(data, own), alone) + believed(alone)
    joint = log_evidence(data, together) + believed(together)
    joint -= log_evidence(pick(data, others), together)
    return (together, True) if joint > apart - DOUBT else (alone, False)
