"""What traces say: regret at budgets with intervals, node-hours until good and staying so, calibration of claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NEAR = 0.03
"""Regret that counts as found."""
RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One repeat of one method on one problem. points: (node-hours, regret); claims: (node-hours, claimed, true)."""

    study: str
    method: str
    nodes: int
    repeat: int
    budget: float
    trials: int
    points: tuple[tuple[float, float], ...]
    claims: tuple[tuple[float, float, float], ...] = ()


def regret_at(record: Record, hours: float) -> float:
    """Regret of the recommendation in force after ``hours`` node-hours; infinite before the first."""
    return next((regret for at, regret in reversed(record.points) if at <= hours), math.inf)


def settled_at(record: Record, near: float = NEAR) -> float:
    """Node-hours from which on the regret stays at or below ``near`` to the end; infinite when it does not."""
    found = math.inf
    for at, regret in reversed(record.points):
        if regret > near:
            break
        found = at
    return found


def median_interval(values: Sequence[float], confidence: float = 0.9) -> tuple[float, float, float]:
    """Median with its order-statistic interval: (median, low, high); infinite values are ranked last."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = len(ordered)
    rng = np.random.default_rng(0)
    medians = np.sort(np.partition(ordered[rng.integers(0, n, (RESAMPLES, n))], n // 2, axis=1)[:, n // 2])
    tail = (1 - confidence) / 2
    low, high = medians[int(tail * RESAMPLES)], medians[int((1 - tail) * RESAMPLES) - 1]
    return float(ordered[n // 2]), float(low), float(high)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Mean claimed and mean true regret over all looks, and the 90% interval of their ratio over draws of sites."""

    claimed: float
    true: float
    low: float
    high: float


def calibration(records: Sequence[Record], after: float) -> Calibration | None:
    """What claims later than ``after`` node-hours are worth; None without claims.

    The interval is the bootstrap's: whole sites are drawn again, since the looks at one site are not independent.
    """
    sums = np.array([[f(column) for column in _claims(r, after) for f in (sum, len)] for r in records])
    if not len(sums) or not sums[:, 1].sum():
        return None
    drawn = sums[np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / np.maximum(drawn[:, 2], 1e-12), (0.05, 0.95))
    claimed, looks, true, _ = sums.sum(axis=0)
    return Calibration(claimed=float(claimed / looks), true=float(true / looks), low=float(low), high=float(high))


def _claims(record: Record, after: float) -> tuple[list[float], list[float]]:
    """Claimed and true regrets of a record later than ``after`` node-hours."""
    seen = [(c, t) for at, c, t in record.claims if at >= after and math.isfinite(c) and math.isfinite(t)]
    return [c for c, _ in seen], [t for _, t in seen]


def table(records: Sequence[Record], budgets: Sequence[float]) -> str:
    """A Markdown table of one problem at one number of nodes: a row a method, medians with their 90% intervals."""
    head = [f"regret at {b:g}" for b in budgets]
    lines = [
        f"| method | repeats | node-hours to 3% (90% interval) | reached | {' | '.join(head)} |",
        "|" + "---|" * (4 + len(budgets)),
    ]
    for method in dict.fromkeys(r.method for r in records):
        own = [r for r in records if r.method == method]
        settled = [settled_at(r) for r in own]
        middle, low, high = median_interval(settled)
        cells = [_cell([regret_at(r, b) for r in own]) for b in budgets]
        reached = sum(map(math.isfinite, settled))
        lines.append(
            f"| {method} | {len(own)} | {_hours(middle, own)} ({_hours(low, own)} to {_hours(high, own)}) "
            f"| {reached}/{len(own)} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _cell(regrets: Sequence[float]) -> str:
    middle, low, high = median_interval(regrets)
    return percent(middle) if low == high else f"{percent(middle)} ({percent(low)} to {percent(high)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A method beside the best of others, on the sites that all of them have.

    best: the other whose median regret at the end is the lowest. regret: that. hours: node-hours after which this
    method's median is no worse; infinite where it never is. worse: by how much its median exceeds the lowest median of
    the others, at each budget.
    """

    sites: int
    best: str
    regret: float
    hours: float
    worse: tuple[float, ...]


def ahead(records: Sequence[Record], method: str, others: Sequence[str], budgets: Sequence[float]) -> Ahead | None:
    """``method`` beside ``others`` on one problem at one number of nodes; None where no site has them all."""
    by_name = {n: {r.repeat: r for r in records if r.method == n} for n in (method, *others)}
    sites = sorted(set.intersection(*(set(known) for known in by_name.values())))
    if not sites or not others:
        return None

    def median(name: str, hours: float) -> float:
        return median_interval([regret_at(by_name[name][site], hours) for site in sites])[0]

    best = min(others, key=lambda name: median(name, budgets[-1]))
    looks = sorted({at for site in sites for at, _ in by_name[method][site].points})
    level = median(best, budgets[-1])
    lowest = [min(median(name, b) for name in others) for b in budgets]
    return Ahead(
        sites=len(sites), best=best, regret=level,
        hours=next((at for at in looks if median(method, at) <= level), math.inf),
        worse=tuple(_excess(median(method, b), low) for b, low in zip(budgets, lowest, strict=True)),
    )  # fmt: skip


def _excess(regret: float, lowest: float) -> float:
    return 0.0 if regret == lowest else regret - lowest


def _hours(value: float, records: Sequence[Record]) -> str:
    return f"{value:.1f}" if math.isfinite(value) else f"> {max(r.budget for r in records):g}"


def percent(value: float) -> str:
    """A regret for people."""
    return f"{100 * value:.1f}%" if math.isfinite(value) else "none"
