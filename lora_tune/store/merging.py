"""The way back of a rescued sweep into a database that lost a part of it, such as a team's after a failover.

Other sweeps of that database, and what people wrote beside this one, stay as they are.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from lora_tune.base.errors import StoreError
from lora_tune.store import records as rows
from lora_tune.store import schema
from lora_tune.store.database import Store
from lora_tune.store.engine import safe_url, sqlite_url
from lora_tune.store.port import Lease, Request
from lora_tune.store.records import StudyRecords
from lora_tune.store.requests import Requests

MERGED = "merged"
"""Ends the name of a rescued database that was merged: it is kept, and not merged again."""


def merge_rescued(store: Store, lease: Lease, path: Path) -> StudyRecords:
    """Put the sweep of ``lease`` as the database ``path`` has it into ``store``, in one transaction; returns it.

    ``path`` is renamed then. Raises StoreError where it is not there or holds another sweep, and where the store knows
    what it does not: a driver went on there after the rescue. SweepBusyError when the lease is lost.
    """
    name = lease.sweep
    if not path.exists():
        raise StoreError(f"there is no {path} to merge; a driver leaves one whose database was set back under it")
    with contextlib.closing(Store(sqlite_url(path), read_only=True)) as source:
        rescued, present = source.load(name), store.load(name)
        if rescued is None:
            raise StoreError(f"{path} holds no records of {name}")
        if present is not None and (why := _unknown_to(rescued, present)):
            raise StoreError(f"{path} cannot be merged into {safe_url(store.url)}: {why}")
        requests = _together(Requests(source, name).all(), Requests(store, name).all())
        with source._reading() as connection:
            row = connection.execute(sa.select(schema.sweeps).where(schema.sweeps.c.name == name)).mappings().one()
        _write(store, lease, rescued, dict(row), requests, source.saves(name)[1])
    path.replace(path.with_name(f"{path.name}.{MERGED}"))
    return rescued


def _unknown_to(rescued: StudyRecords, present: StudyRecords) -> str:
    """What is ``present`` and not in ``rescued``, which would be lost; "" for nothing."""
    if present.id != rescued.id and present.trials:
        return f"it holds another sweep of that name (id {present.id[:8]}, rescued {rescued.id[:8]})"
    known = {attempt.token for attempt in rescued.attempts.values()}
    attempts = [a for a in present.attempts.values() if a.token not in known]
    trials = sorted({*(set(present.trials) - set(rescued.trials)), *(a.trial for a in attempts)})
    if not trials:
        return ""
    numbers = ", ".join(map(str, trials[:5])) + (", ..." if len(trials) > 5 else "")
    return (
        f"a driver has gone on there, with trials {numbers} that it does not know; go on with one of the two, the "
        f"rescued one by --storage sqlite:///PATH"
    )


def _together(rescued: list[Request], present: list[Request]) -> list[Request]:
    """All requests: the rescued ones, and behind them those that were asked of the database since."""
    asked = {(r.who, r.asked_at, r.kind) for r in rescued}
    further = [r for r in present if (r.who, r.asked_at, r.kind) not in asked]
    first = 1 + max((r.number for r in rescued), default=-1)
    return [*rescued, *(replace(r, number=first + at) for at, r in enumerate(further))]


def _write(
    store: Store, lease: Lease, sweep: StudyRecords, row: dict[str, object], requests: list[Request], saves: int
) -> None:
    name = lease.sweep
    evals = [rows.eval_row(name, *key, i, e) for key, curve in sweep.evals.items() for i, e in enumerate(curve)]
    records = {
        schema.trials: [rows.trial_row(name, t) for t in sweep.trials.values()],
        schema.attempts: [rows.attempt_row(name, a) for a in sweep.attempts.values()],
        schema.evals: evals,
        schema.requests: [Requests(store, name)._row(request) for request in requests],
    }
    with store._fenced(lease, wrote=lease.token) as connection:
        connection.execute(sa.delete(schema.sweeps).where(schema.sweeps.c.name == name))
        connection.execute(sa.insert(schema.sweeps).values(**row))
        for table, new in records.items():
            connection.execute(sa.delete(table).where(table.c.sweep == name))
            if new:
                connection.execute(sa.insert(table), new)
        counted = schema.leases.c.saves
        least = sa.case((counted > saves, counted), else_=saves + 1)
        connection.execute(sa.update(schema.leases).where(schema.leases.c.name == name).values(saves=least))
