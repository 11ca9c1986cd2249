"""What all commands share: their options, and errors as one line with an exit code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from lora_tune.errors import EXIT_SURROUNDINGS, InputError, LoraTuneError
from lora_tune.paths import SweepPaths
from lora_tune.records import Sweep
from lora_tune.store import Store, safe_url, sqlite_url

Command = TypeVar("Command", bound=Callable[..., Any])

study_option = click.option("--study", "study_name", required=True, help="NAME of studies/NAME.toml, or a .toml file")
output_option = click.option("--output", type=click.Path(path_type=Path), help="sweep folder [sweeps/STUDY]")
storage_option = click.option("--storage", help="database URL [SQLite in the sweep folder]")


def guarded(command: Command) -> Command:
    """Print a LoraTuneError as one line on standard error and exit with its code."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except LoraTuneError as error:
            click.echo(f"lora_tune: {' '.join(str(error).split())}", err=True)
            sys.exit(error.exit_code)
        except OSError as error:
            where = f" {error.filename}" if error.filename else ""
            click.echo(f"lora_tune:{where}: {error.strerror or error}; check the disk and the permissions", err=True)
            sys.exit(EXIT_SURROUNDINGS)

    return run  # type: ignore[return-value]  # same signature, by functools.wraps


def sweep_paths(name: str, output: Path | None) -> SweepPaths:
    """The sweep's folder: ``--output``, or ``sweeps/NAME`` below the present folder."""
    return SweepPaths((output or Path("sweeps") / name).resolve())


def open_store(paths: SweepPaths, storage: str | None) -> Store:
    """The sweep's database: ``--storage``, or the SQLite file in its folder."""
    return Store(storage or sqlite_url(paths.database))


def load_sweep(name: str, paths: SweepPaths, storage: str | None) -> Sweep:
    """The records of a sweep that exists, for commands that only read. Raises InputError where there is none."""
    missing = InputError(
        f"there is no sweep of {name} at {storage_name(paths, storage)}; start one with: "
        f"python -m lora_tune.sweep --study {name}"
    )
    if storage is None and not paths.database.exists():
        raise missing
    store = open_store(paths, storage)
    try:
        found = store.load(name)
    finally:
        store.close()
    if found is None:
        raise missing
    return found


def storage_name(paths: SweepPaths, storage: str | None) -> str:
    """Where the records lie, for people; without a password."""
    return safe_url(storage) if storage else str(paths.database)
