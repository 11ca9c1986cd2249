"""A study of the stand-in on the test cluster, driven by the real command in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from lora_tune.base.errors import StoreError
from lora_tune.base.paths import SweepPaths
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import Attempt, StudyRecords
from tests.cluster import Cluster

STANDIN = Path(__file__).resolve().parents[1] / "standin"

_NUMBERS = itertools.count()

STUDY = """
[workload]
kind = "mlperf"
implementation = {implementation}
first_eval = 256
eval_every = 128
[site]
launcher = "slurm"
system = "TEST"
gpus_per_node = 8
gres = "gpu:8"
mpi = "none"
container = "standin.sqsh"
data = {data}
model = {data}
stall_minutes = {stall_minutes}
kill_seconds = 5
[site.environment]
STANDIN_PYTHON = {python}
{environment}
[space]
LR = {{ type = "float", low = 1e-5, high = 1e-3, log = true }}
MAX_STEPS = {{ type = "int", low = 60, high = 120, step = 20 }}
layout = {{ type = "layout", tp = [1, 2, 4, 8], cp = [1, 2], gbs = [8] }}
[objective]
target = {target}
[search]
seed = 5
startup_trials = 8
[pruning]
rule = {pruning}
cap = false
[budget]
trials = {trials}
parallel = {parallel}
trial_minutes = {trial_minutes}
"""


class House:
    """A study file, its sweep folder and the cluster.

    Every house has a study name of its own: the cluster remembers the jobs of all tests before this one.
    """

    def __init__(self, folder: Path, cluster: Cluster, **settings: Any) -> None:
        self.cluster = cluster
        self.implementation = Path(shutil.copytree(STANDIN, folder / "implementation"))
        (folder / "data").mkdir()
        environment = settings.pop("environment", {})
        values = {
            "implementation": str(self.implementation),
            "data": str(folder / "data"),
            "python": sys.executable,
            "target": 0.955,
            "trials": 4,
            "parallel": 4,
            "trial_minutes": 5,
            "stall_minutes": 5,
            "pruning": "none",
            **settings,
        }
        shown = {k: json.dumps(v) for k, v in values.items()}
        shown["environment"] = "\n".join(f"{k} = {json.dumps(str(v))}" for k, v in environment.items())
        self.name = f"e2e{next(_NUMBERS)}"
        self.study = folder / f"{self.name}.toml"
        self.study.write_text(STUDY.format(**shown))
        self.paths = SweepPaths(folder / "sweep")
        self._output = (folder / "driver.out").open("ab")
        self._drivers: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """A driver: the command that users type."""
        command = [
            sys.executable,
            "-m",
            "lora_tune.sweep",
            "--study",
            str(self.study),
            "--output",
            str(self.paths.root),
        ]
        environment = {**os.environ, **self.cluster.environment, "LORA_TUNE_IMPLEMENTATION": ""}
        driver = subprocess.Popen(command, env=environment, stdout=self._output, stderr=subprocess.STDOUT)
        self._drivers.append(driver)
        return driver

    def finish(self, seconds: float) -> int:
        """A driver run to its end; returns its exit code."""
        return self.start().wait(seconds)

    def close(self) -> None:
        for driver in self._drivers:
            if driver.poll() is None:
                driver.send_signal(signal.SIGKILL)
                driver.wait()
        self._output.close()

    @property
    def said(self) -> str:
        """What the drivers printed."""
        return Path(self._output.name).read_text()

    def sweep(self) -> StudyRecords:
        """The records as they are in the database now."""
        found = self._load()
        assert found is not None
        return found

    def _load(self) -> StudyRecords | None:
        store = Store(sqlite_url(self.paths.database), read_only=True)
        try:
            return store.load(self.name)
        finally:
            store.close()

    def attempts(self) -> list[Attempt]:
        return list(self.sweep().attempts.values())

    def wait_for_attempt(self, trial: int, number: int, *states: str, seconds: float = 60) -> Attempt:
        """An attempt once its recorded state is one of ``states``."""
        end = time.monotonic() + seconds
        while True:
            attempt = None
            with contextlib.suppress(StoreError):  # the driver is still making the database
                found = self._load()
                attempt = found.attempts.get((trial, number)) if found else None
            if attempt is not None and attempt.state in states:
                return attempt
            assert time.monotonic() < end, f"trial {trial} attempt {number} is not {states}: {attempt}\n{self.said}"
            time.sleep(0.1)

    def slurm_jobs(self) -> Counter[str]:
        """Job name -> how many jobs of this study and that name Slurm knows, ended ones included."""
        return Counter(row[0] for row in self._rows("%j"))

    def node_hours_by_slurm(self) -> float:
        """What Slurm itself accounts for all jobs of this study."""
        total = 0.0
        for _, start, end, count, *nodes in self._rows("%j %S %e %D %N"):
            if nodes and start.isdigit() and end.isdigit():
                total += (int(end) - int(start)) * int(count) / 3600
        return total

    def _rows(self, form: str) -> list[list[str]]:
        epoch = {"SLURM_TIME_FORMAT": "%s"}
        shown = self.cluster.run("squeue", "-h", "-t", "all", "-o", form, environment=epoch)
        return [line.split() for line in shown.splitlines() if line.startswith(f"{self.name}-")]
