"""The simulated cluster: jobs follow their surface on a virtual clock, through the same port as real ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from lora_tune.base.errors import InputError, LauncherError
from lora_tune.base.paths import AttemptPaths
from lora_tune.config.study import load_study
from lora_tune.launchers.base import JobState, Ticket
from lora_tune.logs.mllog import MllogReader
from lora_tune.search.samplers import make_sampler
from lora_tune.workloads import load
from lora_tune.workloads.base import Job, Proposal, Resources
from lora_tune.workloads.implementation import PROBE_STEPS
from lora_tune_simulation.h100 import function as h100
from lora_tune_simulation.launcher import Cluster, SimulatedLauncher, of_study

STUDY = Path(__file__).resolve().parents[2] / "studies" / "simulated_h100.toml"
GOOD = {"LR": 4e-4, "MAX_STEPS": 800, "WARMUP_STEPS": 0, "TP": 4, "PP": 1, "CP": 1, "MINIBS": 4, "MBS": 1, "GBS": 8}
START = 1_000_000.0


def ticking(parameters: Mapping[str, object], seed: int) -> Iterator[tuple[float, str]]:
    """A surface of one line every 100 s, ``LENGTH`` of them."""
    for k in range(int(str(parameters["LENGTH"]))):
        yield 100.0 * k, f"line {k} of seed {seed}"


def job(folder: Path, name: str = "s-0000-0", *, length: int = 5, nodes: int = 1, minutes: float = 0, **more) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"parameters": {"LENGTH": length, **more}, "seed": 7})
    (folder / "parameters.json").write_text(text)
    return Job(
        name=name, folder=folder, files={"parameters.json": text}, argv=("simulated",), log=AttemptPaths(folder).log,
        resources=Resources(nodes=nodes, minutes=minutes),
    )  # fmt: skip


def cluster(surface=ticking, *, nodes: int = 1, **options: float) -> SimulatedLauncher:
    return SimulatedLauncher(surface, Cluster(nodes=nodes, **options), start=START)


def ticket(of: Job) -> Ticket:
    return Ticket(name=of.name, folder=of.folder)


def status(launcher: SimulatedLauncher, of: Job):
    return launcher.poll([ticket(of)])[of.name]


def until_over(launcher: SimulatedLauncher, *jobs: Job) -> None:
    for _ in range(10_000):
        if not any(status(launcher, j).state.alive for j in jobs):
            return
        launcher.sleep(1.0)
    raise AssertionError("the jobs do not end")


def test_lines_appear_as_time_passes_and_the_job_ends_with_the_last(tmp_path) -> None:
    launcher, one = cluster(), job(tmp_path / "a")
    assert launcher.submit(one) == one.name
    assert status(launcher, one).state is JobState.RUNNING
    assert one.log.read_text() == "line 0 of seed 7\n"
    launcher.sleep(250.0)
    status(launcher, one)
    assert len(one.log.read_text().splitlines()) == 3
    until_over(launcher, one)
    found = status(launcher, one)
    assert (found.state, found.exit_code, found.started_at, found.ended_at) == (JobState.ENDED, 0, START, START + 400)
    assert len(one.log.read_text().splitlines()) == 5


def test_sleep_goes_straight_to_the_next_event_and_never_far_past_it(tmp_path) -> None:
    launcher = cluster()
    launcher.submit(job(tmp_path / "a"))
    launcher.sleep(0.25)
    assert launcher.now() == START + 100
    launcher = cluster()
    launcher.sleep(0.25)
    assert launcher.now() > START


def test_jobs_wait_for_nodes_in_order(tmp_path) -> None:
    launcher = cluster(nodes=2)
    first, wide, last = (
        job(tmp_path / "a", "a"), job(tmp_path / "b", "b", nodes=2, length=2), job(tmp_path / "c", "c", length=2)
    )  # fmt: skip
    for one in (first, wide, last):
        launcher.submit(one)
    assert status(launcher, wide).state is JobState.QUEUED
    assert status(launcher, last).state is JobState.QUEUED, "a later job must not starve the wide one"
    until_over(launcher, first, wide, last)
    assert status(launcher, wide).started_at == START + 400
    assert status(launcher, last).started_at == START + 500
    assert len(set(status(launcher, wide).nodes)) == 2


def test_submitting_twice_runs_once(tmp_path) -> None:
    launcher, one = cluster(nodes=2), job(tmp_path / "a")
    assert launcher.submit(one) == launcher.submit(one)
    until_over(launcher, one)
    assert len(one.log.read_text().splitlines()) == 5


def test_a_cancelled_job_stops_where_it_is_and_frees_its_node(tmp_path) -> None:
    launcher, one, two = cluster(), job(tmp_path / "a", "a"), job(tmp_path / "b", "b")
    launcher.submit(one)
    launcher.submit(two)
    launcher.sleep(150.0)
    launcher.cancel(ticket(one))
    found = status(launcher, one)
    assert (found.state, found.ended_at) == (JobState.CANCELLED, START + 150)
    assert status(launcher, two).state is JobState.RUNNING
    launcher.sleep(900.0)
    status(launcher, one)
    assert len(one.log.read_text().splitlines()) == 2
    launcher.cancel(ticket(one), force=True)
    assert status(launcher, one).ended_at == START + 150


def test_a_queued_job_can_be_cancelled_and_never_runs(tmp_path) -> None:
    launcher, one, two = cluster(), job(tmp_path / "a", "a"), job(tmp_path / "b", "b")
    launcher.submit(one)
    launcher.submit(two)
    launcher.cancel(ticket(two))
    until_over(launcher, one)
    launcher.sleep(300)
    assert status(launcher, two).state is JobState.CANCELLED
    assert not two.log.exists()


def test_the_time_limit_ends_a_job(tmp_path) -> None:
    launcher, one = cluster(), job(tmp_path / "a", length=100, minutes=5)
    launcher.submit(one)
    until_over(launcher, one)
    assert status(launcher, one).state is JobState.TIME_LIMIT
    assert status(launcher, one).ended_at == START + 300


@pytest.mark.parametrize(
    ("option", "state"), [("node_failures", JobState.NODE_FAILED), ("preemptions", JobState.PREEMPTED)]
)
def test_nodes_fail_and_jobs_are_preempted_at_the_stated_rate(tmp_path, option, state) -> None:
    """At one event in 2 hours of running, and runs of 1 hour, about 39% of jobs are hit."""
    launcher = cluster(nodes=200, **{option: 500})
    jobs = [job(tmp_path / str(k), f"j{k}", length=37) for k in range(200)]
    for one in jobs:
        launcher.submit(one)
    until_over(launcher, *jobs)
    hit = sum(status(launcher, one).state is state for one in jobs) / len(jobs)
    assert hit == pytest.approx(1 - math.exp(-0.5), abs=0.1)


def test_the_queue_makes_jobs_wait(tmp_path) -> None:
    launcher = cluster(nodes=100, queue_minutes=10)
    jobs = [job(tmp_path / str(k), f"j{k}", length=1) for k in range(100)]
    for one in jobs:
        launcher.submit(one)
    until_over(launcher, *jobs)
    waits = [status(launcher, one).started_at - START for one in jobs]
    assert 400 < sum(waits) / len(waits) < 850


def test_a_launcher_made_again_goes_on_with_its_jobs(tmp_path) -> None:
    first, one, two = cluster(nodes=1), job(tmp_path / "a", "a"), job(tmp_path / "b", "b")
    first.submit(one)
    first.submit(two)
    first.sleep(150.0)
    again = SimulatedLauncher(ticking, Cluster(nodes=1), start=first.now())
    assert again.poll([ticket(one), ticket(two)])[one.name].state is JobState.RUNNING
    until_over(again, one, two)
    assert len(one.log.read_text().splitlines()) == 5
    assert status(again, one).ended_at == START + 400
    assert status(again, two).state is JobState.ENDED


def test_what_was_never_submitted_is_lost_and_what_cannot_run_is_refused(tmp_path) -> None:
    launcher, one = cluster(), job(tmp_path / "a")
    assert status(launcher, one).state is JobState.LOST
    with pytest.raises(LauncherError, match="names no surface"):
        launcher.submit(replace(one, files={}))
    with pytest.raises(LauncherError, match="wants 2 nodes, the simulated cluster has 1"):
        launcher.submit(job(tmp_path / "b", "b", nodes=2))


def test_the_log_reads_as_the_surface_meant_it(tmp_path) -> None:
    launcher, one = cluster(h100), job(tmp_path / "a", **GOOD)
    launcher.submit(one)
    until_over(launcher, one)
    reader = MllogReader()
    reader.feed(one.log.read_bytes())
    run, outcome = reader.run(), h100.outcome(GOOD, 7)
    assert [(e.samples, e.loss) for e in run.evals] == [(s, x) for s, x, _ in outcome.evals]
    assert run.evals[-1].seconds == pytest.approx(outcome.end_seconds - outcome.init_seconds, abs=0.01)
    assert run.throughput[-1] == pytest.approx(outcome.samples_per_second, rel=0.01)
    assert run.eval_seconds[0] == pytest.approx(outcome.seconds_per_eval, abs=0.01)
    assert run.hyperparameters["global_batch_size"] == 8


def test_the_shipped_study_loads_with_its_launcher_its_workload_and_its_sampler(tmp_path) -> None:
    study = load_study(STUDY)
    launcher = of_study(study, study.budget.parallel)
    workload = load(study, STUDY)
    tuned = study.search_space.corner()
    made = workload.job(Proposal(number=0, attempt=0, seed=1, parameters=study.search_space.resolve(tuned)), tmp_path)
    assert set(made.files) == {"parameters.json"}
    assert launcher.now() > 0
    assert type(make_sampler(study)).__name__ == "GreyBoxSampler"
    with pytest.raises(InputError, match=r"workload\.kind = surface"):
        of_study(load_study(STUDY.with_name("tiny.toml")), 1)


def test_a_probe_is_a_short_run_with_two_evals(tmp_path) -> None:
    workload = load(load_study(STUDY), STUDY)
    made = workload.job(Proposal(number=0, attempt=0, seed=1, parameters=GOOD, probe=True), tmp_path)
    data = json.loads(made.files["parameters.json"])
    outcome = h100.outcome(data["parameters"], data["seed"])
    block = PROBE_STEPS * GOOD["GBS"]  # as long as in a probe of run.sub
    assert [s for s, _, _ in outcome.evals] == [block, 2 * block]
    assert outcome.end_seconds - outcome.init_seconds < 250


def test_an_export_says_that_nothing_was_measured(tmp_path) -> None:
    workload = load(load_study(STUDY), STUDY)
    made = workload.export(Proposal(number=3, attempt=0, seed=1, parameters=GOOD), ("study abc",))
    ((name, text),) = made.files.items()
    assert name == "config_SIMH100_1x8x4xtp4pp1cp1.sh"
    assert "simulated surface h100, not on a machine" in text
    assert "export LR=" in text
