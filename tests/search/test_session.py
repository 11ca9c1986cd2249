"""A search that is made from the records anew goes on as if it had never died."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import BaseSampler, NSGAIISampler, QMCSampler
from optuna.trial import FrozenTrial

from lora_tune.config.parameters import Conditions
from lora_tune.config.study import Study, parse_study
from lora_tune.logs.run import Eval
from lora_tune.search.recorded import of_trial, recorded_trials
from lora_tune.search.session import SearchPoint, Session, unproposed
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict
from tests.fakes import command_study

EMPTY = StudyRecords(name="fake", digest="", study_toml="", began_at=0.0)
ENDS = (Verdict.REACHED, Verdict.PRUNED, Verdict.INFEASIBLE, Verdict.REACHED, Verdict.FAILED, Verdict.CAPPED)
"""How trials end, in turn."""


def study_of(search: str = "") -> Study:
    return parse_study(
        command_study(trials=20).replace('sampler = "random"', search or 'sampler = "random"'), Path("fake.toml")
    )


def proposed(session: Session, sweep: StudyRecords) -> StudyRecords:
    """The sweep with the next proposal, as the driver writes it down."""
    asked = session.ask()
    assert isinstance(asked, SearchPoint)
    trial = Trial(
        number=asked.number, seed=1, tuned=asked.tuned, parameters=asked.tuned, why=asked.why, state=TrialState.RUNNING,
        request=asked.request, point=asked.point, sampler_attributes=asked.sampler_attributes,
        proposed_at=float(asked.number),
    )  # fmt: skip
    attempt = Attempt(trial=trial.number, number=0, job_name=f"j{trial.number}", folder="f")
    return replace(
        sweep, trials={**sweep.trials, trial.number: trial}, attempts={**sweep.attempts, (trial.number, 0): attempt}
    )


def ended(session: Session, sweep: StudyRecords, number: int) -> StudyRecords:
    """The sweep with two evals of a trial and its end, of which the session is told."""
    evals = (Eval(100.0, 2.0 + number, 1.0), Eval(200.0, 1.0 + number, 2.0))
    verdict = ENDS[number % len(ENDS)]
    objective = 100.0 + 7 * number % 5 if verdict is Verdict.REACHED else None
    done = replace(sweep.trials[number], metrics=TrialMetrics(objective=objective, node_hours=0.5))
    done = done.finished(verdict, "it ended", 1000.0 + number)
    session.report(number, evals)
    session.tell(done)
    return replace(sweep, trials={**sweep.trials, number: done}, evals={**sweep.evals, (number, 0): evals})


def contents(trials: list[FrozenTrial]) -> list[str]:
    mappings = [(t.params, t.user_attrs, t.system_attrs, t.intermediate_values) for t in trials]
    plain = [repr((t.number, t.state, t.values)) for t in trials]
    return [head + repr([sorted(m.items()) for m in found]) for head, found in zip(plain, mappings, strict=True)]


SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "its place in a sequence, with the study": lambda: QMCSampler(
        seed=1, scramble=True, warn_independent_sampling=False
    ),
    "its generation, with each trial": lambda: NSGAIISampler(seed=1, population_size=3),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_study_made_from_the_records_is_the_one_that_was_there(kind: str) -> None:
    study = study_of()
    session, sweep = Session(study, sampler=SAMPLERS[kind]()), EMPTY
    for number in range(12):
        sweep = proposed(session, sweep)
        if number >= 2:
            sweep = ended(session, sweep, number - 2)
    again = Session(study, sweep, SAMPLERS[kind]())
    live, made = session._study.get_trials(), again._study.get_trials()
    assert contents(made) == contents(live)
    assert again._storage.get_study_system_attrs(0) == session._storage.get_study_system_attrs(0)


def test_a_sampler_that_was_started_anew_for_each_trial_proposes_the_same_sequence() -> None:
    study = study_of()

    def sampler() -> BaseSampler:
        return SAMPLERS["its place in a sequence, with the study"]()

    session, straight, broken = Session(study, sampler=sampler()), EMPTY, EMPTY
    for number in range(8):
        straight = ended(session, proposed(session, straight), number)
        starts = Session(study, broken, sampler())
        broken = ended(starts, proposed(starts, broken), number)
    assert [t.tuned for t in broken.trials.values()] == [t.tuned for t in straight.trials.values()]


def test_points_of_the_study_are_proposed_once_whenever_the_driver_died() -> None:
    study = study_of('sampler = "random"\nenqueue = [{ LR = 2e-3 }, { LR = 3e-3 }, { LR = 2e-3 }]')
    sweep = EMPTY
    for _ in range(5):
        session = Session(study, sweep)
        session.ask()  # and it died before this was written down
        sweep = proposed(Session(study, sweep), sweep)
    rates = [t.tuned["LR"] for t in sweep.trials.values()]
    assert rates[:3] == [2e-3, 3e-3, 2e-3]
    assert not {*rates[3:]} & {2e-3, 3e-3}


def test_the_machines_own_config_counts_for_no_point_of_the_study() -> None:
    base = Trial(number=0, seed=1, tuned={"LR": 2e-3}, parameters={}, metrics=TrialMetrics(base="config_x.sh"))
    assert [*unproposed([{"LR": 2e-3}], replace(EMPTY, trials={0: base}), Conditions())] == [{"LR": 2e-3}]


CONDITIONAL = Conditions(of={"BETA2": {"OPT": ("adam",)}})


def was_requested(number: int, tuned: dict[str, Any], **more: Any) -> Trial:
    return Trial(number=number, seed=1, tuned=tuned, parameters=tuned, **more)


@pytest.mark.parametrize("named", [True, False])
def test_a_point_is_proposed_once_where_the_search_chose_that_its_value_does_not_exist(named: bool) -> None:
    """Its record lacks the value; those of an earlier release do not say either of which point they are."""
    point = {"LR": 2e-3, "BETA2": 0.95}
    drawn = was_requested(0, {"LR": 2e-3, "OPT": "sgd"}, point=point if named else None)
    sweep = replace(EMPTY, trials={0: drawn})
    assert [*unproposed([point], sweep, CONDITIONAL)] == []
    assert [*unproposed([point, point], sweep, CONDITIONAL)] == [point], "stated twice, run twice"
    assert [*unproposed([{"LR": 2e-3, "OPT": "adam"}], sweep, CONDITIONAL)] == [{"LR": 2e-3, "OPT": "adam"}]


def test_what_a_person_asked_for_counts_for_no_point_of_the_study() -> None:
    sweep = replace(EMPTY, trials={0: was_requested(0, {"LR": 2e-3}, request=0)})
    assert [*unproposed([{"LR": 2e-3}], sweep, Conditions())] == [{"LR": 2e-3}]


def test_a_result_that_is_no_number_counts_as_failed() -> None:
    """As in a database that somebody has changed: the sweep goes on."""
    broken = was_requested(0, {"LR": 2e-3, "STEPS": 100}, metrics=TrialMetrics(objective=math.nan))
    sweep = replace(EMPTY, trials={0: broken.finished(Verdict.REACHED, "", 1.0)})
    session = Session(study_of(), sweep)
    assert session._study.get_trials()[0].state.name == "FAIL"
    assert isinstance(session.ask(), SearchPoint)


def test_a_number_whose_record_is_lost_is_not_given_out_again() -> None:
    sweep = EMPTY
    for _ in range(4):
        sweep = proposed(Session(study_of(), sweep), sweep)
    lost = replace(sweep, trials={n: t for n, t in sweep.trials.items() if n not in (1, 3)})
    asked = Session(study_of(), lost).ask()
    assert isinstance(asked, SearchPoint)
    assert asked.number == 4


def test_evals_of_an_attempt_that_was_requeued_are_not_those_of_the_next() -> None:
    session = Session(study_of())
    proposed(session, EMPTY)
    session.report(0, [Eval(100.0, 2.0, 1.0), Eval(200.0, 1.9, 2.0)])
    session.report(0, [Eval(100.0, 2.1, 1.0)])
    assert session._study.get_trials()[0].intermediate_values == {100: 2.1}


def test_a_trial_that_is_older_than_the_space_keeps_its_number_and_what_is_still_a_value() -> None:
    study = study_of()
    old = Trial(number=0, seed=1, tuned={"LR": 99.0, "STEPS": 100}, parameters={}, state=TrialState.RUNNING)
    session = Session(study, replace(EMPTY, trials={0: old}))
    session.report(0, [Eval(100.0, 2.0, 1.0)])
    session.tell(replace(old, metrics=TrialMetrics(objective=5.0)).finished(Verdict.REACHED, "", 1.0))
    (shown,) = session._study.get_trials()
    assert (shown.state.name, shown.params, shown.value) == ("COMPLETE", {"STEPS": 100}, 5.0)
    asked = session.ask()
    assert isinstance(asked, SearchPoint)
    assert asked.number == 1


def test_evals_at_parts_of_an_epoch_stay_apart_and_are_read_back_as_they_were() -> None:
    """Optuna's steps are whole numbers: four evals an epoch would be one."""
    text = command_study(trials=20).replace('["true"]', '["true"]\nlog = { kind = "hf_trainer" }')
    study = parse_study(text, Path("fake.toml"))
    assert study.progress_unit == "epochs"
    session = Session(study)
    sweep = proposed(session, EMPTY)
    evals = [Eval(epoch, loss, 0.0) for epoch, loss in ((0.25, 2.0), (0.5, 1.8), (0.75, 1.7), (1.25, 1.6))]
    session.report(0, evals)
    recorded = recorded_trials(study, replace(sweep, evals={(0, 0): tuple(evals)}))
    for trial in (session._study.get_trials()[0], *recorded):
        assert sorted(trial.intermediate_values) == [250, 500, 750, 1250]
        seen = of_trial(trial, frozenset(trial.params), target=1.75)
        assert seen is not None
        assert [(e.samples, e.loss) for e in seen.evals] == [(e.samples, e.loss) for e in evals]
        assert seen.reached == 0.75
    assert contents(session._study.get_trials()) == contents(recorded)


def test_a_search_of_requests_proposes_what_is_asked_for_and_nothing_else() -> None:
    session = Session(study_of('sampler = "requests"'), EMPTY)
    assert "every point that was asked for is proposed" in str(session.ask())
    session.enqueue({"LR": 0.03}, "asked for", request=4)
    asked = session.ask()
    assert isinstance(asked, SearchPoint)
    assert (asked.tuned["LR"], asked.request) == (0.03, 4)
    assert isinstance(session.ask(), str)
