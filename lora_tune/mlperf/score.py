"""The MLPerf score of runs of one configuration, and its forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lora_tune.mlperf.benchmark import Benchmark


def olympic_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest value; use infinity for a run that did not converge.

    Raises ValueError for fewer than three values.
    """
    if len(values) < 3:
        raise ValueError(f"an olympic mean needs at least 3 runs, got {len(values)}")
    kept = sorted(values)[1:-1]
    return math.fsum(kept) / len(kept)


@dataclass(frozen=True, slots=True)
class Score:
    """A result by MLPerf's rules.

    olympic_minutes: mean minutes without the fastest and the slowest run. factor: RCP normalisation, at least 1.
    minutes: their product. passes: False if the RCP check fails, or there is no RCP.
    """

    olympic_minutes: float
    factor: float
    minutes: float
    passes: bool
    sentence: str


def score(benchmark: Benchmark, minutes: Sequence[float], progress: Sequence[float], batch: int) -> Score:
    """The score of runs of one configuration: ``olympic_mean(minutes) * max(1, RCP_mean / olympic_mean(progress))``.

    progress: where each run converged, in the benchmark's unit. minutes and progress are infinite for a run that did
    not converge. Raises ValueError for fewer than three runs or different lengths.
    """
    if len(minutes) != len(progress):
        raise ValueError(f"{len(minutes)} times came with {len(progress)} counts of progress")
    time, mean = olympic_mean(minutes), olympic_mean(progress)
    against = benchmark.reference(batch)
    if against is None:
        sentence = f"no reference convergence point at or above GBS {batch}: the RCP check fails"
        return Score(time, 1.0, time, False, sentence)
    factor = max(1.0, against.mean / mean)
    passes = mean >= against.fastest and math.isfinite(time)
    if not passes:
        sentence = f"converging at {mean:.6g} is outside what the RCP check accepts (at least {against.fastest:.6g})"
    elif factor > 1:
        sentence = f"faster convergence is taken back (x{factor:.4f}): at {mean:.6g}, RCP mean {against.mean:.6g}"
    else:
        sentence = f"no RCP scaling: converging at {mean:.6g}, RCP mean {against.mean:.6g}"
    return Score(time, factor, time * factor, passes, sentence)


# Forecast: the score of a submission of a configuration and its chance to pass, from some runs.


PRIOR_RUNS = 10
"""Weight of the benchmark's ``stop_cv`` against the runs' own spread, in degrees of freedom."""

MARGINAL = (1.055, 0.03)
"""Growth of ln(minutes) per ln(samples) between runs of a submission, mean and sd over 133 public ones. Above 1,
because skipped first evals make only later samples pay for evals; the cold first block is a constant cost."""

PACE_CV = (0.002, 1.0)
"""Relative sd of minutes not explained by samples, over public submissions: median, and sd of its logarithm."""

FAILURE_PRIOR = (0.1, 9.9)
"""Beta prior of the chance that a run does not converge: mean 1%, weight 10 runs. One of 1,050 public runs did not."""

SUBMITTER_CV = 0.035
"""Relative sd of mean samples to target between submitters of one configuration, beyond the scatter of their runs.
Fitted on half of the public submissions; intervals cover the other half at the stated rate
(``benchmarks.statistics --part prediction``)."""

DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Prediction:
    """Forecast of a submission, from ``runs`` runs.

    passes: probability that all runs but at most one converge and the RCP check accepts their mean. scaled: probability
    of RCP normalisation above 1. factor: expected RCP normalisation. minutes, low, high: expected score and its central
    90% interval, infinite draws left out.
    """

    runs: int
    passes: float
    scaled: float
    factor: float
    minutes: float
    low: float
    high: float
    sentence: str


def predict(
    benchmark: Benchmark,
    minutes: Sequence[float],
    samples: Sequence[float],
    gbs: int,
    *,
    unconverged: int = 0,
    borrowed: Sequence[float] = (),
    interval: float | None = None,
    seed: int = 0,
) -> Prediction:
    """Simulate a submission of a configuration ``DRAWS`` times, from the minutes and samples of its converged runs.

    samples: progress in the benchmark's unit. interval: between evals in that unit, by default the closed division's.
    unconverged: number of runs that did not converge.

    Samples to target are normal with unknown mean and variance (shrunk towards the benchmark's ``stop_cv``), rounded to
    whole ``interval``s. Minutes follow samples by ``MARGINAL``, with a residual of prior ``PACE_CV`` updated by these
    runs. Fewer runs than a submission has are its first ones; otherwise all of its runs are drawn anew.
    borrowed: progress at which another submitter's runs of another configuration of this batch converged: the
    submission is of that one, at this machine's pace, with an extra sd of ``SUBMITTER_CV``. The same seed gives the
    same result. Raises ValueError without a run or for different lengths.
    """
    if not minutes or len(minutes) != len(samples):
        raise ValueError(f"{len(minutes)} times and {len(samples)} sample counts came; give both for at least one run")
    rng = np.random.default_rng(seed)
    interval = interval or _interval(benchmark, gbs)
    drawn, times, failed = _submissions(
        np.asarray(samples, dtype=np.float64), np.asarray(minutes, dtype=np.float64), interval,
        benchmark.stop_cv, benchmark.runs, unconverged, rng, np.asarray(borrowed, dtype=np.float64),
    )  # fmt: skip
    means, scores = _olympic(drawn, failed), _olympic(times, failed)
    finite = np.isfinite(scores)
    if not finite.any():
        return _certain_failure(len(samples), unconverged)
    against = benchmark.reference(gbs)
    factor = np.ones(DRAWS) if against is None else np.maximum(1.0, against.mean / means)
    passes = 0.0 if against is None else float(((means >= against.fastest) & np.isfinite(means)).mean())
    scores, factor = (scores * factor)[finite], factor[finite]
    low, high = (float(v) for v in np.quantile(scores, [0.05, 0.95]))
    scaled = float((factor > 1).mean())
    return Prediction(
        len(samples), passes, scaled, float(factor.mean()), float(scores.mean()), low, high,
        _sentence(len(samples), passes, scaled, float(factor.mean()), float(scores.mean()), (low, high)),
    )  # fmt: skip


def _interval(benchmark: Benchmark, gbs: int) -> float:
    """Eval interval of the closed division, in the benchmark's unit."""
    schedule = benchmark.eval_schedule(gbs)
    return schedule.interval_samples if schedule else 1.0


def _submissions(
    samples: NDArray[np.float64], clock: NDArray[np.float64], interval: float, usual: float, runs: int,
    unconverged: int, rng: np.random.Generator, borrowed: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:  # fmt: skip
    """Samples, minutes and whether the run fails, each [DRAWS, runs], of simulated submissions."""
    kept = len(samples) + unconverged if len(samples) + unconverged < runs and not len(borrowed) else 0
    if len(borrowed):
        drawn = _draw_samples(borrowed, interval, usual, runs, rng, SUBMITTER_CV)
    else:
        drawn = _draw_samples(samples, interval, usual, runs - kept, rng)
    times = _draw_minutes(samples, clock, drawn, rng)
    fail = rng.beta(FAILURE_PRIOR[0] + unconverged, FAILURE_PRIOR[1] + len(samples), size=DRAWS)
    failed = rng.random(drawn.shape) < fail[:, None]
    if not kept:
        return drawn, times, failed
    lost = np.concatenate([np.zeros(len(samples), dtype=bool), np.ones(unconverged, dtype=bool)])
    drawn, times = _before(np.resize(samples, kept), drawn), _before(np.resize(clock, kept), times)
    return drawn, times, np.concatenate([np.tile(lost, (DRAWS, 1)), failed], axis=1)


def _certain_failure(runs: int, unconverged: int) -> Prediction:
    """The forecast if every simulated submission has more than one run that does not converge."""
    return Prediction(
        runs, 0.0, 0.0, 1.0, math.inf, math.inf, math.inf,
        f"a submission would not pass: {unconverged} of {runs + unconverged} runs did not converge, one of them may",
    )  # fmt: skip


def _draw_samples(
    samples: NDArray[np.float64], interval: float, usual: float, runs: int, rng: np.random.Generator,
    elsewhere: float = 0.0,
) -> NDArray[np.float64]:  # fmt: skip
    """Samples to target of new runs, [DRAWS, runs]. usual: relative sd of one run (``Benchmark.stop_cv``).

    elsewhere: sd of ln(samples) between the submitter of ``samples`` and this one.
    """
    mean, n = float(samples.mean()), len(samples)
    freedom = n - 1 + PRIOR_RUNS
    squares = float(((samples - mean) ** 2).sum()) + PRIOR_RUNS * (usual * mean) ** 2
    sd = np.sqrt(squares / rng.chisquare(freedom, size=DRAWS))
    centre = mean + sd / np.sqrt(n) * rng.standard_normal(DRAWS)
    drawn = centre[:, None] + sd[:, None] * rng.standard_normal((DRAWS, runs))
    if elsewhere:
        drawn = drawn * np.exp(elsewhere * rng.standard_normal((DRAWS, 1)))
    return np.asarray(np.maximum(np.round(drawn / interval), 1) * interval, dtype=np.float64)


def _draw_minutes(
    samples: NDArray[np.float64], clock: NDArray[np.float64], drawn: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Minutes of runs with ``drawn`` samples, at the pace of the runs (samples, clock).

    The residual sd is drawn from its prior, weighted by its likelihood given these runs.
    """
    slope = rng.normal(*MARGINAL, size=DRAWS)
    spread = np.exp(rng.normal(np.log(PACE_CV[0]), PACE_CV[1], size=DRAWS))
    pace = np.log(clock) - slope[:, None] * np.log(samples)
    squares = ((pace - pace.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    surprise = squares / (2 * spread**2) + (len(samples) - 1) * np.log(spread)
    weight = np.exp(surprise.min() - surprise)
    chosen = rng.choice(DRAWS, size=DRAWS, p=weight / weight.sum())
    slope, spread = slope[chosen], spread[chosen]
    level = pace[chosen].mean(axis=1) + spread / np.sqrt(len(samples)) * rng.standard_normal(DRAWS)
    noise = spread[:, None] * rng.standard_normal(drawn.shape)
    return np.asarray(np.exp(level[:, None] + slope[:, None] * np.log(drawn) + noise), dtype=np.float64)


def _before(known: NDArray[np.float64], drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([np.tile(known, (DRAWS, 1)), drawn], axis=1)


def _olympic(values: NDArray[np.float64], failed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Row-wise olympic means; infinite if two or more runs fail."""
    ranked = np.sort(np.where(failed, np.inf, values), axis=1)
    return np.asarray(ranked[:, 1:-1].mean(axis=1), dtype=np.float64)


def _sentence(
    runs: int, passes: float, scaled: float, factor: float, minutes: float, interval: tuple[float, float]
) -> str:
    sentence = (
        f"a submission would score {minutes:.2f} min (90%: {interval[0]:.2f} to {interval[1]:.2f}) and pass the "
        f"checks of convergence with probability {passes:.0%}, judged from {runs} run{'s' if runs > 1 else ''}"
    )
    if scaled > 0.5:
        sentence += f"; faster convergence would be taken back (x{factor:.3f}), so only throughput and eval time pay"
    return sentence


FUTURES = 8
"""Simulated outcomes of the further runs."""


def interval_after_more_runs(
    benchmark: Benchmark, minutes: Sequence[float], samples: Sequence[float], gbs: int, more: int
) -> tuple[float, float]:
    """Width of the 90% interval of the score in minutes, now and expected after ``more`` further runs.

    The further runs are simulated from these. Raises ValueError as :func:`predict`.
    """
    now = predict(benchmark, minutes, samples, gbs)
    rng = np.random.default_rng(1)
    known, clock = np.asarray(samples, dtype=np.float64), np.asarray(minutes, dtype=np.float64)
    drawn = _draw_samples(known, _interval(benchmark, gbs), benchmark.stop_cv, more, rng)
    times = _draw_minutes(known, clock, drawn, rng)
    later = [
        predict(benchmark, [*minutes, *times[at]], [*samples, *drawn[at]], gbs) for at in range(FUTURES)
    ]  # fmt: skip
    widths = [p.high - p.low for p in later if math.isfinite(p.high)]
    return now.high - now.low, sum(widths) / len(widths) if widths else math.nan
