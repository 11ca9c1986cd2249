"""What the laboratory makes of its records."""

from __future__ import annotations

import math

import pytest

from benchmarks.laboratory.summary import Record, calibration


def site(number: int, *claims: tuple[float, float, float]) -> Record:
    """A record with (node-hours, claimed, true) looks."""
    return Record(
        study="h100", method="ours", nodes=1, repeat=number, budget=40.0, trials=9, points=((1.0, 0.1),), claims=claims
    )


def test_claims_are_compared_with_the_truth_over_all_looks_and_doubted_by_site() -> None:
    timid = [site(k, (2.0, 9.0, 0.1), (10.0, 0.04, 0.02), (20.0, 0.02, 0.01)) for k in range(6)]
    bold = [site(k, (10.0, 0.01, 0.02), (20.0, math.inf, 0.02)) for k in range(6, 12)]
    found = calibration([*timid, *bold], after=5)
    assert found is not None
    assert found.claimed == pytest.approx((6 * 0.06 + 6 * 0.01) / 18)
    assert found.true == pytest.approx((6 * 0.03 + 6 * 0.02) / 18)
    assert 0.5 < found.low < found.claimed / found.true < found.high < 2.0
    alike = calibration(timid, after=5)
    assert alike is not None
    assert alike.low == pytest.approx(alike.high) == pytest.approx(2.0)


def test_methods_without_claims_have_no_calibration() -> None:
    assert calibration([], after=5) is None
    assert calibration([site(1, (2.0, 0.1, 0.1)), site(2)], after=5) is None
