"""What happens to clusters, seen from the driver: the right class, the right retry, node-hours as Slurm counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from lora_tune.records import TrialState, Verdict
from tests.cluster import wait_until
from tests.slurm.house import House

pytestmark = pytest.mark.slurm

SLOW = {"STANDIN_SECONDS": "10"}


def test_faults_of_the_cluster_become_new_attempts_and_never_a_verdict(house: Callable[..., House]) -> None:
    """A dead node, a requeue by the administrator, a preemption, scancel by hand, and a controller that goes away."""
    home = house(trials=4, parallel=4, environment=SLOW)
    cluster = home.cluster
    driver = home.start()
    first = [home.wait_for_attempt(trial, 0, "running") for trial in range(4)]

    # Slurm counts whole seconds: node-hours are only above zero for jobs that ran through a full one.
    newest = max(attempt.started_at or 0.0 for attempt in first)
    wait_until(lambda: time.time() > newest + 2, 10, "every job has run for two seconds")

    cluster.kill_node(first[0].nodes[0])
    cluster.run("scontrol", "update", f"JobId={first[1].job_id}", "Requeue=1")
    cluster.run("scontrol", "requeue", first[1].job_id)
    cluster.run("scancel", first[2].job_id)
    urgent = cluster.run(
        "sbatch", "--parsable", "-p", "urgent", "-w", first[3].nodes[0], "-N1", "-o", "/dev/null", "--wrap", "sleep 1"
    ).strip()
    again = [home.wait_for_attempt(trial, 1, "queued", "running") for trial in (0, 2, 3, 1)]
    wait_until(lambda: cluster.job_state(urgent) == "COMPLETED", 30, "the urgent job runs")

    # In the middle of trainings: an srun that starts meanwhile retries for minutes, which is Slurm's own doing.
    logs = [home.paths.attempt(trial, 1).log for trial in range(4)]
    training = lambda: sum(log.exists() and "run_start" in log.read_text() for log in logs)  # noqa: E731
    wait_until(lambda: training() >= 3, 60, "the second attempts train on the three nodes that are left")
    cluster.stop_controller()
    time.sleep(2)  # the driver asks in between, and must neither stop nor start anything
    cluster.start_controller()
    cluster.start_slurmd(first[0].nodes[0])
    assert driver.wait(300) in (0, 4), home.said

    sweep = home.sweep()
    assert {trial.verdict for trial in sweep.trials.values()} <= {Verdict.REACHED, Verdict.CENSORED}
    classes = [sweep.attempts[(trial, 0)].failure for trial in range(4)]
    states = [sweep.attempts[(trial, 0)].state for trial in range(4)]
    assert states == ["node failed", "preempted", "cancelled", "preempted"]
    assert classes[0] == "infrastructure"
    assert classes[1] == classes[3] == "preempted"
    assert first[0].nodes[0] in sweep.attempts[(0, 1)].exclude_nodes
    assert all(len(sweep.attempts_of(trial)) == 2 for trial in range(4)), "one retry each"
    assert {a.job_id for a in again} == {sweep.attempts[(t, 1)].job_id for t in range(4)}, "none was submitted anew"
    assert set(home.slurm_jobs().values()) == {1}
    names = {attempt.job_name for attempt in home.attempts()}
    ours = [a for a in home.attempts() if a.state != "preempted"]
    assert names <= set(home.slurm_jobs())
    for attempt in ours:
        start, end = cluster.run(
            "squeue", "-h", "-t", "all", "-j", attempt.job_id, "-o", "%S %e", environment={"SLURM_TIME_FORMAT": "%s"}
        ).split()
        assert attempt.node_hours(0) == pytest.approx((int(end) - int(start)) / 3600)
    requeued = sweep.attempts[(1, 0)]
    assert requeued.started_at is not None
    assert requeued.ended_at is not None
    assert requeued.node_hours(0) >= 2 / 3600, "it ran for two seconds at least before it was requeued"


def test_a_drained_cluster_lets_trials_wait_and_go_on(house: Callable[..., House]) -> None:
    home = house(trials=2, parallel=2, environment={"STANDIN_SECONDS": "1"})
    for node in home.cluster.nodes:
        home.cluster.drain(node)
    driver = home.start()
    home.wait_for_attempt(0, 0, "queued")
    for node in home.cluster.nodes:
        home.cluster.resume(node)
    assert driver.wait(90) in (0, 4), home.said
    assert all(trial.state is TrialState.FINISHED for trial in home.sweep().trials.values())


def test_out_of_memory_is_tried_on_another_node_before_it_counts(house: Callable[..., House]) -> None:
    """TP=1 always runs out of memory here; one other trial does so only once."""
    home = house(trials=6, parallel=4, environment={"STANDIN_SECONDS": "1", "FAIL_MODE": "oom@TP=1"})
    assert home.finish(200) in (0, 4), home.said
    sweep = home.sweep()
    tight = [trial for trial in sweep.trials.values() if trial.parameters["TP"] == 1]
    assert tight, "the seed of the study proposes TP=1 among its first trials"
    for trial in tight:
        one, two = sweep.attempts_of(trial.number)
        assert trial.verdict is Verdict.INFEASIBLE
        assert "CUDA out of memory" in one.line
        assert set(one.nodes) <= set(two.exclude_nodes)
        assert not set(one.nodes) & set(two.nodes)
    for trial in sweep.trials.values():
        assert trial in tight or trial.verdict in (Verdict.REACHED, Verdict.CENSORED)
