"""The reconcile loop: whole sweeps on a fake cluster, with a crash at every possible moment."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_tune.base.errors import LauncherError, SetupError, StoreError, SweepBusyError
from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import Study, load_study
from lora_tune.controller.driver import SURVEY_SECONDS, Dependencies, Driver
from lora_tune.launchers.base import JobState, JobStatus, Ticket
from lora_tune.launchers.files import write_files
from lora_tune.review.screen import Plain, Quiet
from lora_tune.search.optuna_tables import OptunaTables
from lora_tune.search.session import Session
from lora_tune.store import Lease, Store, sqlite_url
from lora_tune.store.records import StopKind, StudyRecords, Trial, TrialState, UnitOfWork, Verdict
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import Job, Proposal
from tests.builders import study_of, sweep_of
from tests.fakes import (
    Crash,
    Crashing,
    FakeClock,
    FakeCluster,
    Script,
    SurveyedCluster,
    Turn,
    command_study,
    curve_script,
    record,
    write_study,
)


class House:
    """Everything a driver needs, in one folder; ``driver()`` is a process start."""

    def __init__(self, folder: Path, cluster: FakeCluster, study: str) -> None:
        self.file = write_study(folder, study)
        self.study: Study = load_study(self.file)
        self.paths = SweepPaths(folder / "sweep")
        self.paths.root.mkdir()
        self.cluster, self.clock = cluster, cluster.clock
        self.store = Store(sqlite_url(self.paths.database))
        self.store.begin(self.study.name, self.study.digest, study, self.clock.now())
        self.session: Any = None

    def driver(self, turn: Turn | None = None, fixed_at: float = -math.inf, **replace: Any) -> Driver:
        lease: Lease = self.store.take_lease(self.study.name, "test", self.clock.now(), dead=True)
        turn = turn or Turn()
        self.session = Session(self.study, self.sweep())
        ports = {
            "workload": load_workload(self.study, self.file),
            "launcher": Crashing(self.cluster, turn, ("submit", "cancel")),
            "store": Crashing(self.store, turn, ("save",)),
            "session": Crashing(self.session, turn, ("ask", "tell", "report")),
            "clock": self.clock,
            "view": Quiet(),
            "projection": Crashing(OptunaTables(self.study, self.store, lease), turn, ("follow",)),
        }
        return Driver(
            self.study, self.paths, Dependencies(**{**ports, **replace}), lease, period=1.0, fixed_at=fixed_at
        )

    def sweep(self) -> StudyRecords:
        found = self.store.load(self.study.name)
        assert found is not None
        return found


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(FakeClock())


def house(tmp_path: Path, cluster: FakeCluster, **budget: Any) -> House:
    return House(tmp_path, cluster, command_study(**{"trials": 6, "parallel": 2, **budget}))


class Patient:
    """A search that proposes nothing while it waits for a result."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._open = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ask(self) -> Any:
        if self._open:
            return "it waits for a result"
        self._open += 1
        return self._inner.ask()

    def tell(self, record: Trial) -> None:
        self._open -= 1
        self._inner.tell(record)


def test_a_sweep_ends_only_once_the_search_knows_every_result(tmp_path: Path, cluster: FakeCluster) -> None:
    """The last trial ended in the tick in which the search was asked, which did not know it yet: the sweep was over."""
    home = house(tmp_path, cluster, trials=3)
    inner = home.driver()._dependencies.session
    assert home.driver(session=Patient(inner)).run().reason == "all 3 trials are proposed"
    assert len(home.sweep().trials) == 3


def in_optunas_tables(database: Path) -> list[tuple[str, float | None]]:
    """State and value of each trial, by number; Optuna's own way to open them takes a second."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute(
            "SELECT state, value FROM trials LEFT JOIN trial_values USING (trial_id) ORDER BY number"
        ).fetchall()


def assert_all_accounted_for(house: House, trials: int) -> None:
    """Every trial finished, every job ran once, and Optuna's tables agree."""
    sweep = house.sweep()
    shown = in_optunas_tables(house.paths.database)
    assert sorted(sweep.trials) == list(range(trials))
    for trial in sweep.trials.values():
        assert trial.state is TrialState.FINISHED
        state, value = shown[trial.number]
        if trial.verdict is Verdict.REACHED:
            assert (state, value) == ("COMPLETE", trial.metrics.objective) == ("COMPLETE", trial.seconds)
        else:
            assert state in ("PRUNED", "FAIL")
            assert trial.seconds is None
            assert trial.metrics.objective is None
    assert all(count == 1 for count in house.cluster.starts.values())
    assert set(house.cluster.starts) == {a.job_name for a in sweep.attempts.values()}


def test_an_intention_from_before_the_clock_was_set_back_is_not_waited_for(
    tmp_path: Path, cluster: FakeCluster
) -> None:
    """Written down an hour ahead, by a driver that was killed then: the trial was not submitted for that hour."""
    there = house(tmp_path, cluster, trials=1)
    there.clock.time += 3600
    first = there.driver(launcher=Crashing(cluster, Turn(0), ("submit",)))
    with pytest.raises(Crash):
        first.run()
    there.clock.time = there.clock.true
    second = there.driver()
    second._submit_grace = 10.0
    for _ in range(8):
        second.tick()
        there.clock.sleep(1.0)
    assert cluster.starts == {}, "the scheduler may still answer"
    second.run()
    assert there.clock.now() < 1_700_000_000.0 + 1800
    assert_all_accounted_for(there, 1)


def test_an_attempt_that_has_begun_is_not_submitted_again_whatever_became_of_its_end(
    tmp_path: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver was killed, or its database set back, before the submission was saved; how it ended is not known."""
    there = house(tmp_path, cluster, trials=1)
    with pytest.raises(Crash):
        there.driver(launcher=Crashing(cluster, Turn(1), ("submit",))).run()
    (name,) = cluster.jobs
    begun, status = cluster.jobs.pop(name), cluster._status

    def as_its_folder_says(ticket: Ticket) -> JobStatus:
        if ticket.name == name:
            return JobStatus(state=JobState.LOST, started_at=begun.submitted, reason="ended.json is of another attempt")
        return status(ticket)

    monkeypatch.setattr(cluster, "_status", as_its_folder_says)
    there.driver().run()
    assert cluster.starts[name] == 1
    first, second = there.sweep().attempts_of(0)
    assert first.token != second.token
    assert_all_accounted_for(there, 1)


def test_a_whole_sweep(tmp_path: Path, cluster: FakeCluster) -> None:
    there = house(tmp_path, cluster, trials=8)
    outcome = there.driver().run()
    assert outcome.reason == "all 8 trials are proposed"
    assert_all_accounted_for(there, 8)
    sweep = there.sweep()
    assert cluster.most_at_once == 2
    verdicts = {t.verdict for t in sweep.trials.values()}
    assert Verdict.REACHED in verdicts
    assert verdicts & {Verdict.PRUNED, Verdict.CAPPED}, "some were stopped early"
    best = sweep.best()
    assert best is not None
    assert best.seconds == min(t.seconds for t in sweep.trials.values() if t.seconds is not None)


def test_time_to_target_comes_from_the_log_not_from_the_poller(tmp_path: Path, cluster: FakeCluster) -> None:
    there = house(tmp_path, cluster, trials=4, parallel=1)
    there.driver().run()
    for trial in there.sweep().trials.values():
        if trial.samples is not None:
            assert trial.seconds == pytest.approx(trial.samples / 100, abs=0.002)


def test_the_log_keeps_what_happened_and_why(tmp_path: Path, cluster: FakeCluster) -> None:
    there = house(tmp_path, cluster)
    there.driver().run()
    events = [json.loads(line) for line in there.paths.driver_log.read_text().splitlines()]
    assert [e["event"] for e in events].count("submitted") == 6
    stopped = [e for e in events if e["event"] == "stop"]
    assert stopped
    assert all(any(w in e["text"] for w in ("reaching", "above", "runs of trial")) for e in stopped)


def test_who_watches_is_told_one_terse_line_a_trial(tmp_path: Path, cluster: FakeCluster) -> None:
    out = io.StringIO()
    there = house(tmp_path, cluster, trials=8)
    there.driver(view=Plain(out)).run()
    lines = [line for line in out.getvalue().splitlines() if line.startswith("trial ")]
    for trial in there.sweep().trials.values():
        (line,) = (line for line in lines if line.startswith(f"trial {trial.number} "))
        assert line[9:20].strip() == trial.verdict
        assert trial.sentence.startswith(line[21:]), "what it says of why is how the record begins"
        assert "; " not in line
        assert len(line) <= 110
    assert len(lines) == len(there.sweep().trials), "no second line says that a job is being stopped"


def test_a_failure_is_told_whole_with_its_remedy(tmp_path: Path) -> None:
    out = io.StringIO()
    there = house(tmp_path, FakeCluster(FakeClock(), lambda *_: iter([(1.0, "step 10; eval loss 0.5")])), trials=1)
    there.driver(view=Plain(out)).run()
    (trial,) = there.sweep().trials.values()
    assert trial.verdict is Verdict.FAILED
    remedy = there.sweep().attempts_of(0)[-1].remedy
    assert remedy
    assert f"trial 0  failed      {trial.sentence}; {remedy}" in out.getvalue().splitlines()


CRASH_POINTS = 120
"""A little more than the turns of an undisturbed sweep of two trials; checked below."""


@pytest.mark.parametrize("turns", range(CRASH_POINTS))
def test_killed_at_any_moment_nothing_is_lost_and_nothing_runs_twice(
    turns: int, tmp_path: Path, cluster: FakeCluster
) -> None:
    there = house(tmp_path, cluster, trials=2)
    try:
        there.driver(Turn(turns)).run()
    except Crash:
        there.clock.sleep(3)
    there.driver().run()
    assert_all_accounted_for(there, 2)


def test_the_crash_points_cover_the_whole_sweep(tmp_path: Path, cluster: FakeCluster) -> None:
    there = house(tmp_path, cluster, trials=2)
    turn = Turn(10_000)
    there.driver(turn).run()
    assert turn.left is not None
    assert CRASH_POINTS - 10 <= 10_000 - turn.left <= CRASH_POINTS


def test_a_cluster_that_is_away_loses_nothing(tmp_path: Path, cluster: FakeCluster) -> None:
    there = house(tmp_path, cluster, trials=4)
    driver = there.driver()
    for _ in range(3):
        driver.tick()
        there.clock.sleep(1)
    cluster.down = True
    for _ in range(60):
        assert driver.tick() == ""
        there.clock.sleep(1)
    cluster.down = False
    driver.run()
    assert_all_accounted_for(there, 4)


class Away:
    """A database that is away for a while."""

    def __init__(self, inner: Any, names: tuple[str, ...]) -> None:
        self.inner, self.names, self.away = inner, names, False
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name) if name in self.names else getattr(self.inner, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        self.asked.append(name)
        if self.away:
            raise StoreError("the database does not answer")
        return getattr(self.inner, name)(*arguments)


def test_a_database_that_is_away_is_caught_up_with(tmp_path: Path, cluster: FakeCluster) -> None:
    there = house(tmp_path, cluster, trials=4)
    store = Away(there.store, ("save",))
    driver = there.driver(store=store)
    for _ in range(2):
        driver.tick()
        there.clock.sleep(1)
    store.away = True
    for _ in range(60):
        assert driver.tick() == ""
        there.clock.sleep(1)
    assert all(job.ended is not None for job in cluster.jobs.values()), "running jobs were watched to their end"
    store.away = False
    driver.run()
    assert_all_accounted_for(there, 4)


def test_while_the_database_is_away_it_is_asked_once_a_tick(tmp_path: Path) -> None:
    cluster = SurveyedCluster(FakeClock())
    there = house(tmp_path, cluster, trials=2, parallel=2)
    store = Away(there.store, ("save",))
    driver = there.driver(store=store)
    driver.tick()
    store.away = True
    driver.tick()
    store.asked.clear()
    driver._orphans.surveyed_at -= SURVEY_SECONDS
    for _ in range(60):
        there.clock.sleep(1)
        driver.tick()
    assert store.asked == ["save"] * 60
    store.away = False
    driver.run()
    assert_all_accounted_for(there, 2)


def test_a_driver_that_was_overtaken_without_the_database_tells_the_search_nothing(tmp_path: Path) -> None:
    """Its next proposal would have the number of one of the other driver's."""
    there = house(tmp_path, FakeCluster(FakeClock()), trials=6, parallel=2)
    store = Away(there.store, ("save",))
    driver = there.driver(store=store)
    session = Away(there.session, ("ask", "tell"))
    object.__setattr__(driver._dependencies, "session", session)
    driver.tick()
    store.away = True
    for _ in range(60):
        there.clock.sleep(1)
        driver.tick()
    there.store.take_lease("fake", "another", there.clock.now(), dead=True)
    store.away = False
    session.asked.clear()
    with pytest.raises(SweepBusyError, match="taken over"):
        driver.tick()
    assert session.asked == []


def test_without_the_database_a_failed_trial_waits_for_its_next_attempt(tmp_path: Path) -> None:
    """Another driver, which would not know of the attempt, would start the same job."""
    lines = iter(["bash: /data/x: No space left on device"] * 2)
    cluster = FakeCluster(
        FakeClock(),
        lambda environment, at: iter([(5.0, line)]) if (line := next(lines, "")) else curve_script(environment, at),
    )
    there = house(tmp_path, cluster, trials=2, parallel=2)
    store = Away(there.store, ("save",))
    driver = there.driver(store=store)
    driver.tick()
    store.away = True
    for _ in range(30):
        there.clock.sleep(1)
        driver.tick()
    assert all(job.ended is not None for job in cluster.jobs.values())
    assert sorted(cluster.starts) == ["fake-0000-0", "fake-0001-0"]
    store.away = False
    for _ in range(2):
        driver.tick()
    assert sorted(cluster.starts) == ["fake-0000-0", "fake-0000-1", "fake-0001-0", "fake-0001-1"]
    driver.run()
    assert_all_accounted_for(there, 2)


def test_a_driver_that_lost_its_lease_neither_writes_nor_submits(tmp_path: Path, cluster: FakeCluster) -> None:
    there = house(tmp_path, cluster)
    first = there.driver()
    first.tick()
    jobs = dict(cluster.starts)
    there.store.take_lease("fake", "another", there.clock.now(), dead=True)
    with pytest.raises(SweepBusyError, match="taken over"):
        first.run()
    assert cluster.starts == jobs


def test_a_driver_that_lost_its_lease_while_it_stood_still_stops_no_job(tmp_path: Path) -> None:
    cluster = FakeCluster(FakeClock(), lambda environment, start: iter([(1e6, "never")]))
    there = house(tmp_path, cluster, trials=1, trial_minutes=0.1)
    first = there.driver()
    first.tick()
    there.store.take_lease("fake", "another", there.clock.now(), dead=True)
    there.clock.sleep(60)
    with pytest.raises(SweepBusyError, match="taken over"):
        first.tick()
    assert [job.ended for job in cluster.jobs.values()] == [None]


def test_a_second_driver_is_refused_with_the_owner(tmp_path: Path, cluster: FakeCluster) -> None:
    there = house(tmp_path, cluster)
    there.store.take_lease("fake", "node7 pid 12 start 99", there.clock.now())
    with pytest.raises(SweepBusyError, match="driven by node7 pid 12"):
        there.store.take_lease("fake", "other", there.clock.now() + 1)


def test_a_job_that_does_not_end_is_killed(tmp_path: Path) -> None:
    cluster = FakeCluster(FakeClock(), lambda environment, start: iter([(1e6, "never")]))
    there = house(tmp_path, cluster, trials=1, trial_minutes=0.1)
    driver = there.driver()
    driver.tick()
    (job,) = cluster.jobs.values()
    job.stubborn = True
    driver.run()
    attempt = there.sweep().attempts[0, 0]
    assert attempt.stop is StopKind.TIME_LIMIT
    assert attempt.killed_at is not None
    assert attempt.killed_at - (attempt.stop_at or 0) > there.study.site.kill_seconds


def test_a_job_that_refuses_to_die_is_shown_with_its_trial(tmp_path: Path) -> None:
    cluster = FakeCluster(FakeClock(), lambda environment, start: iter([(1e6, "never")]))
    there = house(tmp_path, cluster, trials=1, trial_minutes=0.1)
    driver = there.driver()
    driver.tick()
    (job,) = cluster.jobs.values()
    job.stubborn = job.immortal = True
    for _ in range(200):
        driver.tick()
        there.clock.sleep(1)
    assert "refuses to die on n1: tell the administrator" in there.sweep().trials[0].sentence
    job.immortal = False
    driver.run()
    attempt = there.sweep().attempts[0, 0]
    assert attempt.failure == "configuration"
    assert "refuses" not in there.sweep().trials[0].sentence


def test_a_sweep_whose_trials_fail_alike_watches_those_that_run_to_their_end(tmp_path: Path) -> None:
    """Trial 0 takes its time and reaches the target; the three after it die at once. Then there is no reason to end."""
    begun: list[float] = []

    def script(environment: Mapping[str, str], start: float) -> Script:
        begun.append(start)
        if len(begun) == 1:
            return curve_script({"LR": "1e-3", "STEPS": "6000", "TARGET": "-0.9"}, start)
        if len(begun) <= 4:
            return iter([(1.0, "FileNotFoundError: [Errno 2] No such file or directory: '/data'")])
        return curve_script(environment, start)

    there = house(tmp_path, FakeCluster(FakeClock(), script), trials=7, attempts=1)
    assert there.driver().run().reason == "all 7 trials are proposed"
    verdicts = [trial.verdict for trial in there.sweep().trials.values()]
    assert verdicts[:4] == [Verdict.REACHED, *[Verdict.FAILED] * 3]
    assert Verdict.FAILED not in verdicts[4:]
    ended = there.sweep().attempts[0, 0].ended_at
    assert ended is not None
    assert min(begun[4:]) >= ended > begun[3] + 30, "nothing more is started while the sweep may have to end"


def test_a_log_that_cannot_be_read_fails_its_own_trial_only(tmp_path: Path, cluster: FakeCluster) -> None:
    there = house(tmp_path, cluster, trials=3, parallel=3, attempts=2)
    driver = there.driver()
    driver.tick()
    spoilt = there.paths.attempt(1, 0).log
    readable = cluster.jobs["fake-0001-0"].job.log
    assert spoilt == readable
    readable.unlink(missing_ok=True)
    cluster.jobs["fake-0001-0"].job = replace(cluster.jobs["fake-0001-0"].job, log=there.paths.root / "elsewhere.log")
    spoilt.mkdir()
    driver.run()
    sweep = there.sweep()
    failed = sweep.attempts[1, 0]
    assert failed.failure == "infrastructure"
    assert "not a regular file" in failed.line
    assert len(sweep.attempts_of(1)) == 2
    assert [len(sweep.attempts_of(n)) for n in (0, 2)] == [1, 1]
    assert not {t.verdict for t in sweep.trials.values()} & {Verdict.FAILED, Verdict.CANCELLED}


def test_jobs_that_no_record_wants_are_cancelled(tmp_path: Path) -> None:
    """The database was put back from yesterday's copy, say: its jobs of today are nobody's."""
    cluster = SurveyedCluster(FakeClock())
    there = house(tmp_path, cluster, trials=4)
    orphan = replace(
        load_workload(there.study, there.file).job(
            Proposal(number=77, attempt=0, seed=1, parameters={"LR": 1e-3, "STEPS": 100, "GBS": 8}),
            there.paths.attempt(77, 0).folder,
        )
    )
    write_files(orphan)
    other = replace(orphan, name="other-0001-0", log=tmp_path / "other" / "job.log")
    other.log.parent.mkdir()
    for job in (orphan, other):
        cluster.submit(job)
    driver = there.driver()
    driver.tick()
    assert cluster.jobs[orphan.name].ended is not None
    assert cluster.jobs[other.name].ended is None, "another sweep's job is left alone"
    assert all(job.ended is None for name, job in cluster.jobs.items() if name.startswith("fake-000"))
    events = [json.loads(line) for line in there.paths.driver_log.read_text().splitlines()]
    assert [e["event"] for e in events].count("orphan") == 1


def test_a_job_that_is_lost_and_runs_all_the_same_is_ended_before_its_successor_has_long_run(tmp_path: Path) -> None:
    """Its next attempt would run beside it; the survey came ten minutes later."""

    class Forgetful(SurveyedCluster):
        lost: str = ""

        def _status(self, ticket: Ticket) -> JobStatus:
            return JobStatus(state=JobState.LOST) if ticket.name == self.lost else super()._status(ticket)

    cluster = Forgetful(FakeClock())
    there = house(tmp_path, cluster, trials=1)
    driver = there.driver()
    driver.tick()
    (cluster.lost,) = cluster.jobs
    there.clock.sleep(1)
    driver.tick()
    there.clock.sleep(1)
    driver.tick()
    assert cluster.jobs[cluster.lost].ended is not None
    assert [job.ended for name, job in cluster.jobs.items() if name != cluster.lost] == [None], "the next attempt runs"


def test_a_driver_that_was_overtaken_while_it_stood_still_cancels_no_job_of_the_other(tmp_path: Path) -> None:
    """A suspended machine, a file system that hung: the first thing due afterwards is the look for orphans."""
    cluster = SurveyedCluster(FakeClock())
    there = house(tmp_path, cluster, trials=4)
    first = there.driver()
    first.tick()
    second = there.driver()
    while len(cluster.jobs) == 2:
        second.tick()
        there.clock.sleep(1)
    going = [name for name, job in cluster.jobs.items() if job.ended is None]
    assert any(name not in {a.job_name for a in first.sweep.attempts.values()} for name in going)
    first._orphans.surveyed_at -= SURVEY_SECONDS
    with pytest.raises(SweepBusyError, match="taken over"):
        first.tick()
    assert all(cluster.jobs[name].ended is None for name in going)


def test_without_the_database_nobody_knows_which_jobs_are_orphans(tmp_path: Path) -> None:
    """Cut off from it, a driver may have been overtaken: the jobs that it does not know may be another driver's."""
    cluster = SurveyedCluster(FakeClock())
    there = house(tmp_path, cluster, trials=4)
    store = Away(there.store, ("save",))
    first = there.driver(store=store)
    first.tick()
    store.away = True
    second = there.driver()
    while len(cluster.jobs) == 2:
        second.tick()
        there.clock.sleep(1)
    going = [name for name, job in cluster.jobs.items() if job.ended is None]
    first._orphans.surveyed_at -= SURVEY_SECONDS
    first.tick()
    assert all(cluster.jobs[name].ended is None for name in going)
    store.away = False
    with pytest.raises(SweepBusyError, match="taken over"):
        first.tick()
    assert all(cluster.jobs[name].ended is None for name in going)


def failing(line: str, code: int = 1) -> Any:
    def script(environment: Any, start: float) -> Any:
        yield 1.0, line

    return script


def test_a_machine_that_fails_a_trial_gets_another_chance_without_a_word_to_the_search(tmp_path: Path) -> None:
    clock = FakeClock()
    broken: list[int] = []

    def script(environment: Any, start: float) -> Any:
        from tests.fakes import curve_script

        if not broken:
            broken.append(1)
            return iter([(1.0, "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024 DUE TO NODE FAILURE ***")])
        return curve_script(environment, start)

    cluster = FakeCluster(clock, script)
    there = house(tmp_path, cluster, trials=2, parallel=1)
    there.driver().run()
    sweep = there.sweep()
    assert len(sweep.attempts_of(0)) == 2
    assert sweep.attempts[0, 0].failure
    assert sweep.trials[0].verdict in (Verdict.REACHED, Verdict.PRUNED, Verdict.CENSORED)
    assert_all_accounted_for(there, 2)


def where_the_node_fails(tmp_path: Path, launcher: str) -> tuple[House, FakeCluster]:
    fault = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024 DUE TO NODE FAILURE ***"
    cluster = FakeCluster(FakeClock(), lambda environment, start: iter([(1.0, fault)]))
    study = command_study(trials=5, parallel=1, attempts=1)
    return House(tmp_path, cluster, study.replace("[site]", f'[site]\nlauncher = "{launcher}"')), cluster


def test_the_only_machine_is_never_left_out_nor_said_to_be(tmp_path: Path) -> None:
    """What ``timeout`` ends with all its jobs leaves two in a row behind that failed on the only node."""
    there, _ = where_the_node_fails(tmp_path, "local")
    with pytest.raises(SetupError, match="3 trials in a row failed"):
        there.driver().run()
    assert [there.sweep().attempts[number, 0].exclude_nodes for number in range(3)] == [(), (), ()]
    assert "is excluded" not in there.paths.driver_log.read_text()


def test_a_node_where_two_trials_failed_in_a_row_is_left_out(tmp_path: Path) -> None:
    there, cluster = where_the_node_fails(tmp_path, "slurm")
    with pytest.raises(SetupError, match="3 trials in a row failed"):
        there.driver().run()
    left_out = [there.sweep().attempts[number, 0].exclude_nodes for number in range(3)]
    assert left_out == [(), (), ("n1",)]
    assert cluster.jobs["fake-0002-0"].job.exclude_nodes == ("n1",)
    said = [json.loads(line).get("text", "") for line in there.paths.driver_log.read_text().splitlines()]
    assert [text for text in said if "node n1 is excluded for a day: 2 trials in a row" in text]


def test_trials_that_print_nothing_end_the_sweep_with_the_reason(tmp_path: Path) -> None:
    cluster = FakeCluster(FakeClock(), lambda environment, start: iter(()))
    there = house(tmp_path, cluster, trials=50, parallel=1)
    with pytest.raises(SetupError, match="3 trials in a row failed"):
        there.driver().run()
    assert len(there.sweep().trials) == 3


def test_a_success_that_is_only_claimed_is_none(tmp_path: Path) -> None:
    def liar(environment: Any, start: float) -> Any:
        yield 1.0, record(start + 1, "run_start", None)
        yield 2.0, record(start + 2, "eval_accuracy", 1.5, samples_count=100)
        yield 3.0, record(start + 3, "run_stop", None, status="success")

    there = house(tmp_path, FakeCluster(FakeClock(), liar), trials=1)
    there.driver().run()
    trial = there.sweep().trials[0]
    assert trial.verdict is Verdict.CENSORED
    assert trial.seconds is None


def test_the_node_hour_budget_is_exceeded_by_no_more_than_what_runs(tmp_path: Path, cluster: FakeCluster) -> None:
    there = House(tmp_path, cluster, command_study(node_hours=0.01, parallel=2))
    outcome = there.driver().run()
    assert "0.01 node-hours" in outcome.reason
    sweep = there.sweep()
    last = max(a.intended_at for a in sweep.attempts.values())
    spent_then = sum(
        max(0.0, min(a.ended_at or 0, last) - (a.started_at or 0)) / 3600
        for a in sweep.attempts.values()
        if a.intended_at < last
    )
    assert spent_then < 0.01


def test_no_further_attempt_is_submitted_once_a_budget_is_spent(tmp_path: Path) -> None:
    broken = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024 DUE TO NODE FAILURE ***"
    cluster = FakeCluster(FakeClock(), lambda environment, start: iter([(40.0, broken)]))
    there = house(tmp_path, cluster, trials=2, parallel=1, node_hours=0.01, attempts=5)
    there.driver().run()
    (trial,) = there.sweep().trials.values()
    assert trial.verdict is Verdict.CANCELLED
    assert "the budget of 0.01 node-hours is spent" in trial.sentence
    assert len(there.sweep().attempts) == 1


@pytest.mark.parametrize("steps", [(0, -3600, 30, -7200, 0), (0, 7200, -30, 7200, 0)], ids=["back", "ahead"])
def test_a_clock_that_is_set_loses_nothing_and_stops_nothing(
    steps: Sequence[int], tmp_path: Path, cluster: FakeCluster
) -> None:
    there = house(tmp_path, cluster, trials=4)
    driver = there.driver()
    for step in steps:
        assert driver.tick() == ""
        there.clock.sleep(1)
        there.clock.time += step  # the driver's; the cluster's own clock stays right
    driver.run()
    assert_all_accounted_for(there, 4)
    assert all(a.node_hours(there.clock.now()) >= 0 for a in there.sweep().attempts.values())
    assert not [a for a in there.sweep().attempts.values() if a.stop in (StopKind.TIME_LIMIT, StopKind.SILENT)]


def test_cancel_all_leaves_nothing_running(tmp_path: Path, cluster: FakeCluster) -> None:
    there = house(tmp_path, cluster)
    driver = there.driver()
    driver.tick()
    assert driver.cancel_all(60)
    assert all(job.ended is not None for job in cluster.jobs.values())
    assert {t.verdict for t in there.sweep().trials.values()} == {Verdict.CANCELLED}


def test_cancel_all_starts_nothing_that_was_not_submitted_yet(tmp_path: Path) -> None:
    class Slow(FakeCluster):
        late = True

        def submit(self, job: Job) -> str:
            if self.late:
                raise LauncherError("Socket timed out")
            return super().submit(job)

    cluster = Slow(FakeClock())
    there = house(tmp_path, cluster)
    driver = there.driver()
    driver.tick()
    cluster.late = False
    assert driver.cancel_all(90)
    assert cluster.starts == {}
    sweep = there.sweep()
    assert {t.verdict for t in sweep.trials.values()} == {Verdict.CANCELLED}
    assert all(a.ended_at is not None and a.node_hours(0) == 0 for a in sweep.attempts.values())


def slow_search(tmp_path: Path, cluster: FakeCluster) -> tuple[House, Driver]:
    """Twenty slots to be filled by a search that takes a fifth of a second for a proposal."""
    there = house(tmp_path, cluster, trials=20, parallel=20)
    driver = there.driver()
    plain = there.session.ask

    def slow() -> Any:
        there.clock.sleep(0.2)
        return plain()

    there.session.ask = slow
    return there, driver


def test_filling_many_slots_does_not_keep_running_trials_waiting(tmp_path: Path, cluster: FakeCluster) -> None:
    _, driver = slow_search(tmp_path, cluster)
    driver.tick()
    assert len(cluster.jobs) == 3, "half a second's worth, and the next tick goes on"
    driver.tick()
    assert len(cluster.jobs) == 6


def test_slots_wait_for_slow_proposals_and_not_for_the_next_tick_as_well(tmp_path: Path, cluster: FakeCluster) -> None:
    """A tick's pause after every half second of proposals left most of a pack's slots empty."""
    there, driver = slow_search(tmp_path, cluster)
    began = there.clock.now()
    driver.run()
    submitted = [a.submitted_at or math.inf for a in there.sweep().attempts.values()]
    assert max(submitted) - began == pytest.approx(20 * 0.2)


def test_the_best_trial_is_looked_for_again_when_another_one_has_ended() -> None:
    study = study_of()
    sweep = sweep_of(study, trials=8)
    ended = [t for t in sweep.trials.values() if t.verdict is Verdict.REACHED]
    book = UnitOfWork(sweep)
    best = book.sweep.best()
    assert best in ended
    assert best is not None
    book.put_trial(replace(ended[-1], metrics=replace(ended[-1].metrics, objective=best.objective / 2)))
    found = book.sweep.best()
    assert found is not None
    assert found.number == ended[-1].number


class Unanswered:
    """Optuna's tables, which cannot be written for the first ``failures`` times after the last trial's end."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def follow(self, sweep: StudyRecords) -> str:
        if len(sweep.trials) < 6 or any(t.state is not TrialState.FINISHED for t in sweep.trials.values()):
            return ""
        self.failures -= 1
        return "the tables are locked" if self.failures >= 0 else ""


class Heard(Quiet):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(("failures", "stays"), [(2, False), (100, True)])
def test_optunas_tables_are_written_again_at_the_end_and_at_the_next_start(
    tmp_path: Path, cluster: FakeCluster, failures: int, stays: bool
) -> None:
    there, heard = house(tmp_path, cluster), Heard()
    driving = there.driver(projection=Unanswered(failures), view=heard)
    assert driving.run().reason == "all 6 trials are proposed"
    assert any("the tables are locked; the sweep's next start does so" in line for line in heard.lines) is stays
    there.driver().run()
    assert_all_accounted_for(there, 6)
