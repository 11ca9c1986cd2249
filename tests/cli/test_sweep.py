"""``python -m lora_tune.sweep`` as users run it: real processes, real jobs, real interruptions."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import sqlite3
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.__main__ import main as cli
from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers.job_records import read_records
from lora_tune.logs.mllog import MllogReader
from lora_tune.store.records import StudyRecords, TrialState, Verdict
from tests.recorded import recorded
from tests.waiting import wait_for

TRIAL = r"""
import json, math, os, sys, time
rate, steps, pace = float(os.environ["LR"]), int(os.environ["STEPS"]), float(os.environ["PACE"])
def say(key, value, **metadata):
    record = {"namespace": "", "time_ms": round(time.time() * 1000), "event_type": "POINT_IN_TIME", "key": key}
    print(":::MLLOG " + json.dumps({**record, "value": value, "metadata": {"file": "t.py", "lineno": 1, **metadata}}))
    sys.stdout.flush()
slope = 0.5 * math.exp(-(math.log10(rate) + 3) ** 2)
say("run_start", None)
for i in range(1, 11):
    time.sleep(pace)
    samples = i * steps * 8 // 10
    say("eval_accuracy", 3.0 - slope * math.log(samples), samples_count=samples)
    if 3.0 - slope * math.log(samples) <= float(os.environ["TARGET"]):
        say("run_stop", None, status="success")
        sys.exit(0)
say("run_stop", None, status="aborted")
"""


def study(trials: int = 6, pace: float = 0.05, argv: str = "", extra: str = "") -> str:
    """A study whose trials take a second or two."""
    return f"""
description = "short trials"
[workload]
kind = "command"
argv = {argv or json.dumps([sys.executable, "trial.py"])}
[site]
system = "TEST"
kill_seconds = 3
[space]
LR = {{ type = "float", low = 1e-4, high = 1e-2, log = true }}
STEPS = {{ type = "int", low = 100, high = 400, step = 100 }}
PACE = {pace}
GBS = 8
[objective]
target = 0.0
[budget]
trials = {trials}
parallel = 2
trial_minutes = 1
{extra}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with ``studies/quick.toml`` and the trial program, to run commands in."""
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "quick.toml").write_text(study())
    (tmp_path / "trial.py").write_text(TRIAL)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lora_tune.sweep", *arguments]


def sweep(place: Path, *arguments: str, name: str = "quick") -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        command("--study", name, *arguments),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def records(place: Path, name: str = "quick") -> StudyRecords:
    return recorded(place / "sweeps" / name / "sweep.db", name)


def trains(folder: Path) -> bool:
    """Whether the trial of an attempt runs."""
    started = read_records(AttemptPaths(folder), "").started
    return started is not None and started.process.alive


def executions(place: Path, name: str = "quick") -> dict[str, int]:
    """How often each trial's program really ran, all its attempts together, by their own logs."""
    ran: dict[str, int] = {}
    for log in (place / "sweeps" / name / "trials").glob("*/*/job.log"):
        trial = log.parent.parent.name
        ran[trial] = ran.get(trial, 0) + log.read_text().count('"run_start"')
    return ran


def test_tunes_prunes_exports_and_reports(place: Path) -> None:
    done = sweep(place)
    assert done.returncode == 0, done.stderr
    sweep_folder = place / "sweeps" / "quick"
    assert (sweep_folder / "study.toml").read_text() == study()
    assert done.stdout.startswith("quick: 6 trials, 2 at a time, records in sweeps/quick\n")
    assert "config   sweeps/quick/best/config_TEST_1x1x1xtp1pp1cp1.sh" in done.stdout
    (line,) = (line.removeprefix("run it   ") for line in done.stdout.splitlines() if line.startswith("run it   "))
    typed = subprocess.run(["bash", "-euc", line], cwd=place, capture_output=True, text=True, timeout=60)
    assert '"run_start"' in typed.stdout, "the line works where it is printed"
    assert (sweep_folder / "report.html").stat().st_size > 0
    found = records(place)
    assert len(found.trials) == 6
    assert all(t.state is TrialState.FINISHED for t in found.trials.values())
    verdicts = {t.verdict for t in found.trials.values()}
    assert Verdict.REACHED in verdicts
    assert verdicts <= {Verdict.REACHED, Verdict.PRUNED, Verdict.CAPPED, Verdict.CENSORED}


def test_the_time_is_the_one_in_the_log(place: Path) -> None:
    sweep(place, "--trials", "2")
    for trial in records(place).trials.values():
        reader = MllogReader()
        reader.feed((place / f"sweeps/quick/trials/{trial.number:04d}/attempt-0/job.log").read_bytes())
        stop = reader.run().reached(0.0)
        assert (trial.seconds, trial.samples) == ((stop.seconds, stop.samples) if stop else (None, None))


def test_the_same_command_resumes(place: Path) -> None:
    assert sweep(place, "--trials", "3").returncode == 0
    first = records(place).trials
    again = sweep(place, "--trials", "5")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("resuming quick: 3 of 5 trials ended; 2 at a time, records in sweeps/quick\n")
    trials = records(place).trials
    assert len(trials) == 5
    assert all(trials[number] == trial for number, trial in first.items())
    assert set(executions(place).values()) == {1}


@pytest.mark.parametrize("moment", [1, 4, 7])
def test_killed_in_the_middle_every_trial_is_accounted_for_and_none_runs_twice(place: Path, moment: int) -> None:
    (place / "studies" / "quick.toml").write_text(study(pace=0.3))
    driver = subprocess.Popen(command("--study", "quick", "--quiet"), cwd=place, stdout=subprocess.DEVNULL)
    log = place / "sweeps" / "quick" / "driver.log"
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= moment, 60, "the driver's work")
    driver.kill()
    driver.wait()
    # The lease of a dead process of this host does not keep anybody out.
    folders = sorted((place / "sweeps/quick/trials").glob("*/*"))
    running = [folder for folder in folders if trains(folder)]
    done = sweep(place)
    assert done.returncode == 0, done.stderr
    found = records(place)
    assert len(found.trials) == 6
    assert all(t.state is TrialState.FINISHED for t in found.trials.values())
    assert executions(place) == {f"{n:04d}": 1 for n in range(6)}
    for folder in running:
        assert found.attempts[int(folder.parent.name), 0].exit_code is not None, "it was adopted and seen to its end"


def test_the_next_driver_does_not_time_anew_what_has_no_time_stamps(place: Path) -> None:
    """The trial goes on while nobody reads its log; read at once afterwards it would seem to have taken no time."""
    (place / "trial.py").write_text(
        "import time\nfor step in range(1, 11):\n    time.sleep(0.4)\n"
        """    print('{"step": %d, "eval_loss": %.3f}' % (step, (10 - step) / 10), flush=True)\n"""
    )
    unstamped = study(trials=1).replace("[site]", '[workload.log]\nkind = "jsonl"\n[site]')
    (place / "studies" / "quick.toml").write_text(unstamped)
    driver = subprocess.Popen(command("--study", "quick", "--quiet"), cwd=place, stdout=subprocess.DEVNULL)
    log = place / "sweeps" / "quick" / "trials" / "0000" / "attempt-0" / "job.log"
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= 3, 60, "the trial's first evals")
    driver.kill()
    driver.wait()
    wait_for(lambda: len(log.read_text().splitlines()) == 10, 60, "the trial's end")
    done = sweep(place)
    assert done.returncode == 0, done.stderr
    (trial,) = records(place).trials.values()
    assert trial.seconds == pytest.approx(9 * 0.4, rel=0.4)


def test_a_second_driver_is_refused_with_the_owner(place: Path) -> None:
    (place / "studies" / "quick.toml").write_text(study(pace=0.5))
    driver = subprocess.Popen(command("--study", "quick", "--quiet"), cwd=place)
    wait_for(lambda: (place / "sweeps/quick/driver.log").exists(), 30, "the first driver")
    second = sweep(place)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(30) == 130
    assert second.returncode == 3
    assert f"pid {driver.pid}" in second.stderr
    assert os.uname().nodename in second.stderr


def under_a_terminal(place: Path, *more: str) -> tuple[subprocess.Popen[bytes], int]:
    """The sweep under a terminal of its own, with a trial that runs; the terminal's other end."""
    leader, follower = pty.openpty()
    driver = subprocess.Popen(
        command("--study", "quick", *more),
        cwd=place,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(follower)
    wait_for(lambda: list((place / "sweeps/quick/trials").glob("*/*/started.json")), 60, "a running trial")
    return driver, leader


def interrupt(place: Path, answer: str) -> tuple[int, str]:
    """Run under a terminal, press Ctrl-C once a trial runs, and answer what is asked."""
    driver, leader = under_a_terminal(place)
    os.write(leader, b"\x03")
    shown = until(leader, b"[keep] ")
    # Python notices no signal between a prompt and the reading of its answer; nobody presses a key that fast.
    wait_for(lambda: Path(f"/proc/{driver.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S", 20, "it reads")
    os.write(leader, answer.encode())
    shown += until(leader, None)
    os.close(leader)
    return driver.wait(60), shown.decode(errors="replace")


def until(terminal: int, text: bytes | None) -> bytes:
    """What the terminal shows up to ``text``, or to the end of the program."""
    shown = b""
    while text is None or text not in shown:
        assert select.select([terminal], [], [], 60)[0], f"nothing more for a minute after {shown!r}"
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the program ended
            break
    return shown


def test_ctrl_c_keeps_the_jobs_on_request_and_the_next_start_adopts_them(place: Path) -> None:
    (place / "studies" / "quick.toml").write_text(study(trials=2, pace=0.4))
    code, shown = interrupt(place, "\n")
    assert code == 130
    assert "the jobs keep running; resume with: " in shown
    assert "-m lora_tune.sweep --study quick" in shown
    assert any(t.state is not TrialState.FINISHED for t in records(place).trials.values())
    assert sweep(place).returncode == 0
    assert executions(place) == {"0000": 1, "0001": 1}


def test_a_second_ctrl_c_keeps_the_jobs_as_the_prompt_says(place: Path) -> None:
    (place / "studies" / "quick.toml").write_text(study(trials=1, pace=0.4))
    code, shown = interrupt(place, "\x03")
    assert (code, "the jobs keep running" in shown) == (130, True)
    assert sweep(place).returncode == 0
    assert executions(place) == {"0000": 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_program_that_ends_the_sweep_is_asked_nothing_and_the_jobs_are_kept(
    place: Path, number: signal.Signals
) -> None:
    """The question would stand on a terminal at which nobody sits; the line that goes on is the one that was typed."""
    (place / "studies" / "quick.toml").write_text(study(trials=6, pace=3))
    driver, leader = under_a_terminal(place, "--trials", "1")
    driver.send_signal(number)
    shown = until(leader, None).decode(errors="replace")
    os.close(leader)
    assert driver.wait(60) == 130
    assert "[keep]" not in shown
    line = re.search(r"resume with: (.*)", shown)
    assert line is not None
    assert line[1].strip().endswith("--study quick --trials 1")
    done = subprocess.run(shlex.split(line[1]), cwd=place, capture_output=True, stdin=subprocess.DEVNULL, timeout=120)
    assert done.returncode == 0, done.stderr
    assert executions(place) == {"0000": 1}


def test_cancelling_the_jobs_needs_the_word(place: Path) -> None:
    (place / "studies" / "quick.toml").write_text(study(trials=2, pace=30))
    code, _ = interrupt(place, "cancel\n")
    assert code == 130
    assert {t.verdict for t in records(place).trials.values()} == {Verdict.CANCELLED}
    folders = (place / "sweeps/quick/trials").glob("*/*")
    assert not any(map(trains, folders))


def test_a_dry_run_shows_all_and_writes_nothing(place: Path) -> None:
    done = sweep(place, "--dry-run")
    assert done.returncode == 0
    assert "trial.py" in done.stdout
    assert "LR=" in done.stdout
    assert not (place / "sweeps").exists()


def test_a_dry_run_says_that_the_script_is_not_there(place: Path) -> None:
    (place / "trial.py").rename(place / "elsewhere.py")
    shown = sweep(place, "--dry-run").stdout
    assert "# no trial would run: study quick: workload.argv: there is no file 'trial.py' in " in shown


def test_a_reader_that_has_seen_enough_is_no_error(place: Path) -> None:
    line = shlex.join(command("--study", "quick", "--dry-run"))
    done = subprocess.run(
        ["bash", "-c", f"{line} | true; exit ${{PIPESTATUS[0]}}"], cwd=place, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_json_is_one_object_a_line(place: Path) -> None:
    done = sweep(place, "--json", "--trials", "2")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    ended = [e for e in events if e["event"] == "trial" and e["state"] in ("reached", "pruned", "censored")]
    assert {e["trial"] for e in ended} == {0, 1}


def test_nothing_reached_is_exit_code_4(place: Path) -> None:
    (place / "studies" / "quick.toml").write_text(study(trials=2).replace("target = 0.0", "target = -9.0"))
    done = sweep(place)
    assert done.returncode == 4, done.stderr
    assert "no trial reached eval loss -9" in done.stdout
    assert not (place / "sweeps/quick/best").exists()


@pytest.mark.parametrize(
    ("arguments", "edit", "code", "message"),
    [
        (["--study", "quik"], None, 2, "there is no study 'quik'; did you mean quick?"),
        ([], ("trials = 6", "trials = true"), 2, "budget.trials: must be a number, not True"),
        ([], ("[site]", 'cwd = "/no/where"\n[site]'), 3, "workload.cwd = '/no/where': there is no such folder"),
        ([], ("trial.py", "trail.py"), 3, "workload.argv: there is no file 'trail.py' in "),
        ([], ("GBS = 8", "layout = { type = 'layout', tp = [3], minibs = [1] }"), 2, "no layout of 1 GPUs satisfies"),
        ([], ("trials = 6", "node_hours = -1"), 2, "budget.node_hours"),
        (["--trials", "0"], None, 2, "option budget.trials"),
        (["--budget-node-hours", "-4"], None, 2, "option budget.node_hours"),
        (["--output", "/proc/no"], None, 3, "/proc/no: "),
        (["--storage", "nonsense"], None, 3, "the storage URL is unreadable"),
    ],
)
def test_bad_input_is_one_line_with_its_exit_code_and_writes_nothing(
    place: Path, arguments: list[str], edit: tuple[str, str] | None, code: int, message: str
) -> None:
    file = place / "studies" / "quick.toml"
    if edit:
        assert edit[0] in file.read_text()
        file.write_text(file.read_text().replace(*edit))
    name = ["--study", "quick"] if "--study" not in arguments else []
    done = subprocess.run(command(*name, *arguments), cwd=place, capture_output=True, text=True, timeout=60)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    if "--storage" not in arguments:
        assert not (place / "sweeps").exists()


def test_a_damaged_database_is_left_as_it_is(place: Path) -> None:
    sweep(place, "--trials", "1")
    database = place / "sweeps" / "quick" / "sweep.db"
    garbage = b"SQLite format 3\0" + b"\xff" * 5000
    for extra in ("-wal", "-shm"):
        database.with_name(database.name + extra).unlink(missing_ok=True)
    database.write_bytes(garbage)
    done = sweep(place)
    assert done.returncode == 3
    assert "sweep.db is damaged" in done.stderr
    assert database.read_bytes() == garbage


def test_a_larger_budget_in_the_file_is_offered_as_an_option(place: Path) -> None:
    sweep(place, "--trials", "1")
    file = place / "studies" / "quick.toml"
    file.write_text(file.read_text().replace("trials = 6", "trials = 9"))
    refused = sweep(place)
    assert "undo that and add --trials 9 to the command" in refused.stderr
    file.write_text(file.read_text().replace("trials = 9", "trials = 6"))
    assert sweep(place, "--trials", "2").returncode == 0


def test_hints_name_the_folder_and_the_study_as_they_were_given(place: Path) -> None:
    elsewhere = place / "elsewhere"
    done = sweep(place, "--trials", "1", "--output", str(elsewhere))
    line = next(x for x in done.stdout.splitlines() if x.startswith("review")).removeprefix("review").strip()
    assert line.endswith(f"-m lora_tune.dashboard --study quick --output {elsewhere}")
    missing = subprocess.run(
        [sys.executable, "-m", "lora_tune.status", "--study", "quick", "--output", str(place / "no where")],
        cwd=place, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert f"-m lora_tune.sweep --study quick --output '{place}/no where'" in missing.stderr


def test_a_changed_study_is_named_and_refused_unless_accepted(place: Path) -> None:
    sweep(place, "--trials", "1")
    file = place / "studies" / "quick.toml"
    file.write_text(file.read_text().replace("high = 1e-2", "high = 2e-2"))
    refused = sweep(place, "--trials", "2")
    assert refused.returncode == 2
    assert "space.LR.high: 0.01 -> 0.02" in refused.stderr
    assert sweep(place, "--trials", "2", "--accept-changes").returncode == 0
    assert (place / "sweeps/quick/study.toml").read_text() == file.read_text()


def test_results_by_one_target_are_never_called_results_by_another(place: Path) -> None:
    """Runs to 0.5 were called "to the target" of 0.4, which none of them had reached, with exit code 0."""
    sweep(place, "--trials", "1")
    file = place / "studies" / "quick.toml"
    file.write_text(file.read_text().replace("target = 0.0", "target = -9.0"))
    for options in ((), ("--accept-changes",)):
        refused = sweep(place, "--trials", "2", *options)
        assert refused.returncode == 2
        assert "the results so far are by what it said before (objective.target: 0.0 -> -9.0)" in refused.stderr
        assert "undo that, or use another --output" in refused.stderr


def bad_trial(script: str) -> str:
    return study(trials=50, argv=json.dumps(["bash", "-c", script]), extra="attempts = 1")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("true", "3 trials in a row failed"),
        ("echo oops >&2; exit 1", "exit code 1"),
        ("head -c 100000 /dev/urandom", "3 trials in a row failed"),
    ],
    ids=["nothing", "exit 1", "garbage"],
)
def test_trials_that_cannot_work_end_the_sweep_with_the_reason(place: Path, script: str, message: str) -> None:
    (place / "studies" / "quick.toml").write_text(bad_trial(script))
    done = sweep(place)
    assert done.returncode == 3, done.stderr
    assert message in done.stderr
    found = records(place)
    assert 3 <= len(found.trials) <= 4
    assert all(t.seconds is None for t in found.trials.values())


def test_a_trial_that_prints_a_gigabyte_is_read_to_its_end(place: Path) -> None:
    script = f"yes 'all work and no play' | head -c 1000000000; exec {sys.executable} trial.py"
    text = study(trials=1, argv=json.dumps(["bash", "-c", script]))
    (place / "studies" / "quick.toml").write_text(text.replace("low = 1e-4, high = 1e-2", "low = 9e-4, high = 1e-3"))
    done = sweep(place)
    assert done.returncode == 0, done.stderr
    assert (place / "sweeps/quick/trials/0000/attempt-0/job.log").stat().st_size > 1_000_000_000


def test_a_log_that_vanishes_does_not_take_the_sweep_down(place: Path) -> None:
    (place / "trial.py").write_text(
        TRIAL.replace("for i in", "os.remove(os.path.join(os.environ['HERE'], 'job.log'))\nfor i in")
    )
    text = study(trials=2, extra="attempts = 1").replace(
        'kind = "command"', 'kind = "command"\nenvironment = { HERE = "{folder}" }'
    )
    (place / "studies" / "quick.toml").write_text(text)
    done = sweep(place)
    assert done.returncode in (3, 4)
    assert "Traceback" not in done.stderr
    assert all(t.seconds is None for t in records(place).trials.values())


def test_a_sweep_that_an_earlier_release_began_goes_on(place: Path) -> None:
    """A release that reads more keys has another hash for the same text, which it reads as the earlier one did."""
    sweep(place, "--trials", "1")
    with contextlib.closing(sqlite3.connect(place / "sweeps" / "quick" / "sweep.db")) as database, database:
        assert database.execute("UPDATE lora_tune_sweep SET digest = 'of an earlier release'").rowcount == 1
    done = sweep(place, "--trials", "2")
    assert done.returncode == 0, done.stderr


def test_a_variable_of_a_former_release_is_not_ignored_in_silence() -> None:
    signed = CliRunner().invoke(cli, ["sweep", "--study", "nowhere"], env={"LORA_TUNE_SIGNING_KEY": "key"})
    assert signed.exit_code == 2
    assert "LORA_TUNE_SIGNING_KEY is set and has no effect any more" in signed.stderr
