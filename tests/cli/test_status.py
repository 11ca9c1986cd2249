"""Status: where a sweep stands, for people, for programs and for monitoring; it reads and never writes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from lora_tune.cli import commands, status
from lora_tune.cli.status import SweepCondition, sweep_condition
from lora_tune.review import screen
from lora_tune.store import LEASE_SECONDS, Changes, Store, sqlite_url
from lora_tune.store.metrics import RunMetrics, TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict
from tests.builders import ACTIVE_ENVIRONMENT, BEGAN, STUDY, stored, study_of, sweep_of
from tests.confirmed_sweep import after_confirm
from tests.contracts.store import where
from tests.waiting import wait_for

OWNER = "host7 pid 42 start 99"


def run(folder: Path, *options: str) -> Result:
    words = ["--study", "built", "--output", str(folder), *options]
    return CliRunner(env=ACTIVE_ENVIRONMENT).invoke(commands.status, words)


@pytest.mark.parametrize(
    ("running", "owner", "sign", "expected"),
    [
        (2, OWNER, 1, SweepCondition.RUNNING),
        (0, OWNER, 1, SweepCondition.RUNNING),
        (2, OWNER, LEASE_SECONDS + 1, SweepCondition.UNATTENDED),
        (2, "", 0, SweepCondition.UNATTENDED),
        (0, "", 0, SweepCondition.ENDED),
    ],
)
def test_a_sweep_runs_has_ended_or_is_left_alone(running: int, owner: str, sign: float, expected: str) -> None:
    sweep = sweep_of(study_of(), trials=6, running=running)
    assert sweep_condition(sweep, (owner, BEGAN - sign), BEGAN) == expected


@pytest.mark.parametrize("width", [60, 120])
def test_after_confirm_the_chosen_trial_comes_first_and_says_so(width: int) -> None:
    """In one run each the one that was passed over was faster: that was luck."""
    study = study_of()
    sweep, chosen, passed = after_confirm(study, sweep_of(study))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(status.picture(study, sweep, ("", 0.0), BEGAN, every=False))
    best = console.export_text().partition("best 5")[2].splitlines()[2:4]
    assert [line.split()[:2] for line in best] == [[str(chosen.number), "confirmed"], [str(passed.number), "passed"]]


def test_the_exit_code_serves_monitoring(tmp_path: Path) -> None:
    study = study_of()
    done, open_ = sweep_of(study, trials=8), sweep_of(study, trials=8, running=1)
    nothing = replace(done, trials={n: _censored(t) for n, t in done.trials.items()})
    for name, sweep, expected in (("done", done, 0), ("open", open_, 3), ("nothing", nothing, 4)):
        stored(tmp_path / name, sweep)
        result = run(tmp_path / name)
        assert result.exit_code == expected, result.output


def test_a_sweep_that_nobody_drives_and_nobody_ended_calls_for_somebody(tmp_path: Path) -> None:
    """Registered and never taken up, or its driver died between two trials: nothing is open, and nothing goes on."""
    store = Store(sqlite_url(stored(tmp_path, sweep_of(study_of(), trials=8))))
    lease = store.take_lease("built", OWNER, BEGAN)
    store.place(lease, where(tmp_path / "built.toml", tmp_path))
    store.release(lease)
    left = run(tmp_path)
    assert left.exit_code == 3
    assert "it is not over and no driver is running; take over with: python -m lora_tune.sweep" in _flat(left.output)
    assert json.loads(run(tmp_path, "--json").stdout)["state"] == "unattended"
    lease = store.take_lease("built", OWNER, BEGAN)
    assert run(tmp_path).exit_code == 3, "its driver has not been heard of since it began"
    store.finish(lease, "all 8 trials are proposed")
    store.release(lease)
    store.close()
    assert run(tmp_path).exit_code == 0


def test_what_it_has_cost_stands_beside_the_node_hours(tmp_path: Path) -> None:
    study, sweep = study_of(), sweep_of(study_of(), trials=8)
    stored(tmp_path, sweep)
    cost = 25 * sweep.node_hours(BEGAN)
    assert json.loads(run(tmp_path, "--json").stdout)["money"] == pytest.approx(cost)
    words = f"of 60 = {cost:,.2f} in money"
    assert words in _flat(run(tmp_path).output)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen.screen(study, sweep, BEGAN, []))
    assert words in console.export_text()


def test_what_packs_held_and_trained_nobody_is_part_of_the_node_hours(tmp_path: Path) -> None:
    sweep = sweep_of(study_of(), trials=8)
    used = sweep.node_hours(BEGAN)
    first = sweep.attempts[0, 0]
    held = replace(first, overhead_seconds=1800.0)
    sweep = replace(sweep, attempts={**sweep.attempts, (0, 0): held})
    stored(tmp_path, sweep)
    told = json.loads(run(tmp_path, "--json").stdout)
    assert told["node_hours_overhead"] == pytest.approx(0.5 * first.node_count)
    assert told["node_hours"] == pytest.approx(used + told["node_hours_overhead"])
    words = f"; {told['node_hours_overhead']:.2g} of them in packs that trained nobody"
    assert words in _flat(run(tmp_path).output)


def test_the_screen_of_a_race_shows_means_and_no_lucky_run() -> None:
    study, field = study_of(), sweep_of(study_of(), trials=2)
    seconds = {0: (1500.0, 1700.0), 1: (1400.0, 1900.0, 1900.0)}
    runs = [(of, s) for of, each in seconds.items() for s in each]
    single = {
        n: Trial(
            number=n,
            seed=n,
            tuned={},
            parameters={},
            replicate_of=of,
            verdict=Verdict.REACHED,
            seconds=s,
            state=TrialState.FINISHED,
            metrics=TrialMetrics(objective=s),
        )
        for n, (of, s) in enumerate(runs)
    }
    ends = (*(TrialMetrics(objective=s) for s in seconds[0]), TrialMetrics())
    several = tuple(RunMetrics(seed=i, position=i, metrics=end) for i, end in enumerate(ends))
    in_one_job = {
        0: replace(single[0], metrics=replace(single[0].metrics, runs=several)),
        **{n: t for n, t in single.items() if t.replicate_of == 1},
    }
    for trials in (single, in_one_job, {}):
        console = Console(width=120, record=True, file=io.StringIO())
        waiting = {9: Trial(number=9, seed=9, tuned={}, parameters={}, replicate_of=1)}
        console.print(
            screen.screen(study, replace(field, trials={**trials, **waiting}, attempts={}, evals={}), BEGAN, [])
        )
        shown = console.export_text()
        assert "best" not in shown
        if not trials:
            assert "mean of runs: none is over yet" in shown
            continue
        words = _flat(re.sub("[│]", " ", shown))
        missed = ", 1 did not reach the target" if trials is in_one_job else ""
        count = 3 if missed else 2
        first = rf"mean of runs: trial 0 26:40 min \([0-9:]+ min to [0-9:]+ min, {count} runs{missed}\)"
        assert re.search(rf"{first}; trial 1 28:53 min \([0-9:]+ min to [0-9:]+ min, 3 runs\)", words)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _censored(trial: Trial) -> Trial:
    return replace(trial, verdict=Verdict.CENSORED, seconds=None, samples=None, metrics=TrialMetrics())


def test_what_it_prints(tmp_path: Path) -> None:
    sweep = sweep_of(study_of(), trials=24, running=2)
    stored(tmp_path, sweep)
    printed = run(tmp_path).output
    best = sweep.best()
    assert best is not None
    assert f"trial {best.number}" in printed
    assert "90% interval" in printed
    assert "take over with: python -m lora_tune.sweep --study built" in " ".join(printed.split())
    assert "saved by stopping early" in _flat(printed)
    assert "another node; run" in printed


def test_a_study_that_was_run_for_more_trials_than_it_names_is_not_25_of_12(tmp_path: Path) -> None:
    """``sweep --trials 25`` goes on where the study's own number ended."""
    for limit, expected in ((30, "24 of 30:"), (12, "24:")):
        text = STUDY.replace("trials = 40", f"trials = {limit}")
        stored(tmp_path / str(limit), sweep_of(study_of(text), trials=24, text=text))
        assert f"trials {expected}" in _flat(run(tmp_path / str(limit)).output)


def test_json_says_the_same_to_programs(tmp_path: Path) -> None:
    sweep = sweep_of(study_of(), trials=24, running=2)
    stored(tmp_path, sweep)
    told = json.loads(run(tmp_path, "--json").stdout)
    best = sweep.best()
    assert best is not None
    assert told["state"] == "unattended"
    assert told["best"]["trial"] == best.number
    assert told["best"]["seconds"] == best.seconds
    assert told["best"]["parameters"] == dict(best.parameters)
    assert len(told["running"]) == 2
    assert told["trials"] == 24
    assert sum(told["verdicts"].values()) == 22
    assert {f["class"] for f in told["failures"]} <= {"infeasible", "infrastructure"}


def test_nothing_is_written_not_even_a_table(tmp_path: Path) -> None:
    empty = tmp_path / "empty.db"
    empty.touch()
    result = CliRunner().invoke(commands.status, ["--study", "tiny", "--storage", f"sqlite:///{empty}"])
    assert result.exit_code == 3
    assert "holds no sweep" in result.output
    assert empty.stat().st_size == 0
    missing = tmp_path / "missing.db"
    result = CliRunner().invoke(commands.status, ["--study", "tiny", "--storage", f"sqlite:///{missing}"])
    assert result.exit_code == 3
    assert not missing.exists()


def test_the_database_url_alone_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "there", sweep_of(study_of(), trials=6))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        commands.status, ["--study", "built", "--storage", sqlite_url(tmp_path / "there" / "sweep.db")]
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", ["status", "logs"])
def test_what_a_command_at_work_loads(tmp_path: Path, command: str) -> None:
    """A look at logs needs no database; a look at a sweep its own, and the search for what is recommended."""
    stored(tmp_path, sweep_of(study_of(), trials=6))
    (tmp_path / "job.log").write_text("step 1 loss 2.5\n")
    module, needs, options = {
        "status": ("status", ["optuna", "scipy", "sqlalchemy"], ["--study", "built", "--output", str(tmp_path)]),
        "logs": ("logs.__main__", ["optuna"], ["--study", "tiny", str(tmp_path / "job.log")]),
    }[command]
    heavy = (
        "optuna",
        "plotly",
        "psycopg",
        "scipy",
        "sqlalchemy",
        "sqlalchemy.dialects.postgresql",
        "submitit",
        "torch",
    )
    program = (
        f"import atexit, sys, lora_tune.{module} as command; "
        f"atexit.register(lambda: print([name for name in {heavy} if name in sys.modules])); command.main({options})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == str(needs), done.stdout + done.stderr
    assert "Usage" not in done.stderr


def test_watching_ends_with_the_sweep(tmp_path: Path) -> None:
    sweep = sweep_of(study_of(), trials=6)
    store = Store(sqlite_url(stored(tmp_path, sweep)))
    lease = store.take_lease("built", OWNER, time.time())
    command = (sys.executable, "-m", "lora_tune.status", "--study", "built", "--output", str(tmp_path))
    watcher = subprocess.Popen((*command, "--watch", "--every", "0.2", "--json"), stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["state"] == "running"
    store.save(lease, Changes(), time.time())
    assert json.loads(watcher.stdout.readline())["driver"] == OWNER
    store.release(lease)
    wait_for(lambda: watcher.poll() is not None, 20, "the watcher ends")
    assert watcher.returncode == 0
    assert json.loads(watcher.stdout.read().splitlines()[-1])["state"] == "ended"
    store.close()


def test_all_trials_are_listed_on_request(tmp_path: Path) -> None:
    sweep: StudyRecords = sweep_of(study_of(), trials=30)
    stored(tmp_path, sweep)
    lines = run(tmp_path, "--all").output.splitlines()
    numbers = {int(words[0]) for line in lines if (words := line.split()) and words[0].isdigit()}
    assert numbers == set(sweep.trials)
