"""A cluster that cannot give a job its nodes: it is waited for, and nobody is to blame."""

from __future__ import annotations

from pathlib import Path

from lora_tune.controller import conclusion, limits
from lora_tune.launchers.base import JobState, JobStatus, Ticket
from lora_tune.store.records import Attempt, Verdict
from tests.builders import study_of
from tests.controller.test_driver import assert_all_accounted_for, house
from tests.fakes import FakeClock, FakeCluster


class Cloud(FakeCluster):
    """Its nodes do not come up until ``capacity_at``, in epoch seconds of its clock."""

    capacity_at = 0.0

    def _status(self, ticket: Ticket) -> JobStatus:
        job = self.jobs.get(ticket.name)
        if job is not None and job.submitted < self.capacity_at:
            return JobStatus(state=JobState.NOT_BEGUN, reason="x1 did not come up", ended_at=job.submitted)
        return super()._status(ticket)


def test_trials_wait_for_capacity_with_growing_pauses_and_spend_no_attempt(tmp_path: Path) -> None:
    cluster = Cloud(FakeClock())
    cluster.capacity_at = cluster.clock.true + 400
    there = house(tmp_path, cluster, trials=3, parallel=2, attempts=1)
    there.driver().run()
    assert_all_accounted_for(there, 3)
    sweep = there.sweep()
    assert {trial.verdict for trial in sweep.trials.values()} <= {Verdict.REACHED, Verdict.CENSORED}
    tries = [attempt for attempt in sweep.attempts_of(0) if attempt.failure]
    assert {attempt.failure for attempt in tries} == {"capacity"}
    assert len(tries) == 4, "at once, after 30 s, 60 s and 120 s"
    assert not any(attempt.node_hours(0.0) for attempt in tries), "no machine has had them"
    assert not any(attempt.exclude_nodes for attempt in sweep.attempts.values())
    assert there.paths.driver_log.read_text().count("no nodes can be had") == 1, "said once"


def test_what_waits_for_nodes_for_longer_than_the_queue_allows_is_given_up() -> None:
    study = study_of()
    limit = study.site.queue_minutes * 60
    tries = [
        Attempt(trial=0, number=n, job_name="j", folder="f", intended_at=n * 900.0, ended_at=at, failure="capacity")
        for n, at in ((0, 5.0), (1, limit + 1))
    ]
    assert limits.without_nodes(study, tries[:1]) == ""
    assert "site.queue_minutes" in limits.without_nodes(study, tries)


def test_an_attempt_that_got_no_nodes_counts_for_none() -> None:
    failures = ("capacity", "infrastructure", "capacity", "displaced")
    tries = [Attempt(trial=0, number=n, job_name="j", folder="f", failure=kind) for n, kind in enumerate(failures)]
    assert conclusion.counted_attempts(tries) == 1


def test_a_clock_that_was_set_back_keeps_no_trial_waiting() -> None:
    one = Attempt(trial=0, number=0, job_name="j", folder="f", ended_at=10_000.0, failure="capacity")
    assert not limits.may_be_submitted([one], 10_001.0)
    assert limits.may_be_submitted([one], 10_030.0)
    assert limits.may_be_submitted([one], 10.0)
