"""The grey-box model: its Gaussian process, its memory model, its arithmetic, and what it reads from trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from scipy.special import ndtr

from lora_tune.curves import Schedule, Timing, predicted_seconds
from lora_tune.logs.run import Eval
from lora_tune.search.grey_box import memory
from lora_tune.search.grey_box.features import Coordinates, from_unit, trend, unit
from lora_tune.search.grey_box.gaussian import (
    Data,
    Posterior,
    Prior,
    condition,
    log_evidence,
    matern,
    repeated_noise,
)
from lora_tune.search.grey_box.model import convergence_prior, learn, thinned, without_pending
from lora_tune.search.grey_box.objective import Goal, closed_schedule, public_family
from lora_tune.search.observations import Observation, readings
from lora_tune.search.recorded import of_trial

LAYOUTS = (
    "tp1 pp1 cp1 minibs1 mbs1",
    "tp2 pp1 cp1 minibs2 mbs1",
    "tp4 pp1 cp1 minibs4 mbs1",
    "tp4 pp1 cp2 minibs8 mbs1",
)
SPACE = {
    "LR": FloatDistribution(1e-5, 1e-2, log=True),
    "MAX_STEPS": IntDistribution(100, 2500),
    "WARMUP_STEPS": IntDistribution(0, 200),
    "layout": CategoricalDistribution(LAYOUTS),
}
COORDINATES = Coordinates(distributions=SPACE, gpus=8)
VALUES = {"LR": 4e-4, "MAX_STEPS": 800, "WARMUP_STEPS": 0, "layout": LAYOUTS[2]}


def believe(
    x: list[float], y: list[float], *, below: list[bool] | None = None, source: list[int] | None = None, sd=0.05
) -> Posterior:
    """A posterior over one feature from readings ``y`` at ``x``."""
    column = np.array(x)[:, None]
    data = Data.local(column, trend(column, ()), np.array(y), sd)
    data = replace(data, source=np.array(source or [0] * len(x)), below=np.array(below or [False] * len(x), bool))
    prior = Prior(mean=np.zeros(2), sd=np.array([3.0, 1.0]), amplitude=0.2, length=0.7, shift=0.1, weights=np.ones(1))
    return condition(data, prior)


def at(posterior: Posterior, x: float) -> tuple[float, float]:
    """Mean and sd at one point."""
    row = np.array([[x]])
    mean, covariance = posterior.predict(row, trend(row, ()))
    return float(mean[0]), math.sqrt(covariance[0, 0])


def test_nothing_seen_leaves_the_prior() -> None:
    mean, sd = at(believe([], []), 0.0)
    assert mean == 0
    assert sd > 3


def test_a_line_is_found_and_repeats_narrow_it() -> None:
    once = believe([-1, -0.5, 0.5, 1], [1, 1.5, 2.5, 3])
    thrice = believe([-1, -0.5, 0.5, 1] * 3, [1, 1.5, 2.5, 3] * 3)
    assert at(once, 0.0)[0] == pytest.approx(2, abs=0.05)
    assert at(thrice, 0.0)[1] < at(once, 0.0)[1]


def test_a_lower_bound_lifts_what_would_lie_below_it_and_leaves_the_rest() -> None:
    readings_ = [0.0, 0.02, -0.02]
    plain = believe([-1, -0.8, -0.6], readings_)
    bounded = believe([-1, -0.8, -0.6, 1], [*readings_, 1.0], below=[False] * 3 + [True])
    harmless = believe([-1, -0.8, -0.6, 1], [*readings_, -9.0], below=[False] * 3 + [True])
    assert at(bounded, 1.0)[0] > 1.0
    assert at(bounded, -0.8)[0] == pytest.approx(at(plain, -0.8)[0], abs=0.05)
    assert at(harmless, 1.0) == pytest.approx(at(plain, 1.0), abs=0.02)


def test_one_sided_posterior_agrees_with_numerical_integration() -> None:
    """One bound on one value: the truncated normal's mean, by quadrature."""
    posterior = believe([0.0], [2.0], below=[True], sd=0.5)
    sd = at(believe([], []), 0.0)[1]
    grid = np.linspace(-30, 30, 200_001)
    weight = np.exp(-0.5 * (grid / sd) ** 2) / (1 + np.exp(-1.702 * (grid - 2) / 0.5))
    assert at(posterior, 0.0)[0] == pytest.approx(float((grid * weight).sum() / weight.sum()), rel=0.02)


def test_another_sources_level_is_doubted_in_proportion_to_its_shift() -> None:
    other = believe([-0.5, 0.0, 0.5] * 8, [1.0] * 24, source=[1] * 24)
    own = believe([-0.5, 0.0, 0.5] * 8, [1.0] * 24)
    assert at(other, 0.0)[1] > 0.15
    assert at(own, 0.0)[1] < 0.03
    corrected = believe([-0.5, 0.0, 0.5] * 8 + [0.0] * 4, [1.0] * 24 + [1.3] * 4, source=[1] * 24 + [0] * 4)
    assert at(corrected, 0.0)[0] > 1.2


def test_evidence_with_bounds_agrees_with_numerical_integration() -> None:
    """p(y > bound) for one reading under the prior predictive, by quadrature."""
    posterior = believe([0.0], [2.0], below=[True], sd=0.5)
    sd = at(believe([], []), 0.0)[1]
    grid = np.linspace(-40, 40, 400_001)
    density = np.exp(-0.5 * (grid / sd) ** 2) / math.sqrt(2 * math.pi) / sd
    chance = float((density * ndtr((grid - 2.0) / 0.5)).sum() * (grid[1] - grid[0]))
    assert log_evidence(posterior.data, posterior.prior) == pytest.approx(math.log(chance), abs=0.02)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_bound_beside_an_exact_reading_has_the_evidence_of_both(order: list[int]) -> None:
    """p(y) p(bound reached | y), the second by the belief that the exact reading leaves."""
    x, y, below = np.array([-0.5, 0.5]), np.array([1.0, 1.5]), np.array([False, True])
    alone = believe([-0.5], [1.0], sd=0.3)
    mean, sd = at(alone, 0.5)
    exact = math.log(ndtr((mean - 1.5) / math.hypot(sd, 0.3)))
    both = believe(x[order].tolist(), y[order].tolist(), below=below[order].tolist(), sd=0.3)
    assert log_evidence(both.data, both.prior) == pytest.approx(log_evidence(alone.data, alone.prior) + exact, abs=0.02)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-5, 5), st.booleans()), max_size=25), st.floats(-1.5, 1.5))
def test_any_readings_give_a_finite_belief(rows, x) -> None:
    posterior = believe([r[0] for r in rows], [r[1] for r in rows], below=[r[2] for r in rows])
    mean, sd = at(posterior, x)
    assert math.isfinite(mean)
    assert 0 < sd < 10
    assert math.isfinite(log_evidence(posterior.data, posterior.prior))


@given(st.floats(-1, 1))
def test_units_and_values_are_inverse(u: float) -> None:
    for name in ("LR", "MAX_STEPS"):
        value = from_unit(SPACE[name], u)
        assert SPACE[name].low <= value <= SPACE[name].high
        assert unit(SPACE[name], value) == pytest.approx(u, abs=0.001)


def test_roles_follow_from_names_and_layouts() -> None:
    assert COORDINATES.layout == "layout"
    assert COORDINATES.speed_names == ("layout",)
    assert COORDINATES.convergence_names == ("LR", "MAX_STEPS", "WARMUP_STEPS")
    assert COORDINATES.batch(VALUES) == 8
    assert COORDINATES.total_samples(VALUES) == 6400
    switches = {
        "FP8_ACT": CategoricalDistribution([0, 1]),
        "LORA_RANK": IntDistribution(4, 64),
        "GBS": IntDistribution(8, 64),
    }
    other = Coordinates(distributions=switches, fixed={"MAX_STEPS": 100})
    assert other.speed_names == ("FP8_ACT", "GBS")
    assert other.convergence_names == ("GBS", "LORA_RANK")
    assert other.total_samples({"GBS": 8, "LORA_RANK": 8, "FP8_ACT": 0}) == 800


def test_warm_up_counts_by_its_samples_whatever_the_schedule_that_follows() -> None:
    def warmup(**values: float) -> float:
        return COORDINATES.convergence_features({**VALUES, **values})[2]

    assert warmup(WARMUP_STEPS=0) == -1
    assert warmup(WARMUP_STEPS=40) == pytest.approx(2 * 40 / 500 / 0.4 - 1), "500 steps are the middle of 100 to 2,500"
    assert warmup(WARMUP_STEPS=40, MAX_STEPS=400) == warmup(WARMUP_STEPS=40, MAX_STEPS=2400)
    assert warmup(WARMUP_STEPS=190, MAX_STEPS=100) == warmup(WARMUP_STEPS=100, MAX_STEPS=100), "all of its schedule"
    assert warmup(WARMUP_STEPS=201, MAX_STEPS=2400) == 1
    other = Coordinates(distributions={n: d for n, d in SPACE.items() if n != "layout"})
    one, four = (other.convergence_features({**VALUES, "GBS": g, "WARMUP_STEPS": 20})[2] for g in (1, 4))
    assert four + 1 == pytest.approx(4 * (one + 1)), "in samples: four times the batch, four times the warm-up"


def test_before_any_run_a_third_of_warm_up_is_believed_lost_give_or_take_as_much() -> None:
    level = math.log(3000.0)
    prior = convergence_prior(COORDINATES, level)
    at = {
        steps: np.array(COORDINATES.convergence_features({**VALUES, "MAX_STEPS": 500, "WARMUP_STEPS": steps}))[None]
        for steps in (0, 60)
    }
    slope = {steps: (trend(x, (0,)) @ prior.mean)[0] for steps, x in at.items()}
    assert slope[60] - slope[0] == pytest.approx(0.35 * 60 * 8 / 3000)
    assert prior.mean[3] == prior.sd[3] > 0
    short = convergence_prior(COORDINATES, math.log(30.0))
    assert short.mean[3] == 1.0, "not without bounds where schedules are far longer than runs"
    without = Coordinates(distributions={n: d for n, d in SPACE.items() if n != "MAX_STEPS"})
    assert without.warmup_feature is None
    assert COORDINATES.warmup_feature == 2


@pytest.mark.parametrize("name", ["MAX_STEPS", "WARMUP_STEPS"])
def test_a_choice_of_one_has_no_feature_and_shifts_no_other(name: str) -> None:
    one = {"GBS": CategoricalDistribution((8, 16)), name: CategoricalDistribution((99,)), "WD": FloatDistribution(0, 1)}
    c = Coordinates(distributions=one, fixed={"MAX_STEPS": 99})
    low, high = (c.convergence_features({"GBS": 8, name: 99, "WD": wd}) for wd in (0.0, 1.0))
    assert [at for at, (a, b) in enumerate(zip(low, high, strict=True)) if a != b] == list(c.other_features)


def test_memory_tells_certain_death_from_bad_luck_and_learns_across_layouts() -> None:
    labels = ("tp", "cp", "mbs")
    rows = np.array([[0.0, 0, 0]] * 2 + [[2.0, 0, 0]] * 10)
    model = memory.fit(rows, [True] * 2 + [True] + [False] * 9, labels)
    rates, _ = model.chance(np.array([[0.0, 0, 0], [2.0, 0, 0], [0.0, 0, 1], [3.0, 1, 0]]))
    certain, flaky, untried_large, untried_small = rates
    assert certain > 0.9
    assert 0.05 < flaky < 0.2
    assert untried_large > 0.7
    assert untried_small < 0.15


def test_a_layout_that_died_each_time_is_believed_to_die_although_one_that_should_need_more_lived() -> None:
    """What is believed of degrees in general may be wrong of a machine; its own trials are not."""
    labels = ("tp", "cp", "mbs")
    died, more = np.array([[2.0, 1, 1]]), np.array([[1.0, 1, 1]])
    model = memory.fit(np.vstack([more, *[died] * 5]), [False] + [True] * 5, labels)
    assert model.chance(died)[0][0] > 0.9
    assert model.draws(died, np.random.default_rng(0), 200).mean() > 0.9
    assert model.chance(more)[0][0] < 0.3


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_hundreds_of_runs_of_layouts_that_live_or_die_leave_a_belief_and_no_certainty(seed: int) -> None:
    """An undamped Newton step ends where every chance is 0 or 1, of layouts that nobody tried too."""
    rng = np.random.default_rng(seed)
    doublings = rng.integers(0, 4, (12, 2)).astype(float)
    runs = doublings[np.minimum(rng.geometric(0.3, 400) - 1, 11)]
    died = runs.sum(axis=1) + rng.normal(0, 0.05, 12)[0] < 2.0
    found = memory.fit(runs, list(died), ("tp", "cp"))
    rows, mean, sd = np.c_[np.ones(400), runs], np.array([-1.0, -1.5, -1.0]), np.array([1.5, 1.0, 1.0])
    p = 1 / (1 + np.exp(-rows @ found.coefficients))
    slope = rows.T @ (died - p) - (found.coefficients - mean) / sd**2
    assert np.abs(slope).max() < 0.01  # the most probable coefficients
    assert np.abs(found.coefficients).max() < 15


def test_seconds_are_those_of_the_curve_statistics() -> None:
    schedule = closed_schedule(8)
    found = Goal().log_seconds(np.log([3000.0]), np.array([2.2]), np.array([35.0]), schedule)[0]
    assert math.exp(found) == pytest.approx(predicted_seconds(3000.0, Timing(2.2, 35.0), schedule), rel=1e-3)


@given(st.floats(1200, 12_000), st.floats(0.005, 0.12), st.sampled_from([64.0, 384.0, 1536.0]))
@settings(max_examples=40, deadline=None)
def test_the_expected_stop_is_the_mean_of_the_evals_at_which_scattered_runs_pass(crossing, sd, interval) -> None:
    schedule = Schedule(1536, interval)
    found = Goal(run_sd=sd).expected_stop(np.log(np.array([crossing])), schedule)[0]
    crossings = crossing * (1 + sd * np.linspace(-4, 4, 8001))
    weights = np.exp(-0.5 * np.linspace(-4, 4, 8001) ** 2)
    evals = np.maximum(0.0, np.ceil((crossings - schedule.first_samples) / interval))
    mean = float(weights @ (schedule.first_samples + interval * evals) / weights.sum())
    assert found == pytest.approx(mean, abs=0.02 * interval)


def test_where_seeds_scatter_little_a_crossing_just_after_an_eval_costs_the_next_interval() -> None:
    """What a miss by a hair costs: the rates on both sides of an eval differ by more than their crossings do."""
    quiet, schedule = Goal(run_sd=0.01), closed_schedule(8)
    before, after = quiet.expected_stop(np.log([3030.0, 3110.0]), schedule)
    assert before == pytest.approx(3072, abs=40)
    assert after == pytest.approx(3456, abs=60)
    assert abs(np.diff(Goal().expected_stop(np.log([3030.0, 3110.0]), schedule))[0] - 80) < 2


@pytest.mark.parametrize(("total", "last"), [(3900, 3840), (3840, 3840), (3839, 3456)])
def test_the_last_chance_to_pass_is_the_last_eval_that_fits_into_the_training(total: float, last: float) -> None:
    goal, schedule, mean = Goal(), closed_schedule(8), np.log([3600.0])
    ends = [goal.finish_probability(mean, np.zeros(1), np.array([float(t)]), schedule)[0] for t in (total, last)]
    assert ends[0] == ends[1]


@given(st.floats(7, 9), st.floats(0.001, 0.5))
@settings(max_examples=25, deadline=None)
def test_samples_below_the_reference_count_as_the_reference(mean: float, sd: float) -> None:
    goal = Goal(reference_samples=lambda _batch: 3178.0 + 192)
    found = goal.scored_ln_samples(np.array([mean]), np.array([sd]), 8, Schedule(1536, 384))[0]
    z = np.linspace(-8, 8, 40_001)
    expected = np.maximum(mean + sd * z, math.log(3178)) @ np.exp(-0.5 * z * z) / np.exp(-0.5 * z * z).sum()
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_schedule_that_ends_too_early_is_a_risk_and_one_without_evals_hopeless() -> None:
    goal, schedule = Goal(), closed_schedule(8)
    mean, sd = np.log([3000.0] * 4), np.full(4, 0.02)
    p = goal.finish_probability(mean, sd, np.array([1000.0, 3000.0, 3400.0, math.inf]), schedule)
    assert p[0] == 0
    assert 0 < p[1] < 0.5 < p[2] < 1
    assert p[3] == pytest.approx(1)


def curve_to(samples: float, last: float, noise: float = 0.0) -> tuple[Eval, ...]:
    """Evals of a log-linear curve that crosses 0.925 at ``samples``."""
    grid = np.arange(1536, last + 1, 384.0)
    return tuple(Eval(s, 0.925 - 0.0224 * math.log(s / samples) + noise, math.nan) for s in grid)


def test_runs_that_reach_the_target_are_read_at_their_crossing() -> None:
    seen = [
        Observation(number=k, values=VALUES, evals=curve_to(2950, 3072), reached=3072, bound=3072) for k in range(4)
    ]
    found = readings(seen, 0.925, [6400] * 4)
    assert all(not r.below for r in found.values())
    assert math.exp(found[0].ln_samples) == pytest.approx(2950, rel=0.02)


def test_runs_that_ended_short_are_forecast_near_and_bounded_far() -> None:
    good = [Observation(number=k, values=VALUES, evals=curve_to(2950, 3072), reached=3072) for k in range(4)]
    near = Observation(number=4, values=VALUES, evals=curve_to(3400, 2700))
    far = Observation(number=5, values=VALUES, evals=curve_to(60_000, 2700))
    unseen = Observation(number=6, values=VALUES, bound=2000)
    found = readings([*good, near, far, unseen], 0.925, [6400] * 7)
    assert not found[4].below
    assert math.exp(found[4].ln_samples) == pytest.approx(3400, rel=0.05)
    assert found[5].below
    assert found[5].ln_samples > math.log(6000)
    assert found[6].below
    assert found[6].ln_samples == pytest.approx(math.log(2000))


def test_diverged_probe_open_and_memory_deaths_say_nothing_of_samples_but_that_divergence_is_bad() -> None:
    seen = [
        Observation(number=0, values=VALUES, reached=3000),
        Observation(number=1, values=VALUES, diverged=True, bound=100),
        Observation(number=2, values=VALUES, probe=True, bound=768),
        Observation(number=3, values=VALUES, infeasible=True),
        Observation(number=4, values=VALUES, open=True, bound=2000),
    ]
    found = readings(seen, 0.925, [6400] * 5)
    assert set(found) == {0, 1}
    assert found[1].below
    assert found[1].ln_samples >= math.log(6400)


def test_an_optuna_trial_is_read_by_its_attributes() -> None:
    trial = optuna.trial.create_trial(
        params=VALUES, distributions=SPACE, value=1500.0, state=TrialState.COMPLETE,
        user_attrs={"samples_per_second": 2.1, "seconds_per_eval": 36.0, "stop_samples": 3072, "verdict": "reached"},
        intermediate_values={1536: 0.94, 3072: 0.924},
    )  # fmt: skip
    found = of_trial(trial, frozenset(SPACE), 0.925)
    assert found is not None
    assert (found.reached, found.samples_per_second, found.open, found.ran) == (3072, 2.1, False, True)
    assert of_trial(trial, frozenset({*SPACE, "other"}), 0.925) is None
    failed = optuna.trial.create_trial(params=VALUES, distributions=SPACE, state=TrialState.FAIL)
    assert of_trial(failed, frozenset(SPACE), 0.925) is None


def test_a_layout_measured_once_serves_every_learning_rate() -> None:
    seen = [Observation(number=0, values=VALUES, samples_per_second=2.2, seconds_per_eval=35.0, reached=3072)]
    model = learn(COORDINATES, Goal(), seen)
    speed, covariance, evals, _ = model.predict_speed([{**VALUES, "LR": 1e-3}, {**VALUES, "layout": LAYOUTS[1]}])
    assert math.exp(speed[0]) == pytest.approx(2.2, rel=0.01)
    assert math.exp(evals[0]) == pytest.approx(35.0, rel=0.02)
    assert covariance[0, 0] < 1e-4 < covariance[1, 1]
    assert speed[1] > speed[0]


def test_a_learning_rate_tried_on_one_layout_informs_the_others() -> None:
    seen = [Observation(number=0, values=VALUES, samples_per_second=2.2, reached=3072)]
    model = learn(COORDINATES, Goal(), seen)
    mean, covariance = model.predict_ln_samples([{**VALUES, "layout": LAYOUTS[0]}, {**VALUES, "LR": 2e-5}])
    assert mean[0] == pytest.approx(math.log(3072), abs=0.05)
    assert covariance[0, 0] < 0.01 < covariance[1, 1]
    assert mean[1] > mean[0] + 0.5


def test_how_smooth_the_valley_of_rates_is_does_not_depend_on_the_range_searched() -> None:
    def alike(low: float, high: float) -> float:
        c = Coordinates(distributions={**SPACE, "LR": FloatDistribution(low, high, log=True)}, gpus=8)
        prior = convergence_prior(c, 8.0)
        x = np.array([c.convergence_features({**VALUES, "LR": rate}) for rate in (3e-4, 6e-4)]) * prior.weights
        return float(matern(x[:1], x[1:], prior.length)[0, 0])

    assert alike(1e-5, 1e-2) == pytest.approx(alike(1e-4, 1e-3))
    # An octave of the rate counts as an octave of the schedule.
    steps = np.array([[0.0], [math.log(2) / math.log(4)]])
    prior = convergence_prior(COORDINATES, 8.0)
    assert alike(1e-5, 1e-2) == pytest.approx(float(matern(steps[:1], steps[1:], prior.length)[0, 0]))


def best_rate(full: float | None, runs: Sequence[tuple[float, float]] = ()) -> float:
    """The learning rate that is believed best after ``runs`` (rate, samples), with a stated rate of full tuning."""
    space = {"LR": FloatDistribution(1e-5, 1e-2, log=True), "LORA_RANK": IntDistribution(1, 256, log=True)}
    c = Coordinates(distributions=space, fixed={"GBS": 8}, full_fine_tuning_lr=full)
    seen = [Observation(number=n, values={"LR": lr, "LORA_RANK": 16}, reached=s) for n, (lr, s) in enumerate(runs)]
    prior, rates = convergence_prior(c, 8.0), np.geomspace(1e-5, 1e-2, 301)
    points = [{"LR": float(rate), "LORA_RANK": 16} for rate in rates]
    if not seen:
        believed = trend(np.array([c.convergence_features(p) for p in points]), (c.rate_feature, *c.other_features))
        return float(rates[np.argmin(believed @ prior.mean)])
    return float(rates[np.argmin(learn(c, Goal(), seen).predict_ln_samples(points)[0])])


@pytest.mark.parametrize(("full", "expected"), [(2e-5, 2e-4), (1e-4, 1e-3), (5e-3, 1e-2), (None, 3.2e-4)])
def test_loras_best_rate_is_expected_at_ten_times_that_of_full_fine_tuning(full: float | None, expected: float) -> None:
    """Within the range that is searched; in its middle where nothing is said."""
    assert best_rate(full) == pytest.approx(expected, rel=0.05)


def test_a_few_runs_overrule_the_stated_rate() -> None:
    """Runs that need fewer samples at ever higher rates than ten times the stated one."""
    runs = [(1e-4, 9000.0), (4e-4, 6000.0), (1.6e-3, 4000.0), (3.2e-3, 3000.0), (6.4e-3, 3200.0)]
    assert best_rate(1e-5) == pytest.approx(1e-4, rel=0.05)
    assert 1.5e-3 < best_rate(1e-5, runs) < 8e-3


def test_what_runs_already_is_counted_as_known_but_changes_no_mean() -> None:
    done = Observation(number=0, values=VALUES, samples_per_second=2.2, seconds_per_eval=30.0, reached=3072)
    running = Observation(number=1, values={**VALUES, "LR": 1e-3}, open=True)
    free, busy = learn(COORDINATES, Goal(), [done]), learn(COORDINATES, Goal(), [done, running])
    before, after = free.predict_ln_samples([running.values]), busy.predict_ln_samples([running.values])
    assert after[0][0] == pytest.approx(before[0][0], abs=1e-3)
    assert after[1][0, 0] < 0.2 * before[1][0, 0]


def test_of_runs_that_began_together_the_lucky_ones_end_first_and_are_not_all_that_is_known() -> None:
    """Ten seeds of one setting: three have arrived by 2,700 samples, seven have had as many and have not."""
    lucky = [Observation(number=k, values=VALUES, evals=curve_to(2600, 2688), reached=2688) for k in range(3)]
    behind = curve_to(2600, 2688, noise=0.01)
    others = [Observation(number=k, values=VALUES, evals=behind, open=True) for k in range(3, 10)]
    alone, known = learn(COORDINATES, Goal(), lucky), without_pending(learn(COORDINATES, Goal(), [*lucky, *others]))
    before, after = alone.predict_ln_samples([VALUES])[0][0], known.predict_ln_samples([VALUES])[0][0]
    assert after > before + 0.03
    assert known.observations == tuple(lucky), "nobody is told to take what only runs"
    fresh = Observation(number=10, values=VALUES, open=True)
    assert without_pending(learn(COORDINATES, Goal(), [*lucky, fresh])).predict_ln_samples([VALUES])[0][0] == before
    probe = Observation(number=11, values=VALUES, evals=behind, open=True, probe=True)
    arrived = Observation(number=12, values=VALUES, evals=curve_to(2600, 2688), open=True, reached=2688)
    assert not readings([fresh, probe, arrived], 0.925, [6400] * 3)


def test_a_run_stopped_just_before_the_target_is_a_reading_and_no_proof_that_it_would_never_arrive() -> None:
    evals = tuple(Eval(s, x, math.nan) for s, x in ((3096.0, 0.9256), (3483.0, 0.9254), (3870.0, 0.9262)))
    stopped = Observation(number=0, values=VALUES, evals=evals, bound=3870.0, attributes={"verdict": "pruned"})
    found = readings([stopped], 0.925, [10_062.0], [public_family(8)])[0]
    assert not found.below
    assert 3000 < math.exp(found.ln_samples) < 5500  # not the 10,062 of its whole schedule


def test_which_readings_a_model_keeps_does_not_depend_on_what_they_say() -> None:
    """The lowest of noisy readings agree with one another: kept alone, they would make the noise look small."""
    rng = np.random.default_rng(3)
    x = rng.uniform(-1, 1, (400, 1))
    data = Data.local(x, trend(x, ()), 8 + 0.2 * x[:, 0] + rng.normal(0, 0.05, 400), 0.05)
    data = replace(data, source=np.r_[np.zeros(300, np.int64), np.arange(1, 101)])
    kept = thinned(data, 120)
    assert len(kept.y) == 120
    assert np.std(kept.y - 8 - 0.2 * kept.x[:, 0]) == pytest.approx(0.05, rel=0.2)
    assert (kept.source != 0).sum() == 60  # others stay represented, or nobody could say that they contradict
    other = thinned(replace(data, y=rng.permutation(data.y)), 120)
    assert np.array_equal(other.x, kept.x)


def test_a_model_of_many_runs_knows_their_noise() -> None:
    rng = np.random.default_rng(5)
    seen = [
        Observation(
            number=k, values={**VALUES, "LR": float(np.exp(rng.uniform(-8.2, -7.2))), "MAX_STEPS": 700 + k},
            reached=3000 * math.exp(rng.normal(0, 0.067)), samples_per_second=2.0,
        )
        for k in range(360)
    ]  # fmt: skip
    # A stop without a curve is read with an error of 6.7%, so the readings are exactly as noisy as claimed.
    assert learn(COORDINATES, Goal(), seen).goal.noise == pytest.approx(1.0, abs=0.21)


def seeds_of(settings: list[float], each: int, spread: float) -> Data:
    """Readings of sd 0.05 that say ``settings`` (one feature, jumping from one to the next), ``each`` seeds of each."""
    x = np.repeat(np.linspace(-1, 1, len(settings)), each)[:, None]
    away = np.random.default_rng(4).normal(0, spread, len(x))
    return Data.local(x, trend(x, ()), np.repeat(settings, each) + away, 0.05)


def test_noise_is_learned_from_repeated_seeds_and_not_from_what_differs_between_settings() -> None:
    rough = [6.0, 6.5, 6.1, 6.9, 6.3, 6.8, 6.0, 6.6]
    assert repeated_noise(seeds_of(rough, each=1, spread=0.0)) == 1.0
    assert repeated_noise(seeds_of(rough, each=20, spread=0.05)) == pytest.approx(1.0, abs=0.1)
    assert repeated_noise(seeds_of(rough, each=20, spread=0.11)) == pytest.approx(2.2, abs=0.2)
    assert 1.0 < repeated_noise(seeds_of(rough[:1], each=5, spread=0.11)) < 2.0  # five seeds say little


def test_what_is_read_beyond_the_ends_of_curves_says_nothing_about_the_noise_of_seeds() -> None:
    """Runs stopped halfway say little of their crossing each; that they agree does not make seeds alike."""
    rng = np.random.default_rng(9)
    x = rng.uniform(-1, 1, (40, 1))
    whole = Data.local(x, trend(x, ()), 8 + rng.normal(0, 0.05, 40), 0.05)
    stopped = replace(whole, extended=np.full(40, 0.2))
    prior = Prior(mean=np.array([8.0, 0]), sd=np.ones(2), amplitude=0.1, length=0.6, weights=np.ones(1))
    repeats = replace(stopped, x=np.zeros((40, 1)))
    assert repeated_noise(repeats) == 1.0
    # Each counts for less than a whole run.
    row = np.zeros((1, 1)), np.array([[1.0, 0.0]])
    assert condition(stopped, prior).predict(*row)[1][0, 0] > condition(whole, prior).predict(*row)[1][0, 0]


def test_where_seeds_scatter_more_than_usual_a_schedule_that_ends_soon_is_a_greater_risk() -> None:
    def risk(spread: float) -> float:
        rng = np.random.default_rng(6)
        seen = [
            Observation(number=k, values=VALUES, reached=3000 * math.exp(rng.normal(0, spread)), samples_per_second=2.0)
            for k in range(40)
        ]
        model = learn(COORDINATES, Goal(), [*seen, Observation(number=40, values=VALUES, open=True)])
        goal = without_pending(model).goal
        assert goal == model.goal  # taking open runs out again does not count the scatter twice
        return float(1 - goal.finish_probability(np.array([0.0]), np.zeros(1), np.array([1.2]), Schedule(0.1, 0.1))[0])

    assert risk(0.06) == pytest.approx(risk(0.03), abs=0.01)  # as usual: never less than the public runs show
    assert risk(0.2) > 4 * risk(0.06)
