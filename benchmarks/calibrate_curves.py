"""Calibrate the shipped families of eval curves on the calibration half of the public runs.

``python -m benchmarks.calibrate_curves`` rewrites ``lora_tune/mlperf/data/llama2_70b_lora.json``. Only submissions with
``public_runs.is_test(...)`` false are read, and of those the good ones: mean samples to target at most 1.2 times the
MLPerf reference convergence point of their batch size. docs/statistics.md explains each step.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import betaincinv

from benchmarks.public_runs import TARGET, PublicRun, by_submission, is_test, load
from lora_tune.curves.family import HUBER, Z90, Family, Offset, estimate, fit_offset, robust_sd
from lora_tune.curves.forecast import expected_stop, forecast
from lora_tune.curves.phases import recognised
from lora_tune.curves.points import first_reached, points
from lora_tune.curves.published import highest_pair
from lora_tune.curves.timing import Schedule
from lora_tune.logs.run import Eval
from lora_tune.mlperf.benchmark import LORA, find_benchmark
from lora_tune.mlperf.convergence import CALIBRATION, envelope

GOOD = 1.2
NOISE_BINS = (-0.75, -0.5, -0.3, -0.15, 0.0, 0.15)
HUBER_ABOVE = tuple(0.5 + 0.05 * i for i in range(17))
WANDERS = tuple(0.0004 + 0.0002 * i for i in range(8))
RATES = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
CONFIDENCE = 0.9
FEWEST_SUBMISSIONS = 3  # per batch size, for estimates by the fixed shape: two at GBS 16 left a bias of -2.4%


def is_good(runs: Sequence[PublicRun]) -> bool:
    """Whether a submission converges within 1.2 times the reference convergence point, in one precision."""
    if recognised([r.run for r in runs]):
        return False
    return float(np.mean([r.stop for r in runs])) <= GOOD * _reference(runs[0].gbs)


def calibrate(runs: Sequence[PublicRun]) -> dict[str, Any]:
    """All constants of ``curves.published`` from ``runs``, without bad submissions."""
    groups = [g for g in by_submission(runs).values() if is_good(g)]
    counts = Counter(g[0].gbs for g in groups)
    good = [r for g in groups for r in g]
    found: dict[str, Any] = {"target": TARGET, **_shape(groups)}
    found["estimated_at"] = sorted(gbs for gbs, count in counts.items() if count >= FEWEST_SUBMISSIONS)
    found |= {
        "noise": {"at": [-0.7, 0.0], "sd": [0.0016, 0.0011], "gbs_power": 0.0},
        "seed": 0.001,
        "seed_gbs_power": 0.0,
        "wander": 0.001,
        "spread": 0.0012,
        "huber_above": 1.0,
    }
    found["thresholds"] = [[0.01, 3.0]]
    found["noise"] = _noise(good, found)
    found["huber_above"] = _huber_above(good, found)
    offsets = {id(r): fit_offset(points(r.run.evals), _family(found, r)) for r in good}
    found["spread"] = robust_sd(np.array([o.value for o in offsets.values()]))
    found["seed"], found["seed_gbs_power"] = _seed(groups, offsets)
    found["wander"] = _wander(good, found)
    found["thresholds"] = _thresholds([worst_pair(r.run.evals, TARGET, _family(found, r)) for r in good])
    return _rounded(found)


def worst_pair(evals: Sequence[Eval], target: float, family: Family) -> float:
    """The largest excess shown by two consecutive evals before the target; see ``curves.published.highest_pair``."""
    stop = first_reached(evals, target)
    return highest_pair(points([e for e in evals if stop is None or e.samples < stop.samples]), family)


def _reference(gbs: int) -> float:
    found = find_benchmark(LORA).reference(gbs)
    assert found is not None, f"public run at GBS {gbs}"
    return found.mean


def _family(calibration: dict[str, Any], run: PublicRun) -> Family:
    found = envelope(calibration, run.gbs)
    assert found is not None, f"public run at GBS {run.gbs}"
    return found.family


def _shape(groups: Sequence[Sequence[PublicRun]]) -> dict[str, Any]:
    """Slope and crossing of each submission's median curve, regressed on ln(GBS/8) with Huber weights.

    A median curve contains sample counts from half of the reference convergence point on, if at least 90% of the
    submission's runs evaluated there: later ones show only the slow runs.
    """
    rows = []
    for group in groups:
        start = 0.47 * _reference(group[0].gbs)
        counts = sorted({e.samples for r in group for e in r.run.evals if e.samples >= start})
        at = [[e.loss for r in group for e in r.run.evals if e.samples == s] for s in counts]
        kept = [(np.log(s), np.median(v)) for s, v in zip(counts, at, strict=True) if len(v) >= 0.9 * len(group)]
        x, y = np.array(kept).T
        slope, level = np.polyfit(x, y, 1)
        rows.append((np.log(group[0].gbs / 8), slope, (TARGET - level) / slope, len(group)))
    g, slopes, crossings, weights = np.array(rows).T
    return {
        "slope": list(_huber_fit(g, slopes, weights, 1)),
        "log_crossing": list(_huber_fit(g, crossings, weights, 2)),
    }


def _huber_fit(x: np.ndarray, y: np.ndarray, weights: np.ndarray, degree: int) -> np.ndarray:
    """Polynomial coefficients, lowest power first, by reweighted least squares with Huber's psi."""
    design = np.vander(x, degree + 1, increasing=True)
    used = weights
    for _ in range(50):
        root = np.sqrt(used)
        coefficients = np.linalg.lstsq(design * root[:, None], y * root, rcond=None)[0]
        residuals = y - design @ coefficients
        scale = max(robust_sd(residuals), 1e-9)
        used = weights * np.minimum(1.0, 1.345 * scale / np.maximum(np.abs(residuals), 1e-12))
    return coefficients


def _noise(good: Sequence[PublicRun], calibration: dict[str, Any]) -> dict[str, Any]:
    """Eval noise against ln(samples / crossing) and batch size, from differences of neighbouring evals.

    A difference, less the curve's fall, has twice the variance of an eval. The eval that stopped the run is excluded,
    since it is low by selection. At GBS 8: a line through the sd of bins, with readings beyond 3 robust sd clipped;
    then the power of GBS by which the differences shrink at other batch sizes.
    """
    rows = []
    for run in good:
        family = _family(calibration, run)
        samples, loss = points(run.run.evals[:-1])
        place = np.log(samples) - family.log_samples[-1]
        residuals = loss - family.loss_at(samples)
        both = zip((place[:-1] + place[1:]) / 2, np.diff(residuals) / np.sqrt(2), strict=True)
        rows.extend((run.gbs, *pair) for pair in both)
    gbs, x, d = np.array(rows).T
    bins = [(gbs == 8) & (x >= low) & (x < high) for low, high in itertools.pairwise(NOISE_BINS)]
    at = [float(x[b].mean()) for b in bins]
    slope, level = np.polyfit(at, [_drawn_in_sd(d[b]) for b in bins], 1, w=[np.sqrt(b.sum()) for b in bins])
    sizes = np.unique(gbs)
    scaled = d / (level + slope * np.clip(x, -0.7, 0.0))
    ratios = np.log([_drawn_in_sd(scaled[gbs == g]) for g in sizes])
    weights = np.array([(gbs == g).sum() for g in sizes], dtype=float)
    logs = np.log(sizes / 8)
    power = float((weights * logs * (ratios - ratios[0])).sum() / (weights * logs**2).sum())
    return {"at": [-0.7, 0.0], "sd": [level - 0.7 * slope, level], "gbs_power": power}


def _drawn_in_sd(values: np.ndarray) -> float:
    limit = 3 * robust_sd(values)
    return float(np.std(np.clip(values, -limit, limit)))


def _huber_above(good: Sequence[PublicRun], calibration: dict[str, Any]) -> float:
    """The constant for which the mean expected stop of the estimates equals the mean stop (GBS 8 runs)."""
    runs = [r for r in good if r.gbs == 8]
    stops = sum(r.stop for r in runs)
    best = (math.inf, HUBER)
    for above in HUBER_ABOVE:
        family = _family({**calibration, "huber_above": above}, runs[0])
        expected = sum(_expected_stop(r, family) for r in runs)
        best = min(best, (abs(expected / stops - 1), above))
    return best[1]


def _expected_stop(run: PublicRun, family: Family) -> float:
    evals = run.run.evals
    schedule = Schedule(evals[0].samples, evals[1].samples - evals[0].samples)
    return expected_stop(estimate(run.run, TARGET, family=family).samples, family, schedule)


def _seed(groups: Sequence[Sequence[PublicRun]], offsets: dict[int, Offset]) -> tuple[float, float]:
    """Seed spread at GBS 8, and its power of GBS, from GBS 8 and all others together."""
    at_8 = _seed_sd([g for g in groups if g[0].gbs == 8], offsets)
    others = [g for g in groups if g[0].gbs > 8]
    logs = np.mean([np.log(g[0].gbs / 8) for g in others for _ in g])
    return at_8, float(np.log(_seed_sd(others, offsets) / at_8) / logs)


def _seed_sd(groups: Sequence[Sequence[PublicRun]], offsets: dict[int, Offset]) -> float:
    """Seed spread such that 90% of runs lie within 1.645 sd of the mean of their submission's other runs."""
    distances, noise = [], []
    for group in groups:
        values = np.array([offsets[id(r)].value for r in group])
        n = len(values)
        others = (values.sum() - values) / (n - 1)
        distances.extend(np.abs(values - others) / np.sqrt(1 + 1 / (n - 1)))
        noise.extend(offsets[id(r)].sd for r in group)
    total = float(np.quantile(distances, 0.9)) / Z90
    return float(np.sqrt(max(total**2 - float(np.median(noise)) ** 2, (0.3 * total) ** 2)))


def _wander(good: Sequence[PublicRun], calibration: dict[str, Any]) -> float:
    """The wander for which forecasts from two or more evals contain the later stop 90% of the time (GBS 8 runs)."""
    runs = [r for r in good if r.gbs == 8]
    best = (1.0, 0.001)
    for wander in WANDERS:
        trial = {**calibration, "wander": wander}
        inside = [forecast_holds(r, n, _family(trial, r)) for r in runs for n in range(2, len(r.run.evals))]
        best = min(best, (abs(float(np.mean(inside)) - 0.9), wander))
    return best[1]


def forecast_holds(run: PublicRun, known: int, family: Family) -> float:
    """Share of the stop's probability in the forecast's central 90%, from the first ``known`` evals.

    The stop is discrete, so its forecast probability is a part of the unit interval; the share of that part between
    0.05 and 0.95 is the expected coverage of a randomised probability integral transform.
    """
    step = run.run.evals[1].samples - run.run.evals[0].samples
    found = forecast(run.run.evals[:known], TARGET, family=family, quantum=step)
    low, high = found.chance_by(run.stop - 1), found.chance_by(run.stop)
    return (min(high, 0.95) - max(low, 0.05)) / (high - low) if high > 0.05 and low < 0.95 and high > low else 0.0


def _thresholds(worst: Sequence[float]) -> list[list[float]]:
    """For each rate the smallest excess that good runs exceed at most that often, with 90% confidence.

    With m of n runs above, the upper limit of the rate is the 0.9 quantile of Beta(m + 1, n - m) (Clopper-Pearson).
    Rates that this many runs cannot support are omitted.
    """
    ranked = np.sort(np.array(worst))[::-1]
    n = len(ranked)
    limits = np.array([betaincinv(m + 1, n - m, CONFIDENCE) for m in range(n // 2)])
    return [[rate, float(ranked[(limits <= rate).sum() - 1])] for rate in RATES if limits[0] <= rate]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    runs = [r for r in load() if not is_test(r.submission)]
    good = {s: g for s, g in by_submission(runs).items() if is_good(g)}
    found = calibrate(runs)
    provenance = {
        "source": "MLPerf Training results v4.0 to v5.1, benchmark llama2_70b_lora (MLCommons, Apache-2.0)",
        "made_by": "python -m benchmarks.calibrate_curves",
        "runs": sum(map(len, good.values())),
        "submissions": len(good),
        "half": "submissions 'round/submitter/system' whose SHA-256 is even",
    }
    CALIBRATION.write_text(json.dumps({"provenance": provenance, **found}, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
