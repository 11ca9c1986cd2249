"""A deterministic sweep of the stand-in that faults can be let loose on, and the questions that it must answer after.

Its trials are a fixed list of points, each with the seed of its number, and the stand-in computes each trial's curve
from these alone: so an undisturbed sweep says what every disturbed one must end with.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_tune.base.errors import StoreError
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StudyRecords, TrialState
from tests.chaos.common import finish_all
from tests.cluster import Cluster
from tests.slurm.house import House

if TYPE_CHECKING:
    from tests.postgres import Postgres

HERE = Path(__file__).resolve().parents[2]
LAYOUTS = ("tp4 pp1 cp1 minibs4 mbs1", "tp8 pp1 cp1 minibs8 mbs1", "tp2 pp1 cp2 minibs4 mbs1")

_NUMBERS = itertools.count()


def points(count: int) -> list[dict[str, Any]]:
    """Tuned values of the trials: spread over the space, each its own."""
    chance = random.Random(11)
    return [
        {
            "LR": round(10 ** chance.uniform(-4, -3.05), 9),
            "MAX_STEPS": chance.choice((100, 120)),
            "layout": LAYOUTS[n % len(LAYOUTS)],
        }
        for n in range(count)
    ]


class SlurmJobs:
    """The jobs of a sweep on the test cluster, whatever names they have."""

    cluster: Cluster
    name: str
    _first_names: dict[str, str]

    def _rows(self, form: str) -> list[list[str]]:
        """Columns of squeue, the name first, of this study's jobs; ended ones included."""
        epoch = {"SLURM_TIME_FORMAT": "%s"}
        shown = self.cluster.run("squeue", "-h", "--all", "-t", "all", "-o", form, environment=epoch)
        return [line.split() for line in shown.splitlines() if line.startswith(f"{self.name}-")]

    def a_job(self, chance: random.Random, *states: str) -> str:
        """The id of one of this sweep's jobs in one of these states; "" where there is none."""
        jobs = [row[1] for row in self._rows("%j %A %T") if row[2] in states]
        return chance.choice(sorted(jobs)) if jobs else ""

    def rename(self, job_id: str, *more: str) -> bool:
        """Give a job another name, and ``more`` of scontrol's changes; False where it has ended meanwhile."""
        (name, *_) = (row[0] for row in self._rows("%j %A") if row[1] == job_id)
        other = f"{self.name}-renamed-{job_id}"
        if not self.cluster.succeeds("scontrol", "update", f"JobId={job_id}", f"JobName={other}", *more):
            return False
        self._first_names.setdefault(other, name)
        return True

    def slurm_jobs(self) -> Counter[str]:
        """As a house's, each job under the name that it was submitted with."""
        jobs: Counter[str] = Counter()
        for name, count in Counter(row[0] for row in self._rows("%j")).items():
            jobs[self._first_names.get(name, name)] += count
        return jobs


class Room(SlurmJobs, House):
    """One sweep of ``trials`` points and the means to disturb it. ``start`` first, then :meth:`finish_all`."""

    def __init__(
        self, folder: Path, cluster: Cluster, trials: int, *, postgres: Postgres | None = None, small: bool = False,
        seconds: float = 4.0,
    ) -> None:  # fmt: skip
        """postgres: keep the records there. small: database and driver.log lie on a tmpfs of 48 MB.

        seconds: how long an undisturbed trial trains.
        """
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"trials": trials, "target": 0.963, "environment": {"STANDIN_SECONDS": seconds}}
        super().__init__(folder, cluster, **settings)
        text = self.study.read_text()
        search = "sampler = 'random'\n" + "".join(f"[[search.enqueue]]\n{_toml(p)}" for p in points(trials))
        text = text.replace("startup_trials = 8\n", search).replace("[budget]\n", "[budget]\nattempts = 40\n")
        self.name = f"chaos{next(_NUMBERS)}"
        self.study = folder / f"{self.name}.toml"
        self.study.write_text(text)
        self.paths.root.mkdir()
        self.small = small
        if small:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", self.paths.root], check=True)
            # Lines of a log that find no room are lost for good, whoever reads it: the jobs' files lie elsewhere.
            (folder / "trials").mkdir()
            self.paths.trials.symlink_to(folder / "trials")
        self.postgres = postgres
        self.url = postgres.new_database() if postgres else sqlite_url(self.paths.database)
        self._clock = folder / "clock"
        self._offset = 0
        self._first_names: dict[str, str] = {}
        self.step_clock(0)

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        return self._drivers[-1]

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.chaos.stepped", str(self._clock), "--study", str(self.study)]
        command += ["--quiet", "--output", str(self.paths.root)]
        environment = {**os.environ, **self.cluster.environment, "LORA_TUNE_IMPLEMENTATION": ""}
        if self.postgres:
            environment["LORA_TUNE_STORAGE"] = self.url
        self._drivers.append(
            subprocess.Popen(command, env=environment, cwd=HERE, stdout=self._output, stderr=subprocess.STDOUT)
        )
        return self.driver

    def set_clock_right(self) -> None:
        self._offset = 1
        self.step_clock(0)

    def step_clock(self, seconds: int) -> None:
        """The wall clock of drivers jumps by ``seconds``; every second jump sets it right again."""
        self._offset = 0 if self._offset else seconds
        new = self._clock.with_suffix(".new")
        new.write_text(f"{self._offset}\n")
        new.replace(self._clock)

    def close(self) -> None:
        super().close()
        if self.small:
            subprocess.run(["umount", "-l", self.paths.root], check=True)

    def finish_all(self, seconds: float) -> None:
        """Drivers, one after another, until one ends the sweep. AssertionError after that time."""
        finish_all(self, seconds)

    def _load(self) -> StudyRecords | None:
        store = Store(self.url, read_only=True)
        try:
            return store.load(self.name)
        finally:
            store.close()

    def finished(self) -> bool:
        """Whether the sweep's own driver has ended it."""
        with contextlib.suppress(StoreError):
            sweep = self._load()
            trials = sweep.trials.values() if sweep else ()
            return bool(trials) and all(t.state is TrialState.FINISHED for t in trials) and self.driver.poll() in (0, 4)
        return False

    def live_log(self, chance: random.Random) -> Path | None:
        """The log of a job that writes just now."""
        recent = time.time() - 2
        logs = [log for log in self.paths.trials.glob("*/*/job.log") if log.stat().st_mtime > recent]
        return chance.choice(sorted(logs)) if logs else None

    def a_line(self, log: Path, chance: random.Random) -> bytes:
        lines = [line for line in log.read_bytes().splitlines() if b":::MLLOG" in line]
        return chance.choice(lines) if lines else b""

    def job_processes(self) -> Iterator[int]:
        """Processes of this study's jobs, on whatever node, but for Slurm's own."""
        folder = str(self.paths.root).encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                variables = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
                if folder in variables and b"\0SLURM_JOB_ID=" in b"\0" + variables:
                    yield int(entry.name)

    # -- what must hold after it

    def results(self) -> dict[int, tuple[str, float | None, float | None]]:
        """What the user is told of each trial in the end: verdict, samples and seconds to the target."""
        return {n: (str(t.verdict), t.samples, t.seconds) for n, t in sorted(self.sweep().trials.items())}

    def losses(self, undisturbed: dict[int, tuple[str, float | None, float | None]]) -> list[str]:
        """What is wrong with the ended sweep, in words; nothing when all is right."""
        wrong = []
        sweep = self.sweep()
        lost = [t.number for t in sweep.trials.values() if t.state is not TrialState.FINISHED]
        lost += sorted(set(undisturbed) - set(sweep.trials))
        if lost:
            wrong.append(f"trials {lost} are lost")
        jobs, attempts = self.slurm_jobs(), self.attempts()
        if twice := {name: n for name, n in jobs.items() if n > 1}:
            wrong.append(f"jobs that ran twice: {twice}")
        if unknown := set(jobs) - {a.job_name for a in attempts}:
            wrong.append(f"jobs that nobody knows: {sorted(unknown)}")
        if still := [row for row in self._rows("%j %T") if row[1] in ("RUNNING", "PENDING", "COMPLETING")]:
            wrong.append(f"jobs left behind: {still}")
        ours, slurms = sum(a.node_hours(0) for a in attempts), self.node_hours_by_slurm()
        if abs(ours - slurms) > 1e-6:
            wrong.append(f"node-hours: {3600 * ours:.0f} node-seconds recorded, {3600 * slurms:.0f} by Slurm")
        found = self.results()
        if changed := {
            n: (found.get(n), undisturbed[n]) for n in undisturbed if not _same(found.get(n), undisturbed[n])
        }:
            told = {
                n: [sweep.trials[n].sentence, *(a.line for a in sweep.attempts_of(n))] for n in changed if n in found
            }
            wrong.append(f"results that differ (ours, undisturbed): {changed}; their sentences and failures: {told}")
        return wrong


STAMP_SECONDS = 0.02
"""Time stamps are whole milliseconds: seconds to the target that differ by less are the same, and so is the rank."""


def _same(one: tuple[str, float | None, float | None] | None, other: tuple[str, float | None, float | None]) -> bool:
    if one is None or one[:2] != other[:2] or one[2] is None or other[2] is None:
        return one == other
    return abs(one[2] - other[2]) < STAMP_SECONDS


def _toml(point: dict[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in point.items())
