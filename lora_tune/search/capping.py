"""Adaptive capping: stop a run that can no longer beat the incumbent, at a stated risk.

The objective is run time, so a run is useful only while it may still end before the incumbent's upper quantile (Hutter
et al. 2009, adaptive capping; here for noisy times). A capped trial is censored, not bad.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.config.study import Study
from lora_tune.curves.family import LARGEST_EXPONENT, Family
from lora_tune.curves.forecast import Forecast, chance_text, forecast
from lora_tune.curves.phases import second_phase
from lora_tune.curves.points import first_reached, usable_loss, usable_samples
from lora_tune.curves.published import CONTINUE, StallVerdict
from lora_tune.curves.timing import Timing
from lora_tune.logs.run import Eval
from lora_tune.search.noise import Noise

FEWEST_EVALS = 2
"""Evals before the forecast may stop a run; the elapsed time may do so at any time."""

FEWEST_HEALED = 4
"""The same after a change of precision: a curve falls within four evals of it (0.955 to 0.924 in public logs)."""


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The best configuration so far: its name, and the seconds to the target of its finished runs.

    noise: of ln(seconds), including its own runs (``noise.clock_noise``). pace_spread: relative standard deviation of
    the machine's speed (``curves.pace_spread``).
    """

    name: str
    seconds: tuple[float, ...]
    noise: Noise
    pace_spread: float = 0.0

    def upper_quantile(self, probability: float) -> float:
        """Seconds that one more run stays under with ``probability``; infinite without a finished run.

        Student's prediction bound on ln(seconds) with the sweep's noise, plus the variance of the machine's speed for
        the known runs and for the next one.
        """
        from scipy.special import stdtrit

        known = np.log([s for s in self.seconds if 0 < s < math.inf])
        n = len(known)
        if n == 0:
            return math.inf
        scale, freedom = self.noise.student
        variance = scale**2 + self.pace_spread**2
        quantile = float(stdtrit(freedom, probability))
        width = quantile * math.sqrt(variance * (1 + 1 / n))
        return float(np.exp(min(float(known.mean()) + width, LARGEST_EXPONENT)))


def cap(
    evals: Sequence[Eval],
    timing: Timing,
    incumbent: Incumbent,
    now_seconds: float,
    risk: float,
    *,
    target: float,
    family: Family | None = None,
    quantum: float | None = None,
    healing: float = 0.0,
) -> StallVerdict:
    """Whether to stop a run at ``now_seconds`` since ``run_start``.

    risk: accepted chance of stopping a run of a configuration no worse than the incumbent. Half is for the elapsed
    time: the limit is the time that an incumbent's run stays under with probability ``1 - risk/2``. Half is for the
    forecast: a run is stopped if its chance of ending within the limit is below ``risk/2``. Only a calibrated
    ``family`` forecasts, because a run's own curve cannot predict a step decay or a plateau.

    quantum: samples between evals. healing: samples after which the run changes precision, 0 for never; the forecast
    waits for ``FEWEST_HEALED`` evals after that. Accepts any evals and never raises.
    """
    if first_reached(evals, target) is not None:
        return CONTINUE
    limit = incumbent.upper_quantile(1 - risk / 2)
    most = f"{100 * (1 - risk / 2):.3g}% of runs of {incumbent.name}"
    if now_seconds > limit:
        return _capped(f"{now_seconds:.0f} s have passed, and {most} need at most {limit:.0f} s")
    usable = [e for e in evals if usable_loss(e.loss) and usable_samples(e.samples)]
    fewest = FEWEST_HEALED if healing > 0 else FEWEST_EVALS
    if family is None or not math.isfinite(limit) or len(second_phase(usable, healing)) < fewest:
        return CONTINUE
    ahead = forecast(usable, target, family=family, quantum=quantum, healing=healing)
    chance = _chance_within(ahead, usable[-1], timing, limit) if ahead.stops else None
    if chance is None or chance >= risk / 2:
        return CONTINUE
    within = f"within {limit:.0f} s, the time that {most} stay under"
    return _capped(f"the chance of reaching {target:g} {within}, is {chance_text(chance)}")


def _capped(sentence: str) -> StallVerdict:
    return StallVerdict(True, f"capped: {sentence}", "capped")


def _chance_within(ahead: Forecast, last: Eval, timing: Timing, limit: float) -> float | None:
    """Probability that an eval at or below the target ends within ``limit`` seconds; None if the speed is unknown."""
    timing = timing.at(last.samples)
    if not timing.samples_per_second > 0:
        return None
    per_eval = timing.seconds_per_eval if timing.seconds_per_eval > 0 else 0.0
    stops = np.asarray(ahead.stops)
    begin = last.seconds if math.isfinite(last.seconds) else last.samples / timing.samples_per_second
    ends = begin + (stops - last.samples) / timing.samples_per_second + per_eval * np.arange(1, len(stops) + 1)
    within = int(np.searchsorted(ends, limit, side="right"))
    return ahead.chance[within - 1] if within else 0.0


# Whether another node-hour pays for itself.


def gain_below_threshold(study: Study, gain: float | None) -> str:
    """Why the next node-hour is not worth its cost; "" if it is, or if that is unknown.

    gain: expected improvement of the recommendation, as a share of the score (``session.expected_gain``).
    """
    least = study.budget.stop_below
    if least is None or gain is None or gain >= least:
        return ""
    return (
        f"the next node-hour is expected to improve the score by {100 * gain:.2g}%, "
        f"less than budget.stop_below = {100 * least:g}%"
    )
