"""What the grey-box model expects of configurations: the seconds of one run, and of one beside another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_tune.search.grey_box.memory_risk import death_logs
from lora_tune.search.grey_box.model import SearchModel
from lora_tune.search.observations import SEED_SD, UNIFORM_SD

CLEAR_SDS = 1.0
"""Standard deviations of a difference from which on another configuration replaces what the user has: it is better
with a chance of 84%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """What is believed of a configuration beside another: ln(the other's seconds over its own), deaths included."""

    ln_saved: float
    sd: float

    @property
    def share(self) -> float:
        """The share of the other's seconds that it is expected to save."""
        return -math.expm1(-self.ln_saved)

    @property
    def is_clear(self) -> bool:
        """Whether it is better beyond the doubt."""
        return self.ln_saved > 0 and self.ln_saved >= CLEAR_SDS * self.sd


def forecast(model: SearchModel, values: Mapping[str, Any]) -> tuple[float, float]:
    """Mean and sd of ln(score) of one run of ``values`` that lives and arrives."""
    (ln_samples,), covariance = model.predict_ln_samples([values])
    speed, first, evals, second = model.predict_speed([values])
    batch = model.coordinates.batch(values)
    schedule, goal = model.schedule(batch), model.goal
    seconds = float(goal.log_seconds(np.array([ln_samples]), np.exp(speed), np.exp(evals), schedule)[0])
    normalised = max(0.0, goal.ln_reference(batch, schedule) - float(ln_samples))
    noise = (SEED_SD * model.scales.convergence.noise_scale) ** 2
    # A run ends at an eval, which lies anywhere within an interval after its crossing.
    noise += (UNIFORM_SD * min(1.0, schedule.interval_samples / math.exp(ln_samples))) ** 2
    return seconds + normalised, math.sqrt(float(covariance[0, 0] + first[0, 0] + 0.1 * second[0, 0]) + noise)


def compared(model: SearchModel, values: Mapping[str, Any], instead: Mapping[str, Any]) -> Advantage:
    """What is believed of the seconds to the target of ``values`` beside those of ``instead``."""
    pair = [values, instead]
    samples, doubt = model.predict_ln_samples(pair)
    speed, speed_doubt, evals, _ = model.predict_speed(pair)
    first, second = (
        float(model.goal.log_seconds(samples[i], np.exp(speed[i]), np.exp(evals[i]), model.schedule(batch)))
        for i, batch in enumerate(map(model.coordinates.batch, pair))
    )
    spread = sum(float(c[0, 0] + c[1, 1] - 2 * c[0, 1]) for c in (doubt, speed_doubt))
    risk, other_risk = (_log_risk(model, v, float(samples[i]), float(doubt[i, i])) for i, v in enumerate(pair))
    saved = second - first + other_risk - risk
    if model.memory.differs(values, instead):
        died, _ = model.memory.chance(pair)
        saved -= float(np.subtract(*death_logs(died)))
    return Advantage(ln_saved=saved, sd=math.sqrt(max(0.0, spread)))


def _log_risk(model: SearchModel, values: Mapping[str, Any], ln_samples: float, variance: float) -> float:
    """ln of what runs of ``values`` cost that end before they arrive."""
    total = np.array([model.coordinates.total_samples(values)])
    schedule = model.schedule(model.coordinates.batch(values))
    return float(model.goal.log_risk(np.array([ln_samples]), np.array([math.sqrt(variance)]), total, schedule)[0])
