"""The stall test: should a run be stopped because its eval curve says that it will not reach the target in time?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.curves.family import Family
from lora_tune.curves.forecast import chance_words, forecast
from lora_tune.curves.learn import learn_family
from lora_tune.curves.points import Array, Points, eval_interval, evals_of, first_reached, points, usable_loss
from lora_tune.logs.mllog import Eval, RunLog

IN_A_ROW = 2
"""Evals that must agree before a run is stopped: spikes of one eval recover by the next."""

FEWEST_REFERENCES = 4
"""Finished runs of a study before they count as a reference."""

FEWEST_FOR_OWN_FIT = 6
"""Evals before a run is judged by nothing but its own curve."""

HOPELESS = 0.1
"""Beside a reference, the share of the false-prune rate that "cannot reach the target by the end" may use."""

EVALS_TO_HEAL = 4
"""Evals that an FP4 curve takes to come down after its healing step (0.955 to 0.924 in public v5.1 logs)."""

LEAST_DELAY = 1.1
"""A run forecast to need less than this times the samples of the median curve is slow, not stalled."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``stop`` and why, in one sentence that is stored with the trial. reason: "", "diverged", "stalled", "capped"."""

    stop: bool
    sentence: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What good runs of a workload look like: a median curve and how far above it they go, two evals in a row.

    thresholds: (rate, excess) pairs: at most a share ``rate`` of good runs has, at any time of its life, two evals in
    a row further above the family's curve than ``excess``, in units of sqrt(noise^2 + spread^2). ``rate`` falls,
    ``excess`` rises.
    """

    family: Family
    thresholds: tuple[tuple[float, float], ...]

    def threshold(self, rate: float) -> float:
        """The smallest tabled excess whose rate is at most ``rate``; the largest one when none is."""
        return next((excess for share, excess in self.thresholds if share <= rate), self.thresholds[-1][1])

    def rate_of(self, excess: float) -> float:
        """The share of good runs with this excess, by the table (log-linear between its rows)."""
        rates, excesses = np.array(self.thresholds).T
        return float(np.exp(np.interp(excess, excesses, np.log(rates))))


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSettings:
    """How strict the stall test is.

    false_prune_rate: share of good runs that may be stopped over their whole life.
    no_verdict_before: samples before which nothing is said, except on NaN (warm-up, a late first eval).
    healing_samples: where an FP4 run changes precision (``HEALING_ITER * GBS``); 0: it does not. Its curve falls
        discontinuously over the next four evals, so nothing is said until then, and no other curve is a reference.
    max_samples: where the run ends anyway; None when unknown.
    reference: a calibrated envelope; None: learn one from the finished runs, or use the run's own curve alone.
    """

    false_prune_rate: float = 0.01
    no_verdict_before: float = 0.0
    healing_samples: float = 0.0
    max_samples: float | None = None
    reference: Envelope | None = None


GO_ON = Verdict(False, "")


def verdict(
    evals: Sequence[Eval],
    target: float,
    references: Sequence[RunLog | Sequence[Eval]] = (),
    settings: StallSettings | None = None,
) -> Verdict:
    """Whether to stop the run whose evals so far are ``evals``.

    ``references``: the finished runs of the same study, as evidence of what a good run looks like. Used only when
    ``settings.reference`` is None and at least four of them reached the target.
    """
    settings = settings or StallSettings()
    reference = settings.reference or envelope_from(references, target)
    return stalled(
        evals, target, reference=reference, false_prune_rate=settings.false_prune_rate,
        no_verdict_before=settings.no_verdict_before, healing_samples=settings.healing_samples,
        max_samples=settings.max_samples,
    )  # fmt: skip


def stalled(
    evals: Sequence[Eval],
    target: float,
    *,
    reference: Envelope | None,
    false_prune_rate: float = 0.01,
    no_verdict_before: float = 0.0,
    healing_samples: float = 0.0,
    max_samples: float | None = None,
) -> Verdict:
    """The stall test on one run. Takes any sequence of evals and never raises.

    Stops on two evals in a row that are not finite (at any time), on a blow-up, on two evals in a row further above
    the reference curve than ``false_prune_rate`` of good runs ever are, and on a curve that by its forecast does not
    reach the target by ``max_samples``.
    """
    if first_reached(evals, target) is not None:
        return GO_ON
    if len(evals) >= IN_A_ROW and not any(usable_loss(e.loss) for e in evals[-IN_A_ROW:]):
        return Verdict(True, f"diverged: the last {IN_A_ROW} evals are not finite", "diverged")
    if healing_samples > 0:
        reference = None
        healed = healing_samples + EVALS_TO_HEAL * eval_interval(points(evals).samples)
        no_verdict_before = max(no_verdict_before, healed)
    recent = [e for e in evals if e.samples >= no_verdict_before]
    usable = points(recent)
    found = _blown_up(usable)
    if not found.stop and reference is not None:
        found = _against(usable, target, reference, false_prune_rate)
    if not found.stop and max_samples is not None:
        found = _out_of_time(recent, target, reference, max_samples, false_prune_rate)
    return found


def envelope_from(references: Sequence[RunLog | Sequence[Eval]], target: float) -> Envelope | None:
    """An envelope learned from finished runs that reached ``target``; None with fewer than four of them.

    Thresholds are the one-sided Student prediction bound for one more run, ``t(1 - rate, n - 1) * sqrt(1 + 1/n)``
    (Hahn and Meeker 1991, section 4.4), and never below the worst that the references themselves showed.
    """
    from scipy.special import stdtrit

    good = [evals_of(r) for r in references if first_reached(evals_of(r), target) is not None]
    family = learn_family(good, target) if len(good) >= FEWEST_REFERENCES else None
    if family is None:
        return None
    worst = max(worst_pair(evals, target, family) for evals in good)
    wide = math.sqrt(1 + 1 / len(good))
    rates = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
    rows = ((rate, max(worst, float(stdtrit(len(good) - 1, 1 - rate)) * wide)) for rate in rates)
    return Envelope(family=family, thresholds=tuple(rows))


def worst_pair(evals: Sequence[Eval], target: float, family: Family) -> float:
    """The largest excess that two evals in a row both show before the target, in units of sqrt(noise^2 + spread^2).

    -inf with fewer than two such evals. Evals before the family's first knot are not looked at.
    """
    stop = first_reached(evals, target)
    usable = points([e for e in evals if stop is None or e.samples < stop.samples])
    scaled = excesses(usable, family)
    return float(np.minimum(scaled[:-1], scaled[1:]).max()) if len(scaled) >= IN_A_ROW else -math.inf


def excesses(usable: Points, family: Family) -> Array:
    """How far each eval from the family's first knot on lies above its curve, in sqrt(noise^2 + spread^2)."""
    samples, loss = Points(*(v[usable.samples >= 0.999 * np.exp(family.log_samples[0])] for v in usable))
    scale = np.sqrt(family.noise_at(samples) ** 2 + family.spread**2)
    return np.asarray((loss - family.loss_at(samples)) / scale, dtype=np.float64)


def _against(usable: Points, target: float, reference: Envelope, rate: float) -> Verdict:
    """Two evals in a row above the threshold, both also later than the median curve by ``LEAST_DELAY``."""
    family = reference.family
    scaled = excesses(usable, family)[-IN_A_ROW:]
    if len(scaled) < IN_A_ROW or float(scaled.min()) <= reference.threshold(rate):
        return GO_ON
    above = float((usable.loss[-IN_A_ROW:] - family.loss_at(usable.samples[-IN_A_ROW:])).min())
    if family.samples_at(target - above) < LEAST_DELAY * family.samples_at(target):
        return GO_ON
    share = reference.rate_of(float(scaled.min()))
    return Verdict(
        True,
        f"stalled: two evals in a row {above:.4f} above the median curve ({family.name}); "
        f"at most {100 * share:.1f}% of good runs look like this",
        "stalled",
    )


def _blown_up(usable: Points) -> Verdict:
    """Two evals in a row above the first one by more than the whole fall so far, and above 1.2 times the best."""
    loss = usable.loss
    if len(loss) < 1 + IN_A_ROW:
        return GO_ON
    best, first, low = float(loss.min()), float(loss[0]), float(loss[-IN_A_ROW:].min())
    if low > first + (first - best) and low > best + 0.2 * abs(best):
        return Verdict(
            True, f"diverged: two evals in a row at {low:.4g} or above after a best of {best:.4g}", "diverged"
        )
    return GO_ON


def _out_of_time(
    recent: Sequence[Eval], target: float, reference: Envelope | None, max_samples: float, rate: float
) -> Verdict:
    """Stop when a forecast leaves too small a chance of reaching the target by ``max_samples``.

    Forecast by the reference's shape, and from six evals on by the run's own: a shape learned from runs that all
    reached the target promises it to one that will not. Too small: less than the false-prune rate where this is the
    only test, ``HOPELESS`` of it beside a reference.
    """
    evals = len(points(recent).samples)
    ways: list[tuple[Family | None, str]] = []
    if reference is not None and evals >= IN_A_ROW:
        ways.append((reference.family, reference.family.name))
    if evals >= FEWEST_FOR_OWN_FIT:
        ways.append((None, "its own curve so far"))
    risk = rate if reference is None else HOPELESS * rate
    for family, source in ways:
        chance = forecast(recent, target, family=family).chance_by(max_samples)
        if chance < risk:
            words = f"the chance of reaching {target:g} by {max_samples:g} samples is {chance_words(chance)}"
            return Verdict(True, f"stalled: {words}, by {source}", "stalled")
    return GO_ON
