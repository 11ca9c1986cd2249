"""Files that jobs execute, and checks that no other user can replace them.

submitit's task is a pickle in the attempt's folder: a user who can replace it runs code as the job's user.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from lora_tune.base.errors import RefusedError, SetupError
from lora_tune.base.files import write_text
from lora_tune.base.paths import AttemptPaths
from lora_tune.workloads.base import Job

_OTHERS, _GROUP = stat.S_IWOTH, stat.S_IWGRP


def pickle_folder(attempt: AttemptPaths, job: str) -> Path:
    """Make submitit's folder of an attempt, private to this user. Raises RefusedError if other users could write to it.

    Refused are: a folder of another user; pickles writable by group or others; an attempt's folder, or a parent, that
    is world-writable without the sticky bit. Group-writable parents are allowed, for teams with a shared output folder.
    job: its name, for the message.
    """
    folder = attempt.submitit
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(folder, _GROUP | _OTHERS, "go-w", job)
    _check(attempt.folder, _OTHERS, "o-w", job)
    for above in attempt.folder.absolute().parents:
        mode = above.stat().st_mode
        if mode & _OTHERS and not mode & stat.S_ISVTX:
            raise _writable(job, above, "o-w")
    return folder


def _check(folder: Path, unwanted: int, mode: str, job: str) -> None:
    status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        raise RefusedError(job, f"{folder} belongs to user id {status.st_uid}, not to you", "use another --output")
    if status.st_mode & unwanted:
        raise _writable(job, folder, mode)


def _writable(job: str, folder: Path, mode: str) -> RefusedError:
    answer = f"{folder} is writable by others, who could put their code into your jobs"
    return RefusedError(job, answer, f"chmod {mode} {folder}, or use another --output")


def write_files(job: Job) -> None:
    """Make the job's folder and write its files durably (a job may read them after a power failure of this host).

    Raises OSError.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    for name, text in job.files.items():
        file = job.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)


# Secrets reach a job through its environment only, never through this process's environment, a file or a command line.


SOURCING = ("sh", "-c", '. "$0" && exec "$@"')
"""Shell command that sources the file in the next argument and executes the arguments after it."""


def secret_values(job: Job) -> dict[str, str]:
    """The values of a job's secrets. Raises RefusedError if one is missing, because no attempt could run."""
    try:
        return {name: secret.read(name) for name, secret in job.secrets.items()}
    except SetupError as error:
        raise RefusedError(job.name, str(error), "then run the same command again") from error


@contextlib.contextmanager
def file_in_memory(values: Mapping[str, str]) -> Iterator[str]:
    """Yield the path of an in-memory file that a shell of this user sources for ``values``; "" for no values."""
    if not values:
        yield ""
        return
    descriptor = os.memfd_create("variables")
    try:
        text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
        os.write(descriptor, text.encode())
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
