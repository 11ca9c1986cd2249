"""Advice on convergence: learning rate, training length, noise, overfitting; each rule with its evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from lora_tune.base.text import trials_text
from lora_tune.config.study import Study
from lora_tune.controller.evidence import max_samples
from lora_tune.logs.run import Eval, TrainPoint
from lora_tune.search.recommendation import leaders
from lora_tune.store.records import StudyRecords, Trial, Verdict

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """seen: the observation, a clause. do: the action. evidence: the numbers. trials: where it was observed."""

    seen: str
    do: str
    evidence: str
    trials: tuple[int, ...] = ()


def reached(sweep: StudyRecords) -> list[Trial]:
    """Trials that reached the target."""
    return [t for t in sweep.trials.values() if t.verdict is Verdict.REACHED]


def finite_evals(sweep: StudyRecords, trial: Trial) -> list[Eval]:
    """The trial's finite evals."""
    return [e for e in sweep.last_evals(trial.number) if math.isfinite(e.loss)]


def learning_rate(trial: Trial) -> float | None:
    """The trial's learning rate under its usual names, or None."""
    for name in ("LR", "learning_rate", "lr"):
        value = trial.parameters.get(name)
        if isinstance(value, int | float):
            return float(value)
    return None


FALLS = 0.25
"""A loss falls if it has made this share of the way to the target; used when no trial reached the target."""
COMPARED = 30
"""Maximum reference trials in a comparison; more would not change it."""
RISES = 0.25
"""A curve oscillates if this share of its steps goes up; in the public runs it is 3 to 6%."""
CALM_RISES, BY_CHANCE = 0.06, 0.01
"""Share of upward steps of a calm curve, and the significance level for more of them. One rise in four steps, as in 23
of 550 public good runs, is within chance."""
FLAT = 0.05
"""A curve is flat if its last third makes less than this share of its whole fall."""
RISE_SDS = 4.0
"""Standard deviations of an eval by which the last three must exceed the lowest to count as risen, since the minimum of
twenty is low by chance. Of flat simulated curves at most 0.6% count as risen at 4, 11% at 2."""
EDGE = 0.08
"""A value within this share of a range's end, on the scale of the search, is near the end."""


def _flat_from_the_start(study: Study, sweep: StudyRecords) -> list[tuple[Trial, float]]:
    """Trials whose loss hardly fell, with their learning rates, compared at the samples where they stopped.

    The loss hardly fell if it made less than half of the median progress of the trials that reached the target; without
    such trials, less than ``FALLS`` of the way.
    """
    target = study.target
    usual = reached(sweep)
    good = [finite_evals(sweep, t) for t in usual[:: 1 + len(usual) // COMPARED]]
    flat = []
    for trial in sweep.trials.values():
        rate, evals = learning_rate(trial), finite_evals(sweep, trial)
        if rate is None or len(evals) < 3 or trial.verdict in (None, Verdict.REACHED):
            continue
        others = [w for other in good if (w := _way([e for e in other if e.samples <= evals[-1].samples], target)) > 0]
        if _way(evals, target) < (0.5 * median(others) if others else FALLS):
            flat.append((trial, rate))
    return flat


def _way(evals: Sequence[Eval], target: float) -> float:
    """Progress from the first eval towards the target by the last three evals, as a share; 0 for fewer than two
    evals."""
    if len(evals) < 2 or not evals[0].loss > target:
        return 0.0
    return (evals[0].loss - median(e.loss for e in evals[-3:])) / (evals[0].loss - target)


def rate_off(study: Study, sweep: StudyRecords, *, high: bool) -> Advice | None:
    """The loss does not fall, or is not finite, at learning rates above (high) or below those that reach the target."""
    flat, good = _flat_from_the_start(study, sweep), [r for t in reached(sweep) if (r := learning_rate(t)) is not None]
    limit = (max if high else min)(good, default=math.nan)
    off = [(t, r) for t, r in flat if (r != limit and (r > limit) is high if good else _is_noisy(sweep, t) is high)]
    if not off:
        return None
    numbers, nearest = tuple(t.number for t, _ in off), (min if high else max)(r for _, r in off)
    end = (
        math.sqrt(nearest * limit) if good else nearest / 3 if high else 3 * nearest
    )  # half-way: a good rate is no limit
    against = f"the {'highest' if high else 'lowest'} that reached the target is {limit:.3g}"
    curves = "their curves jump or diverge" if high else "their curves are calm"
    do = "lower the upper end of the learning rate to about {:.2g}, or warm up longer"
    return Advice(
        seen=f"the loss does not fall: the learning rate is too {'high' if high else 'low'}",
        do=(do if high else "raise the lower end of the learning rate to about {:.2g}").format(end),
        evidence=f"{trials_text(numbers)} at {nearest:.3g} or {'above' if high else 'below'} hardly moved towards it; "
        + (against if good else curves),
        trials=numbers,
    )


def _is_noisy(sweep: StudyRecords, trial: Trial) -> bool:
    """Whether a curve jumps or becomes non-finite, as with too high a learning rate."""
    evals = sweep.last_evals(trial.number)
    return any(not math.isfinite(e.loss) for e in evals) or _rises(evals) >= RISES


def _rises(evals: Sequence[Eval]) -> float:
    """Share of steps between evals that rise by more than 2% of the curve's range.

    0 if a calm curve may have as many by chance.
    """
    losses = [e.loss for e in evals if math.isfinite(e.loss)]
    if len(losses) < 5:
        return 0.0
    least = 0.02 * (max(losses) - min(losses))
    rises, steps = sum(b - a > least for a, b in pairwise(losses)), len(losses) - 1
    fewer = math.fsum(
        math.comb(steps, k) * CALM_RISES**k * (1 - CALM_RISES) ** (steps - k) for k in range(rises)
    )  # binomial tail
    return rises / steps if 1 - fewer < BY_CHANCE else 0.0


def oscillates(study: Study, sweep: StudyRecords) -> Advice | None:
    """Curves that go up and down while they fall."""
    del study
    shares = [(t, _rises(finite_evals(sweep, t))) for t in sweep.trials.values()]
    restless = [(t, share) for t, share in shares if share >= RISES]
    if not restless or len(restless) < 0.1 * max(1, len(sweep.trials)):
        return None
    numbers = tuple(t.number for t, _ in restless)
    rates = [r for t, _ in restless if (r := learning_rate(t)) is not None]
    at = f", at learning rates from {min(rates):.3g}" if rates else ""
    return Advice(
        seen="the eval loss oscillates",
        do="lower the learning rate or raise the global batch size there",
        evidence=f"{trials_text(numbers)}: {median(s for _, s in restless):.0%} of the steps between evals go up "
        f"(3 to 6% in the public runs){at}",
        trials=numbers,
    )


def plateau(study: Study, sweep: StudyRecords) -> Advice | None:
    """Trials that ended above the target on a flat curve, so that more steps do not help."""
    flat = [t for t in _ended_short(sweep) if _last_third(finite_evals(sweep, t)) < FLAT]
    if not flat:
        return None
    numbers = tuple(t.number for t in flat)
    lowest = min(min(e.loss for e in finite_evals(sweep, t)) for t in flat)
    return Advice(
        seen="the eval loss stays on a plateau above the target",
        do="more steps of the same will not help: try another learning rate or a longer schedule from the start",
        evidence=f"the last third of {trials_text(numbers)} made less than {FLAT:.0%} of the fall; the lowest is "
        f"{lowest:.4g}, target {study.target:g}",
        trials=numbers,
    )


def too_short(study: Study, sweep: StudyRecords) -> Advice | None:
    """Trials that ended while still falling, with a forecast crossing not far beyond."""
    del study
    short = []
    for trial in _ended_short(sweep):
        crossing, end = (
            trial.metrics.crossing_samples,
            max_samples(trial) or trial.metrics.last_samples,
        )
        falling = _last_third(finite_evals(sweep, trial)) >= FLAT
        if crossing is not None and end and falling and end < crossing < 2 * end:
            short.append((trial.number, crossing / end))
    if not short:
        return None
    numbers, factors = tuple(n for n, _ in short), sorted(f"{f:.2f}" for _, f in short)
    span = factors[0] if factors[0] == factors[-1] else f"{factors[0]} to {factors[-1]}"
    return Advice(
        seen="trials end before they get there",
        do=f"allow more steps: about {max(f for _, f in short) - 1:.0%} more would have been enough",
        evidence=f"{trials_text(numbers)} still fell at the end; the forecast crossing lies {span} times as far",
        trials=numbers,
    )


def _ended_short(sweep: StudyRecords) -> list[Trial]:
    return [
        t for t in sweep.trials.values() if t.verdict is Verdict.CENSORED and len(finite_evals(sweep, t)) >= 6
    ]  # fmt: skip


def _last_third(evals: Sequence[Eval]) -> float:
    """Share of the whole fall in the last third, by medians of neighbours against spikes."""
    losses = [e.loss for e in evals]
    third = max(2, len(losses) // 3)
    fall = max(losses[:3]) - min(losses)
    if fall <= 0:
        return 0.0
    return (median(losses[-third - 2 : -third + 1]) - median(losses[-3:])) / fall


def at_the_edge(study: Study, sweep: StudyRecords) -> Advice | None:
    """The best trials crowd at one end of a range."""
    best = [t for t in leaders(study, sweep) if t.tuned]
    best = best[: max(3, len(best) // 4)]
    if len(best) < 3 or len(reached(sweep)) < 8:
        return None
    space, crowded = study.search_space.distributions(), {}
    drawn = {name: [t.tuned[name] for t in best if name in t.tuned] for name in space}
    for name, spread in space.items():
        # Too few trials for a conditional parameter.
        if len(drawn[name]) == len(best) and (side := _side(spread, drawn[name])) is not None:
            crowded[name] = side
    if not crowded:
        return None
    numbers = tuple(t.number for t in best)
    ranges = (f"{name} {min(drawn[name]):.3g} to {max(drawn[name]):.3g}" for name in crowded)
    return Advice(
        seen="the best trials lie at " + " and ".join(f"the {side.name} end of {n}" for n, side in crowded.items()),
        do="widen " + ", ".join(f"space.{name} beyond {side.end:g}" for name, side in crowded.items()),
        evidence=f"the best {len(best)} of {len(reached(sweep))}, {trials_text(numbers)}: {', '.join(ranges)}",
        trials=numbers,
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """One end of a range."""

    name: str
    end: float


def _side(spread: BaseDistribution, drawn: Sequence[Any]) -> _Side | None:
    """The end of a numeric range at which values crowd; None if there is none, or the end is a natural bound.

    Natural lower bounds are 0, and 1 for integers on a log scale. Distances are on the search's scale, where 0.999 is
    not at the end of 0.9 to 0.9999.
    """
    from optuna.distributions import IntDistribution

    from lora_tune.search.grey_box.features import coder, ends

    if (bounds := ends(spread)) is None:
        return None
    coded = coder(spread)
    places = [(coded(v)[0] + 1) / 2 for v in drawn]
    least = 1 if isinstance(spread, IntDistribution) and spread.log else 0
    if max(places) < EDGE and bounds[0] != least:
        return _Side("lower", bounds[0])
    return _Side("upper", bounds[1]) if min(places) > 1 - EDGE else None


def eval_sd(losses: Sequence[float]) -> float:
    """Standard deviation of an eval about a smooth curve, from the median absolute second difference.

    The second difference of independent errors has variance 6 (1 + 4 + 1); 1.4826 scales a median absolute deviation to
    a normal standard deviation.
    """
    return 1.4826 * median(abs(a - 2 * b + c) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)) / 6**0.5


def overfits(study: Study, sweep: StudyRecords, train: Mapping[int, Sequence[TrainPoint]]) -> Advice | None:
    """Train loss falls while the last three evals exceed the lowest by more than the noise of evals.

    A curve that falls to its end has its lowest eval there and does not qualify. The closed division fixes weight decay
    and dropout, so there the advice omits them.
    """
    overfitted = []
    for number, points in train.items():
        evals, losses = finite_evals(sweep, sweep.trials[number]), [p.loss for p in points if math.isfinite(p.loss)]
        if len(evals) < 6 or len(losses) < 12:
            continue
        lowest = min(e.loss for e in evals)
        rise = min(e.loss for e in evals[-3:]) - lowest
        quarter = len(losses) // 4
        falls = median(losses[-2 * quarter : -quarter]) - median(losses[-quarter:])
        scatter = RISE_SDS * eval_sd([e.loss for e in evals])
        if rise > max(scatter, 0.05 * (evals[0].loss - lowest)) and falls > 0:
            overfitted.append((number, rise, falls))
    if not overfitted:
        return None
    numbers = tuple(n for n, _, _ in overfitted)
    return Advice(
        seen="train loss falls while eval loss rises: the adapter learns the training set by heart",
        do=("raise weight decay or dropout, " if study.division == "open" else "")
        + "lower the learning rate, or stop earlier",
        evidence=f"{trials_text(numbers)}: at the end the eval loss is {median(r for _, r, _ in overfitted):.3g} above "
        f"its lowest and the train loss {median(f for _, _, f in overfitted):.3g} lower than before",
        trials=numbers,
    )


CONVERGENCE_RULES: tuple[Callable[[Study, StudyRecords], Advice | None], ...] = (
    partial(rate_off, high=False),
    partial(rate_off, high=True),
    oscillates,
    plateau,
    too_short,
    at_the_edge,
)
