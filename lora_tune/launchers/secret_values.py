"""How secrets reach a job: by its own environment, never by ours, a file or a command line."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping

from lora_tune.base.errors import RefusedError, SetupError
from lora_tune.workloads.base import Job

SOURCING = ("sh", "-c", '. "$0" && exec "$@"')
"""A command that reads variables from the file that follows it, and becomes the command behind that."""


def secret_values(job: Job) -> dict[str, str]:
    """The values of a job's secrets. Raises RefusedError where one is not there: no attempt could run."""
    try:
        return {name: secret.read(name) for name, secret in job.secrets.items()}
    except SetupError as error:
        raise RefusedError(job.name, str(error), "then run the same command again") from error


@contextlib.contextmanager
def file_in_memory(values: Mapping[str, str]) -> Iterator[str]:
    """A file that a shell of this user sources for ``values``, in memory and gone with the block; "" for no values."""
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
