"""The portfolio: what it proposes in an ordinary Optuna study, and what it learns of the parameters' roles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from lora_tune.base.format import duration
from lora_tune.search.forecasts import FORECASTS
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.objective import Goal, closed_schedule
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.portfolio import Arms, PortfolioSampler
from lora_tune.search.sentences import TO_BE_SURE
from lora_tune.search.tpe import WindowedTPESampler
from lora_tune.search.whole.encoding import Encoding
from lora_tune.search.whole.model import learn_whole
from lora_tune.search.whole.proposals import expecting, propose, recommend_whole
from lora_tune.search.whole.runs import Run

SPACE: dict[str, BaseDistribution] = {
    "LR": FloatDistribution(1e-5, 1e-1, log=True),
    "HIDDEN": IntDistribution(64, 1024, log=True),
    "OPTIMIZER": CategoricalDistribution(("adamw", "lion")),
}
START = {"LR": 1e-3, "HIDDEN": 512, "OPTIMIZER": "adamw"}
COORDINATES = Coordinates(distributions=SPACE)


def physics(values: dict[str, Any]) -> tuple[float, float]:
    """(samples to the target, samples/s) of a script whose model size drives both: the best size is about 180."""
    size, off = math.log(values["HIDDEN"] / 256), math.log(values["LR"] / 3e-3)
    samples = 1e4 * math.exp(0.2 * off**2 + 0.5 * math.exp(-1.5 * size) - 0.5 * (values["OPTIMIZER"] == "lion"))
    return samples, 50 * math.exp(-0.9 * size)


def seconds(values: dict[str, Any]) -> float:
    samples, speed = physics(values)
    return samples / speed


def run_of(values: dict[str, Any]) -> Run:
    return Run(values=values, ln_score=math.log(seconds(values)), ln_pace=-math.log(physics(values)[1]))


def sampler(seed: int = 1, centre: dict[str, Any] | None = START) -> PortfolioSampler:
    tpe = WindowedTPESampler(seed=seed, n_startup_trials=5, multivariate=True, constant_liar=True)
    return PortfolioSampler(COORDINATES, Arms(grey_box=None, tpe=tpe), target=1.0, centre=centre, seed=seed)


def trial_of(study: optuna.Study) -> float:
    """One trial with all the pieces that the driver records; its seconds."""
    trial = study.ask(SPACE)
    samples, speed = physics(trial.params)
    for name, value in {"samples_per_second": speed, "stop_samples": samples, "verdict": "reached"}.items():
        trial.set_user_attr(name, value)
    study.tell(trial, samples / speed)
    return samples / speed


def test_a_parameter_that_drives_speed_is_found_whatever_its_name_suggests() -> None:
    rng = np.random.default_rng(2)
    runs = [
        run_of({"LR": float(np.exp(rng.uniform(-9, -3))), "HIDDEN": int(rng.integers(64, 1024)), "OPTIMIZER": "lion"})
        for _ in range(6)
    ]
    assert Encoding(SPACE, COORDINATES).guess("HIDDEN") == {"samples"}
    relevance = learn_whole(Encoding(SPACE, COORDINATES), runs, centre=START).scales.pace.of
    assert relevance["HIDDEN"] > 0
    assert relevance["LR"] == 0


def test_a_role_that_the_study_states_is_not_tested() -> None:
    stated = Coordinates(distributions=SPACE, roles={"HIDDEN": "convergence"})
    runs = [run_of({"LR": 1e-3, "HIDDEN": size, "OPTIMIZER": "lion"}) for size in (64, 128, 256, 512, 1024)]
    model = learn_whole(Encoding(SPACE, stated), runs, stated=frozenset(["HIDDEN"]))
    assert model.scales.pace.of["HIDDEN"] == 0


def test_a_role_that_the_study_states_holds_from_the_first_pace_on() -> None:
    """Until a run tells its pace the whole score is one piece, which holds every parameter."""
    encoding = Encoding(SPACE, Coordinates(distributions=SPACE, roles={"HIDDEN": "speed"}))
    stated = frozenset(["HIDDEN"])
    runs = [run_of({**START, "HIDDEN": size}) for size in (64, 128, 256, 512)]
    before = learn_whole(encoding, [], stated=stated).scales
    told, anew = (learn_whole(encoding, runs, s, stated=stated).scales for s in (before, None))
    assert told.pace.of["HIDDEN"] == anew.pace.of["HIDDEN"] == 1
    assert told.samples.of["HIDDEN"] == anew.samples.of["HIDDEN"] == 0


def test_a_bound_teaches_that_a_configuration_is_worse() -> None:
    encoding = Encoding(SPACE, COORDINATES)
    good, bad = {**START, "LR": 3e-3}, {**START, "LR": 5e-2}
    model = learn_whole(encoding, [run_of(good), run_of(START)])
    late = Run(values=bad, ln_pace=-math.log(physics(bad)[1]), above=math.log(seconds(good)) + 1.0)
    told = learn_whole(encoding, [run_of(good), run_of(START), late])
    assert told.predict([bad])[0][0] > model.predict([good])[0][0] + 0.5


def test_deaths_of_memory_keep_proposals_away_from_their_neighbourhood() -> None:
    encoding = Encoding(SPACE, COORDINATES)
    dead = [Run(values={**START, "HIDDEN": size}, failed=True) for size in (900, 1000)]
    model = learn_whole(encoding, [run_of(START), run_of({**START, "HIDDEN": 128}), *dead])
    near, far = model.succeeds([{**START, "HIDDEN": 950}, {**START, "HIDDEN": 128}])
    assert near < 0.5 < far


def test_an_open_run_is_not_proposed_again() -> None:
    encoding = Encoding(SPACE, COORDINATES)
    known = [run_of(START), run_of({**START, "LR": 3e-3}), run_of({**START, "HIDDEN": 256})]
    first = propose(learn_whole(encoding, known), np.random.default_rng(1), init_seconds=20, limit_seconds=3600)
    open_ = Run(values=first.values, open=True)
    second = propose(
        learn_whole(encoding, [*known, open_]), np.random.default_rng(1), init_seconds=20, limit_seconds=3600
    )
    assert second.values != first.values


def test_only_what_reached_the_target_is_recommended() -> None:
    encoding = Encoding(SPACE, COORDINATES)
    unknown = Run(values={**START, "LR": 3e-3}, ln_pace=-3.0, above=2.0)
    found = recommend_whole(learn_whole(encoding, [run_of(START), unknown]), np.random.default_rng(0))
    assert found is not None
    assert found.values == START
    assert recommend_whole(learn_whole(encoding, [unknown], centre=START), np.random.default_rng(0)) is None


def test_a_script_whose_model_size_drives_both_is_nearly_solved_after_thirty_trials() -> None:
    study = optuna.create_study(sampler=sampler())
    study.enqueue_trial(START)
    scores = [trial_of(study) for _ in range(30)]
    best = min(seconds({"LR": 3e-3, "HIDDEN": size, "OPTIMIZER": "lion"}) for size in range(64, 1025))
    values, score, words = study.sampler.recommend(study)  # type: ignore[attr-defined]
    recommended = seconds(values)
    assert words.startswith(f"expected {duration(score)} to the target, ")
    assert scores[0] > 1.5 * best
    assert recommended < 1.05 * best


def test_every_trial_says_why_and_keeps_the_forecast_that_it_is_judged_by() -> None:
    study = optuna.create_study(sampler=sampler())
    study.enqueue_trial(START)
    for _ in range(4):
        trial_of(study)
    attributes = study.trials[-1].user_attrs
    assert "speed and convergence" in attributes["why"]
    mean, sd = json.loads(attributes[FORECASTS])["whole"]
    assert math.isfinite(mean)
    assert sd > 0
    gain = study.sampler.expected_gain(study)  # type: ignore[attr-defined]
    assert 0 <= gain < 1


def test_nothing_is_recommended_before_a_run_reached_the_target() -> None:
    study = optuna.create_study(sampler=sampler(centre=None))
    study.tell(study.ask(SPACE), state=TrialState.PRUNED)
    with pytest.raises(ValueError, match="nothing to recommend"):
        study.sampler.recommend(study)  # type: ignore[attr-defined]
    assert study.sampler.expected_gain(study) is None  # type: ignore[attr-defined]


def test_a_plain_objective_without_any_of_the_pieces_works_too() -> None:
    study = optuna.create_study(sampler=sampler())
    study.enqueue_trial(START)
    for _ in range(12):
        trial = study.ask(SPACE)
        study.tell(trial, seconds(trial.params))
    assert min(t.value for t in study.trials) < 0.8 * seconds(START)


@pytest.mark.parametrize("value", [lambda p: 500.0, lambda p: seconds(p)])
def test_a_script_without_noise_is_asked_nothing_twice(value: Callable[[dict[str, Any]], float]) -> None:
    study = optuna.create_study(sampler=sampler(centre=None))
    for _ in range(24):
        trial = study.ask(SPACE)
        study.tell(trial, value(trial.params))
    late = [tuple(t.params.values()) for t in study.trials[8:]]
    assert len(set(late)) >= len(late) - 1


def test_with_layouts_the_grey_box_begins_and_both_models_forecast() -> None:
    layouts = {**SPACE, "layout": CategoricalDistribution(("tp1 pp1 cp1 minibs8 mbs1", "tp2 pp1 cp1 minibs8 mbs1"))}
    coordinates = Coordinates(distributions=layouts, gpus=2)
    grey_box = GreyBoxSampler(layouts, gpus=2, seed=1)
    tpe = WindowedTPESampler(seed=1, n_startup_trials=5, multivariate=True, constant_liar=True)
    both = PortfolioSampler(coordinates, Arms(grey_box=grey_box, tpe=tpe), target=1.0, seed=1)
    study = optuna.create_study(sampler=both)
    study.ask(layouts)
    said = json.loads(study.trials[0].user_attrs[FORECASTS])
    assert said.keys() == {"grey_box", "whole"}
    assert both.trust_in(study).grey_box > 0.5


def test_a_lucky_run_beside_failures_is_not_recommended() -> None:
    encoding, lucky = Encoding(SPACE, COORDINATES), {**START, "LR": 9e-3}
    pace = run_of(START).ln_pace
    known = [Run(values=v, ln_score=ln, ln_pace=pace) for v, ln in ((START, 6.13), (lucky, 6.10))]
    alone = recommend_whole(learn_whole(encoding, known), np.random.default_rng(0))
    pace = run_of(lucky).ln_pace
    failed = [Run(values={**lucky, "LR": rate}, ln_pace=pace, above=5.0, failed=True) for rate in (8.9e-3, 9.1e-3)]
    warned = recommend_whole(learn_whole(encoding, [*known, *failed]), np.random.default_rng(0))
    assert alone is not None
    assert warned is not None
    assert alone.values == lucky
    assert warned.values != lucky


def test_records_without_forecasts_are_judged_by_forecasts_made_anew() -> None:
    layouts = {**SPACE, "layout": CategoricalDistribution(("tp1 pp1 cp1 minibs8 mbs1", "tp2 pp1 cp1 minibs8 mbs1"))}
    tpe = WindowedTPESampler(seed=1, n_startup_trials=5, multivariate=True, constant_liar=True)
    arms = Arms(grey_box=GreyBoxSampler(layouts, gpus=2, seed=1), tpe=tpe)
    portfolio = PortfolioSampler(Coordinates(distributions=layouts, gpus=2), arms, target=1.0, seed=1)
    study = optuna.create_study(sampler=portfolio)
    rng = np.random.default_rng(4)
    for number in range(9):
        values = {**START, "HIDDEN": int(rng.integers(64, 1024)), "layout": "tp2 pp1 cp1 minibs8 mbs1"}
        samples, speed = physics(values)
        facts = {"samples_per_second": speed, "stop_samples": samples, "verdict": "reached", "number": number}
        made = optuna.trial.create_trial(
            params=values, distributions=layouts, value=samples / speed, user_attrs=facts
        )  # fmt: skip
        study.add_trial(made)
    # The hidden size drives speed, which the grey box does not believe.
    assert portfolio.trust_in(study).grey_box < 0.5


def with_runs(*runs: tuple[dict[str, Any], float]) -> tuple[optuna.Study, PortfolioSampler]:
    """A study in which configurations took so many times their expected seconds; infinite: they did not arrive."""
    made = sampler()
    study = optuna.create_study(sampler=made)
    for values, luck in runs:
        samples, speed = physics(values)
        facts: dict[str, Any] = {"samples_per_second": speed, "verdict": "reached", "stop_samples": samples * luck}
        state = TrialState.COMPLETE
        if math.isinf(luck):
            state, facts = TrialState.PRUNED, {**facts, "verdict": "censored", "stop_samples": None}
        value = samples / speed * luck if state is TrialState.COMPLETE else None
        study.add_trial(
            optuna.trial.create_trial(params=values, distributions=SPACE, value=value, user_attrs=facts, state=state)
        )
    return study, made


NEIGHBOUR = {**START, "LR": 1.05e-3}


def test_the_start_stays_until_another_configuration_is_clearly_better() -> None:
    hardly, made = with_runs((START, 1.0), (NEIGHBOUR, 0.97))
    values, seconds_of_it, sentence = made.recommend(hardly)
    assert values == START
    assert seconds_of_it == pytest.approx(seconds(START), rel=0.05)
    assert "not yet clear" in sentence
    faster = {**START, "LR": 3e-3}
    clearly, made = with_runs((START, 1.0), *4 * [(faster, 0.9)])
    assert made.recommend(clearly)[0] == faster


def test_a_start_that_never_reached_the_target_does_not_stay() -> None:
    study, made = with_runs((START, math.inf), (NEIGHBOUR, 0.97))
    assert made.recommend(study)[0] == NEIGHBOUR


def test_forecasts_that_were_made_anew_once_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = {**SPACE, "layout": CategoricalDistribution(("tp1 pp1 cp1 minibs8 mbs1", "tp2 pp1 cp1 minibs8 mbs1"))}
    tpe = WindowedTPESampler(seed=1, n_startup_trials=5, multivariate=True, constant_liar=True)
    grey_box = GreyBoxSampler(layouts, gpus=2, seed=1)
    made = PortfolioSampler(
        Coordinates(distributions=layouts, gpus=2), Arms(grey_box=grey_box, tpe=tpe), target=1.0, seed=1
    )
    study = optuna.create_study(sampler=made)
    for luck in (1.0, 1.1, 0.9, 1.2):
        values = {**START, "layout": "tp2 pp1 cp1 minibs8 mbs1"}
        facts = {"samples_per_second": 20.0, "stop_samples": 1e4 * luck, "verdict": "reached"}
        study.add_trial(
            optuna.trial.create_trial(params=values, distributions=layouts, value=500.0 * luck, user_attrs=facts)
        )
    before = made.trust_in(study)

    def made_again(*_: object, **__: object) -> None:
        raise AssertionError("forecasts are made anew")

    monkeypatch.setattr(grey_box, "forecast", made_again)
    assert made.trust_in(study) == before


def test_sixteen_slots_that_are_asked_at_once_do_not_ask_the_same() -> None:
    study, _ = with_runs(
        (START, 1.0), (NEIGHBOUR, 1.02), ({**START, "HIDDEN": 256}, 0.98), ({**START, "LR": 3e-3}, 1.0)
    )
    asked = [study.ask(SPACE).params for _ in range(16)]
    assert len({tuple(sorted(p.items())) for p in asked}) == 16
    assert len({p["OPTIMIZER"] for p in asked}) == 2
    folds = [math.log(p["LR"] / START["LR"]) for p in asked]
    assert max(folds) - min(folds) > 0.5


def test_what_is_expected_of_open_runs_leaves_little_to_gain_where_they_are() -> None:
    encoding = Encoding(SPACE, COORDINATES)
    known = [run_of(START), run_of({**START, "LR": 3e-3}), run_of({**START, "HIDDEN": 256})]
    model = learn_whole(encoding, known)
    first = propose(model, np.random.default_rng(1), init_seconds=20, limit_seconds=3600)
    waiting = learn_whole(encoding, [*known, Run(values=first.values, open=True)])
    second = propose(waiting, np.random.default_rng(1), init_seconds=20, limit_seconds=3600)
    assert second.gain < 0.7 * first.gain
    assert expecting(waiting).predict([first.values])[0] == pytest.approx(waiting.predict([first.values])[0], abs=0.02)
    assert expecting(waiting).predict([first.values])[1] < waiting.predict([first.values])[1]


SLOW, FAST = "tp4 pp1 cp1 minibs4 mbs1", "tp2 pp1 cp2 minibs4 mbs1"
DARING = "tp4 pp1 cp1 minibs4 mbs2"
"""Larger micro-batches than the start's: it may well die of memory."""


SPACE_OF_LAYOUTS = {"LR": FloatDistribution(1e-4, 1e-2, log=True), "layout": CategoricalDistribution((SLOW, DARING))}


def studied_on(layout: str, runs: int, *, probes: bool) -> tuple[optuna.Study, PortfolioSampler]:
    """After a run of the start, which is slow, and some on a layout that is 5% faster."""
    space = {**SPACE_OF_LAYOUTS, "layout": CategoricalDistribution((SLOW, layout))}
    start = {"LR": 1e-3, "layout": SLOW}
    tpe = WindowedTPESampler(seed=1, n_startup_trials=5, multivariate=True, constant_liar=True)
    grey_box = GreyBoxSampler(space, goal=Goal(schedule=closed_schedule), gpus=8, probes=probes, seed=1)
    made = PortfolioSampler(
        Coordinates(distributions=space, gpus=8), Arms(grey_box=grey_box, tpe=tpe), target=1.0, centre=start, seed=1
    )
    study = optuna.create_study(sampler=made)
    alike = json.dumps({"grey_box": [7.0, 0.1], "whole": [7.0, 0.1]})
    for values, samples, speed in ((start, 3072, 2.0), *runs * [({"LR": 1.1e-3, "layout": layout}, 3050, 2.1)]):
        facts = {"samples_per_second": speed, "seconds_per_eval": 35.0, "init_seconds": 60.0, "stop_samples": samples}
        made_of = {**facts, "verdict": "reached", FORECASTS: alike}
        study.add_trial(
            optuna.trial.create_trial(params=values, distributions=space, value=samples / speed, user_attrs=made_of)
        )
    return study, made


def with_runs_on(layout: str, runs: int) -> tuple[dict[str, Any], str]:
    """What is recommended then."""
    study, made = studied_on(layout, runs, probes=False)
    values, _, sentence = made.recommend(study)
    return dict(values), sentence


def test_a_layout_that_would_replace_the_start_is_run_shortly_until_it_has_lived_often_enough() -> None:
    study, made = studied_on(DARING, 1, probes=True)
    assert made.recommend(study)[0]["layout"] == SLOW
    short = 0
    while made.recommend(study)[0]["layout"] == SLOW:
        trial = study.ask(SPACE_OF_LAYOUTS)
        assert (trial.params["layout"], trial.user_attrs["kind"]) == (DARING, "probe")
        assert trial.user_attrs["why"] == TO_BE_SURE
        beside = study.ask(SPACE_OF_LAYOUTS)
        assert beside.user_attrs["why"] != TO_BE_SURE, "one at a time: the first may be the last"
        study.tell(beside, state=TrialState.FAIL)
        for name, value in {"samples_per_second": 2.1, "verdict": "probed"}.items():
            trial.set_user_attr(name, value)
        study.tell(trial, state=TrialState.PRUNED)
        short += 1
    assert 1 <= short <= 8
    assert study.ask(SPACE_OF_LAYOUTS).user_attrs["why"] != TO_BE_SURE


def told_to_be_sure(ending: str, asked: int) -> int:
    """Short runs of the daring layout among so many proposals, each ending so without a word of memory."""
    study, _ = studied_on(DARING, 1, probes=True)
    for _ in range(asked):
        trial = study.ask(SPACE_OF_LAYOUTS)
        study.tell(trial, state=TrialState[ending])
    return sum(t.user_attrs["why"] == TO_BE_SURE for t in study.trials if "why" in t.user_attrs)


def test_a_short_run_that_fails_for_another_reason_than_memory_is_not_asked_for_again() -> None:
    """It would fail again, and three in a row end the sweep."""
    assert told_to_be_sure("FAIL", 3) == 1


def test_short_runs_that_measured_nothing_come_to_an_end() -> None:
    assert told_to_be_sure("PRUNED", 10) == 8


def test_a_start_that_nobody_counted_the_samples_of_is_compared_with_nothing() -> None:
    study, made = studied_on(DARING, 1, probes=True)
    uncounted = optuna.create_study(sampler=made)
    for t in study.trials:
        facts = {name: value for name, value in t.user_attrs.items() if name != "stop_samples"}
        uncounted.add_trial(
            optuna.trial.create_trial(params=t.params, distributions=t.distributions, value=t.value, user_attrs=facts)
        )
    assert uncounted.ask(SPACE_OF_LAYOUTS).user_attrs["why"] != TO_BE_SURE


def test_where_trials_are_never_short_none_is_asked_for_to_be_sure() -> None:
    study, _ = studied_on(DARING, 1, probes=False)
    assert study.ask(SPACE_OF_LAYOUTS).user_attrs["kind"] == "full"


def test_a_faster_layout_is_clear_long_before_other_hyperparameters_are() -> None:
    """Seeds leave the rate open, and speeds settle the layout."""
    values, sentence = with_runs_on(FAST, 2)
    assert values == {"LR": 1e-3, "layout": FAST}
    assert "on a faster layout" in sentence


def test_a_layout_that_lived_once_and_may_well_die_of_memory_is_not_clearly_better() -> None:
    """What its one run took is not all that it costs."""
    assert with_runs_on(DARING, 1)[0]["layout"] == SLOW
    assert with_runs_on(DARING, 6)[0]["layout"] == DARING


def on_daring(study: optuna.Study, shown: bool) -> None:
    """A full run of the daring layout begins, with an eval on record or without."""
    values = {"LR": 2e-3, "layout": DARING}
    evals = {384: 2.0} if shown else {}
    study.add_trial(
        optuna.trial.create_trial(
            params=values, distributions=SPACE_OF_LAYOUTS, state=TrialState.RUNNING, intermediate_values=evals
        )
    )


@pytest.mark.parametrize("shown", [False, True])
def test_a_full_run_that_has_shown_that_its_layout_lives_holds_up_no_short_one(shown: bool) -> None:
    """Of many at a time one of the layout is always open."""
    study, _ = studied_on(DARING, 1, probes=True)
    on_daring(study, shown)
    assert (study.ask(SPACE_OF_LAYOUTS).user_attrs["why"] == TO_BE_SURE) == shown


def test_a_forecast_counts_no_run_that_is_still_open_as_ended() -> None:
    study, made = studied_on(DARING, 1, probes=True)
    grey_box = made._arms.grey_box
    assert grey_box is not None
    asked = {"LR": 2e-3, "layout": SLOW}
    alone = grey_box.forecast(study, asked)
    for _ in range(6):
        study.add_trial(
            optuna.trial.create_trial(params=asked, distributions=SPACE_OF_LAYOUTS, state=TrialState.RUNNING)
        )
    assert grey_box.forecast(study, asked) == pytest.approx(alone)
