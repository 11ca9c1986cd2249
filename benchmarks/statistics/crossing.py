"""Crossing estimates and forecasts on submissions that the calibration never saw, and on simulated curves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.calibrate_curves import calibrate, forecast_holds, is_good
from benchmarks.public_runs import TARGET, PublicRun, by_submission, fold, is_test, load
from lora_tune import curves
from lora_tune.curves.family import Z90
from lora_tune.logs.run import Eval
from lora_tune.mlperf import convergence
from lora_tune.mlperf.convergence import CALIBRATION, envelope

FOLDS = 5
LARGEST_BIAS, COVERED, FEWEST = 0.005, (0.87, 0.93), 20
"""The bars: of the bias, and of the coverage where there are so many runs."""
Estimator = Callable[[PublicRun], curves.Crossing]


def main() -> None:
    runs = load()
    groups = by_submission(runs)
    test = [g for s, g in groups.items() if is_test(s) and is_good(g)]
    calibration = json.loads(CALIBRATION.read_text())
    print("Good submissions of the test half. Variances within submissions; bias of the expected stop against the raw")
    print(
        "stop, +/- its standard error; coverage of the mean of the submission's other runs by each run's 90% interval."
    )
    heads = f"{'sd':>6} {'raw sd':>6} {'less var.':>9} {'bias':>14} {'cover':>6}  bars missed"
    print(f"{'estimator':44} {'GBS':>4} {'runs':>5} {heads}")
    for gbs in sorted({g[0].gbs for g in test}):
        chosen = [g for g in test if g[0].gbs == gbs]
        print(row("fixed shape, Huber offset", chosen, fixed_shape(calibration)))
    at_8 = [g for g in test if g[0].gbs == 8]
    print(row("free fit (no family)", at_8, lambda r: curves.estimate(r.run, TARGET)))
    print(row("shape learned from 12 runs of the study", at_8, learned(runs)))
    print(f"\nEvery good submission, by {FOLDS} calibrations that did not see it:")
    everyone = [g for g in groups.values() if is_good(g)]
    folds = [calibrate([r for r in runs if fold(r.submission, FOLDS) != k]) for k in range(FOLDS)]
    for gbs in sorted({g[0].gbs for g in everyone}):
        chosen = [g for g in everyone if g[0].gbs == gbs]
        fixed = gbs in calibration["estimated_at"]
        for name, estimator, ships in (
            ("fixed shape, cross-fitted", lambda r: _cross_fitted(r, folds), fixed),
            ("free fit", lambda r: curves.estimate(r.run, TARGET), not fixed),
        ):
            print(row(f"{name}{', ships' if ships else ''}", chosen, estimator))
    forecasts(at_8, calibration)
    simulated(calibration, at_8)


def fixed_shape(calibration: dict) -> Estimator:
    return lambda r: curves.estimate(r.run, TARGET, family=envelope(calibration, r.gbs).family)


def learned(runs: Sequence[PublicRun]) -> Estimator:
    """A family learned from the first runs of twelve calibration submissions, as a study's own trials would be."""
    groups = [g for s, g in sorted(by_submission(runs).items()) if not is_test(s) and is_good(g) and g[0].gbs == 8]
    family = curves.learn_family([g[0].run for g in groups[:12]], TARGET)
    return lambda r: curves.estimate(r.run, TARGET, family=family)


def _cross_fitted(run: PublicRun, folds: Sequence[dict]) -> curves.Crossing:
    family = envelope(folds[fold(run.submission, FOLDS)], run.gbs).family
    return curves.estimate(run.run, TARGET, family=family)


def row(name: str, groups: Sequence[Sequence[PublicRun]], estimator: Estimator) -> str:
    """One line of the table: variance, bias and coverage of an estimator over submissions of one batch size."""
    gbs = groups[0][0].gbs
    reference = convergence.published(gbs)
    assert reference is not None
    own, raw, surplus, inside = [], [], [], []
    for group in groups:
        found = [estimator(r) for r in group]
        samples = np.array([f.samples for f in found])
        stops = np.array([r.stop for r in group])
        own.append(samples.var(ddof=1))
        raw.append(stops.var(ddof=1))
        expected = [expected_stop(r, f.samples, reference.family) for r, f in zip(group, found, strict=True)]
        surplus.extend(np.array(expected) - stops)
        inside.extend(covers(found, samples))
    reduction = f"{1 - np.mean(own) / np.mean(raw):.1%}" if np.mean(raw) > 0 else "-"
    mean = np.mean([r.stop for g in groups for r in g])
    bias, error = np.mean(surplus) / mean, np.std(surplus) / np.sqrt(len(surplus)) / mean
    sds = f"{np.sqrt(np.mean(own)):6.0f} {np.sqrt(np.mean(raw)):6.0f}"
    biases = f"{bias:+7.2%} ±{error:.2%}"
    missed = ", ".join(_missed(float(bias), float(np.mean(inside)), len(surplus)))
    return f"{name:44} {gbs:>4} {len(surplus):>5} {sds} {reduction:>9} {biases} {np.mean(inside):7.1%}  {missed}"


def _missed(bias: float, covered: float, runs: int) -> list[str]:
    """The bars that a row misses."""
    low, high = COVERED
    found = [f"bias over {LARGEST_BIAS:.1%}"] if abs(bias) >= LARGEST_BIAS else []
    outside = runs >= FEWEST and not low <= covered <= high
    return [*found, f"coverage outside {low:.0%} to {high:.0%}"] if outside else found


def expected_stop(run: PublicRun, crossing: float, family: curves.Family) -> float:
    evals = run.run.evals
    return curves.expected_stop(
        crossing, family, curves.Schedule(evals[0].samples, evals[1].samples - evals[0].samples)
    )


def covers(found: Sequence[curves.Crossing], samples: np.ndarray) -> np.ndarray:
    """Whether each interval holds the mean of the other runs, the interval widened by that mean's standard error."""
    n = len(samples)
    others = (samples.sum() - samples) / (n - 1)
    widths = np.log([f.high / f.low for f in found]) / (2 * Z90)
    return np.abs(np.log(others / samples)) <= Z90 * widths * np.sqrt(1 + 1 / (n - 1))


def forecasts(groups: Sequence[Sequence[PublicRun]], calibration: dict) -> None:
    """Coverage of the raw stop by forecasts from a run's first evals."""
    print("\nForecasts of the raw stop from the first evals (GBS 8, test half): share of stops in the central 90%")
    for known in (1, 2, 3, 4):
        runs = [r for g in groups for r in g if len(r.run.evals) > known]
        inside = [forecast_holds(r, known, envelope(calibration, r.gbs).family) for r in runs]
        print(f"  {known} known: {np.mean(inside):6.1%} of {len(runs)} runs")


def simulated(calibration: dict, groups: Sequence[Sequence[PublicRun]], runs: int = 4000) -> None:
    """Bias and coverage where the truth is known: GBS 8 curves with seed offsets and noise, stopped at the target.

    Noise: normal, or the standardised residuals of real evals (skewed) about their runs' median offset.
    """
    rng = np.random.default_rng(0)
    family = envelope(calibration, 8).family
    samples = 1536.0 + 384 * np.arange(40)
    draws = {
        "normal": rng.normal(0, 1, (runs, 40)),
        "of real evals": rng.choice(real_noise(family, groups), (runs, 40)),
    }
    print(f"\nSimulated GBS 8 runs ({runs}) with a known crossing:")
    for name, noise in draws.items():
        errors, inside = [], []
        for eps in noise:
            offset = rng.normal(0, family.seed)
            loss = family.loss_at(samples) + offset + eps * family.noise_at(samples)
            last = int(np.argmax(loss <= TARGET)) + 1
            evals = [Eval(s, v, s / 2) for s, v in zip(samples[:last], loss[:last], strict=True)]
            found = curves.estimate(evals, TARGET, family=family)
            errors.append(np.log(found.samples / family.samples_at(TARGET - offset)))
            inside.append(found.low <= family.samples_at(TARGET) <= found.high)
        print(f"  noise {name:14} bias {np.mean(errors):+.2%}, sd {np.std(errors):.1%}, covered {np.mean(inside):.1%}")


def real_noise(family: curves.Family, groups: Sequence[Sequence[PublicRun]]) -> np.ndarray:
    """Residuals of evals at 1,536 to 2,688 samples about their run's median, in units of the family's noise."""
    pool = []
    for run in (r for g in groups for r in g):
        kept = [e for e in run.run.evals[:-1] if e.samples <= 2700]
        samples = np.array([e.samples for e in kept])
        residuals = np.array([e.loss for e in kept]) - family.loss_at(samples)
        pool.extend((residuals - np.median(residuals)) / family.noise_at(samples))
    return np.array(pool)
