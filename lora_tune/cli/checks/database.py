"""Where the sweep itself writes its records."""

from __future__ import annotations

import shlex
from pathlib import Path

from lora_tune import store as stores
from lora_tune.base.errors import Finding, StoreError, good, problem
from lora_tune.base.files import NETWORK, file_system, mountinfo


def file(folder: Path, mounts: str | None = None) -> Finding:
    """Whether the sweep's SQLite file would lie on a network file system. ``mounts``: text of /proc/self/mountinfo."""
    kind = file_system(folder, mountinfo() if mounts is None else mounts) or "an unknown file system"
    if kind in NETWORK:
        return problem(
            f"{folder} is on {kind}",
            "SQLite's locks do not hold there: a second host corrupts the database, so a sweep refuses to begin",
            "keep the sweep folder, and put the database on a local disk (--storage sqlite:////LOCAL/DISK/sweep.db) "
            "or use --storage postgresql+psycopg://...",
        )
    return good(f"the database at {folder} is on {kind}")


def chosen(database: Path, mounts: str | None = None) -> Finding:
    """The same of the ``database`` that ``--storage`` names, in whose folder a sweep makes nothing but the file."""
    if database.parent.is_dir():
        return file(database.parent, mounts)
    return problem(
        f"{database.parent} is no folder, and --storage names a file in it",
        "every record of the sweep lies there",
        f"make it (mkdir -p {shlex.quote(str(database.parent))}), or correct the URL",
    )


def server(url: str) -> Finding:
    """Whether the PostgreSQL server answers."""
    try:
        return good(f"the database {stores.safe_url(url)} answers: {stores.server_version(url)}")
    except StoreError as error:
        return problem(str(error), "every record of the sweep lies there", "start the server, or correct the URL")
