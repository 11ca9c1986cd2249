"""A sweep on the test cluster whose trials really take their time, driven by a user without rights where one can be.

As on this machine, every number that it reports is recomputed from the ledger that each run of a trial keeps elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from tests.chaos.local_room import HERE, LocalRoom
from tests.chaos.room import SlurmJobs
from tests.cluster import Cluster
from tests.reachable import reachable

NOBODY = 65534
PYTHON = Path("/usr/bin/python3")
"""A Python that every user can start, unlike one below root's home."""

CLOCK = Path(__file__).parent / "host_clock"


class TimedRoom(SlurmJobs, LocalRoom):
    """One sweep of ``trials`` on Slurm and the means to disturb it."""

    site = "gpus_per_node = 0"

    def __init__(self, folder: Path, cluster: Cluster, trials: int, *, stamps: bool = True, seed: int = 1) -> None:
        self.cluster = cluster
        self._first_names = {}
        self._host_clock = folder / "host_clock"
        self._clock_now = (0.0, 0.0, time.monotonic())  # ahead, rate, since
        self.slews: list[float] = []
        self.user = NOBODY if _anyone() else os.geteuid()
        super().__init__(folder, trials, stamps=stamps, seed=seed, pace=1.0, name="timed")
        self._write_clock()
        if self.user:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, self.user, self.user)
            reachable(folder)
            reachable(cluster.folder)

    def _places(self) -> dict[str, Any]:
        # A driver that is not root's needs a Python that it may start, and so do its jobs.
        python = PYTHON if self.user else sys.executable
        return {**super()._places(), "python": python, "host_clock": self._host_clock, "launcher": "slurm"}

    def command(self, *further: str) -> list[str]:
        own = super().command(*further)
        if not self.user:
            return own
        user = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        return [*user, str(PYTHON), *own[1:]]

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(CLOCK), str(HERE), sysconfig.get_path("purelib")))
        further = {"PYTHONPATH": path, "CHAOS_HOST_CLOCK": str(self._host_clock), "PYTHONDONTWRITEBYTECODE": "1"}
        home = {"HOME": str(self.paths.root.parent), "USER": "nobody"} if self.user else {}
        return {**os.environ, **self.cluster.environment, **further, **home}

    # -- what faults hit

    def job_processes(self) -> list[int]:
        return self.processes()

    def slew(self, rate: float) -> float:
        """The hosts' wall clock gains so much a second from now on; every second call sets that to nothing."""
        ahead, before, since = self._clock_now
        now = time.monotonic()
        self._clock_now = (ahead + before * (now - since), 0.0 if before else rate, now)
        self.slews.append(self._clock_now[1])
        self._write_clock()
        return self._clock_now[1]

    def set_clock_right(self) -> None:
        super().set_clock_right()
        if self._clock_now[1]:
            self.slew(0.0)

    def _write_clock(self) -> None:
        new = self._host_clock.with_suffix(".new")
        new.write_text(" ".join(map(repr, self._clock_now)))
        new.chmod(0o644)
        new.replace(self._host_clock)

    def close(self) -> None:
        self.cluster.succeeds("scontrol", "update", "PartitionName=gpu", "Hidden=NO")
        super().close()

    # -- what must hold after it

    @property
    def inexact(self) -> float:
        """A drift of a second in a whole job is taken for none (``job_runner``)."""
        return 1.0 if self.slews else 0.0

    def losses(self) -> list[str]:
        left = [row for row in self._rows("%j %T") if row[1] in ("RUNNING", "PENDING", "COMPLETING", "SUSPENDED")]
        return [*super().losses(), *([f"jobs left behind: {left}"] if left else [])]


def _anyone() -> bool:
    """Whether a user without rights can start Python with this checkout and its libraries."""
    if os.geteuid() or not PYTHON.exists():
        return False
    path = os.pathsep.join((str(HERE), sysconfig.get_path("purelib")))
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    asked = [*user, str(PYTHON), "-c", "import lora_tune.sweep, optuna, submitit, tests"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return not subprocess.run(asked, cwd="/", env=environment, capture_output=True, check=False).returncode
