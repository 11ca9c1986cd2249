"""The only place that knows a file name under ``sweeps/``."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """The files of one attempt of one trial. ``claim``, ``started`` and ``ended`` are written by the job itself."""

    folder: Path

    @property
    def log(self) -> Path:
        """The job's output."""
        return self.folder / "job.log"

    @property
    def job(self) -> Path:
        """Command and environment, written before submission."""
        return self.folder / "command.json"

    @property
    def claim(self) -> Path:
        """Created exclusively by the one process that runs this attempt."""
        return self.folder / "claim.json"

    @property
    def started(self) -> Path:
        """Process id, host and time of the trial's first process."""
        return self.folder / "started.json"

    @property
    def ended(self) -> Path:
        """Exit code and time."""
        return self.folder / "ended.json"

    @property
    def pauses(self) -> Path:
        """When the job stood still, written by its runner; absent where it never did."""
        return self.folder / "pauses.json"

    @property
    def cgroup(self) -> Path:
        """Where the cgroup of the job's processes is, where it has one."""
        return self.folder / "cgroup"

    @property
    def slot(self) -> Path:
        """Which pack this attempt trains in, where it shares a job with others."""
        return self.folder / "slot.json"

    @property
    def checkpoint(self) -> Path:
        """Where the trial was when its pack was asked to end."""
        return self.folder / "slot.pt"

    @property
    def previous(self) -> AttemptPaths | None:
        """The attempt of the same trial before this one; None of the first."""
        head, _, number = self.folder.name.rpartition("-")
        earlier = int(number) - 1 if number.isdecimal() else -1
        return AttemptPaths(self.folder.with_name(f"{head}-{earlier}")) if earlier >= 0 else None

    @property
    def slurm(self) -> Path:
        """The token by which Slurm knows this attempt's job, and the command that submitted it."""
        return self.folder / "slurm.json"

    @property
    def submitit(self) -> Path:
        """submitit's own folder: its pickles and the launcher process's output."""
        return self.folder / "submitit"


@dataclass(frozen=True, slots=True)
class PackPaths:
    """The files of a job's packs beside those of the job: what the sweep asks of them, and what each says of itself."""

    folder: Path

    @property
    def requests(self) -> Path:
        """A file for each trial that is to be trained, until the pack takes it."""
        return self.folder / "requests"

    @property
    def taken(self) -> Path:
        """The requests that the pack took."""
        return self.folder / "taken"

    @property
    def stops(self) -> Path:
        """A file for each trial that is to end, by its name."""
        return self.folder / "stops"

    @property
    def slots(self) -> Path:
        """How many trials each pack may train side by side, where that has changed since the job began."""
        return self.folder / "slots.json"

    def state(self, pack: int) -> Path:
        """What the job's pack of this number wrote of itself last."""
        return self.folder / (f"state-{pack}.json" if pack else "state.json")

    @property
    def closed(self) -> Path:
        """There from the moment on when the pack takes no more."""
        return self.folder / "closed"


@dataclass(frozen=True, slots=True)
class SweepPaths:
    """The files of one sweep: ``sweeps/<study>/``."""

    root: Path

    @property
    def study(self) -> Path:
        """Verbatim copy of the study file that the sweep began with."""
        return self.root / "study.toml"

    @property
    def identity(self) -> Path:
        """Which sweep this folder belongs to, and where its records are."""
        return self.root / "sweep.json"

    @property
    def database(self) -> Path:
        return self.root / "sweep.db"

    @property
    def priors(self) -> Path:
        """Runs of old logs that the search starts from, one JSON object a line."""
        return self.root / "priors.jsonl"

    @property
    def driver_log(self) -> Path:
        """One JSON object a line: what the driver did and why."""
        return self.root / "driver.log"

    @property
    def driver_output(self) -> Path:
        """What a driver printed that another program started."""
        return self.root / "driver.out"

    @property
    def unsaved(self) -> Path:
        """What the database could not take yet, one JSON object a line; gone once it could."""
        return self.root / "unsaved.jsonl"

    @property
    def saved(self) -> Path:
        """How often drivers of this folder have written to the sweep's database, by which an older one is known."""
        return self.root / "saved.json"

    @property
    def rescued(self) -> Path:
        """A fresh database with all that a driver knew when its own was deleted, replaced or set back under it."""
        return self.root / "rescued.db"

    @property
    def lock(self) -> Path:
        """The driver that owns this folder: host, process, and a token of its own."""
        return self.root / "driver.lock"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def best(self) -> Path:
        """Folder of the exported best configuration."""
        return self.root / "best"

    @property
    def artifacts(self) -> Path:
        """Files that optuna-dashboard shows beside trials."""
        return self.root / "artifacts"

    @property
    def prepared(self) -> Path:
        """What is known of the preparation: its command's key, its attempt, its job, how it ended."""
        return self.root / "prepare" / "preparation.json"

    def preparation(self, attempt: int) -> AttemptPaths:
        """The folder of one attempt of the sweep's preparation, ``prepare/attempt-0``."""
        return AttemptPaths(self.root / "prepare" / f"attempt-{attempt}")

    @property
    def trials(self) -> Path:
        return self.root / "trials"

    @property
    def packs(self) -> Path:
        """Folders of the jobs that several trials share, ``packs/0000`` and so on."""
        return self.root / "packs"

    def attempt(self, trial: int, attempt: int) -> AttemptPaths:
        """The folder of one attempt, e.g. ``trials/0007/attempt-0``."""
        return AttemptPaths(self.trials / f"{trial:04d}" / f"attempt-{attempt}")

    def confirm(self, trial: int) -> Path:
        """Folder of the replicates of trial ``trial``: ``result_0.txt`` and so on."""
        return self.root / "confirm" / f"{trial:04d}"


def display_path(path: Path) -> str:
    """A path relative to the present folder where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


# The names by which a sweep and an attempt say who they are: in a job's environment, and at the head of its log.


SWEEP_VARIABLE, ATTEMPT_VARIABLE = "LORA_TUNE_SWEEP", "LORA_TUNE_ATTEMPT"
"""The variables in which a job finds the id of its sweep and the token of its attempt."""

SWEEP_KEY, ATTEMPT_KEY = "lora_tune_sweep", "lora_tune_attempt"
"""The MLLOG keys under which our own recipes print them; a user's own program need not."""


HEAD_BYTES = 1 << 16
"""A log's own head stands within its first so many bytes: Slurm's and submitit's lines may come before it."""

_HEAD = re.compile(rb"(?m)^lora-tune: attempt ([0-9a-f]{1,64}) of sweep [0-9a-f]{0,64}\n")


def log_head(sweep: str, token: str) -> bytes:
    """The line at the head of a log that says whose it is, as the runner of jobs writes it."""
    return f"lora-tune: attempt {token} of sweep {sweep}\n".encode("ascii")


def token_in(head: bytes) -> str:
    """The token of the attempt that a log is of, from its first ``HEAD_BYTES``; "" where it does not say."""
    match = _HEAD.search(head)
    return match[1].decode("ascii") if match else ""


def without_head(chunk: bytes) -> bytes:
    """Bytes of a log less the line that says whose it is, which its program did not print."""
    return _HEAD.sub(b"", chunk)


def new_token() -> str:
    """A name that no other sweep and no other attempt has."""
    return uuid.uuid4().hex
