"""What is handed over in place of the configuration of today: each step clear by itself, at every look."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from lora_tune.search.advantage import Advantage, SeedDoubt
from lora_tune.search.grey_box.from_today import FromTodaySampler
from lora_tune.search.incumbent import IncumbentChoice, choose

SPACE: dict[str, BaseDistribution] = {"LR": FloatDistribution(1e-5, 1e-1, log=True)}
START = {"LR": 1e-3}
NEIGHBOUR = {"LR": 1.05e-3}

RUN_SD, DIFFER_SD = 0.045, 0.03
"""How far runs of one configuration scatter, and how far configurations differ."""


def believed(runs: list[float]) -> tuple[float, float]:
    """Mean and variance of a configuration after runs of ln(seconds)."""
    precision = 1 / DIFFER_SD**2 + len(runs) / RUN_SD**2
    return sum(runs) / RUN_SD**2 / precision, 1 / precision


def beside(best: list[float], start: list[float], looks: int) -> Advantage:
    (first, own), (second, other) = believed(best), believed(start)
    return Advantage(
        ln_saved=second - first, sd=math.sqrt(own + other), seeds=SeedDoubt(own, other, 0.0, RUN_SD), looks=looks
    )  # fmt: skip


def share_that_leaves(better_by: float, *, counted: bool, sweeps: int = 200) -> float:
    """Sweeps of 40 runs in which another configuration is ever handed over: one is better by so much, eleven equal.

    Every third run is one of the two that are compared, as the decision asks.
    """
    left = 0
    for sweep in range(sweeps):
        rng = np.random.default_rng(sweep)
        runs: list[list[float]] = [[rng.normal(0, RUN_SD)]] + [[] for _ in range(12)]
        for look in range(2, 41):
            at, known = int(rng.integers(1, 13)), [r for r in runs[1:] if r]
            if look % 3 == 0:
                best = min(known, key=lambda r: believed(r)[0])
                at = 0 if beside(best, runs[0], look).decision().of_other else runs.index(best)
            runs[at].append(rng.normal(-better_by if at == 1 else 0, RUN_SD))
            best = min((r for r in runs[1:] if r), key=lambda r: believed(r)[0])
            if beside(best, runs[0], look if counted else 1).is_clear:
                left += 1
                break
    return left / sweeps


def test_of_many_that_are_no_better_the_luckiest_of_forty_looks_seldom_replaces_what_the_user_has() -> None:
    assert share_that_leaves(0.0, counted=False) > 0.5
    assert share_that_leaves(0.0, counted=True) < 0.15


def test_what_is_much_better_replaces_it_nevertheless() -> None:
    assert share_that_leaves(0.15, counted=True) > 0.85


def table(**known: Advantage) -> Any:
    return lambda values, other: known[f"{values['name']}_{other['name']}"]


def named(name: str) -> Mapping[str, Any]:
    return {"name": name}


def test_a_faster_layout_speaks_for_no_learning_rate() -> None:
    """The best is clearly better than the start, by its layout alone."""
    faster, unclear = Advantage(ln_saved=0.05, sd=0.005), Advantage(ln_saved=0.01, sd=0.04)
    both = Advantage(ln_saved=0.06, sd=0.04)
    assert both.is_clear
    found = choose(
        named("start"), named("moved"), named("best"),
        table(moved_start=faster, best_start=both, best_moved=unclear),
    )  # fmt: skip
    assert found.held == named("moved")
    assert not found.replaced


def test_where_nothing_of_the_layout_is_clear_the_best_is_held_against_the_start() -> None:
    found = choose(
        named("start"), named("moved"), named("best"),
        table(moved_start=Advantage(ln_saved=-0.01, sd=0.005), best_start=Advantage(ln_saved=0.2, sd=0.04)),
    )  # fmt: skip
    assert found.held == named("start")
    assert found.replaced


class TestDecidingRuns:
    def test_the_one_that_ran_less_is_run_again(self) -> None:
        assert beside([-0.05] * 4, [0.0], 5).decision().of_other
        assert not beside([-0.05], [0.0] * 4, 5).decision().of_other

    def test_they_are_worth_nothing_where_it_is_clear_and_little_where_it_is_hopeless(self) -> None:
        assert beside([-0.3] * 4, [0.0] * 4, 8).decision().worth == 0
        hopeless = beside([-0.001] * 30, [0.0] * 30, 60).decision()
        promising = beside([-0.1], [0.0], 2).decision()
        assert hopeless.worth < 1e-3 < 3e-3 < promising.worth

    @pytest.mark.parametrize("open_runs", [0, 1, 3, 8])
    def test_as_many_are_open_at_a_time_as_may_decide_together(self, open_runs: int) -> None:
        over = beside([-0.05] * 4, [0.0], 5)
        found = IncumbentChoice(
            start=START, moved=START, held=START, best=NEIGHBOUR, over=over, compared=lambda *_: over
        )
        wanted = found.wanted([self.running(START)] * open_runs)
        assert (wanted is not None) == (open_runs < over.decision().runs)
        if wanted is not None:
            assert wanted[0] == START

    def running(self, values: dict[str, Any]) -> FrozenTrial:
        return optuna.trial.create_trial(params=values, distributions=SPACE, state=TrialState.RUNNING)

    def test_a_search_runs_the_configuration_of_today_again_where_that_decides_most(self) -> None:
        """Where little else is to be gained, and not while that one is so much better that no run would tell."""
        narrow: dict[str, BaseDistribution] = {"LR": FloatDistribution(9.9e-4, 1.11e-3, log=True)}
        study, made = studied(narrow, START, *(({"LR": 1.1e-3}, took) for took in (450, 505, 470, 490)))
        assert made.recommend(study)[0] == START
        asked = [study.ask(narrow) for _ in range(4)]
        again = [t for t in asked if "another seed of the configuration of today" in t.user_attrs["why"]]
        assert again
        assert all(t.params == START for t in again)


def studied(
    space: dict[str, BaseDistribution], start: dict[str, Any] | None, *runs: tuple[dict[str, Any], float]
) -> tuple[optuna.Study, FromTodaySampler]:
    """After a run of today's configuration that took 500 s (None: it has none yet) and others; infinite: no target."""
    made = FromTodaySampler(space, start=START, defaults=START, seed=1)
    study = optuna.create_study(sampler=made)
    for values, took in ([(start, 500.0)] if start else []) + list(runs):
        facts: dict[str, Any] = {"samples_per_second": 10.0, "stop_samples": 10.0 * took, "verdict": "reached"}
        state = TrialState.COMPLETE
        if math.isinf(took):
            state, facts = TrialState.PRUNED, {"samples_per_second": 10.0, "verdict": "censored"}
        value = took if state is TrialState.COMPLETE else None
        study.add_trial(
            optuna.trial.create_trial(params=values, distributions=space, value=value, user_attrs=facts, state=state)
        )
    return study, made


def test_the_start_stays_while_its_first_run_is_open() -> None:
    study, made = studied(SPACE, None, (NEIGHBOUR, 485.0))
    assert made.recommend(study)[0] == NEIGHBOUR
    study.add_trial(optuna.trial.create_trial(params=START, distributions=SPACE, state=TrialState.RUNNING))
    assert made.recommend(study)[0] == START


def test_the_start_stays_until_another_configuration_is_clearly_better() -> None:
    hardly, made = studied(SPACE, START, (NEIGHBOUR, 485.0))
    values, _, sentence = made.recommend(hardly)
    assert values == START
    assert "not yet clear" in sentence
    clearly, made = studied(SPACE, START, *4 * [({"LR": 3e-3}, 300.0)])
    assert made.recommend(clearly)[0]["LR"] > 2e-3


def test_a_start_that_never_reached_the_target_does_not_stay() -> None:
    study, made = studied(SPACE, None, (START, math.inf), (NEIGHBOUR, 485.0))
    assert made.recommend(study)[0] == NEIGHBOUR
