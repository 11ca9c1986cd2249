"""The grey-box sampler in ordinary Optuna studies: what it proposes, recommends and says."""

from __future__ import annotations

import math

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from benchmarks.laboratory.arena import play
from benchmarks.laboratory.ours import GreyBox, misleading
from benchmarks.laboratory.problem import Problem
from lora_tune.base.text import duration
from lora_tune.config.parameters import FloatParameter, IntParameter, LayoutParameter
from lora_tune.config.space import Space
from lora_tune.logs.run import Eval
from lora_tune.search.grey_box.acquisition import OOM_SECONDS, value_actions
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.model import learn
from lora_tune.search.grey_box.objective import Goal, closed_schedule
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.observations import Observation
from lora_tune.search.published import llama2_70b_lora
from lora_tune_simulation.h100 import time_to_target

SPACE = {
    "LR": FloatDistribution(1e-5, 1e-2, log=True),
    "MAX_STEPS": IntDistribution(100, 2500),
    "layout": CategoricalDistribution(
        ("tp1 pp1 cp1 minibs1 mbs1", "tp2 pp1 cp2 minibs4 mbs1", "tp4 pp1 cp1 minibs4 mbs1", "tp8 pp1 cp1 minibs8 mbs1")
    ),
}
GOAL = Goal(schedule=closed_schedule)
GOOD = {"LR": 4e-4, "MAX_STEPS": 800, "layout": "tp4 pp1 cp1 minibs4 mbs1"}


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def sampler(**options) -> GreyBoxSampler:
    return GreyBoxSampler(SPACE, goal=GOAL, gpus=8, seed=1, **options)


def finish(study: optuna.Study, trial: optuna.Trial, *, speed: float = 2.2, samples: float = 3072) -> None:
    """Tell a run that reached the target, with its pieces."""
    pieces = {"samples_per_second": speed, "seconds_per_eval": 35.0, "stop_samples": samples, "init_seconds": 70.0}
    for name, value in pieces.items():
        trial.set_user_attr(name, value)
    study.tell(trial, samples / speed + 175)


def after_one_good_run(**options) -> tuple[optuna.Study, GreyBoxSampler]:
    made = sampler(**options)
    study = optuna.create_study(sampler=made)
    study.enqueue_trial(GOOD)
    finish(study, study.ask(SPACE))
    return study, made


def test_proposals_lie_in_the_space_and_say_why() -> None:
    study, _ = after_one_good_run()
    for _ in range(3):
        trial = study.ask(SPACE)
        assert all(SPACE[name]._contains(SPACE[name].to_internal_repr(v)) for name, v in trial.params.items())
        assert "expected to improve the recommendation" in trial.user_attrs["why"]
        assert trial.user_attrs["kind"] == "full"


def test_without_being_told_the_space_it_learns_it_from_the_trials() -> None:
    study = optuna.create_study(sampler=GreyBoxSampler(goal=GOAL, gpus=8, seed=1))
    finish(study, study.ask(SPACE))
    trial = study.ask(SPACE)
    assert "why" in trial.user_attrs
    assert set(trial.params) == set(SPACE)


def test_a_study_without_the_pieces_is_left_to_optunas_default() -> None:
    made = GreyBoxSampler({"x": FloatDistribution(-1, 1)}, seed=1)
    study = optuna.create_study(sampler=made)
    for _ in range(8):
        trial = study.ask({"x": FloatDistribution(-1, 1)})
        study.tell(trial, trial.params["x"] ** 2)
    assert "TPE" in study.trials[-1].user_attrs["why"]


def test_parallel_proposals_differ() -> None:
    study, _ = after_one_good_run()
    asked = [study.ask(SPACE).params for _ in range(8)]
    assert len({tuple(sorted(p.items())) for p in asked}) >= 7
    assert len({p["layout"] for p in asked}) >= 2


def test_probes_are_proposed_only_where_they_are_possible() -> None:
    study, _ = after_one_good_run(probes=True)
    kinds = [study.ask(SPACE).user_attrs["kind"] for _ in range(4)]
    assert "probe" in kinds


def test_a_layout_that_always_dies_is_soon_left_alone() -> None:
    study, made = after_one_good_run()
    deaths = 0
    for _ in range(12):
        trial = study.ask(SPACE)
        if trial.params["layout"].startswith("tp1 "):
            deaths += 1
            trial.set_user_attr("verdict", "infeasible")
            trial.set_constraint("feasible", 1.0)
            study.tell(trial, state=TrialState.PRUNED)
        else:
            finish(study, trial, speed=2.0)
    assert deaths <= 3
    assert not made.recommend(study)[0]["layout"].startswith("tp1 ")


@pytest.mark.parametrize(
    ("fixed", "seen", "samples"),
    [({"VAL_CHECK_INTERVAL": 40}, (), 80), ({}, (128.0, 256.0, 384.0), 256), ({}, (), 768)],
    ids=("fixed by the study", "seen in its trials", "unknown: as in the closed division"),
)
def test_a_short_run_is_expected_to_train_two_of_the_studys_own_eval_intervals(fixed, seen, samples) -> None:
    known = Observation(
        number=0, values=GOOD, samples_per_second=2.2, seconds_per_eval=35.0, reached=3072, init_seconds=70.0,
        evals=tuple(Eval(s, 0.93 - s / 1e5, math.nan) for s in seen),
    )  # fmt: skip
    model = learn(Coordinates(distributions=SPACE, gpus=8, fixed=fixed), Goal(), [known])
    actions = value_actions(model, np.random.default_rng(0), probes=True, capped=True)
    short = next(a for a in actions if a.kind == "probe" and a.values["layout"].startswith("tp8 "))
    speeds, _, evals, _ = model.predict_speed([short.values])
    work = samples / math.exp(speeds[0]) + math.exp(evals[0])
    seconds = 70 + (1 - short.risk) * work + short.risk * OOM_SECONDS
    assert 3600 * short.node_hours == pytest.approx(seconds, rel=1e-3)


def test_the_recommendation_combines_the_best_parts_of_different_trials() -> None:
    """The fast layout was only ever run at a poor rate, the good rate only on a slow layout."""
    made = sampler()
    study = optuna.create_study(sampler=made)
    fast, slow = "tp2 pp1 cp2 minibs4 mbs1", "tp8 pp1 cp1 minibs8 mbs1"
    for lr, layout, speed, samples in (
        (1e-4, fast, 2.5, 5400), (4e-4, slow, 1.7, 3072), (4.2e-4, slow, 1.7, 3072), (1.5e-3, slow, 1.7, 4600)
    ):  # fmt: skip
        study.enqueue_trial({"LR": lr, "MAX_STEPS": 800, "layout": layout})
        finish(study, study.ask(SPACE), speed=speed, samples=samples)
    values, seconds, words = made.recommend(study)
    assert values["layout"] == fast
    assert 2e-4 < values["LR"] < 9e-4
    assert seconds == pytest.approx(3000 / 2.5 + 5 * 35, rel=0.12)
    assert words.startswith(f"expected {duration(seconds)} to the target, ")
    assert "above the best there is" in words


def test_more_runs_of_the_best_lower_the_claimed_regret() -> None:
    study, made = after_one_good_run()

    def claimed() -> float:
        return float(made.recommend(study)[2].split("expected to be ")[1].split("%")[0])

    before = claimed()
    for _ in range(12):
        finish(study, study.ask(SPACE), samples=3072)
    assert claimed() < before


def site(variant: int) -> Problem:
    """A small 8x H100 problem that a test can afford."""
    space = Space(
        {
            "LR": FloatParameter(type="float", low=1e-5, high=1e-2, log=True),
            "MAX_STEPS": IntParameter(type="int", low=100, high=2500),
            "layout": LayoutParameter(type="layout", tp=(2, 4, 8), cp=(1, 2), gbs=(8,)),
        },
        nodes=1,
        gpus_per_node=8,
    )
    return Problem("small", time_to_target.variant(variant), space)


def test_what_claims_are_held_against_is_ten_times_as_exact_as_they_are() -> None:
    """The usual truth, a mean of 512 runs, is off by as much as a late claim."""
    problem = site(1)
    values = {"LR": 4e-4, "MAX_STEPS": 900, "layout": "tp4 pp1 cp1 minibs4 mbs1"}
    truth = time_to_target.variant(1).expected_score(problem.space.resolve(values), 200_000)
    assert problem.exact_score(values) == pytest.approx(truth, rel=1e-3)
    assert problem.exact_best == pytest.approx(problem.best, rel=0.01)
    assert problem.exact_regret(values) == pytest.approx(truth / problem.exact_best - 1, abs=1e-3)


def regrets(problem: Problem, prior: tuple[Observation, ...], budget: float) -> list[float]:
    trace = play(problem, GreyBox(problem, 1, prior=prior), slots=1, budget=budget, seed=1)
    return [regret for _, regret in trace.points]


def test_it_finds_a_good_configuration_within_a_few_runs() -> None:
    assert min(regrets(site(1), llama2_70b_lora(), 5.0)[-3:]) < 0.1


def test_a_misleading_prior_costs_at_most_a_few_runs() -> None:
    """Ten times too high learning rates: within 8 node-hours (about 16 runs) it is nevertheless near the best."""
    assert regrets(site(2), misleading(), 8.0)[-1] < 0.15


def test_published_results_are_read_with_their_sources() -> None:
    table = llama2_70b_lora()
    assert len(table) == 149
    assert len({o.source for o in table}) == 149
    assert sum(o.source.startswith("v6.0") for o in table) == 13
    assert all(o.source and o.reached > 2500 and o.values["GBS"] >= 8 for o in table)
    assert math.isclose(float(np.median([o.values["LR"] for o in table])), 5e-4)


def test_while_nothing_has_reached_the_target_it_tries_what_may_and_does_not_repeat_what_cannot() -> None:
    """Rates too low to arrive and a rate too high are known; between them a run in three may arrive.

    To know a chance better lowers its logarithm in the mean, so that every run there seemed to be worth less than none.
    """
    space = {
        "LR": FloatDistribution(2e-4, 3.2e-2, log=True), "MAX_STEPS": IntDistribution(80, 160),
        "layout": CategoricalDistribution(("tp4 pp1 cp1 minibs4 mbs1",)),
    }  # fmt: skip
    fixed = {"LR": 2e-4, "MAX_STEPS": 160, "layout": "tp4 pp1 cp1 minibs4 mbs1"}
    falling = tuple(Eval(128.0 * k, x, math.nan) for k, x in enumerate((1.21, 1.158, 1.136, 1.124, 1.117, 1.112), 1))
    spoilt = tuple(Eval(128.0 * k, x, math.nan) for k, x in enumerate((7.4, 7.6, 4.4, 3.8, 3.5, 3.3), 1))
    known = {
        "samples_per_second": 0.44,
        "seconds_per_eval": 60.0,
        "bound": 768.0,
        "attributes": {"verdict": "censored"},
    }
    seen = [
        *(Observation(number=k, values=fixed | {"LR": 2e-4 + 1e-5 * k}, evals=falling, **known) for k in range(6)),
        Observation(number=6, values=fixed | {"LR": 2e-2}, evals=spoilt, **known),
    ]
    model = learn(Coordinates(distributions=space, gpus=8), Goal(target=1.08, limit_seconds=3600), seen)
    runs = [a for a in value_actions(model, np.random.default_rng(0), probes=False, capped=True) if a.kind == "full"]
    assert not model.target_known
    assert min(a.gain for a in runs) > -1e-9
    assert 4e-4 < runs[0].values["LR"] < 6e-3


def test_trials_that_say_nothing_new_are_not_learned_again() -> None:
    study, made = after_one_good_run()
    seen = made.observations(study, frozenset(SPACE))
    model = made.model(SPACE, seen)
    assert made.model(SPACE, made.observations(study, frozenset(SPACE))) is model
    finish(study, study.ask(SPACE))
    assert made.model(SPACE, made.observations(study, frozenset(SPACE))) is not model
