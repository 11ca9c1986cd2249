"""Evidence that one sample of runs has the smaller mean, valid at every look."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lora_tune.curves.evalues import EFFECTS, critical, interval, log_evidence, two_samples


@pytest.mark.parametrize(
    ("statistic", "pairs", "freedom"), [(1.0, 0.7, 2), (4.0, 4.0, 16), (-2.0, 4.0, 16), (30.0, 1.5, 5)]
)
def test_evidence_is_the_mixed_likelihood_ratio_of_students_statistic(
    statistic: float, pairs: float, freedom: int
) -> None:
    ratios = [
        weight * stats.nct.pdf(statistic, freedom, effect * math.sqrt(pairs)) / stats.t.pdf(statistic, freedom)
        for effect, weight in EFFECTS.items()
    ]
    assert log_evidence(statistic, pairs, freedom) == pytest.approx(math.log(sum(ratios)), abs=1e-4)


def test_weights_of_the_effects_sum_to_one() -> None:
    assert sum(EFFECTS.values()) == 1


def test_equal_arms_exceed_one_over_the_level_at_any_look_at_most_that_often() -> None:
    rng, exceeded = np.random.default_rng(0), 0
    for _ in range(400):
        baseline, arm = rng.normal(size=4).tolist(), rng.normal(size=1).tolist()
        for look in range(25):
            (arm if look % 2 else baseline).append(float(rng.normal()))
            seen = two_samples(arm, baseline)
            if seen is not None and log_evidence(seen.statistic, seen.pairs, seen.freedom) >= math.log(20):
                exceeded += 1
                break
    assert exceeded <= 0.05 * 400


def test_the_interval_covers_the_difference_at_all_looks_together() -> None:
    rng, missed = np.random.default_rng(1), 0
    for _ in range(60):
        baseline, arm = (rng.normal(size=3) + 1.5).tolist(), rng.normal(size=1).tolist()
        for look in range(12):
            (arm if look % 2 else baseline).append(float(rng.normal() + (0 if look % 2 else 1.5)))
            seen = two_samples(arm, baseline)
            assert seen is not None
            low, high = interval(seen, 0.1)
            if not low <= 1.5 <= high:
                missed += 1
                break
    assert missed <= 0.1 * 60


def test_few_runs_decide_nothing_however_far_apart() -> None:
    assert two_samples([1.0], [2.0]) is None
    assert two_samples([1.0, 1.1], []) is None
    assert critical(0.01, 0.7, 2) == math.inf


def test_runs_that_do_not_scatter_give_no_nan() -> None:
    seen = two_samples([1.0, 1.0], [2.0, 2.0])
    assert seen is not None
    assert math.isfinite(log_evidence(seen.statistic, seen.pairs, seen.freedom))
