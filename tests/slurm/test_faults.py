"""What happens to clusters, seen from the driver: the right class, the right retry, node-hours as Slurm counts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

import pytest

from lora_tune.store.records import TrialState, Verdict
from tests.cluster import ask_for_a_second, wait_until
from tests.slurm.house import House

pytestmark = pytest.mark.slurm

SLOW = {"STANDIN_SECONDS": "10"}


def test_faults_of_the_cluster_become_new_attempts_and_what_a_person_cancels_stays_cancelled(
    house: Callable[..., House],
) -> None:
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
    again = [home.wait_for_attempt(trial, 1, "queued", "running") for trial in (0, 3, 1)]
    wait_until(lambda: cluster.job_state(urgent) == "COMPLETED", 30, "the urgent job runs")

    # In the middle of trainings: an srun that starts meanwhile retries for minutes, which is Slurm's own doing.
    logs = [home.paths.attempt(trial, 1).log for trial in (0, 1, 3)]
    training = lambda: sum(log.exists() and "run_start" in log.read_text() for log in logs)  # noqa: E731
    wait_until(lambda: training() >= 3, 60, "the second attempts train on the three nodes that are left")
    cluster.stop_controller()
    time.sleep(2)  # the driver asks in between, and must neither stop nor start anything
    cluster.start_controller()
    cluster.start_slurmd(first[0].nodes[0])
    assert driver.wait(300) in (0, 4), home.said

    sweep = home.sweep()
    assert sweep.trials[2].verdict is Verdict.CANCELLED
    assert "somebody cancelled its job, outside the sweep (scancel)" in sweep.trials[2].sentence
    assert {sweep.trials[n].verdict for n in (0, 1, 3)} <= {Verdict.REACHED, Verdict.CENSORED}
    classes = [sweep.attempts[(trial, 0)].failure for trial in range(4)]
    states = [sweep.attempts[(trial, 0)].state for trial in range(4)]
    assert states == ["node failed", "preempted", "cancelled", "preempted"]
    assert classes[0] == "infrastructure"
    assert classes[1] == classes[3] == "preempted"
    assert first[0].nodes[0] in sweep.attempts[(0, 1)].exclude_nodes
    assert [len(sweep.attempts_of(trial)) for trial in range(4)] == [2, 2, 1, 2], "one retry each, for faults alone"
    assert {a.job_id for a in again} == {sweep.attempts[(t, 1)].job_id for t in (0, 1, 3)}, "none was submitted anew"
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


def test_daemons_that_die_alone_and_a_controller_that_restarts(house: Callable[..., House]) -> None:
    """A slurmd dies and comes back; one dies and its job goes on as a ghost; one is dead when its job must end."""
    home = house(trials=4, parallel=4, stall_minutes=0.15, environment={"STANDIN_SECONDS": "9", "NCCL_TEST": "0"})
    cluster = home.cluster
    short, ghostly, dead, _ = cluster.nodes
    text = home.study.read_text().replace("kill_seconds = 5", "kill_seconds = 2")
    home.study.write_text(
        text.replace("[site.environment]\n", f'[site.environment]\nFAIL_MODE = "hang@SLURMD_NODENAME={dead}"\n')
    )
    driver = home.start()
    first = {a.nodes[0]: a for a in [home.wait_for_attempt(trial, 0, "running") for trial in range(4)]}
    assert set(first) == set(cluster.nodes)
    log = {node: home.paths.attempt(first[node].trial, 0).log for node in first}
    holds = lambda node, words: log[node].exists() and words in log[node].read_text()  # noqa: E731
    wait_until(lambda: all(holds(node, "run_start") for node in log), 60, "all four train")
    wait_until(lambda: holds(dead, "eval_accuracy"), 30, "the one that hangs has hung")

    cluster.kill_slurmd(short)
    cluster.restart_controller()
    cluster.kill_slurmd(ghostly)
    cluster.run("scontrol", "update", f"NodeName={ghostly}", "State=DOWN", "Reason=no answer")
    cluster.start_slurmd(short)
    # Late: Slurm itself gives a silent node up after a while, and the job with it.
    wait_until(lambda: time.time() - log[dead].stat().st_mtime > 6, 10, "the trial that hangs is soon given up")
    cluster.kill_slurmd(dead)
    undying = f"job {first[dead].job_id} refuses to die on {dead}: tell the administrator"
    shown = lambda: home.sweep().trials[first[dead].trial].sentence  # noqa: E731
    wait_until(lambda: shown() == undying, 60, "the driver says that the job does not end")
    assert undying in home.said
    cluster.start_slurmd(dead)
    assert driver.wait(120) in (0, 4), home.said

    sweep = home.sweep()
    assert {trial.verdict for trial in sweep.trials.values()} <= {Verdict.REACHED, Verdict.CENSORED}
    tries = {node: sweep.attempts_of(first[node].trial) for node in first}
    assert {node: len(found) for node, found in tries.items()} == {
        node: 2 if node in (ghostly, dead) else 1 for node in cluster.nodes
    }, "what its daemon's death did not touch is not run again"
    assert (tries[ghostly][0].state, tries[dead][0].stop) == ("node failed", "silent")
    for node in (ghostly, dead):
        assert tries[node][0].failure == "infrastructure"
        assert node in tries[node][1].exclude_nodes
    assert f"job {first[ghostly].job_id} has expired" in log[ghostly].read_text(), (
        "the ghost's script went on by itself"
    )
    assert set(home.slurm_jobs().values()) == {1}


def test_a_drained_cluster_lets_trials_wait_and_go_on(house: Callable[..., House]) -> None:
    home = house(trials=2, parallel=2, environment={"STANDIN_SECONDS": "1"})
    for node in home.cluster.nodes:
        home.cluster.drain(node)
    driver = home.start()
    home.wait_for_attempt(0, 0, "queued")
    wait_until(lambda: "waits, drained" in home.said, 60, "the driver says what the trials wait for")
    for node in home.cluster.nodes:
        home.cluster.resume(node)
    assert driver.wait(90) in (0, 4), home.said
    assert all(trial.state is TrialState.FINISHED for trial in home.sweep().trials.values())


def test_one_bad_node_of_four_costs_no_trial(house: Callable[..., House]) -> None:
    """Every trial fails at its start on that node, whatever its class: as many reach the target as with it drained."""
    trials = {"trials": 6, "parallel": 4, "target": 0.97}
    points = [
        f'{{ LR = {rate}, MAX_STEPS = 100, layout = "tp{tp} pp1 cp1 minibs{tp} mbs1" }}'
        for rate in (4e-4, 2e-5, 8e-4)
        for tp in (4, 8)
    ]

    def the_same_six(environment: dict[str, str]) -> House:
        home = house(**trials, environment=environment)
        text = home.study.read_text()
        home.study.write_text(text.replace("[search]\n", f"[search]\nenqueue = [{', '.join(points)}]\n"))
        return home

    drained = the_same_six({"STANDIN_SECONDS": "3"})
    bad = drained.cluster.nodes[1]
    drained.cluster.drain(bad)
    assert drained.finish(300) == 0, drained.said
    drained.cluster.resume(bad)

    for mode, kind, words in [
        ("ecc", "infrastructure", "uncorrectable ECC error"),
        ("nodata", "configuration", "No such file or directory: '/data/train.npy'"),
    ]:
        home = the_same_six({"STANDIN_SECONDS": "3", "FAIL_MODE": f"{mode}@SLURMD_NODENAME={bad}"})
        assert home.finish(300) == 0, home.said
        sweep = home.sweep()
        assert len(sweep.reached()) >= len(drained.sweep().reached()) > 0
        assert not [trial.sentence for trial in sweep.trials.values() if trial.verdict is Verdict.FAILED]
        failed = [a for a in home.attempts() if a.failure]
        assert {(a.failure, a.nodes) for a in failed} == {(kind, (bad,))}
        assert all(words in a.line for a in failed)
        assert len(failed) <= 3, "after that the node is left out"
        log = home.paths.attempt(failed[0].trial, failed[0].number).log.read_text()
        assert "/etc/dgx-release: No such file or directory" in log
        assert "sudo: a password is required" in log


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


def test_a_minute_without_controller_and_a_time_limit(house: Callable[..., House]) -> None:
    """Trainings go on while slurmctld is away, and are read; one then runs into Slurm's own limit with evals made."""
    environment = {"STANDIN_SECONDS": "75", "NCCL_TEST": "0", "FAIL_MODE": "slow@SEED=5002"}
    home = house(trials=3, parallel=3, environment=environment, trial_minutes=10)
    cluster = home.cluster
    driver = home.start()
    first = [home.wait_for_attempt(trial, 0, "running") for trial in range(3)]
    logs = [home.paths.attempt(trial, 0).log for trial in range(3)]
    training = lambda: all(log.exists() and "run_start" in log.read_text() for log in logs)  # noqa: E731
    wait_until(training, 60, "all three train")
    cluster.stop_controller()
    away = time.monotonic()
    wait_until(lambda: "squeue" in home.said, 60, "the driver says that the cluster does not answer")
    wait_until(lambda: time.monotonic() > away + 60, 61, "the minute is over")
    assert driver.poll() is None
    cluster.start_controller()
    wait_until(lambda: "eval_accuracy" in logs[1].read_text(), 60, "the slow one has an eval")
    wait_until(lambda: home.sweep().last_evals(1) != (), 30, "which the driver has seen")
    ask_for_a_second(home.paths.attempt(1, 0).folder)
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    cluster.run("scontrol", "update", f"JobId={first[1].job_id}", f"EndTime={now}")
    assert driver.wait(240) in (0, 4), home.said

    sweep = home.sweep()
    assert all(len(sweep.attempts_of(trial)) == 1 for trial in range(3)), "a controller that is away is no failure"
    assert home.said.count("squeue failed") <= 2, "trouble that lasts is said once"
    assert sweep.attempts[(1, 0)].state == "time limit"
    assert sweep.trials[1].verdict is Verdict.CENSORED
    assert sweep.trials[1].sentence.startswith("ran into the job's time limit; eval loss")
    assert {sweep.trials[n].verdict for n in (0, 2)} <= {Verdict.REACHED, Verdict.CENSORED}
    assert sum(a.node_hours(0) for a in home.attempts()) == pytest.approx(home.node_hours_by_slurm(), abs=1e-6)


def test_a_controller_that_crashes_forgets_jobs_and_gives_their_ids_out_again(house: Callable[..., House]) -> None:
    """What was submitted and not yet saved is lost with slurmctld: each such trial is run again, none is mixed up."""
    home = house(trials=3, parallel=3, environment={"STANDIN_SECONDS": "3", "NCCL_TEST": "0"})
    cluster = home.cluster
    cluster.restart_controller()  # its state is saved now: what is submitted next is not
    driver = home.start()
    first = [home.wait_for_attempt(trial, 0, "queued", "running") for trial in range(3)]
    cluster.stop_controller(kill=True)
    cluster.start_controller()
    known = home.slurm_jobs()
    assert driver.wait(240) in (0, 4), home.said

    sweep = home.sweep()
    assert {trial.verdict for trial in sweep.trials.values()} <= {Verdict.REACHED, Verdict.CENSORED}, home.said
    for attempt in first:
        ended = sweep.attempts[(attempt.trial, 0)]
        # One that was saved while it waited is started twice: the node refuses the copy, and Slurm cancels both.
        lost = ended.state == ("cancelled" if known[attempt.job_name] else "lost")
        assert lost or known[attempt.job_name], home.said
        # A new attempt may get a lost one's id, and meet it on its node: then it is cancelled as well.
        assert len(sweep.attempts_of(attempt.trial)) in ((2, 3) if lost else (1,))
        assert ended.failure == ("infrastructure" if lost else "")
    last = [sweep.attempts_of(trial)[-1] for trial in range(3)]
    assert all(home.slurm_jobs()[attempt.job_name] == 1 for attempt in last)
    assert len({attempt.job_id for attempt in last}) == 3, "no two trials took one job for theirs"
    ran = [attempt for attempt in home.attempts() if attempt.state != "lost"]
    assert sum(a.node_hours(0) for a in ran) == pytest.approx(home.node_hours_by_slurm(), abs=1e-6)


def test_a_missing_implementation_ends_the_command_before_anything_is_recorded(house: Callable[..., House]) -> None:
    home = house()
    shutil.rmtree(home.implementation)
    assert home.finish(60) == 3
    assert "does not exist; give workload.implementation" in home.said
    assert not home.paths.database.exists()
