"""A database that several drivers share: real processes, real PostgreSQL, ``kill -9``, a server that goes away."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.store import LEASE_SECONDS, Store
from lora_tune.store.records import StudyRecords, TrialState
from tests.cli.test_sweep import TRIAL, executions, study
from tests.postgres import PASSWORD, Postgres
from tests.recorded import recorded
from tests.waiting import wait_for

pytestmark = pytest.mark.postgres

numbers = itertools.count()


class Place:
    """A folder with studies and a database that they share; the processes that it started end with it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.names: list[str] = []
        self.processes: list[subprocess.Popen[str]] = []
        (folder / "studies").mkdir()
        (folder / "trial.py").write_text(TRIAL)

    def study(self, **options: object) -> str:
        """A new study; its name."""
        name = f"shared{next(numbers)}"
        (self.folder / "studies" / f"{name}.toml").write_text(study(**options))  # type: ignore[arg-type]
        self.names.append(name)
        return name

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "LORA_TUNE_STORAGE": self.url}

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", f"lora_tune.{command}", *arguments]
        return subprocess.run(
            argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self, command: str, *arguments: str, host: str = "") -> subprocess.Popen[str]:
        """A process; ``host``: on another host, as far as its name tells."""
        argv = [sys.executable, "-m", f"lora_tune.{command}", *arguments]
        if host:
            argv = ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh", *argv]
        out = (self.folder / f"out{len(self.processes)}").open("w")
        process = subprocess.Popen(
            argv, cwd=self.folder, env=self.environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, text=True
        )
        self.processes.append(process)
        return process

    def output(self, process: subprocess.Popen[str]) -> str:
        return (self.folder / f"out{self.processes.index(process)}").read_text()

    def sweep(self, name: str) -> StudyRecords:
        return recorded(self.url, name)

    def begun(self, name: str) -> int:
        return len(list((self.folder / "sweeps" / name / "trials").glob("*/*/started.json")))


@pytest.fixture
def place(tmp_path: Path, postgres_url: str) -> Iterator[Place]:
    made = Place(tmp_path, postgres_url)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def assert_all_ran_once(place: Place, name: str, trials: int) -> None:
    sweep = place.sweep(name)
    assert sorted(sweep.trials) == list(range(trials))
    assert all(t.state is TrialState.FINISHED for t in sweep.trials.values())
    assert executions(place.folder, name) == {f"{n:04d}": 1 for n in range(trials)}


def test_every_command_works_on_postgresql_and_the_password_is_nowhere(place: Place) -> None:
    name = place.study(trials=3, pace=0.1)
    driver = place.start("sweep", "--study", name)
    wait_for(lambda: place.begun(name) >= 1, 60, "a trial")
    for started in (place.folder / "sweeps" / name / "trials").glob("*/*/started.json"):
        trial = Path("/proc", str(json.loads(started.read_text())["pid"]))
        if trial.exists():
            assert PASSWORD.encode() not in (trial / "environ").read_bytes(), "a trial has no business with it"
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert PASSWORD.encode() not in process.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
    assert driver.wait(120) == 0, place.output(driver)
    assert_all_ran_once(place, name, 3)
    seen = place.output(driver)
    for command in ("status", "report", "export"):
        done = place.run(command, "--study", name)
        assert done.returncode == 0, done.stderr
        seen += done.stdout + done.stderr
    dashboard = place.start("dashboard", "--study", name, "--port", "0")
    wait_for(lambda: "/dashboard" in place.output(dashboard), 60, "the dashboard")
    dashboard.send_signal(signal.SIGINT)
    dashboard.wait(30)
    seen += place.output(dashboard)
    assert not (place.folder / "sweeps" / name / "sweep.db").exists()
    for file in (place.folder / "sweeps").rglob("*"):
        seen += file.read_text(errors="replace") if file.is_file() else ""
    assert PASSWORD not in seen


def test_a_password_on_the_command_line_is_refused_with_the_safe_ways(place: Place) -> None:
    done = place.run("sweep", "--study", place.study(), "--storage", place.url)
    assert done.returncode == 2
    assert "LORA_TUNE_STORAGE" in done.stderr
    assert ".pgpass" in done.stderr
    assert PASSWORD not in done.stderr


def test_the_database_is_away_and_the_driver_dies_and_nothing_is_lost(place: Place, postgres: Postgres) -> None:
    name = place.study(trials=4, pace=0.4)
    driver = place.start("sweep", "--study", name, "--quiet")
    wait_for(lambda: place.begun(name) == 2, 60, "two trials")
    postgres.stop()
    unsaved = place.folder / "sweeps" / name / "unsaved.jsonl"
    ended = (place.folder / "sweeps" / name / "trials").glob
    wait_for(lambda: len(list(ended("*/*/ended.json"))) == 2, 60, "both trials end meanwhile")
    wait_for(lambda: unsaved.exists() and unsaved.read_text().count('"finished') >= 2, 30, "their ends on disk")
    assert place.begun(name) == 2, "nothing is submitted that other drivers could not see"
    driver.kill()
    driver.wait()
    postgres.start()
    again = place.run("sweep", "--study", name)
    assert again.returncode == 0, again.stderr
    assert "saved what an earlier driver could not" in again.stdout
    assert not unsaved.exists()
    assert_all_ran_once(place, name, 4)


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="another host name needs root")
def test_a_standby_on_another_host_takes_over_when_the_lease_has_run_out(place: Place) -> None:
    name = place.study(trials=40, pace=0.4)
    first = place.start("sweep", "--study", name, "--quiet")
    wait_for(lambda: place.begun(name) >= 1, 60, "the first driver's trial")
    standby = place.start("sweep", "--study", name, "--standby", host="other-host")
    wait_for(lambda: f"standby: {name} is driven by" in place.output(standby), 60, "the standby")
    first.kill()
    store = Store(place.url, read_only=True)
    wait_for(lambda: store.held(name).owner.startswith("other-host"), LEASE_SECONDS + 60, "the hand-over")
    store.close()
    log = place.folder / "sweeps" / name / "driver.log"
    wait_for(lambda: '"adopted"' in log.read_text(), 60, "the job is adopted")
    standby.send_signal(signal.SIGTERM)
    assert standby.wait(60) == 130
