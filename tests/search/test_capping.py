"""A run that can no longer beat the incumbent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune import curves
from lora_tune.logs.run import Eval
from lora_tune.mlperf import convergence
from lora_tune.search.capping import Incumbent, cap
from lora_tune.search.noise import KNOWN_WIDTH, UNKNOWN_WIDTH, Noise

TARGET = 0.925
TIMING = curves.Timing(2.0, 40.0)
USUAL = Noise(0.067)


def incumbent(*seconds: float, beside: Iterable[Sequence[float]] = (), width: float = UNKNOWN_WIDTH) -> Incumbent:
    """One of these runs, in a sweep that repeated other configurations too."""
    logarithms = [[math.log(s) for s in runs if 0 < s < math.inf] for runs in (seconds, *beside)]
    return Incumbent("trial 7", seconds, Noise(0.067, width).after(logarithms))


INCUMBENT = incumbent(1700.0, 1720.0, 1690.0, 1710.0)
FAMILY = convergence.published(8).family


def run(count: int, offset: float = 0.0) -> list[Eval]:
    samples = 1536 + 384.0 * np.arange(count)
    losses = FAMILY.loss_at(samples) + offset
    return [Eval(s, v, s / 2 + 40 * (i + 1)) for i, (s, v) in enumerate(zip(samples, losses, strict=True))]


def ask(evals: list[Eval], now: float, risk: float = 0.05) -> curves.StallVerdict:
    return cap(evals, TIMING, INCUMBENT, now, risk, target=TARGET, family=FAMILY, quantum=384)


def test_a_run_that_keeps_up_goes_on() -> None:
    assert not ask(run(3), 1250).stop


def test_a_run_far_behind_is_capped_by_forecast_long_before_the_clock() -> None:
    found = ask(run(3, 0.02), 1250)
    assert (found.stop, found.reason) == (True, "capped")
    assert "the chance of reaching 0.925 within" in found.sentence
    assert "trial 7" in found.sentence


def test_the_clock_caps_whatever_the_curve_says() -> None:
    found = ask([], 10_000)
    assert found.reason == "capped"
    assert "10000 s have passed" in found.sentence


def test_a_run_that_reached_the_target_is_never_capped() -> None:
    assert not ask([*run(4), Eval(3072, 0.9249, 1700)], 10_000).stop


def test_without_an_incumbent_there_is_no_cap() -> None:
    none = Incumbent("nobody", (), USUAL)
    assert none.upper_quantile(0.99) == math.inf
    assert not cap(run(3, 0.05), TIMING, none, 1e9, 0.05, target=TARGET, family=FAMILY).stop


def test_a_smaller_risk_leaves_more_time() -> None:
    assert INCUMBENT.upper_quantile(0.995) > INCUMBENT.upper_quantile(0.9) > 1720


def test_one_run_bounds_the_next_less_tightly_than_four() -> None:
    assert incumbent(1705.0).upper_quantile(0.95) > INCUMBENT.upper_quantile(0.95)


def noisy(sd: float, configurations: int, seed: int) -> list[list[float]]:
    """Seconds of three runs of each of so many settings."""
    random = np.random.default_rng(seed)
    return [list(1700 * np.exp(random.normal(0, sd, 3))) for _ in range(configurations)]


def test_the_spread_that_a_study_shows_counts_and_the_priors_no_more() -> None:
    def limit(sd: float) -> float:
        return incumbent(1700.0, beside=noisy(sd, 4, 2)).upper_quantile(0.975)

    assert limit(0.01) < 1.1 * 1700 < incumbent(1700.0).upper_quantile(0.975)
    assert limit(0.2) > 1.5 * 1700


@pytest.mark.parametrize("sd", [0.02, 0.2])
def test_a_run_of_the_incumbents_setting_outlasts_its_limit_no_more_often_than_the_risk(sd: float) -> None:
    over = []
    for seed in range(400):
        (first, second, *_), *others = noisy(sd, 6, seed)
        over.append(second > incumbent(first, beside=others).upper_quantile(0.95))
    assert 0.02 <= np.mean(over) <= 0.08


def test_a_prior_of_another_workload_is_believed_less() -> None:
    there, here = (incumbent(1700.0, width=width).upper_quantile(0.975) for width in (KNOWN_WIDTH, UNKNOWN_WIDTH))
    assert here > 1.05 * there


def test_on_a_machine_whose_speed_varies_the_incumbent_is_surer_of_less() -> None:
    steady, unsteady = Incumbent("a", (1700.0,), USUAL), Incumbent("a", (1700.0,), USUAL, pace_spread=0.1)
    assert unsteady.upper_quantile(0.99) > 1.2 * steady.upper_quantile(0.99)


def test_an_unknown_speed_is_no_reason_to_stop() -> None:
    unknown = curves.Timing(math.nan, math.nan)
    assert not cap(run(3, 0.02), unknown, INCUMBENT, 1250, 0.05, target=TARGET, family=FAMILY).stop


numbers = st.one_of(st.floats(), st.sampled_from([384.0, 1536.0, 0.925, math.nan, math.inf]))


@settings(deadline=None)
@given(
    st.lists(st.builds(Eval, samples=numbers, loss=numbers, seconds=numbers), max_size=12),
    st.lists(numbers, max_size=4),
    numbers,
)
def test_no_input_breaks_a_cap(evals: list[Eval], seconds: list[float], now: float) -> None:
    found = cap(evals, TIMING, incumbent(*seconds), now, 0.05, target=TARGET)
    assert found.stop == bool(found.sentence)


@pytest.mark.parametrize("risk", [0.01, 0.2])
def test_the_sentence_states_the_risk_it_was_decided_at(risk: float) -> None:
    assert f"{100 * (1 - risk / 2):.3g}%" in ask([], 10_000, risk).sentence
