"""The only module that knows file names under ``sweeps/``."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """The files of one attempt of one trial. The job itself writes ``claim``, ``started`` and ``ended``."""

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
        """Suspensions of the job, written by its runner; missing if there were none."""
        return self.folder / "pauses.json"

    @property
    def cgroup(self) -> Path:
        """Path of the cgroup of the job's processes, if it has one."""
        return self.folder / "cgroup"

    @property
    def slot(self) -> Path:
        """The pack in which this attempt trains, if it shares a job."""
        return self.folder / "slot.json"

    @property
    def checkpoint(self) -> Path:
        """State of the trial when its pack was stopped."""
        return self.folder / "slot.pt"

    @property
    def previous(self) -> AttemptPaths | None:
        """The trial's previous attempt; None for the first."""
        head, _, number = self.folder.name.rpartition("-")
        earlier = int(number) - 1 if number.isdecimal() else -1
        return AttemptPaths(self.folder.with_name(f"{head}-{earlier}")) if earlier >= 0 else None

    @property
    def slurm(self) -> Path:
        """The token that identifies this attempt's job in Slurm, and the command that submitted it."""
        return self.folder / "slurm.json"

    @property
    def submitit(self) -> Path:
        """submitit's own folder: its pickles and the launcher process's output."""
        return self.folder / "submitit"


@dataclass(frozen=True, slots=True)
class PackPaths:
    """Files for communication with the packs of a shared job."""

    folder: Path

    @property
    def requests(self) -> Path:
        """One file per trial to train, until the pack takes it."""
        return self.folder / "requests"

    @property
    def taken(self) -> Path:
        """Requests that the pack has taken."""
        return self.folder / "taken"

    @property
    def stops(self) -> Path:
        """One file per trial to stop, by its name."""
        return self.folder / "stops"

    @property
    def slots(self) -> Path:
        """Maximum concurrent trials per pack, if changed since the job began."""
        return self.folder / "slots.json"

    def state(self, pack: int) -> Path:
        """Last state written by pack number ``pack``."""
        return self.folder / (f"state-{pack}.json" if pack else "state.json")

    @property
    def closed(self) -> Path:
        """Exists once the pack takes no more trials."""
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
        """The sweep that owns this folder, and the location of its records."""
        return self.root / "sweep.json"

    @property
    def database(self) -> Path:
        return self.root / "sweep.db"

    @property
    def priors(self) -> Path:
        """Prior runs for the search, one JSON object per line."""
        return self.root / "priors.jsonl"

    @property
    def driver_log(self) -> Path:
        """The driver's actions with reasons, one JSON object per line."""
        return self.root / "driver.log"

    @property
    def driver_output(self) -> Path:
        """Output of a driver that another program started."""
        return self.root / "driver.out"

    @property
    def unsaved(self) -> Path:
        """Changes that the database could not save yet, one JSON object per line; deleted once saved."""
        return self.root / "unsaved.jsonl"

    @property
    def saved(self) -> Path:
        """Save count of this folder's drivers, to detect a restored older database."""
        return self.root / "saved.json"

    @property
    def rescued(self) -> Path:
        """Database with all records of a driver whose own was deleted, replaced or set back."""
        return self.root / "rescued.db"

    @property
    def lock(self) -> Path:
        """The driver that owns this folder: host, process, and a token."""
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
        """State of the preparation: key of its command, attempt, job, outcome."""
        return self.root / "prepare" / "preparation.json"

    def preparation(self, attempt: int) -> AttemptPaths:
        """The folder of one attempt of the sweep's preparation, ``prepare/attempt-0``."""
        return AttemptPaths(self.root / "prepare" / f"attempt-{attempt}")

    @property
    def trials(self) -> Path:
        return self.root / "trials"

    @property
    def packs(self) -> Path:
        """Folders of shared jobs, ``packs/0000`` and so on."""
        return self.root / "packs"

    def attempt(self, trial: int, attempt: int) -> AttemptPaths:
        """The folder of one attempt, e.g. ``trials/0007/attempt-0``."""
        return AttemptPaths(self.trials / f"{trial:04d}" / f"attempt-{attempt}")

    def confirm(self, trial: int) -> Path:
        """Folder of the replicates of trial ``trial``: ``result_0.txt`` and so on."""
        return self.root / "confirm" / f"{trial:04d}"


def display_path(path: Path) -> str:
    """A path relative to the working directory if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


# Identification of sweep and attempt: in a job's environment, and at the head of its log.


SWEEP_VARIABLE, ATTEMPT_VARIABLE = "LORA_TUNE_SWEEP", "LORA_TUNE_ATTEMPT"
"""Environment variables of a job with the id of its sweep and the token of its attempt."""

SWEEP_KEY, ATTEMPT_KEY = "lora_tune_sweep", "lora_tune_attempt"
"""MLLOG keys under which our own recipes print them; optional for other programs."""


HEAD_BYTES = 1 << 16
"""The head of a log is within its first bytes, possibly after lines of Slurm and submitit."""

_HEAD = re.compile(rb"(?m)^lora-tune: attempt ([0-9a-f]{1,64}) of sweep [0-9a-f]{0,64}\n")


def log_head(sweep: str, token: str) -> bytes:
    """The line, written by the job runner, that identifies a log."""
    return f"lora-tune: attempt {token} of sweep {sweep}\n".encode("ascii")


def token_in(head: bytes) -> str:
    """The attempt token in a log's first ``HEAD_BYTES``; "" if there is none."""
    match = _HEAD.search(head)
    return match[1].decode("ascii") if match else ""


def without_head(chunk: bytes) -> bytes:
    """Bytes of a log without the line of log_head(), which its program did not print."""
    return _HEAD.sub(b"", chunk)


def new_token() -> str:
    """A unique id for a sweep or an attempt."""
    return uuid.uuid4().hex
