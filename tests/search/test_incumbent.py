"""What is handed over in place of the configuration of today: each step clear by itself, at every look."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from lora_tune.search.advantage import Advantage, SeedDoubt, Weighed, heard, weighed
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.incumbent import IncumbentChoice, choose
from lora_tune.search.portfolio import Arms, PortfolioSampler
from lora_tune.search.tpe import WindowedTPESampler
from tests.search.test_portfolio import NEIGHBOUR, SPACE, START, with_runs

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
    return lambda values, other: weighed(known[f"{values['name']}_{other['name']}"])


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
        over = weighed(beside([-0.05] * 4, [0.0], 5))
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
        narrow: dict[str, BaseDistribution] = {"LR": FloatDistribution(9e-4, 1.2e-3, log=True)}
        tpe = WindowedTPESampler(seed=1, n_startup_trials=5, multivariate=True, constant_liar=True)
        made = PortfolioSampler(
            Coordinates(distributions=narrow), Arms(grey_box=None, tpe=tpe), target=1.0, centre={"LR": 1e-3}, seed=1
        )
        study = optuna.create_study(sampler=made)
        for rate, took in ((1e-3, 500), *((1.1e-3, took) for took in (450, 505, 470, 490))):
            facts = {"samples_per_second": 10.0, "stop_samples": 10.0 * took, "verdict": "reached"}
            study.add_trial(
                optuna.trial.create_trial(
                    params={"LR": rate}, distributions=narrow, value=float(took), user_attrs=facts
                )
            )
        assert made.recommend(study)[0] == {"LR": 1e-3}
        asked = [study.ask(narrow) for _ in range(4)]
        again = [t for t in asked if "another seed of the configuration of today" in t.user_attrs["why"]]
        assert again
        assert all(t.params == {"LR": 1e-3} for t in again)


def test_the_start_stays_while_its_first_run_is_open() -> None:
    study, made = with_runs((NEIGHBOUR, 0.97))
    assert made.recommend(study)[0] == NEIGHBOUR
    study.add_trial(optuna.trial.create_trial(params=START, distributions=SPACE, state=TrialState.RUNNING))
    assert made.recommend(study)[0] == START


def test_what_one_of_two_models_doubts_is_handed_over_only_where_it_is_hardly_believed() -> None:
    """Else it would change whenever the belief moves to the other model."""
    for_it, against = Advantage(ln_saved=0.05, sd=0.02), Advantage(ln_saved=-0.03, sd=0.02)
    assert not Weighed(((0.6, for_it), (0.4, against))).is_clear
    assert Weighed(((0.97, for_it), (0.03, against))).is_clear
    assert not Weighed(((0.6, against), (0.4, for_it))).is_clear


def test_a_model_that_denies_what_the_two_have_measured_has_no_voice() -> None:
    """The best took half the time of today's configuration; a model with a share of 22% was sure of the opposite."""
    seeds = SeedDoubt(0.001, 0.001, 0.0, 0.04)
    for_it = Advantage(ln_saved=0.87, sd=0.06, seeds=seeds)
    against = Advantage(ln_saved=-3.1, sd=0.04, seeds=seeds)
    parts = [(0.78, for_it), (0.22, against)]
    assert not heard(parts, [], [7.7]).is_clear, "of one that has not run nothing is measured"
    assert heard(parts, [6.8], [7.7]).is_clear
    assert not heard(parts, [10.8], [7.7]).is_clear
    agreeing = heard([(0.6, replace(for_it, ln_saved=0.80)), (0.4, replace(for_it, ln_saved=0.95))], [6.8], [7.7])
    assert all(share > 0.3 for share, _ in agreeing.parts), "both are heard"
