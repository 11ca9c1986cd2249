"""Of a job that trials share, what no trial used is the sweep's: all node-hours together are those of its jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import LauncherError
from lora_tune.config.study import parse_study
from lora_tune.controller import limits
from lora_tune.controller.shared_jobs import RELEASE_SECONDS, SharedJobs
from lora_tune.launchers.base import SharedJob
from lora_tune.store.records import Attempt, StudyRecords, UnitOfWork
from tests.fakes import FakeClock, FakeCluster, command_study

BEGAN = 1e9


def attempt(number: int, *stay: float, share: float = 1.0, nodes: int = 1) -> Attempt:
    """A trial's only attempt, from ``stay[0]`` to ``stay[1]`` seconds after its job began; without them it waits."""
    begin, end = [BEGAN + at for at in stay] or (None, None)
    return Attempt(
        trial=number, number=0, job_name=f"s-{number}", folder=f"t/{number}", started_at=begin, ended_at=end,
        node_share=share, node_count=nodes,
    )  # fmt: skip


def job(*numbers: int, ended: float | None = None) -> SharedJob:
    names = [f"s-{number}" for number in numbers]
    ended_at = None if ended is None else BEGAN + ended
    return SharedJob(name=f"pack of {names[0]}", first=names[0], trials=names, started_at=BEGAN, ended_at=ended_at)


def records(*attempts: Attempt) -> StudyRecords:
    return StudyRecords(
        name="s", digest="", study_toml="", began_at=BEGAN, trials={}, evals={},
        attempts={(a.trial, a.number): a for a in attempts},
    )  # fmt: skip


class Jobs:
    """A launcher that tells of these jobs."""

    def __init__(self, *jobs: SharedJob) -> None:
        self.told = list(jobs)

    def shared_jobs(self) -> list[SharedJob]:
        return self.told

    def let_go(self) -> bool:
        return False


def booked(attempts: list[Attempt], *jobs: SharedJob, now: float) -> StudyRecords:
    work = UnitOfWork(records(*attempts))
    SharedJobs(Jobs(*jobs), work, Events()).charge(BEGAN + now)  # type: ignore[arg-type]
    return work.sweep


def test_the_start_the_gaps_and_the_last_wait_of_a_job_are_overhead_of_the_sweep_and_of_no_trial() -> None:
    # Loads for 10 s, trains two side by side for 20 s, waits for 5 s, trains a third alone for 20 s, waits for 20 s.
    trials = [attempt(0, 10, 30, share=0.5), attempt(1, 10, 30, share=0.5), attempt(2, 35, 55)]
    sweep = booked(trials, job(0, 1, 2, ended=75), now=80)
    assert sweep.overhead_hours * 3600 == pytest.approx(10 + 5 + 20)
    assert sweep.node_hours(BEGAN + 80) * 3600 == pytest.approx(75)
    assert [a.node_hours(BEGAN + 80) * 3600 for a in sweep.attempts.values()] == pytest.approx([10, 10, 20])


def test_a_job_that_runs_has_held_its_nodes_until_now() -> None:
    sweep = booked([attempt(0, nodes=2)], job(0), now=30)
    assert sweep.node_hours(BEGAN + 30) * 3600 == pytest.approx(2 * 30)


def test_a_budget_of_node_hours_is_spent_by_overhead_too() -> None:
    limited = parse_study(command_study(trials=9), Path("x.toml")).with_options({"budget": {"node_hours": 70 / 3600}})
    trials = [attempt(0, 10, 55)]
    assert not limits.spent(limited, records(*trials), BEGAN + 80)
    assert "node-hours is spent" in limits.spent(limited, booked(trials, job(0, ended=75), now=80), BEGAN + 80)


def test_what_a_job_gave_trials_that_no_record_knows_any_more_is_overhead_of_those_that_are_known() -> None:
    sweep = booked([attempt(1, 10, 20)], job(0, 1, 2, ended=75), now=80)
    assert sweep.attempts[1, 0].overhead_seconds == pytest.approx(65)
    assert not booked([attempt(7, 10, 20)], job(0, ended=75), now=80).overhead_hours


def test_two_jobs_that_were_started_for_one_trial_are_both_borne_by_it() -> None:
    # The first began and was never asked for anything: its driver died before it wrote the request.
    unasked = replace(job(0, ended=30), name="pack-0000", trials=[])
    sweep = booked([attempt(0, 40, 60)], unasked, replace(job(0, ended=75), name="pack-0001"), now=80)
    assert sweep.node_hours(BEGAN + 80) * 3600 == pytest.approx(30 + 75)


class Names(list[str]):
    """Names of trials that count how many of them were asked for."""

    asked = 0

    def __getitem__(self, which: Any) -> Any:
        found = super().__getitem__(which)
        self.asked += len(found)
        return found


def test_a_look_at_a_job_that_thousands_have_left_asks_for_those_that_train() -> None:
    over, alive = [attempt(i, 10 + i, 11 + i) for i in range(3000)], replace(attempt(3000), started_at=BEGAN + 3010)
    names = Names(a.job_name for a in (*over, alive))
    shared = replace(job(0), trials=names)
    work = UnitOfWork(records(*over, alive))
    jobs = SharedJobs(Jobs(shared), work, Events())  # type: ignore[arg-type]
    jobs.charge(BEGAN + 3020)
    assert names.asked == 3001
    jobs.charge(BEGAN + 3030)
    assert names.asked == 3001
    assert work.sweep.node_hours(BEGAN + 3030) * 3600 == pytest.approx(3030)


def test_while_a_job_runs_no_record_is_written_for_less_than_a_second() -> None:
    work = UnitOfWork(records(attempt(0)))
    jobs = SharedJobs(Jobs(job(0)), work, Events())  # type: ignore[arg-type]
    jobs.charge(BEGAN + 5)
    assert work.take_changes().attempts
    jobs.charge(BEGAN + 5.5)
    assert not work.take_changes().attempts


@given(
    stays=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0.01, 1)), min_size=1, max_size=8),
    end=st.floats(100, 200),
)
def test_all_node_hours_together_are_those_of_the_job(stays: list[tuple[float, float, float]], end: float) -> None:
    trials = [attempt(i, begin, begin + lasts, share=share / 8) for i, (begin, lasts, share) in enumerate(stays)]
    sweep = booked(trials, job(*range(len(trials)), ended=end), now=300)
    assert sweep.node_hours(BEGAN + 300) * 3600 == pytest.approx(end, abs=0.01)


class Cluster:
    """Jobs that live until they are let go, and end a look later."""

    def __init__(self, ends: bool = True, answers: bool = True) -> None:
        self.ended: float | None = None
        self._ends, self._answers, self._asked = ends, answers, 0

    def shared_jobs(self) -> list[SharedJob]:
        return [job(0, ended=self.ended)] if self._answers else []

    def let_go(self) -> bool:
        if not self._answers:
            raise LauncherError("Socket timed out")
        self._asked += 1
        if self._ends and self._asked == 2:
            self.ended = 40
        return self.ended is None


class Events:
    def warn_once(self, kind: str, text: str) -> None:
        assert (kind, text) == ("cluster", "Socket timed out")


def at_the_end(cluster: object) -> tuple[SharedJobs, UnitOfWork]:
    work = UnitOfWork(records(attempt(0, 10, 30)))
    return SharedJobs(cluster, work, Events()), work  # type: ignore[arg-type]


def test_a_sweep_that_is_over_waits_until_its_jobs_have_ended_and_all_is_booked() -> None:
    jobs, work = at_the_end(Cluster())
    assert [jobs.let_go(BEGAN + at) for at in (31, 41, 42)] == [False, False, True]
    assert work.sweep.node_hours(BEGAN + 99) * 3600 == pytest.approx(40)


@pytest.mark.parametrize("cluster", [Cluster(ends=False), Cluster(answers=False)], ids=["hangs", "does not answer"])
def test_it_does_not_wait_for_ever(cluster: Cluster) -> None:
    jobs, _ = at_the_end(cluster)
    assert not jobs.let_go(BEGAN + 31)
    assert jobs.let_go(BEGAN + 32 + RELEASE_SECONDS)


def test_where_trials_share_no_jobs_there_is_nothing_to_wait_for() -> None:
    jobs, work = at_the_end(FakeCluster(FakeClock()))
    jobs.charge(BEGAN + 50)
    assert jobs.let_go(BEGAN + 50)
    assert work.sweep.attempts[0, 0] == replace(attempt(0, 10, 30), overhead_seconds=0.0)
