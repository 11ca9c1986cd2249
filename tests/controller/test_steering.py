"""A person steers a sweep that runs: every request is done or refused by the driver alone, and stays on record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lora_tune.config.parameters import Conditions
from lora_tune.controller import conclusion
from lora_tune.controller.driver import Driver
from lora_tune.controller.steering import SteeredStudy, apply_requests, fulfilled
from lora_tune.launchers.base import JobState, JobStatus
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.run import RunLog
from lora_tune.status import main as status
from lora_tune.steer import main as steer
from lora_tune.store import Lease
from lora_tune.store.port import Request
from lora_tune.store.records import Attempt, Trial, TrialState, Verdict
from lora_tune.store.requests import Requests
from tests.controller.test_driver import House
from tests.fakes import FakeClock, FakeCluster, command_study


@pytest.fixture
def home(tmp_path: Path) -> House:
    return House(tmp_path, FakeCluster(FakeClock()), command_study(trials=6, parallel=2))


def driver(home: House) -> Driver:
    """A driver whose desk is the sweep's own table, under the driver's lease."""
    desk = Requests(home.store, home.study.name)
    made = home.driver(requests=desk)
    held = home.store.held(home.study.name)
    desk._lease = Lease(home.study.name, held.owner, held.token)
    return made


def ask(home: House, kind: str, **what: Any) -> Request:
    return Requests(home.store, home.study.name).ask(
        Request(kind=kind, what=what, who="ada@login1", asked_at=home.clock.now())
    )


def answers(home: House) -> list[tuple[bool, str]]:
    return [(r.accepted, r.answer) for r in Requests(home.store, home.study.name).all()]


def test_a_trial_is_stopped_by_a_person_and_known_as_such(home: House) -> None:
    driving = driver(home)
    driving.tick()
    ask(home, "stop", trial=0)
    assert driving.run().reason == "all 6 trials are proposed"
    stopped = home.sweep().trials[0]
    assert (stopped.verdict, stopped.sentence) == (Verdict.CANCELLED, "stopped by ada@login1")
    assert len(home.sweep().attempts_of(0)) == 1, "not run again"
    assert answers(home) == [(True, "trial 0 is asked to end")]


def test_a_configuration_is_tried_next_and_once(home: House) -> None:
    driving = driver(home)
    driving.tick()
    ask(home, "enqueue", values={"LR": 0.002}, clone_of=None)
    driving.run()
    asked = [t for t in home.sweep().trials.values() if t.tuned["LR"] == 0.002]
    assert [t.why for t in asked] == ["asked for by ada@login1: try LR=0.002"]
    assert asked[0].number == 2, "the next after those that ran already"


@pytest.mark.parametrize("ticks", range(6))
def test_a_configuration_is_tried_once_whenever_the_driver_was_killed(home: House, ticks: int) -> None:
    """After its answer and before the trial, for one, and long after the trial."""
    first = driver(home)
    first.tick()
    ask(home, "enqueue", values={"LR": 0.002}, clone_of=None)
    ask(home, "enqueue", values={"LR": 0.002}, clone_of=None)
    for _ in range(ticks):
        first.tick()
        home.clock.sleep(20)
    driver(home).run()
    made = [t for t in home.sweep().trials.values() if t.tuned["LR"] == 0.002]
    assert [t.request for t in made] == [0, 1], "asked for twice, run twice"


NONE = Conditions()


class TestRecordsOfAnEarlierRelease:
    """They name no request: a trial counts for one by its words, or else by its values."""

    MADE = Trial(
        number=3, seed=1, tuned={}, parameters={}, why="asked for by ada@login1: try LR=0.002; evals later",
        proposed_at=200.0,
    )  # fmt: skip

    def asked(self, number: int, at: float, **answer: Any) -> Request:
        values = {"values": {"LR": 0.002}}
        return Request(number=number, kind="enqueue", what=values, who="ada@login1", asked_at=at, **answer)

    def test_what_was_run_for_somebody_is_not_run_again(self) -> None:
        assert fulfilled([self.asked(0, 100.0)], [self.MADE], NONE) == {0}
        others = [replace(self.MADE, request=7), replace(self.MADE, why="")]
        assert fulfilled([self.asked(0, 100.0)], others, NONE) == set()

    def test_values_count_where_the_sampler_had_words_of_its_own(self) -> None:
        made = replace(self.MADE, why="the first of a new layout", tuned={"LR": 0.002, "STEPS": 100})
        assert fulfilled([self.asked(0, 100.0)], [made], NONE) == {0}
        assert fulfilled([self.asked(0, 100.0)], [replace(made, point={"LR": 0.002})], NONE) == set()
        assert fulfilled([self.asked(0, 100.0)], [replace(made, tuned={"LR": 0.003})], NONE) == set()
        both = [self.asked(0, 100.0), self.asked(1, 101.0)]
        assert fulfilled(both, [made, self.MADE], NONE) == {0, 1}

    def test_numbers_that_begin_anew_after_a_rescue_are_other_requests(self) -> None:
        made = replace(self.MADE, request=0)
        assert fulfilled([self.asked(0, 100.0)], [made], NONE) == {0}
        assert fulfilled([self.asked(0, 300.0)], [made], NONE) == set()

    def test_what_somebody_asks_for_again_afterwards_is_run(self) -> None:
        assert fulfilled([self.asked(1, 300.0)], [self.MADE], NONE) == set()

    def test_a_trial_counts_for_one_of_two_requests(self) -> None:
        asked = [self.asked(0, 100.0), self.asked(1, 101.0)]
        assert fulfilled(asked, [self.MADE], NONE) == {0}
        assert fulfilled(asked, [self.MADE, replace(self.MADE, number=4)], NONE) == {0, 1}

    def test_a_clock_ahead_of_the_drivers_asks_no_trial_twice(self) -> None:
        assert fulfilled([self.asked(0, 900.0, answered_at=199.0)], [self.MADE], NONE) == {0}


def test_pause_holds_proposals_and_resume_goes_on_also_for_the_next_driver(home: House) -> None:
    ask(home, "pause")
    driving = driver(home)
    for _ in range(5):
        assert driving.tick() == "", "not over"
        home.clock.sleep(1)
    assert home.sweep().trials == {}
    later = driver(home)
    assert later.tick() == ""
    assert home.sweep().trials == {}
    ask(home, "resume")
    later.run()
    assert len(home.sweep().trials) == 6


def test_the_budget_changes_while_it_runs(home: House) -> None:
    ask(home, "set", parallel=4, trials=8)
    driving = driver(home)
    driving.tick()
    assert sum(t.state is not TrialState.FINISHED for t in home.sweep().trials.values()) == 4
    assert driving.run().reason == "all 8 trials are proposed"


@pytest.mark.parametrize(
    ("kind", "what", "refused"),
    [
        ("stop", {"trial": 99}, "there is no trial 99"),
        ("enqueue", {"values": {"LR": 1e9}}, "LR = 1000000000.0 is not within"),
        ("enqueue", {"values": {"RATE": 1.0}}, "RATE is not tuned; tuned are"),
        ("enqueue", {"values": {}}, "no values are given"),
        ("set", {"price_per_node_hour": 3}, "price_per_node_hour cannot change while a sweep runs"),
        ("set", {"parallel": 0}, "parallel"),
        ("dance", {}, "'dance' is nothing that this release can do"),
    ],
)
def test_what_cannot_be_is_refused_in_words_and_changes_nothing(
    home: House, kind: str, what: dict[str, Any], refused: str
) -> None:
    ask(home, kind, **what)
    driver(home).run()
    ((accepted, answer),) = answers(home)
    assert not accepted
    assert answer.startswith("refused: ")
    assert refused in answer
    assert len(home.sweep().trials) == 6


def test_the_course_is_the_sum_of_what_was_accepted(home: House) -> None:
    def request(kind: str, accepted: bool = True, **what: Any) -> Request:
        return Request(kind=kind, what=what, who="", asked_at=0.0, accepted=accepted)

    asked = [request("set", parallel=9), request("set", False, parallel=1), request("pause"), request("set", trials=7)]
    found = apply_requests(home.study, asked)
    assert (found.study.budget.parallel, found.study.budget.trials, found.paused) == (9, 7, True)
    assert apply_requests(home.study, [*asked, request("resume")]).paused is False
    assert apply_requests(home.study, []) == SteeredStudy(home.study)


def test_scancel_by_a_person_is_no_fault_of_the_machine(home: House) -> None:
    trial = Trial(number=0, seed=1, tuned={}, parameters={})
    attempt = Attempt(trial=0, number=0, job_name="x", folder="x")
    cancelled = JobStatus(state=JobState.CANCELLED)
    seen = Diagnosis(FailureKind.INFRASTRUCTURE, "*** JOB 7 ON n1 CANCELLED AT 2026-11-22 ***", "somebody cancelled it")
    found = conclusion.conclude(home.study, [attempt], cancelled, RunLog(), seen, trial=trial)
    assert isinstance(found, conclusion.Finish)
    assert found.verdict is Verdict.CANCELLED
    cause = Diagnosis(FailureKind.INFRASTRUCTURE, "DUE TO PREEMPTION", "", specific=True)
    found = conclusion.conclude(home.study, [attempt], cancelled, RunLog(), cause, trial=trial)
    assert isinstance(found, conclusion.Retry)


class TestCommand:
    """What is typed, from request to the answer that status shows."""

    def call(self, home: House, *words: str) -> tuple[int, str]:
        done = CliRunner().invoke(steer, ["--study", str(home.file), "--output", str(home.paths.root), *words])
        return done.exit_code, done.output

    def test_a_clone_with_a_change_is_typed_answered_and_shown(self, home: House) -> None:
        driving = driver(home)
        driving.tick()
        code, said = self.call(home, "--enqueue", "--clone", "0", "--set", "LR=0.002")
        assert code == 0, said
        assert "request 0: try LR=0.002" in said
        driving.run()
        assert "(trial 0 changed): the next free slot runs it" in self.call(home)[1]
        shown = CliRunner().invoke(status, ["--study", str(home.file), "--output", str(home.paths.root), "--json"])
        (request,) = json.loads(shown.output)["requests"]
        assert request["accepted"] is True
        assert "@" in request["who"]
        shown = CliRunner().invoke(status, ["--study", str(home.file), "--output", str(home.paths.root)])
        assert "requests" in shown.output

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--stop", "7"), "--stop 7: there is no such trial; there are 2, from 0"),
            (("--enqueue", "--set", "LR"), "--set LR: write NAME=VALUE"),
            (("--enqueue", "--set", "LR=fast"), "'fast' is not a number"),
            (("--enqueue", "--set", "LR=7"), "LR = 7.0 is not within"),
            (("--set", "LR=0.002"), "add --enqueue"),
            (("--clone", "9", "--enqueue"), "--clone 9: there is no such trial"),
            (("--parallel", "9" * 400), "budget.parallel: must be an integer of at most 18 digits"),
            (("--stop", "9" * 400), "there is no such trial"),
            (("--parallel", "0"), "parallel"),
        ],
    )
    def test_a_mistake_is_told_before_it_is_a_request(self, home: House, words: tuple[str, ...], said: str) -> None:
        driver(home).tick()
        code, output = self.call(home, *words)
        assert code == 2
        assert said in output
        assert answers(home) == []
