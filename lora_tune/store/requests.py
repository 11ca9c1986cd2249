"""Users' requests to a sweep and their remarks, and merging a rescued sweep back into a database.

Any process may add requests. A rescued sweep is merged into a database that lost part of it, for example a shared one
after a failover; other sweeps, requests and remarks there are kept.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from lora_tune.base.errors import KeyTakenError, StoreError
from lora_tune.store import records as rows
from lora_tune.store import schema
from lora_tune.store.database import Store
from lora_tune.store.engine import safe_url, sqlite_url
from lora_tune.store.port import Lease, Remark, Request
from lora_tune.store.records import StudyRecords

TRIES = 5
"""Attempts to insert: of concurrent requests with the same number, all but one must retry."""


class Requests:
    """The requests of one sweep. A driver passes its lease, and answers under it."""

    def __init__(self, store: Store, sweep: str, lease: Lease | None = None) -> None:
        self._store, self._sweep, self._lease = store, sweep, lease

    def all(self) -> list[Request]:
        """Every request, oldest first. Raises StoreError."""
        table = schema.requests
        query = sa.select(table.c.record).where(table.c.sweep == self._sweep).order_by(table.c.number)
        with self._store._reading() as connection:
            return [Request(**json.loads(text)) for text in connection.scalars(query)]

    def copy_in(self, requests: Iterable[Request]) -> None:
        """Insert requests of another database, with their answers. Raises StoreError."""
        rows = [self._row(request) for request in requests]
        if rows:
            with self._store._writing() as connection:
                connection.execute(sa.insert(schema.requests), rows)

    def ask(self, request: Request) -> Request:
        """Add a request; returns it with its number. Raises StoreError."""
        table = schema.requests
        for left in range(TRIES, 0, -1):
            try:
                with self._store._writing() as connection:
                    last = sa.select(sa.func.max(table.c.number)).where(table.c.sweep == self._sweep)
                    newest = connection.scalar(last)
                    numbered = replace(request, number=0 if newest is None else newest + 1)
                    connection.execute(sa.insert(table).values(self._row(numbered)))
            except KeyTakenError:
                if left == 1:
                    raise
                continue
            return numbered
        raise AssertionError("the loop returns or raises")

    def answer(self, request: Request, answer: str, now: float, *, accepted: bool) -> Request:
        """Record the answer to a request. Raises SweepBusyError without the lease, StoreError."""
        assert self._lease is not None, "only a driver answers"
        done = replace(request, answered_at=now, accepted=accepted, answer=answer)
        table, row = schema.requests, self._row(done)
        this_sweep = (table.c.sweep == self._sweep) & (table.c.number == request.number)
        with self._store._fenced(self._lease) as connection:
            connection.execute(sa.update(table).where(this_sweep).values(record=row["record"]))
        return done

    def _row(self, request: Request) -> dict[str, Any]:
        record = json.dumps({**asdict(request), "what": dict(request.what)})
        return {"sweep": self._sweep, "number": request.number, "record": record}


# Remarks that users wrote in the dashboard of an earlier release, for the report.


class Remarks:
    """The remarks of one sweep, in every version."""

    def __init__(self, store: Store, sweep: str) -> None:
        self._store, self._sweep = store, sweep

    def latest(self) -> dict[int, Remark]:
        """The current remark of each trial. Raises StoreError."""
        return {remark.trial: remark for remark in sorted(self.history(), key=lambda r: r.version)}

    def history(self) -> list[Remark]:
        """Every version of every remark, oldest first. Raises StoreError."""
        table = schema.remarks
        query = sa.select(table).where(table.c.sweep == self._sweep).order_by(table.c.written_at, table.c.version)
        with self._store._reading() as connection:
            rows = connection.execute(query).mappings().all()
        return [Remark(**{k: v for k, v in row.items() if k != "sweep"}) for row in rows]


MERGED = "merged"
"""Suffix of a merged rescue file, which is kept but not merged again."""


def merge_rescued(store: Store, lease: Lease, path: Path) -> StudyRecords:
    """Write the sweep of ``lease`` from the database ``path`` into ``store``, in one transaction; returns it.

    Then renames ``path``. Raises StoreError if it does not exist or holds another sweep, or if the store has newer
    records because a driver continued there after the rescue; SweepBusyError if the lease is lost.
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
        requests = _merged(Requests(source, name).all(), Requests(store, name).all())
        with source._reading() as connection:
            row = connection.execute(sa.select(schema.sweeps).where(schema.sweeps.c.name == name)).mappings().one()
        _write(store, lease, rescued, dict(row), requests, source.saves(name)[1])
    path.replace(path.with_name(f"{path.name}.{MERGED}"))
    return rescued


def _unknown_to(rescued: StudyRecords, present: StudyRecords) -> str:
    """What ``present`` has and ``rescued`` lacks, which a merge would lose; "" if nothing."""
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


def _merged(rescued: list[Request], present: list[Request]) -> list[Request]:
    """The rescued requests, then the database's newer ones, renumbered."""
    copied = {(r.who, r.asked_at, r.kind) for r in rescued}
    further = [r for r in present if (r.who, r.asked_at, r.kind) not in copied]
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
