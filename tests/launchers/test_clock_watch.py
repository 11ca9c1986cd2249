"""The wall clock against the one that nobody sets or slews, while a job runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from lora_tune.launchers import job_runner
from lora_tune.launchers.job_runner import ClockWatch

RATES = pytest.mark.parametrize("rate", [-0.08, 0.08])


def watched(monkeypatch: pytest.MonkeyPatch, ahead: Callable[[float], float], seconds: int) -> list[float]:
    """What is noted of a job of so many seconds. ahead: how far the wall clock is ahead at a second of the job."""
    now = 0.0
    monkeypatch.setattr(job_runner, "LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(job_runner, "_read", lambda: (now, ahead(now)))
    with ClockWatch() as watch:
        for quarter in range(4 * seconds):
            now = quarter / 4
            watch._look()
        now = float(seconds)
    return watch.steps


@RATES
def test_a_clock_that_is_slewed_all_the_time_has_drifted(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 8%, as a time service may: every look sees two hundredths of a second, and the job 48 seconds."""
    assert watched(monkeypatch, lambda now: rate * now, 600) == [pytest.approx(600 * rate)]


@RATES
def test_a_slew_is_no_step_where_nobody_could_look_for_long(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, lambda now: rate * max(0.0, now - 10.0), 11) == []
    assert watched(monkeypatch, lambda now: rate * (now if now % 30 == 0 else now // 30 * 30), 60) != []


def test_a_step_is_no_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, lambda now: -7200.0 * (now > 5.1), 600) == [-7200.0]


@pytest.mark.parametrize(("rate", "seconds"), [(5e-4, 3600), (0.08, 12), (-0.009, 1000)])
def test_a_drift_that_changes_no_result_is_not_noted(
    rate: float, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than a second, or than a hundredth of the job: a machine's clock is always corrected a little."""
    assert watched(monkeypatch, lambda now: rate * now, seconds) == []


def test_a_slew_moves_the_monotonic_clock_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel slews every clock but the raw one: these two run on together, and the log with them."""
    true = {name: getattr(time, name) for name in ("time", "monotonic")}
    steady, began = job_runner.steady, job_runner.steady()
    slew = lambda: 0.08 * (steady() - began + 100.0)  # noqa: E731
    before = job_runner._read()
    for name, clock in true.items():
        monkeypatch.setattr(time, name, lambda clock=clock: clock() + slew())
    monkeypatch.setattr(job_runner, "steady", lambda: steady() + slew())
    after = job_runner._read()
    assert after[1] - before[1] == pytest.approx(8.0, abs=0.5)
    assert 0 <= after[0] - before[0] < 5.0
