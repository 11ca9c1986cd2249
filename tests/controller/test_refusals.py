"""A scheduler that takes no job, and a sweep whose trials all failed: a person fixes it and types the command again."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lora_tune.base.errors import LauncherError, LimitError, RefusedError, SetupError
from lora_tune.base.paths import SweepPaths
from lora_tune.controller.runtime import Preparation, prepare
from lora_tune.controller.submissions import UNKNOWN_SECONDS
from lora_tune.launchers.slurm.parse import refusal
from lora_tune.store.records import TrialState, Verdict
from lora_tune.workloads.base import Job
from tests.controller.test_driver import House, assert_all_accounted_for, house
from tests.fakes import FakeClock, FakeCluster, curve_script

FAILED = "Batch job submission failed: "
POLICY = f"{FAILED}Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"

LASTING = {
    f"{FAILED}Invalid account or account/partition combination specified": "site.account",
    f"invalid partition specified: x; {FAILED}Invalid partition name specified": "site.partition",
    f"{FAILED}Invalid qos specification": "site.qos",
    f"{FAILED}Requested reservation is invalid": "site.reservation",
    f"{FAILED}Invalid feature specification": "--constraint",
    "Invalid generic resource (gres) specification": 'gres = "none"',
    f"{FAILED}Invalid node name specified": "site.nodelist",
    "sbatch: unrecognized option '--nosuch'; Try \"sbatch --help\" for more information": "site.sbatch_args",
    "Invalid --time specification": "site.sbatch_args",
    f"{FAILED}Invalid license specification": "--licenses",
    "Unable to open file run.sub": "workload.implementation",
    "Batch script contains DOS line breaks (\\r\\n); instead of expected UNIX line breaks (\\n).": "the script",
    "This does not look like a batch script.  The first; line must start with #! followed by the path": "the script",
    "Batch script is empty!": "the script",
    "Script arguments not permitted with --wrap option": "the script",
    f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)": "trial_minutes",
    f"{FAILED}User's group not permitted to use this partition": "site.partition",
    f"QOSMaxWallDurationPerJobLimit; {POLICY}": "trial_minutes",
}
"""What Slurm 22.05 printed, asked for each of these -> what the remedy names."""

BY_SIZE = (
    f"{FAILED}Node count specification invalid",
    f"{FAILED}Requested node configuration is not available",
    f"{FAILED}More processors requested than permitted",
    f"Memory specification can not be satisfied; {FAILED}Requested node configuration is not available",
    *(
        f"{reason}; {POLICY}"
        for reason in (
            "QOSMaxNodePerJobLimit", "QOSMaxCpuPerJobLimit", "QOSMaxCpuMinutesPerJobLimit", "QOSMaxNodePerUserLimit",
            "QOSGrpNodeLimit", "QOSMinNode", "QOSMaxCpuPerNode",
        )
    ),
)  # fmt: skip

PASSING = (
    f"{FAILED}Unable to contact slurm controller (connect failure)",
    f"{FAILED}Required partition not available (inactive or drain)",
    f"{FAILED}Socket timed out on send/recv operation",
    f"{FAILED}Unexpected missing socket error",
    f"{FAILED}Slurm temporarily unable to accept job, sleeping and retrying",
    f"AssocMaxSubmitJobLimit; {POLICY}",
    f"QOSMaxSubmitJobPerUserLimit; {POLICY}",
    POLICY,
)


@pytest.mark.parametrize(("words", "named"), LASTING.items())
def test_an_answer_that_lasts_names_what_to_correct(words: str, named: str) -> None:
    found = refusal("h100-0003-0", words)
    assert isinstance(found, RefusedError)
    assert (found.permanent, found.by_size) == (True, False)
    assert named in found.remedy
    assert str(found) == f"h100-0003-0 was not submitted: {words}; {found.remedy}"


@pytest.mark.parametrize("words", BY_SIZE)
def test_a_job_may_ask_for_too_much(words: str) -> None:
    found = refusal("h100-0003-0", words)
    assert isinstance(found, RefusedError)
    assert found.by_size


@pytest.mark.parametrize("words", PASSING)
def test_what_may_pass_is_no_refusal(words: str) -> None:
    assert type(refusal("h100-0003-0", words)) is LauncherError


def test_an_answer_that_nobody_knows_is_a_refusal_that_may_not_last() -> None:
    found = refusal("h100-0003-0", "the site's own filter says no")
    assert isinstance(found, RefusedError)
    assert not found.permanent


OF_A_FILTER = (
    f"[*] Too many simultaneous jobs in queue.; --> Max job limits for normal = 1 jobs; {FAILED}Unspecified error",
    "ERROR: you exceed the limit of 4 jobs for account team in partition normal",
    "Max jobs of this account: 3. Come back later",
    "User ada has 2 jobs in partition gpu, please wait until one has ended",
    "quota of running jobs in partition gpu reached",
    "job cap of account team reached",
    "only one job for each user and qos",
    "your account has pending jobs: 4, threshold: 4",
    "Sie haben bereits 2 Jobs in der Partition gpu",
    "Vous avez d\u00e9j\u00e0 des travaux en attente dans la partition gpu",
)
"""What a site's own filters and wrappers print."""


@pytest.mark.parametrize("words", OF_A_FILTER)
def test_what_a_sites_own_filter_says_of_accounts_and_partitions_corrects_nothing(words: str) -> None:
    found = refusal("h100-0003-0", words)
    assert isinstance(found, RefusedError)
    assert not found.permanent
    assert "site.partition" not in found.remedy


def test_a_limit_is_waited_for_however_long_it_takes_and_said_once(tmp_path: Path) -> None:
    """After ten minutes of it the sweep ended: its own job filled the limit."""
    cluster = Choosy(FakeClock())
    there = house(tmp_path, cluster, trials=3, parallel=2)
    end = cluster.clock.now() + 2 * UNKNOWN_SECONDS
    asked: list[float] = []

    def one_at_a_time(job: Job) -> LauncherError | None:
        asked.append(cluster.clock.now())
        full = cluster.jobs and cluster.clock.now() < end
        return LimitError(job.name, "Too many jobs", 1) if full else None

    cluster.answer = one_at_a_time
    there.driver().run()
    assert_all_accounted_for(there, 3)
    assert there.paths.driver_log.read_text().count("Too many jobs; taken for a limit of this site") == 1
    assert len([at for at in asked if at < end]) < 80, "a scheduler that says no is asked less and less often"


class Choosy(FakeCluster):
    """Takes jobs while ``answer`` returns None for them, else raises what it returns."""

    answer: Callable[[Job], LauncherError | None] = staticmethod(lambda job: None)

    def submit(self, job: Job) -> str:
        if job.name not in self.jobs and (error := self.answer(job)) is not None:
            raise error
        return super().submit(job)


def no_account(job: Job) -> LauncherError:
    return refusal(job.name, f"{FAILED}Invalid account or account/partition combination specified")


def ticks(there: House, driver: object, seconds: int) -> None:
    for _ in range(seconds):
        driver.tick()  # type: ignore[attr-defined]
        there.clock.sleep(1)


def test_a_lasting_refusal_ends_the_command_when_what_runs_has_ended_and_costs_no_trial(tmp_path: Path) -> None:
    cluster = Choosy(FakeClock())
    there = house(tmp_path, cluster, trials=6, parallel=2)
    driver = there.driver()
    driver.tick()
    cluster.answer = no_account  # an allocation that ended in the middle of the sweep
    with pytest.raises(SetupError, match=r"Invalid account.*correct site\.account.*rerun the same command"):
        driver.run()

    sweep = there.sweep()
    assert all(job.ended is not None for job in cluster.jobs.values()), "what ran was watched to its end"
    ended = [t for t in sweep.trials.values() if t.state is TrialState.FINISHED]
    assert len(ended) == 2
    assert Verdict.FAILED not in {t.verdict for t in ended}
    (left,) = (t for t in sweep.trials.values() if t.state is not TrialState.FINISHED)
    (attempt,) = sweep.attempts_of(left.number)
    assert (attempt.state, attempt.failure) == ("intended", "configuration")
    assert "Invalid account" in attempt.line
    assert "correct site.account" in attempt.remedy
    assert "Invalid account" in left.sentence, "status shows it with the trial"

    cluster.answer = lambda job: None
    again = there.driver()
    again.tick()
    fixed = there.sweep().attempts[left.number, 0]
    assert (fixed.state, fixed.failure, fixed.line) == ("queued", "", "")
    assert there.sweep().trials[left.number].sentence == ""
    again.run()
    assert_all_accounted_for(there, 6)


def test_several_refused_trials_say_it_once_each_not_every_tick(tmp_path: Path) -> None:
    cluster = Choosy(FakeClock())
    cluster.answer = lambda job: LauncherError(f"{job.name} was not submitted: Socket timed out")
    there = house(tmp_path, cluster, trials=6, parallel=3)
    driver = there.driver()
    ticks(there, driver, 30)
    assert there.paths.driver_log.read_text().count("was not submitted") == 3
    assert all("Socket timed out" in trial.sentence for trial in there.sweep().trials.values())
    cluster.answer = lambda job: None
    driver.run()
    assert_all_accounted_for(there, 6)


def test_a_refusal_that_nobody_knows_is_tried_again_for_a_while(tmp_path: Path) -> None:
    cluster = Choosy(FakeClock())
    cluster.answer = lambda job: refusal(job.name, "the site's own filter says no")
    there = house(tmp_path, cluster, trials=2, parallel=1)
    ticks(there, driver := there.driver(), int(UNKNOWN_SECONDS))
    cluster.answer = lambda job: None
    ticks(there, driver, 3)
    cluster.answer = lambda job: refusal(job.name, "the site's own filter says no")
    began = there.clock.now()
    with pytest.raises(SetupError, match="filter says no"):
        driver.run()
    assert there.clock.now() - began >= UNKNOWN_SECONDS, "a job that was taken in between starts the count again"
    cluster.answer = lambda job: None
    there.driver().run()
    assert_all_accounted_for(there, 2)


NODES = """
[workload]
kind = "command"
argv = ["true"]
[space]
LR = { type = "float", low = 1e-5, high = 1e-1, log = true }
STEPS = 100
GBS = 8
NODES = { type = "categorical", choices = [1, 64] }
[objective]
target = 0.0
[search]
sampler = "random"
[budget]
trials = 8
parallel = 2
"""


def test_a_trial_that_is_too_large_for_the_cluster_fails_and_the_smaller_ones_go_on(tmp_path: Path) -> None:
    cluster = Choosy(FakeClock())
    cluster.answer = lambda job: (
        refusal(job.name, f"{FAILED}Node count specification invalid") if job.resources.nodes > 1 else None
    )
    there = House(tmp_path, cluster, NODES)
    there.driver().run()
    sweep = there.sweep()
    large = [t for t in sweep.trials.values() if t.parameters["NODES"] == 64]
    small = [t for t in sweep.trials.values() if t.parameters["NODES"] == 1]
    assert large
    assert small
    for trial in large:
        (attempt,) = sweep.attempts_of(trial.number)
        assert (trial.verdict, attempt.failure, attempt.node_hours(0)) == (Verdict.FAILED, "configuration", 0)
        assert "take the node count out of the space" in attempt.remedy
    assert all(trial.verdict is not Verdict.FAILED for trial in small)


def test_what_failed_before_it_was_mended_does_not_end_the_sweep_again(tmp_path: Path) -> None:
    broken = [True]
    cluster = FakeCluster(FakeClock(), lambda environment, at: iter(()) if broken else curve_script(environment, at))
    there = house(tmp_path, cluster, trials=8, parallel=1)
    with pytest.raises(SetupError, match="3 trials in a row failed"):
        there.driver().run()
    with pytest.raises(SetupError, match="3 trials in a row failed"):
        there.driver().run()  # a server that only starts again spends no further trial
    assert len(there.sweep().trials) == 3

    there.clock.sleep(60)
    again = there.driver(fixed_at=there.clock.now())
    with pytest.raises(SetupError, match="3 trials in a row failed"):
        again.run()  # it was not fixed
    assert len(there.sweep().trials) == 6

    there.clock.sleep(60)
    broken.clear()
    there.driver(fixed_at=there.clock.now()).run()
    assert len(there.sweep().trials) == 8
    assert all(there.sweep().trials[number].verdict is not Verdict.FAILED for number in (6, 7))


STUDY = """
[workload]
kind = "command"
argv = ["bash", "train.sh"]
cwd = "."
log = { kind = "jsonl", global_batch_size = 8 }
[space]
LR = { type = "float", low = 1e-3, high = 5e-2, log = true }
[objective]
target = 2.0
[budget]
trials = 4
parallel = 1
trial_minutes = 2
"""


def test_the_command_that_is_typed_again_after_the_mending_goes_on(tmp_path: Path) -> None:
    (tmp_path / "fixed.toml").write_text(STUDY)
    (tmp_path / "train.sh").write_text("echo 'bash: nccl-tests: command not found'; exit 127\n")
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", "fixed.toml", "--output", "sweep"]
    run = functools.partial(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    failed = run()
    assert failed.returncode == 3, failed.stdout + failed.stderr
    assert "fix it and rerun the same command" in failed.stderr
    (tmp_path / "train.sh").write_text('echo \'{"step": 4, "eval_loss": 1.5, "seconds": 1}\'\n')
    again = run()
    assert again.returncode == 0, again.stdout + again.stderr
    assert "all 4 trials are proposed: 4 reached" in again.stdout


def test_a_folder_into_which_everybody_writes_ends_the_command_and_names_its_cure(tmp_path: Path) -> None:
    """It was tried again for ever."""
    (tmp_path / "open.toml").write_text(STUDY)
    (tmp_path / "train.sh").write_text('echo \'{"step": 4, "eval_loss": 1.5, "seconds": 1}\'\n')
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", "open.toml", "--output", "shared/sweep"]
    run = functools.partial(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    refused = run()
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert f"chmod o-w {tmp_path / 'shared'}" in refused.stderr
    (tmp_path / "shared").chmod(0o755)
    assert run().returncode == 0


def test_a_preparation_that_is_refused_ends_the_command(tmp_path: Path) -> None:
    cluster, said = Choosy(FakeClock()), list[str]()
    job = Job(name="made-prepare-0", folder=tmp_path / "p", argv=("true",), log=tmp_path / "p" / "job.log")
    how = Preparation(
        make=lambda folder: job,
        launcher=cluster,
        now=cluster.clock.now,
        tick=lambda: cluster.clock.sleep(1),
        echo=said.append,
    )
    (tmp_path / "sweep").mkdir()
    answers: list[LauncherError | None] = [LauncherError("Socket timed out")] * 5
    cluster.answer = lambda job: answers.pop() if answers else no_account(job)
    with pytest.raises(RefusedError, match=r"correct site\.account"):
        prepare(SweepPaths(tmp_path / "sweep"), how)
    assert said == ["Socket timed out"], "trouble that lasts is said once"

    began = cluster.clock.now()
    cluster.answer = lambda job: refusal(job.name, "the site's own filter says no")
    with pytest.raises(RefusedError, match="filter says no"):
        prepare(SweepPaths(tmp_path / "sweep"), replace(how, tick=patience(cluster.clock)))
    assert cluster.clock.now() - began == UNKNOWN_SECONDS


def patience(clock: FakeClock) -> Callable[[], None]:
    """Waits a second at a time, and fails after an hour."""
    end = clock.now() + 3600

    def wait() -> None:
        assert clock.now() < end, "asked again for ever"
        clock.sleep(1)

    return wait
