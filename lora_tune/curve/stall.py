"""The stall test: should a run be stopped because its eval curve says that it will not reach the target in time?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.curve.family import Family, learn_family, pair_slopes
from lora_tune.curve.points import evals_of, first_reached, points, usable_loss
from lora_tune.mllog import Eval, Run

IN_A_ROW = 2
"""Evals that must agree before a run is stopped: spikes of one eval recover by the next."""

FEWEST_REFERENCES = 4
"""Finished runs of a study before they count as a reference."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``stop`` and why, in one sentence that is stored with the trial. reason: "", "diverged", "stalled", "capped"."""

    stop: bool
    sentence: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What good runs of a workload look like: a median curve and how far above it they go, two evals in a row.

    thresholds: (rate, loss) pairs: a share ``rate`` of good runs is at some eval pair more than ``loss`` above the
    family's curve with both evals; ``rate`` falls, ``loss`` rises.
    """

    family: Family
    thresholds: tuple[tuple[float, float], ...]

    def threshold(self, rate: float) -> float:
        """The smallest tabled excess whose rate is at most ``rate``; the largest one when none is."""
        return next((loss for share, loss in self.thresholds if share <= rate), self.thresholds[-1][1])

    def rate_of(self, excess: float) -> float:
        """The share of good runs with this excess, by the table (log-linear between its rows)."""
        rates, losses = np.array(self.thresholds).T
        return float(np.exp(np.interp(excess, losses, np.log(rates))))


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSettings:
    """How strict the stall test is.

    false_prune_rate: share of good runs that may be stopped over their whole life.
    no_verdict_before: samples before which nothing is said, except on NaN (healing step, warm-up, first eval).
    max_samples: where the run ends anyway; None when unknown.
    reference: a calibrated envelope; None: learn one from the finished runs, or use the run's own curve alone.
    """

    false_prune_rate: float = 0.01
    no_verdict_before: float = 0.0
    max_samples: float | None = None
    reference: Envelope | None = None


GO_ON = Verdict(False, "")


def verdict(
    evals: Sequence[Eval],
    target: float,
    references: Sequence[Run | Sequence[Eval]] = (),
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
        no_verdict_before=settings.no_verdict_before, max_samples=settings.max_samples,
    )  # fmt: skip


def stalled(
    evals: Sequence[Eval],
    target: float,
    *,
    reference: Envelope | None,
    false_prune_rate: float = 0.01,
    no_verdict_before: float = 0.0,
    max_samples: float | None = None,
) -> Verdict:
    """The stall test on one run. Takes any sequence of evals and never raises.

    Stops on two evals in a row that are not finite (at any time), on a blow-up, on two evals in a row further above
    the reference curve than ``false_prune_rate`` of good runs ever are, and without a reference on a curve whose own
    steepest credible slope does not reach the target by ``max_samples``.
    """
    if first_reached(evals, target) is not None:
        return GO_ON
    if len(evals) >= IN_A_ROW and not any(usable_loss(e.loss) for e in evals[-IN_A_ROW:]):
        return Verdict(True, f"diverged: the last {IN_A_ROW} evals are not finite", "diverged")
    recent = [e for e in evals if e.samples >= no_verdict_before]
    blown = _blown_up(recent)
    if blown.stop:
        return blown
    if reference is not None:
        return _against(recent, reference, false_prune_rate)
    return _by_own_fit(recent, target, max_samples)


def envelope_from(references: Sequence[Run | Sequence[Eval]], target: float) -> Envelope | None:
    """An envelope learned from finished runs that reached ``target``; None with fewer than four of them."""
    good = [r for r in references if first_reached(evals_of(r), target) is not None]
    family = learn_family(good, target) if len(good) >= FEWEST_REFERENCES else None
    if family is None:
        return None
    worst = np.array([worst_pair(evals_of(r), family) for r in good])
    worst = worst[np.isfinite(worst)]
    return _student_envelope(family, worst) if len(worst) >= FEWEST_REFERENCES else None


def worst_pair(evals: Sequence[Eval], family: Family) -> float:
    """The largest excess over the family's curve that two evals in a row both show; -inf with fewer than two."""
    samples, loss = points(evals)
    if len(samples) < IN_A_ROW:
        return -math.inf
    excess = loss - family.loss_at(samples)
    return float(np.minimum(excess[:-1], excess[1:]).max())


def _student_envelope(family: Family, worst: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Envelope:
    """Thresholds from few runs: the one-sided Student prediction bound for the next run's worst pair.

    ``mean + t(1 - rate, n - 1) * sd * sqrt(1 + 1/n)`` (Hahn and Meeker 1991, section 4.4), sd at least half an
    eval's noise so that few lucky runs do not make a tight envelope.
    """
    from scipy.special import stdtrit

    n = len(worst)
    sd = max(float(np.std(worst, ddof=1)), 0.5 * family.noise) * math.sqrt(1 + 1 / n)
    rates = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
    rows = tuple((rate, float(worst.mean() + stdtrit(n - 1, 1 - rate) * sd)) for rate in rates)
    return Envelope(family=family, thresholds=rows)


def _against(recent: Sequence[Eval], reference: Envelope, rate: float) -> Verdict:
    samples, loss = points(recent)
    if len(samples) < IN_A_ROW:
        return GO_ON
    excess = float((loss[-IN_A_ROW:] - reference.family.loss_at(samples[-IN_A_ROW:])).min())
    if excess <= reference.threshold(rate):
        return GO_ON
    share = reference.rate_of(excess)
    return Verdict(
        True,
        f"stalled: two evals in a row {excess:.4f} above the median curve ({reference.family.name}); "
        f"{100 * share:.1f}% of good runs look like this",
        "stalled",
    )


def _blown_up(recent: Sequence[Eval]) -> Verdict:
    """Two evals in a row above the first one by more than the whole fall so far, and above 1.2 times the best."""
    samples, loss = points(recent)
    if len(samples) < 1 + IN_A_ROW:
        return GO_ON
    best, first, low = float(loss.min()), float(loss[0]), float(loss[-IN_A_ROW:].min())
    if low > first + (first - best) and low > best + 0.2 * abs(best):
        return Verdict(
            True, f"diverged: two evals in a row at {low:.4g} or above after a best of {best:.4g}", "diverged"
        )
    return GO_ON


def _by_own_fit(recent: Sequence[Eval], target: float, max_samples: float | None) -> Verdict:
    """Without a reference: stop when even the steepest credible line through the last half misses the target.

    The line goes through the lower quartile of the levels with the 10% steepest slope between pairs; at least six
    evals.
    """
    samples, loss = points(recent)
    if len(samples) < 6 or max_samples is None:
        return GO_ON
    start = min(len(samples) - 6, len(samples) // 2)
    samples, loss = samples[start:], loss[start:]
    x = np.log(samples)
    slope = min(0.0, float(np.quantile(pair_slopes(x, loss), 0.1)))
    level = float(np.quantile(loss - slope * (x - x[-1]), 0.25))
    at_end = level + slope * (math.log(max(max_samples, samples[-1])) - x[-1])
    if at_end <= target:
        return GO_ON
    return Verdict(
        True,
        f"stalled: its own curve, at its steepest, ends at {at_end:.4g} by {max_samples:g} samples; target {target:g}",
        "stalled",
    )
