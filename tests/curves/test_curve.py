"""Eval curves in, estimates and verdicts out."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune import curves
from lora_tune.logs.run import Eval, RunLog
from lora_tune.mlperf import convergence

TARGET = 0.925
GBS_8 = curves.log_linear(
    0.92483, -0.02244, 3000, noise=0.0015, seed=0.001, wander=0.001, spread=0.0012, drift=0.01, name="test"
)

numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -1.0, 384.0, 384.0, 768.0, 0.925, 0.93, 1e308, 1e-308, math.nan, math.inf, -math.inf]),
)
anything = st.lists(st.builds(Eval, samples=numbers, loss=numbers, seconds=numbers), max_size=40)


def run_of(*losses: float, first: float = 1536, step: float = 384) -> list[Eval]:
    return [Eval(first + i * step, loss, (first + i * step) / 2) for i, loss in enumerate(losses)]


@settings(deadline=None)  # the first example imports scipy
@given(anything, st.one_of(st.none(), st.just(GBS_8)), st.floats(0.1, 10))
def test_no_sequence_of_evals_breaks_an_estimate(
    evals: list[Eval], family: curves.Family | None, target: float
) -> None:
    found = curves.estimate(evals, target, family=family)
    assert found.low <= found.samples <= found.high
    assert found.censored == (not any(e.loss <= target for e in evals))


@settings(deadline=None)  # the first example imports scipy
@given(anything, st.lists(numbers, max_size=5), st.lists(numbers, max_size=5))
def test_no_run_breaks_a_timing(evals: list[Eval], speeds: list[float], lengths: list[float]) -> None:
    run = RunLog(evals=tuple(evals), throughput=tuple(speeds), eval_seconds=tuple(lengths))
    curves.timing(run)
    assert curves.pace_spread(run) >= 0
    assert curves.samples_between_evals(run) >= 0


def good_run(last: float = 3072, offset: float = 0.0) -> list[Eval]:
    samples = np.arange(1536, last + 1, 384)
    return [Eval(s, v + offset, s / 2) for s, v in zip(samples, GBS_8.loss_at(samples), strict=True)]


def test_a_run_on_the_family_curve_crosses_where_the_family_does() -> None:
    found = curves.estimate(good_run(), TARGET, family=GBS_8)
    assert found.samples == pytest.approx(GBS_8.samples_at(TARGET))
    assert (found.stop_samples, found.stop_seconds, found.censored) == (3072, 1536, False)
    assert found.low < found.samples < found.high


def test_one_spike_does_not_move_the_fixed_shape_estimate() -> None:
    evals = good_run()
    spiked = [*evals[:2], Eval(2304, evals[2].loss + 0.6, 1152), *evals[3:]]
    clean = curves.estimate(evals, TARGET, family=GBS_8).samples
    assert curves.estimate(spiked, TARGET, family=GBS_8).samples == pytest.approx(clean, rel=0.001)


def test_an_unfinished_run_gives_a_censored_forecast_that_widens_with_the_distance() -> None:
    near, far = (curves.estimate(good_run(last), TARGET, family=GBS_8) for last in (2688, 1536))
    assert near.censored
    assert near.stop_samples is None
    assert far.high / far.low > near.high / near.low


def test_without_a_family_a_free_fit_extends_the_runs_own_curve() -> None:
    found = curves.estimate(good_run(2688), TARGET)
    assert found.samples == pytest.approx(GBS_8.samples_at(TARGET), rel=0.001)


def test_a_flat_unfinished_curve_never_crosses() -> None:
    found = curves.estimate(run_of(0.95, 0.95, 0.95, 0.95), TARGET)
    assert (found.samples, found.low, found.high) == (math.inf, 2688, math.inf)


def test_nothing_read_yet_means_anything_is_possible() -> None:
    found = curves.estimate([], TARGET)
    assert (found.samples, found.low, found.high, found.censored) == (math.inf, 0, math.inf, True)


def test_timing_drops_the_cold_block() -> None:
    found = curves.timing(RunLog(throughput=(1.9, 2.0, 2.02, 2.01), eval_seconds=(40.0, 38.0, 38.5, 38.2)))
    assert found == curves.Timing(2.01, 38.2)


def test_the_spread_of_the_pace_leaves_out_the_cold_block_and_one_hiccup() -> None:
    assert curves.pace_spread(RunLog(throughput=(1.0, 2.0, 2.0, 2.0, 0.5))) == 0
    assert curves.pace_spread(RunLog(throughput=(1.0, 1.9, 2.0, 2.1))) == pytest.approx(1.4826 * 0.05)
    assert curves.pace_spread(RunLog(throughput=(1.0, 2.0, 1.0))) == 0, "two blocks say nothing of their spread"


def test_timing_falls_back_to_time_stamps() -> None:
    evals = tuple(Eval(s, 1.0, s / 2 + 30 * (i + 1)) for i, s in enumerate((384, 768, 1152)))
    assert curves.timing(RunLog(evals=evals, eval_seconds=(30.0, 30.0, 30.0))).samples_per_second == pytest.approx(2.0)


def test_predicted_seconds_adds_training_and_evals() -> None:
    schedule = curves.Schedule(1536, 384)
    expected = (3000 + 192) / 2.0 + 30 * (1 + (3192 - 1536) / 384)
    assert curves.predicted_seconds(3000, curves.Timing(2.0, 30.0), schedule) == pytest.approx(expected)


def test_the_published_shape_is_there_for_the_batch_sizes_of_the_public_runs() -> None:
    assert convergence.published(4) is None
    assert convergence.published(256) is None
    assert convergence.published(8).family.samples_at(TARGET) == pytest.approx(2980, rel=0.01)
    assert convergence.published(128).family.samples_at(TARGET) == pytest.approx(11000, rel=0.02)


def test_a_stricter_false_prune_rate_needs_a_larger_excess() -> None:
    envelope = convergence.published(8)
    assert envelope.threshold(0.01) > envelope.threshold(0.1)
    assert envelope.threshold(1e-9) == envelope.thresholds[-1][1]
    assert envelope.rate_of(envelope.threshold(0.05)) == pytest.approx(0.05)


def test_a_run_that_leaves_its_family_is_estimated_without_it() -> None:
    healed = run_of(0.961, 0.958, 0.955, 0.952, 0.934, 0.9235)
    found = curves.estimate(healed, TARGET, family=convergence.published(8).family)
    assert "fixed shape" not in found.method
    assert 3072 <= found.samples <= 3456


def test_a_forecast_is_a_distribution_over_the_coming_evals() -> None:
    found = curves.forecast(good_run(2304), TARGET, family=GBS_8)
    assert found.stops[:2] == (2688, 3072)
    assert list(found.chance) == sorted(found.chance)
    assert found.chance_by(2687) == 0 < found.chance_by(3072) < found.chance_by(3840)
    assert found.quantile(0.05) <= 3072 <= found.quantile(0.95)


def test_a_run_that_has_stopped_is_certain() -> None:
    found = curves.forecast(good_run(), TARGET, family=GBS_8)
    assert (found.stops, found.chance) == ((3072,), (1.0,))


def test_a_run_that_wanders_more_is_forecast_less_surely() -> None:
    steady, wandering = (dataclasses.replace(GBS_8, wander=w) for w in (0.0, 0.004))
    late = [curves.forecast(good_run(2304), TARGET, family=f).quantile(0.95) for f in (steady, wandering)]
    assert late[0] < late[1]


def test_a_flat_run_has_no_forecast() -> None:
    found = curves.forecast(run_of(0.95, 0.95, 0.95), TARGET)
    assert (found.chance_by(1e9), found.quantile(0.5)) == (0.0, math.inf)


def test_the_stop_is_expected_half_an_interval_after_the_crossing() -> None:
    schedule = curves.Schedule(1536, 384)
    crossings = np.linspace(2880, 3264, 50)
    quiet = dataclasses.replace(GBS_8, noise=(1e-6, 1e-6))
    lag = [curves.expected_stop(c, quiet, schedule) - c for c in crossings]
    assert np.mean(lag) == pytest.approx(192, rel=0.02)
    assert curves.expected_stop(100, GBS_8, schedule) == pytest.approx(1536, rel=0.001)
    assert curves.expected_stop(math.inf, GBS_8, schedule) == math.inf


def test_noise_makes_a_run_stop_earlier_than_its_curve_crosses() -> None:
    schedule = curves.Schedule(1536, 96)
    loud = dataclasses.replace(GBS_8, noise=(0.004, 0.004))
    assert curves.expected_stop(3000, loud, schedule) < 3000


def test_a_shape_is_learned_from_runs_of_the_study() -> None:
    rng = np.random.default_rng(4)
    runs = []
    for _ in range(8):
        samples = np.arange(512.0, 4500, 384)
        losses = 0.9 + 0.3 * (samples / 500) ** -1.4 + rng.normal(0, 0.0008) + rng.normal(0, 0.001, len(samples))
        runs.append([Eval(s, v, s) for s, v in zip(samples, losses, strict=True)])
    family = curves.learn_family(runs, 0.915)
    truth = 500 * (0.3 / 0.015) ** (1 / 1.4)
    assert family.samples_at(0.915) == pytest.approx(truth, rel=0.05)
    assert list(family.loss) == sorted(family.loss, reverse=True)
    early = curves.estimate(runs[0][:7], 0.915, family=family)
    assert early.censored
    assert early.low < truth < early.high


def test_slow_runs_that_go_on_longest_do_not_lift_the_learned_shapes_end() -> None:
    fast = [good_run(3072, o) for o in (-0.0008, -0.0004, 0.0, 0.0004)]
    slow = [good_run(9000, o) for o in (0.012, 0.014)]
    family = curves.learn_family([*fast, *slow], TARGET)
    truth = GBS_8.loss_at(np.array([4224.0]))[0]
    assert family.loss_at(np.array([4224.0]))[0] == pytest.approx(truth, abs=0.002)


def test_two_runs_teach_no_shape() -> None:
    assert curves.learn_family([good_run(), good_run()], TARGET) is None


@settings(deadline=None)
@given(anything)
def test_no_sequence_of_evals_breaks_a_forecast(evals: list[Eval]) -> None:
    for reference in (None, convergence.published(8)):
        ahead = curves.forecast(evals, TARGET, family=None if reference is None else reference.family)
        assert all(0 <= c <= 1 for c in ahead.chance)


@settings(deadline=None)
@given(st.lists(anything, max_size=6))
def test_no_runs_break_learning(runs: list[list[Eval]]) -> None:
    family = curves.learn_family(runs, TARGET)
    assert family is None or list(family.log_samples) == sorted(family.log_samples)


def test_thousands_of_evals_are_thinned_without_losing_the_crossing() -> None:
    rng = np.random.default_rng(0)
    samples = np.linspace(100, 6000, 5000)
    losses = GBS_8.loss_at(samples) + rng.normal(0, 0.0005, 5000)
    found = curves.estimate([Eval(s, v, s) for s, v in zip(samples, losses, strict=True)], 0.90)
    assert found.censored
    assert found.samples == pytest.approx(GBS_8.samples_at(0.90), rel=0.05)


@pytest.mark.public_data
def test_the_shipped_calibration_is_what_the_script_makes_of_the_public_runs(public_data: Path) -> None:
    from benchmarks.calibrate_curves import calibrate
    from benchmarks.public_runs import is_test, load
    from lora_tune.mlperf.convergence import CALIBRATION

    shipped = json.loads(CALIBRATION.read_text())
    made = calibrate([r for r in load(public_data) if not is_test(r.submission)])
    assert {k: v for k, v in shipped.items() if k != "provenance"} == made


@pytest.mark.public_data
def test_on_runs_it_never_saw_the_estimate_halves_the_variance_of_the_stop(public_data: Path) -> None:
    from benchmarks.calibrate_curves import is_good
    from benchmarks.public_runs import by_submission, is_test, load

    family = convergence.published(8).family
    own, raw = [], []
    for submission, group in by_submission(load(public_data)).items():
        if is_test(submission) and group[0].gbs == 8 and is_good(group):
            own.append(np.var([curves.estimate(r.run, TARGET, family=family).samples for r in group], ddof=1))
            raw.append(np.var([r.stop for r in group], ddof=1))
    assert np.mean(own) < 0.5 * np.mean(raw)


def test_expensive_evals_are_spaced_out_and_cheap_ones_are_not() -> None:
    crossing = curves.estimate(good_run(), TARGET, family=GBS_8)
    now = curves.Schedule(1536, 384)
    dear = curves.choose_schedule(crossing, curves.Timing(2.0, 200.0), step=8, current=now)
    cheap = curves.choose_schedule(crossing, curves.Timing(2.0, 2.0), step=8, current=now)
    assert cheap.schedule.interval_samples < 384
    assert dear.schedule.interval_samples > cheap.schedule.interval_samples
    assert dear.saved_seconds > 0
    assert cheap.schedule.first_samples % 8 == cheap.schedule.interval_samples % 8 == 0
    assert "s less than now" in dear.sentence


def test_an_unknown_crossing_leaves_the_eval_schedule_alone() -> None:
    nothing = curves.estimate([], TARGET)
    now = curves.Schedule(1536, 384)
    assert curves.choose_schedule(nothing, curves.Timing(2.0, 30.0), step=8, current=now).schedule == now


@pytest.mark.parametrize(
    ("chance", "words"),
    [(0.0, "under 0.01%"), (3.3e-16, "under 0.01%"), (1e-4, "0.01%"), (0.0088, "0.88%"), (0.5, "50%")],
)
def test_a_chance_is_never_said_to_be_nil(chance: float, words: str) -> None:
    assert curves.chance_text(chance) == words
