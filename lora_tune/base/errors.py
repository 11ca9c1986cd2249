"""Every error that lora_tune raises for its user.

    LoraTuneError
    +-- InputError          exit 2   the user's input: a study file, an option, an exported value
    |   +-- StudyError               a study file, named with the key that is wrong
    +-- SetupError   exit 3   the machine: a tool, file, folder, database or cluster is missing
    |   +-- SweepBusyError           another driver owns this sweep, or its folder
    |   +-- ForeignFolderError       the folder belongs to another sweep than the database says
    |   +-- LauncherError            a job could not be submitted, read or cancelled
    |   |   +-- RefusedError         the scheduler answered, and takes no such job
    |   |   +-- LimitError           the scheduler takes no more jobs of this user while others of them are there
    |   +-- StoreError               the database is unreadable, of another version, or does not answer
    |       +-- DatabaseChangedError   it is not the one that was written to before
    |       +-- NoSweepError             there is no such database yet, or no sweep was ever in it
    |       +-- KeyTakenError          another process has inserted a row with the same key
    +-- NothingReachedError exit 4   the sweep ended and no trial reached the target

A message is one line: what came, what is allowed, what to do. A programmer's mistake is an
``assert`` or a built-in exception, never one of these.
"""

from __future__ import annotations

import enum
import shutil
from dataclasses import dataclass
from pathlib import Path

EXIT_DONE = 0
EXIT_INPUT = 2
EXIT_SETUP = 3
EXIT_NOTHING_REACHED = 4
EXIT_INTERRUPTED = 130


class LoraTuneError(Exception):
    """Base of the tree; ``exit_code`` is that of the command."""

    exit_code = 1


class InputError(LoraTuneError):
    """The user's input is invalid."""

    exit_code = EXIT_INPUT


class StudyError(InputError):
    """A study file is invalid. The message reads ``file: key: problem; remedy``."""

    def __init__(self, file: Path | str, key: str, problem: str) -> None:
        where = f"{file}: {key}: " if key else f"{file}: "
        super().__init__(where + problem)
        self.file = file
        self.key = key
        self.problem = problem


class SetupError(LoraTuneError):
    """Something that the command needs is missing: what, where, how to get it."""

    exit_code = EXIT_SETUP


class SweepBusyError(SetupError):
    """Another driver owns this sweep."""


class ForeignFolderError(SetupError):
    """The folder and the database do not belong together."""


class LauncherError(SetupError):
    """The launcher refused or could not answer."""


class RefusedError(LauncherError):
    """The scheduler refused a job.

    answer: its message. remedy: what the user can do. permanent: it will refuse again until that is done. by_size: it
    refuses the requested size, and may accept a smaller job.
    """

    def __init__(self, job: str, answer: str, remedy: str, *, permanent: bool = True, by_size: bool = False) -> None:
        super().__init__(f"{job} was not submitted: {answer}; {remedy}")
        self.answer, self.remedy, self.permanent, self.by_size = answer, remedy, permanent, by_size


class LimitError(LauncherError):
    """The scheduler accepts no more jobs of this user for now: it refused one while others were in the queue.

    Sites word this differently; the queued jobs are the evidence. answer: its message. jobs: their number.
    """

    def __init__(self, job: str, answer: str, jobs: int) -> None:
        self.limit = (
            f"sbatch takes no further job while others of yours are there: {answer}; taken for a limit of this site"
        )
        super().__init__(f"{job} waits, beside {jobs} of your jobs: {answer}; taken for a limit of this site")


class StoreError(SetupError):
    """The database cannot be read or written."""


class DatabaseChangedError(StoreError):
    """The database was deleted, replaced, damaged or set back after this driver wrote to it.

    It will not recover by itself, so the driver's records must be saved elsewhere.
    """


class NoSweepError(StoreError):
    """There is no database here yet, or no driver has written to it."""


class KeyTakenError(StoreError):
    """Another process has already inserted a row with this key."""


class NothingReachedError(LoraTuneError):
    """The sweep is over and no trial reached the target."""

    exit_code = EXIT_NOTHING_REACHED


# Findings of checks: what was found, why it matters, how to fix it.


class Level(enum.IntEnum):
    """Severity of a finding."""

    GOOD = 0
    WARNING = 1
    """Trials run, perhaps slower or less safely."""
    PROBLEM = 2
    """Trials will fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    what: what was found. why: why it matters. fix: the command or change that fixes it. Both are empty if good.
    """

    level: Level
    what: str
    why: str = ""
    fix: str = ""


def good(what: str) -> Finding:
    return Finding(Level.GOOD, what)


def warning(what: str, why: str, fix: str) -> Finding:
    return Finding(Level.WARNING, what, why, fix)


def problem(what: str, why: str, fix: str) -> Finding:
    return Finding(Level.PROBLEM, what, why, fix)


def free_space(folder: Path, required_gb: float, why: str) -> Finding:
    """Free space where ``folder`` is, or will be."""
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free / 1e9
    if free < required_gb:
        return problem(f"{free:.0f} GB free at {place}", why, f"free {required_gb - free:.0f} GB, or use another disk")
    return good(f"{free:.0f} GB free at {place}")
