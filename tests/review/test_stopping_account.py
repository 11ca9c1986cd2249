"""What a sweep says of its stopping rule: the rate that it supports, what was stopped, and what audits showed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_tune.config.study import Study, parse_study
from lora_tune.review.stopping import account_text, false_rate, promise_text, stopping_account
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict
from tests.controller.test_policy import NOW, attempt, finished_well, run, study, trial
from tests.fakes import command_study


def ended(number: int, verdict: Verdict, sentence: str = "", **known: Any) -> Trial:
    done = trial(
        number, state=TrialState.FINISHED, finished_at=NOW + number, sentence=sentence, metrics=TrialMetrics(**known)
    )
    return replace(done, verdict=verdict)


def with_trials(sweep: StudyRecords, *trials: Trial) -> StudyRecords:
    attempts = {(t.number, 0): replace(attempt(ended_at=NOW), trial=t.number) for t in trials}
    return replace(
        sweep,
        trials={**sweep.trials, **{t.number: t for t in trials}},
        attempts={**sweep.attempts, **attempts},
    )


def words(study: Study, sweep: StudyRecords) -> str:
    account = stopping_account(study, sweep, NOW)
    assert account is not None
    return account_text(account)


def test_before_enough_have_ended_it_says_when_runs_are_compared() -> None:
    assert words(study(), finished_well(3)) == "3 finished runs so far; runs are compared from 4 on"


def test_it_says_what_the_references_support_and_when_the_stated_rate_is() -> None:
    more = study().with_options({"pruning": {"references": 14}})
    assert words(more, finished_well(15)) == (
        "judged by the best 14 of 15 finished runs, at most 6.67% of runs that would have become the best are "
        "stopped; 1% from 99 references on"
    )


def test_it_says_what_was_caught_and_for_how_much() -> None:
    caught = [ended(n, Verdict.PRUNED, "stalled: further above") for n in (20, 21)]
    missed, diverged = ended(22, Verdict.CENSORED), ended(23, Verdict.PRUNED, "diverged: NaN")
    said = words(study(), with_trials(finished_well(8), *caught, missed, diverged))
    assert "2 of 4 runs that missed the target were stopped, with " in said


def test_audits_measure_the_rate_and_state_their_price() -> None:
    known = {"audited": "stalled: further above", "audited_samples": 200.0, "last_samples": 800.0}
    audits = [ended(20, Verdict.REACHED, **known), ended(21, Verdict.CENSORED, **known)]
    account = stopping_account(study(), with_trials(finished_well(8), *audits), NOW)
    assert account is not None
    assert (account.audited, account.erred) == (2, 1)
    assert account.audit_hours == pytest.approx(2 * 300 / 3600 * 0.75)
    assert account.false_rate is not None
    assert account.false_rate[0] < 1 / 9 < account.false_rate[1]
    assert "1 of 2 audits reached the target" in account_text(account)


def test_the_interval_of_the_measured_rate_is_clopper_and_pearsons() -> None:
    assert false_rate(0, 10, 10, 90) == (0.0, pytest.approx(0.0280, abs=2e-3))
    low, high = false_rate(10, 20, 100, 50)
    assert low < 50 / 100 < high


def test_a_study_says_its_promise_and_its_price_before_the_first_run() -> None:
    audited = study().with_options({"pruning": {"audit": 0.05}})
    assert promise_text(audited) == (
        "stopping: the first 4 runs go to their ends; then each is compared with the best 3 of those that ended: of "
        "runs that would have become the best, at most 25% are stopped; the stated 1% needs 99; 5% of condemned runs "
        "go on as audits"
    )
    assert promise_text(study().with_options({"pruning": {"rule": "none"}})) == ""
    assert stopping_account(study().with_options({"pruning": {"rule": "none"}}), finished_well(3), NOW) is None


class TestWithoutATarget:
    """Every run measures something: good are those that are among the best."""

    @staticmethod
    def study(**pruning: Any) -> Study:
        text = command_study(trials=40).replace("target = 0.0", 'score = "best_value"\nmetric = "eval_loss"')
        return parse_study(text, Path("x.toml")).with_options({"pruning": {"audit": 0.0, **pruning}})

    @staticmethod
    def measured(count: int, *more: Trial, level: float = 9.0) -> StudyRecords:
        """Trials 1 to ``count``, of which the n-th came down to n / 10, and ``more``, which came down to ``level``."""
        found = with_trials(finished_well(count), *more)
        lowest = {**{n: n / 10 for n in range(1, count + 1)}, **{t.number: level for t in more}}
        trials = {n: replace(t, metrics=replace(t.metrics, objective=lowest[n])) for n, t in found.trials.items()}
        evals = {(n, 0): run(9.5, 9.2, low).evals for n, low in lowest.items()}
        return replace(found, trials=trials, evals=evals)

    @pytest.mark.parametrize(("level", "good"), [(9.0, 0), (0.05, 2)])
    def test_an_audit_was_good_where_it_came_among_the_best(self, level: float, good: int) -> None:
        known = {"audited": "stalled: further above", "audited_samples": 200.0, "last_samples": 300.0}
        audits = [ended(n, Verdict.REACHED, **known) for n in (20, 21)]
        said = words(self.study(), self.measured(16, *audits, level=level))
        assert f"{good} of 2 audits reached the best 4" in said

    def test_of_what_missed_them_it_says_how_much_was_stopped(self) -> None:
        stopped, bad = ended(20, Verdict.PRUNED, "stalled: further above"), ended(21, Verdict.REACHED)
        said = words(self.study(), self.measured(16, stopped, bad))
        assert "1 of 14 runs that missed the best 4 were stopped" in said
