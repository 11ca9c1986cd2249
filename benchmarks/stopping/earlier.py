"""The stopping rule as it was until 2026-11-22, kept as a peer: an envelope and the log-linear forecast of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.calibrate_curves import worst_pair
from lora_tune.curves.family import Family
from lora_tune.curves.forecast import chance_words, forecast
from lora_tune.curves.learn import learn_family
from lora_tune.curves.points import Points, first_reached, points, usable_loss
from lora_tune.curves.stall import GO_ON, Envelope, StallVerdict, excesses
from lora_tune.logs.run import Eval

IN_A_ROW = 2
"""Evals that must agree before a run is stopped: spikes of one eval recover by the next."""

FEWEST_REFERENCES = 4
"""Finished runs of a study before they count as a reference."""

FEWEST_FOR_OWN_FIT = 6
"""Evals before a run is judged by nothing but its own curve."""

HOPELESS = 0.1
"""Beside a reference, the share of the false-prune rate that "cannot reach the target by the end" may use."""

LEAST_DELAY = 1.1
"""A run forecast to need less than this times the samples of the median curve is slow, not stalled."""


def stalled(
    evals: Sequence[Eval],
    target: float,
    *,
    reference: Envelope | None,
    false_prune_rate: float = 0.01,
    max_samples: float | None = None,
) -> StallVerdict:
    """The stall test on one run. Takes any sequence of evals and never raises.

    Stops on two evals in a row that are not finite (at any time), on a blow-up, on two evals in a row further above
    the reference curve than ``false_prune_rate`` of good runs ever are, and on a curve that by its forecast does not
    reach the target by ``max_samples``.
    """
    if first_reached(evals, target) is not None:
        return GO_ON
    if len(evals) >= IN_A_ROW and not any(usable_loss(e.loss) for e in evals[-IN_A_ROW:]):
        return StallVerdict(True, f"diverged: the last {IN_A_ROW} evals are not finite", "diverged")
    usable = points(evals)
    found = _blown_up(usable)
    if not found.stop and reference is not None:
        found = _against(usable, target, reference, false_prune_rate)
    if not found.stop and max_samples is not None:
        found = _out_of_time(evals, target, reference, max_samples, false_prune_rate)
    return found


def envelope_from(references: Sequence[Sequence[Eval]], target: float) -> Envelope | None:
    """An envelope learned from finished runs that reached ``target``; None with fewer than four of them.

    Thresholds are the one-sided Student prediction bound for one more run, ``t(1 - rate, n - 1) * sqrt(1 + 1/n)``
    (Hahn and Meeker 1991, section 4.4), and never below the worst that the references themselves showed.
    """
    from scipy.special import stdtrit

    good = [r for r in references if first_reached(r, target) is not None]
    family = learn_family(good, target) if len(good) >= FEWEST_REFERENCES else None
    if family is None:
        return None
    worst = max(worst_pair(evals, target, family) for evals in good)
    wide = math.sqrt(1 + 1 / len(good))
    rates = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
    rows = ((rate, max(worst, float(stdtrit(len(good) - 1, 1 - rate)) * wide)) for rate in rates)
    return Envelope(family=family, thresholds=tuple(rows))


def _against(usable: Points, target: float, reference: Envelope, rate: float) -> StallVerdict:
    """Two evals in a row above the threshold, both also later than the median curve by ``LEAST_DELAY``."""
    family = reference.family
    scaled = excesses(usable, family)[-IN_A_ROW:]
    if len(scaled) < IN_A_ROW or float(scaled.min()) <= reference.threshold(rate):
        return GO_ON
    above = float((usable.loss[-IN_A_ROW:] - family.loss_at(usable.samples[-IN_A_ROW:])).min())
    if family.samples_at(target - above) < LEAST_DELAY * family.samples_at(target):
        return GO_ON
    share = reference.rate_of(float(scaled.min()))
    return StallVerdict(
        True,
        f"stalled: two evals in a row {above:.4f} above the median curve ({family.name}); "
        f"at most {100 * share:.1f}% of good runs look like this",
        "stalled",
    )


def _blown_up(usable: Points) -> StallVerdict:
    """Two evals in a row above the first one by more than the whole fall so far, and above 1.2 times the best."""
    loss = usable.loss
    if len(loss) < 1 + IN_A_ROW:
        return GO_ON
    best, first, low = float(loss.min()), float(loss[0]), float(loss[-IN_A_ROW:].min())
    if low > first + (first - best) and low > best + 0.2 * abs(best):
        return StallVerdict(
            True, f"diverged: two evals in a row at {low:.4g} or above after a best of {best:.4g}", "diverged"
        )
    return GO_ON


def _out_of_time(
    recent: Sequence[Eval], target: float, reference: Envelope | None, max_samples: float, rate: float
) -> StallVerdict:
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
            return StallVerdict(True, f"stalled: {words}, by {source}", "stalled")
    return GO_ON
