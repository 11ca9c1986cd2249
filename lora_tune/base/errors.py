"""Every error that lora_tune raises for its user.

    LoraTuneError
    +-- InputError          exit 2   the user's input: a study file, an option, an exported value
    |   +-- StudyError               a study file, named with the key that is wrong
    +-- SetupError   exit 3   the machine: a tool, file, folder, database or cluster is missing
    |   +-- SweepBusyError           another driver owns this sweep, or its folder
    |   +-- ForeignFolderError       the folder holds another sweep than the database says
    |   +-- LauncherError            a job could not be submitted, read or cancelled
    |   |   +-- RefusedError         the scheduler answered, and takes no such job
    |   |   +-- LimitError           the scheduler takes no more jobs of this user while others of them are there
    |   +-- StoreError               the database is unreadable, of another version, or away
    |       +-- DatabaseChangedError   it is not the one that was written to before
    |       +-- NoSweepError             there is no such database yet, or no sweep was ever in it
    |       +-- KeyTakenError          somebody else has written a row with the same key
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
    """Base of the tree; ``exit_code`` is what a command returns for it."""

    exit_code = 1


class InputError(LoraTuneError):
    """The user's input cannot be used."""

    exit_code = EXIT_INPUT


class StudyError(InputError):
    """A study file cannot be used. The message reads ``file: key: problem; remedy``."""

    def __init__(self, file: Path | str, key: str, problem: str) -> None:
        where = f"{file}: {key}: " if key else f"{file}: "
        super().__init__(where + problem)
        self.file = file
        self.key = key
        self.problem = problem


class SetupError(LoraTuneError):
    """Something that the command needs is not there: what, where, how to get it."""

    exit_code = EXIT_SETUP


class SweepBusyError(SetupError):
    """Another driver owns this sweep."""


class ForeignFolderError(SetupError):
    """The folder and the database do not belong together."""


class LauncherError(SetupError):
    """The launcher refused or could not answer."""


class RefusedError(LauncherError):
    """The scheduler takes no such job.

    answer: what it said. remedy: what a person can do. lasting: it will say so again until that is done. by_size: what
    it refuses is how much the job asks for, and a smaller job may be taken.
    """

    def __init__(self, job: str, answer: str, remedy: str, *, permanent: bool = True, by_size: bool = False) -> None:
        super().__init__(f"{job} was not submitted: {answer}; {remedy}")
        self.answer, self.remedy, self.permanent, self.by_size = answer, remedy, permanent, by_size


class LimitError(LauncherError):
    """The scheduler takes no more jobs of this user for now: it refused one while others of them were in the queue.

    What it says of that is a site's own; that jobs were there is the evidence. answer: its words. jobs: how many.
    """

    def __init__(self, job: str, answer: str, jobs: int) -> None:
        self.limit = (
            f"sbatch takes no further job while others of yours are there: {answer}; taken for a limit of this site"
        )
        super().__init__(f"{job} waits, beside {jobs} of your jobs: {answer}; taken for a limit of this site")


class StoreError(SetupError):
    """The database cannot be read or written."""


class DatabaseChangedError(StoreError):
    """The database was deleted, replaced, damaged or set back under a driver that had written to it.

    It will not be whole again by itself: what the driver knows must be kept elsewhere.
    """


class NoSweepError(StoreError):
    """There is no database here yet, or no driver has ever written to it."""


class KeyTakenError(StoreError):
    """The database holds a row with this key: somebody else was quicker."""


class NothingReachedError(LoraTuneError):
    """The sweep is over and no trial reached the target."""

    exit_code = EXIT_NOTHING_REACHED


# What a look at a machine, a file or a cluster says: what was found, why it matters, how to fix it.


class Level(enum.IntEnum):
    """How bad it is."""

    GOOD = 0
    WARNING = 1
    """Trials run, perhaps slower or less safely."""
    PROBLEM = 2
    """Trials will fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    what: what was found. why: why it matters. fix: the command or the change that fixes it. Both empty when good.
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
