"""One place decides what is recommended; status, report, explain, confirm and the screens are views of it."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from lora_tune.cli.confirm import contenders
from lora_tune.cli.explain import next_proposal
from lora_tune.cli.report import _cards
from lora_tune.cli.status import as_json, picture
from lora_tune.config.study import Study, find_study, load_study
from lora_tune.controller.evidence import whole_runs
from lora_tune.logs.run import Eval
from lora_tune.review.summary import overview
from lora_tune.search.recommendation import best_run, chance_to_pass, leaders, nearest, ranked, recommend
from lora_tune.store.metrics import Confirmed, ConfirmedChoice, TrialMetrics
from lora_tune.store.records import Attempt, StudyRecords, Verdict
from tests.search.test_recommendation import STUDY, ended, study_of, sweep_of

NOW = 2e9


def noisy() -> tuple[Study, StudyRecords]:
    """Five equal runs of one configuration, and one run of another that was luckier than any of them."""
    study = study_of(f'{STUDY}[search]\nsampler = "tpe"\n')
    steady, lucky = ({"LR": lr, "WARMUP": 10, "OPTIMIZER": "adam"} for lr in (4e-4, 4.2e-4))
    trials = [ended(study, n, steady, 100.0 + n) for n in range(5)] + [ended(study, 5, lucky, 93.0)]
    others = [ended(study, 6 + n, {**steady, "LR": 4e-5 * (n + 1)}, 140.0 - 5 * n) for n in range(4)]
    return study, sweep_of(study, [*trials, *others])


def test_every_command_hands_over_the_same_configuration_with_the_same_interval() -> None:
    study, sweep = noisy()
    config = recommend(study, sweep)
    assert config is not None
    shown = as_json(study, sweep, ("", 0.0), NOW)["recommended"]
    assert (shown["trial"], shown["objective"]) == (config.trial.number, config.objective)
    assert (shown["interval"], shown["why"]) == ((config.low, config.high), config.why)
    assert contenders(study, sweep, 3)[0] == config.trial
    assert next_proposal(study, sweep, NOW).recommended.startswith(f"trial {config.trial.number}, ")


def test_the_best_single_run_is_shown_beside_it_without_an_interval() -> None:
    """It was picked for being the lowest: an interval about it held the truth in 4 to 8% of noisy sweeps."""
    study, sweep = noisy()
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(picture(study, sweep, ("", 0.0), NOW, every=False))
    lines = {" ".join(line.split()[:2]): line for line in console.export_text().splitlines() if line.strip()}
    assert "90% interval" in next(line for name, line in lines.items() if name.startswith("recommended"))
    assert "trial 5" in lines["best run"]
    assert "interval" not in lines["best run"]
    lucky = best_run(study, sweep)
    assert lucky is not None
    assert lucky.number == 5


def test_the_nearest_trial_is_what_is_shown_where_nothing_can_be_recommended() -> None:
    study, sweep = noisy()
    assert nearest(study, sweep) is None, "one is recommended"
    assert (
        recommend(study, sweep_of(study, [ended(study, 0, {"LR": 1e-3, "WARMUP": 0, "OPTIMIZER": "adam"}, None)]))
        is None
    )


def test_every_list_of_the_best_is_a_part_of_one_ranking() -> None:
    """Values first, then by the lowest eval; who is passed over keeps its place but is no best run."""
    study = study_of(f'{STUDY}[search]\nsampler = "tpe"\n')
    done = {n: ended(study, n, {"LR": 1e-4 * (n + 1), "WARMUP": 0, "OPTIMIZER": "adam"}, 100.0 - n) for n in range(3)}
    over = Confirmed(choice=ConfirmedChoice.PASSED_OVER, runs=3, missed=0, node_hours=1.0, sentence="worse")
    done[2] = replace(done[2], metrics=replace(done[2].metrics, confirmed=over))
    ends = {3: Verdict.CENSORED, 4: Verdict.PRUNED, 5: Verdict.CENSORED, 6: Verdict.INFEASIBLE}
    done |= {n: replace(done[0], number=n, verdict=v, metrics=TrialMetrics()) for n, v in ends.items()}
    lowest = {3: 0.8, 4: 0.6, 5: 0.7, 0: 0.5, 1: 0.5}
    sweep = sweep_of(study, list(done.values()))
    attempts = {(n, 0): Attempt(trial=n, number=0, job_name="", folder="") for n in lowest}
    curves = {n: (Eval(8.0, x + 0.1, 1.0), Eval(16.0, x, 2.0), Eval(24.0, math.nan, 3.0)) for n, x in lowest.items()}
    sweep = replace(sweep, attempts=attempts, evals={(n, 0): curve for n, curve in curves.items()})
    best = best_run(study, sweep)
    assert [t.number for t in ranked(study, sweep)] == [2, 1, 0, 4, 5, 3]
    assert best is not None
    assert best.number == 1
    assert [t.number for t in leaders(study, sweep)] == [1, 2, 0]
    assert [t.number for t in whole_runs(study, sweep)] == [1, 0, 5, 3]
    missed = replace(sweep, trials={n: t for n, t in done.items() if not t.has_value})
    closest = nearest(study, missed)
    assert closest is not None
    assert (closest.trial.number, closest.point.loss) == (4, 0.6)


@pytest.fixture
def scored() -> tuple[Study, StudyRecords]:
    """A study of MLPerf's benchmark: one configuration ran three times, another once and needed too few samples."""
    study = load_study(find_study("h100"))
    study = study.model_copy(update={"search": study.search.model_copy(update={"sampler": "tpe", "enqueue": ()})})
    space = study.search_space
    corner = space.corner()
    trials = []
    for number, (samples, factor) in enumerate([(3072, 1.0), (3072, 1.0), (3072, 1.0), (1500, 0.6)]):
        trial = ended(study, number, corner, 1000.0 * factor, samples=float(samples))
        trials.append(replace(trial, parameters={**trial.parameters, "GBS": 8, "N": int(number == 3)}))
    return study, sweep_of(study, trials)


def test_the_chance_to_pass_is_that_of_what_is_recommended_and_not_of_the_luckiest_run(
    scored: tuple[Study, StudyRecords],
) -> None:
    study, sweep = scored
    lucky, config = best_run(study, sweep), recommend(study, sweep)
    assert lucky is not None
    assert config is not None
    of = {number: chance_to_pass(study, sweep, replace(config, trial=sweep.trials[number])) for number in (0, 3)}
    assert of[0] is not None
    assert of[3] is not None
    assert (of[0].runs, of[3].runs) == (3, 1)
    expected = chance_to_pass(study, sweep, config)
    cards = _cards(study, sweep, overview(study, sweep, NOW))
    _, value, sentence = next(card for card in cards if card[0].startswith("Passing"))
    assert expected is not None
    assert (value, sentence) == (f"{expected.passes:.0%}", expected.sentence)
    assert math.isfinite(expected.minutes)
    assert chance_to_pass(study, sweep, None) is None
