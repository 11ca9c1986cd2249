"""A fault of the set-up costs nothing: its trials are run again under their own numbers once a person has fixed it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lora_tune.config.study import Study
from lora_tune.controller.node_faults import nothing_measured, retry_after_fix, retryable_trials
from lora_tune.store import Store, sqlite_url
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StopKind, StudyRecords, Trial, TrialState, Verdict
from lora_tune.sweep import main as sweep
from lora_tune.workloads.base import Start
from tests.builders import study_of
from tests.controller.test_driver import in_optunas_tables
from tests.waiting import wait_for

STUDY = """
[workload]
kind = "command"
argv = ["bash", "train.sh", "{LR}", "{folder}"]
cwd = "."
log = { kind = "jsonl", global_batch_size = 8 }
[space]
LR = { type = "float", low = 1e-3, high = 5e-2, log = true }
[objective]
target = 2.0
[search]
seed = 3
enqueue = [{ LR = 0.01 }, { LR = 0.02 }]
[budget]
trials = 5
parallel = 2
trial_minutes = 2
"""

TRAINS = 'echo \'{"step": 4, "eval_loss": 1.5\'"${1//[^0-9]/}"\', "seconds": 1}\'\n'
"""The eval depends on the learning rate: a parameter without effect would be trouble of its own."""

FAULTS = {
    "SPANK": "echo 'srun: spank.c:1105: _do_option_cb(): Assertion `opt failed.'; exit 134",
    "a command that is not there": "nccl_tests_of_site",
    "little host memory": "echo 'slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.'; exit 137",
    "what nobody knows": "echo 'site check: rack 7 is being cabled'; exit 3",
}


def typed(folder: Path) -> Result:
    """The command as a person types it, each time the same."""
    return CliRunner().invoke(sweep, ["--study", str(folder / "mended.toml"), "--output", str(folder / "sweep")])


def records(folder: Path, name: str = "mended") -> StudyRecords:
    store = Store(sqlite_url(folder / "sweep" / "sweep.db"), read_only=True)
    try:
        loaded = store.load(name)
        assert loaded is not None
        return loaded
    finally:
        store.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mended.toml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_same_command_after_the_fix_runs_the_same_trials_again(home: Path, fault: str) -> None:
    (home / "train.sh").write_text(fault + "\n")
    failed = typed(home)
    assert failed.exit_code == 3, failed.output
    assert "fix it and rerun the same command" in failed.output
    before = records(home).trials
    # The sweep ends when it knows the fault: one that was proposed by then may not have run.
    assert {t.verdict for t in before.values()} - {None} == {Verdict.FAILED}

    (home / "train.sh").write_text(TRAINS)
    again = typed(home)
    assert again.exit_code == 0, again.output
    after = records(home)
    assert sorted(after.trials) == [0, 1, 2, 3, 4], "the budget is of five trials, and no number was spent"
    assert {t.verdict for t in after.trials.values()} == {Verdict.REACHED}
    kept = ("number", "seed", "tuned", "parameters", "point", "why", "sampler_attributes")
    for number, trial in before.items():
        assert [getattr(after.trials[number], name) for name in kept] == [getattr(trial, name) for name in kept]
    assert [after.trials[n].tuned["LR"] for n in (0, 1)] == [0.01, 0.02], "the points of the study come first"
    first = [after.attempts_of(number)[-1].intended_at for number in sorted(after.trials)]
    assert first == sorted(first), "and are started first"
    assert [state for state, _ in in_optunas_tables(home / "sweep" / "sweep.db")] == ["COMPLETE"] * 5


def test_what_failed_of_the_set_up_spends_no_node_hours_and_no_attempt_of_the_budget(home: Path) -> None:
    (home / "mended.toml").write_text(STUDY.replace("trials = 5", "trials = 5\nnode_hours = 0.0002\nattempts = 1"))
    (home / "train.sh").write_text(f"sleep 0.4; {FAULTS['SPANK']}\n")
    assert typed(home).exit_code in (3, 4), "three failed, or the budget was spent before"
    (home / "train.sh").write_text(TRAINS)
    done = typed(home)
    assert done.exit_code == 0, done.output
    after = records(home)
    assert {after.trials[n].verdict for n in (0, 1)} == {Verdict.REACHED}
    spent, charged = after.node_hours(0), after.charged_hours(0)
    assert spent - charged == pytest.approx(sum(a.node_hours(0) for a in after.attempts.values() if a.fixed_at))
    assert spent > charged > 0


def test_no_more_are_run_again_at_one_time_than_the_study_allows_and_none_while_it_is_not_fixed(home: Path) -> None:
    (home / "mended.toml").write_text(STUDY.replace("trials = 5\nparallel = 2", "trials = 8\nparallel = 8"))
    (home / "train.sh").write_text(FAULTS["SPANK"] + "\n")
    for _ in range(2):
        assert typed(home).exit_code == 3
    assert sorted(records(home).trials) == list(range(8))
    (home / "train.sh").write_text(TRAINS)
    one = ["--study", "mended.toml", "--output", "sweep", "--parallel", "1"]
    assert CliRunner().invoke(sweep, one).exit_code == 0
    after = records(home)
    assert {t.verdict for t in after.trials.values()} == {Verdict.REACHED}
    runs = sorted((a.started_at, a.ended_at) for a in after.attempts.values() if a.fixed_at is None)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(runs) if end and begin)


def test_a_trial_that_fails_alike_again_while_others_run_is_left_alone(home: Path) -> None:
    """Then its values are to blame: no further command runs it a third time."""
    (home / "mended.toml").write_text(STUDY.replace("trials = 5", "trials = 3\nattempts = 1"))
    (home / "train.sh").write_text(f'if [ "$1" = 0.02 ]; then echo "KeyError: \'x\'"; exit 1; fi\n{TRAINS}')
    for _ in range(3):
        assert typed(home).exit_code == 0
    after = records(home)
    assert after.trials[1].verdict is Verdict.FAILED
    assert [len(after.attempts_of(n)) for n in range(3)] == [1, 2, 1]


@pytest.mark.long
def test_a_driver_that_is_killed_after_the_fix_loses_none_and_runs_none_twice(home: Path) -> None:
    (home / "train.sh").write_text(FAULTS["a command that is not there"] + "\n")
    assert typed(home).exit_code == 3
    (home / "train.sh").write_text(
        f'touch "$2/runs"; while [ ! -e {home}/go ]; do sleep 0.05; done; echo x >> "$2/times"; {TRAINS}'
    )
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", "mended.toml", "--output", "sweep"]
    driver = subprocess.Popen(command, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(list((home / "sweep").glob("**/runs"))) == 2, 60, "two trials run again")
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    (home / "go").touch()
    again = typed(home)
    assert again.exit_code == 0, again.output
    after = records(home)
    assert {t.verdict for t in after.trials.values()} == {Verdict.REACHED}
    assert sorted(after.trials) == [0, 1, 2, 3, 4]
    assert [path.read_text() for path in (home / "sweep").glob("**/times")] == ["x\n"] * 5


# -- what comes back, from the records alone --------------------------------------------------------------------------


TUNED = {"LR": 1e-3, "MAX_STEPS": 800, "layout": "tp4 pp1 cp1 minibs4 mbs1 sp0"}


def failed(number: int, failure: str, at: float = 100.0, **known: object) -> tuple[Trial, Attempt]:
    """A trial that failed at once, at ``at``."""
    trial = Trial(
        number=number, seed=1, tuned=TUNED, parameters={}, state=TrialState.FINISHED, verdict=Verdict.FAILED,
        finished_at=at,
    )  # fmt: skip
    attempt = Attempt(
        trial=number, number=0, job_name=f"j{number}", folder="f", submitted_at=at - 2, started_at=at - 1, ended_at=at,
        failure=failure, remedy="fix it", state="ended",
    )  # fmt: skip
    return trial, replace(attempt, **known)  # type: ignore[arg-type]


def sweep_with(*rows: tuple[Trial, Attempt]) -> StudyRecords:
    return StudyRecords(
        name="x", digest="", study_toml="", began_at=0.0, trials={t.number: t for t, _ in rows},
        attempts={(a.trial, a.number): a for _, a in rows},
    )  # fmt: skip


@pytest.fixture(scope="module")
def study() -> Study:
    return study_of()


def test_which_classes_are_the_set_ups(study: Study) -> None:
    """What the values did is none: a loss that is no loss; a refusal by size; what nobody knows once others ran."""
    ran = failed(9, "")
    ran = (replace(ran[0], verdict=Verdict.CENSORED), ran[1])
    kinds = ("configuration", "unsatisfiable", "unread", "mismatch", "infrastructure", "held", "drained")
    for kind in kinds:
        assert [t.number for t in retryable_trials(study, sweep_with(ran, failed(0, kind)))] == [0], kind
    for kind in ("implausible", "unknown"):
        assert retryable_trials(study, sweep_with(ran, failed(0, kind))) == [], kind
    assert retryable_trials(study, sweep_with(ran, failed(0, "configuration", submitted_at=None))) == []
    assert [t.number for t in retryable_trials(study, sweep_with(failed(0, "unknown")))] == [0]


def test_a_limit_of_time_is_fixed_by_a_longer_one_alone(study: Study) -> None:
    hours = failed(0, "configuration", stop=StopKind.TIME_LIMIT, started_at=100.0 - study.budget.trial_minutes * 60)
    assert retryable_trials(study, sweep_with(hours)) == []
    longer = study.with_options({"budget": {"trial_minutes": study.budget.trial_minutes + 30}})
    assert [t.number for t in retryable_trials(longer, sweep_with(hours))] == [0]


def based(number: int = 0) -> tuple[Trial, Attempt]:
    trial, attempt = failed(number, "configuration")
    values = {"CONT": "old.sqsh", "LR": "4e-4"}
    return replace(trial, metrics=TrialMetrics(base="config.sh", pace_spread=0.1), base_values=values), attempt


BEGIN = Start(
    name="config.sh", parameters={"LR": 3e-4}, tuned={**TUNED, "LR": 3e-4}, values={"CONT": "new.sqsh", "LR": "3e-4"}
)


def test_while_nothing_was_measured_the_fix_may_be_in_the_machines_own_config(study: Study) -> None:
    changes = retry_after_fix(study, sweep_with(based(), failed(1, "configuration")), BEGIN, 200.0)
    base, other = changes.trials
    assert (base.base_values, base.parameters, base.tuned) == (BEGIN.values, BEGIN.parameters, BEGIN.tuned)
    assert (base.state, base.verdict, base.metrics) == (TrialState.WAITING, None, TrialMetrics(base="config.sh"))
    assert (other.base_values, other.tuned, other.parameters["LR"]) == ({}, TUNED, 1e-3)
    assert {a.fixed_at for a in changes.attempts} == {200.0}


def test_once_something_was_measured_trial_0_is_what_it_was(study: Study) -> None:
    ran = failed(1, "")
    there = sweep_with(based(), (replace(ran[0], verdict=Verdict.CENSORED), ran[1]))
    assert not nothing_measured(study, there)
    (base,) = retry_after_fix(study, there, BEGIN, 200.0).trials
    assert base.base_values["CONT"] == "old.sqsh"


@pytest.mark.parametrize(
    "alive",
    [{"failure": "", "ended_at": None}, {"failure": "infrastructure", "ended_at": None, "stop": StopKind.SILENT}],
    ids=["runs", "is being given up"],
)
def test_a_job_that_lives_was_begun_with_the_config_of_then(study: Study, alive: dict[str, object]) -> None:
    trial, attempt = failed(1, "")
    running = (replace(trial, state=TrialState.RUNNING, verdict=None), replace(attempt, **alive))  # type: ignore[arg-type]
    assert not nothing_measured(study, sweep_with(based(), running))


def test_nothing_changes_where_nothing_failed_of_the_set_up(study: Study) -> None:
    assert not retry_after_fix(study, sweep_with(), BEGIN, 1.0)


@pytest.mark.parametrize(("hours", "again"), [(2.0, [0]), (1.0, [])], ids=["a larger budget", "the same budget"])
def test_a_trial_that_waited_when_the_budget_was_spent_goes_on_under_its_own_number(
    study: Study, hours: float, again: list[int]
) -> None:
    """Trial 0, the machine's own config, would never be measured: its node failed as the last node-hour went."""
    trial, attempt = failed(0, "infrastructure")
    waited = replace(
        trial, verdict=Verdict.CANCELLED, sentence="proposed; not submitted, the budget of 1 node-hours is spent"
    )
    lived = replace(attempt, started_at=0.0, ended_at=3600.0, nodes=1)
    by_user = replace(failed(1, "")[0], verdict=Verdict.CANCELLED, sentence="cancelled by the user")
    there = sweep_with((waited, lived), (by_user, replace(failed(1, "")[1], started_at=None)))
    larger = study.with_options({"budget": {"node_hours": hours}})
    changes = retry_after_fix(larger, there, None, 4000.0)
    assert [t.number for t in changes.trials if t.state is TrialState.WAITING] == again
