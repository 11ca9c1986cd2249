"""The command: copy a sweep's records into another database, and make the old one count as older."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import click

from lora_tune import store as stores
from lora_tune.base.errors import InputError
from lora_tune.base.format import counted
from lora_tune.base.paths import SweepPaths
from lora_tune.base.small_files import write_json
from lora_tune.commands.again import again
from lora_tune.commands.confirm.command import SUFFIX
from lora_tune.commands.options import guarded, load_review, output_option, storage_name, storage_option, study_option
from lora_tune.controller.sweep_folder import owned
from lora_tune.store import Lease
from lora_tune.store.leases import take_lease
from lora_tune.store.locate import open_store
from lora_tune.store.records import StudyRecords


def _target(_context: click.Context, _parameter: click.Parameter, url: str) -> str:
    """The URL; one with a password is refused, since every user of a machine can read command lines."""
    if stores.has_password(url):
        raise click.UsageError("--to has a password in it, and every user of this machine can read command lines; put "
                               "it into ~/.pgpass")  # fmt: skip
    return url


@click.command()
@study_option
@storage_option
@output_option
@click.option("--to", required=True, callback=_target, help="URL of the database that the records go to")
@guarded
def main(study_name: str, to: str, **options: Any) -> None:
    """Copy a sweep's records into another database, such as from SQLite to PostgreSQL, to go on there.

    Nobody may drive the sweep meanwhile; its jobs go on. The old database is left as it is, and is refused from then
    on: the sweep's folder knows that it is older. Exit codes: 0 done; 2 your input; 3 the machine.
    """
    review = load_review(study_name, options["output"], options["storage"])
    source, name = open_store(review.paths, options["storage"]), review.sweep.name
    target = stores.Store(to)
    try:
        now = time.time()
        lease = take_lease(source, name, now)
        try:
            with owned(review.paths, review.sweep, stores.safe_url(source.url)):
                moved = _moved(source, target, lease, review.paths, now)
        finally:
            source.release(lease)
    finally:
        source.close()
        target.close()
    before = storage_name(review.paths, options["storage"])
    click.echo(
        f"{counted(moved, 'trials')} of {name} copied from {before} to {stores.safe_url(to)}; go on with: "
        f"LORA_TUNE_STORAGE={shlex.quote(stores.safe_url(to))} {again('sweep', study_name, storage=False)}"
    )


def _moved(source: stores.Store, target: stores.Store, lease: Lease, paths: SweepPaths, now: float) -> int:
    """How many trials were copied.

    The replicates of ``confirm``, what people asked and what they wrote go along. Raises InputError for a full target.
    """
    folders = {lease.sweep: paths, lease.sweep + SUFFIX: SweepPaths(paths.root / "confirm")}
    sweeps = {name: sweep for name in folders if (sweep := source.load(name)) is not None}
    for name in sweeps:
        if target.load(name) is not None:
            raise InputError(f"{stores.safe_url(target.url)} holds a sweep {name} already; name an empty database")
    for name, sweep in sweeps.items():
        _copy(source, target, sweep, folders[name].saved, now)
    stores.Requests(target, lease.sweep).copy_in(stores.Requests(source, lease.sweep).all())
    stores.Remarks(target, lease.sweep).copy_in(stores.Remarks(source, lease.sweep).history())
    return len(sweeps[lease.sweep].trials)


def _copy(source: stores.Store, target: stores.Store, sweep: StudyRecords, saved: Path, now: float) -> None:
    saves = source.saves(sweep.name)[1] + 1
    where = next((placed for placed in source.registered() if placed.name == sweep.name), None)
    target.copy_in(sweep, now, saves, where)
    copied = target.load(sweep.name)
    assert copied is not None
    assert (copied.id, copied.trials, copied.attempts) == (sweep.id, sweep.trials, sweep.attempts)
    saved.parent.mkdir(parents=True, exist_ok=True)
    write_json(saved, {"sweep": sweep.id, "saves": saves})
