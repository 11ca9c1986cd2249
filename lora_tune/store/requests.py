"""What people ask of a sweep that runs: rows that anybody may add, and that its driver alone answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa

from lora_tune.base.errors import KeyTakenError, RemarkChangedError
from lora_tune.store import schema
from lora_tune.store.database import Store
from lora_tune.store.port import Lease, Remark, Request

TRIES = 5
"""Requests that arrive at one moment take the same number; all but one try again."""


class Requests:
    """The requests of one sweep. A driver hands its lease over, and answers under it."""

    def __init__(self, store: Store, sweep: str, lease: Lease | None = None) -> None:
        self._store, self._sweep, self._lease = store, sweep, lease

    def all(self) -> list[Request]:
        """Every request, oldest first. Raises StoreError."""
        table = schema.requests
        wanted = sa.select(table.c.record).where(table.c.sweep == self._sweep).order_by(table.c.number)
        with self._store._reading() as connection:
            return [Request(**json.loads(text)) for text in connection.scalars(wanted)]

    def copy_in(self, requests: Iterable[Request]) -> None:
        """Take over what was asked in another database, with its answers. Raises StoreError."""
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
        """Write down what became of a request. Raises SweepBusyError without the lease, StoreError."""
        assert self._lease is not None, "only a driver answers"
        done = replace(request, answered_at=now, accepted=accepted, answer=answer)
        table, row = schema.requests, self._row(done)
        mine = (table.c.sweep == self._sweep) & (table.c.number == request.number)
        with self._store._fenced(self._lease) as connection:
            connection.execute(sa.update(table).where(mine).values(record=row["record"]))
        return done

    def _row(self, request: Request) -> dict[str, Any]:
        record = json.dumps({**asdict(request), "what": dict(request.what)})
        return {"sweep": self._sweep, "number": request.number, "record": record}


# What people write beside a sweep and its trials: theirs alone, never read by the driver, kept in every version.


class Remarks:
    """The remarks of one sweep. Anybody may add one; nothing is overwritten."""

    def __init__(self, store: Store, sweep: str) -> None:
        self._store, self._sweep = store, sweep

    def latest(self) -> dict[int, Remark]:
        """By trial what is written there now. Raises StoreError."""
        return {remark.trial: remark for remark in sorted(self.history(), key=lambda r: r.version)}

    def history(self) -> list[Remark]:
        """Every version of every remark, the oldest first. Raises StoreError."""
        table = schema.remarks
        wanted = sa.select(table).where(table.c.sweep == self._sweep).order_by(table.c.written_at, table.c.version)
        with self._store._reading() as connection:
            rows = connection.execute(wanted).mappings().all()
        return [Remark(**{k: v for k, v in row.items() if k != "sweep"}) for row in rows]

    def write(self, remark: Remark) -> None:
        """Add a version. Raises RemarkChangedError where somebody was quicker, StoreError."""
        values = {name: getattr(remark, name) for name in ("trial", "version", "text", "who", "written_at")}
        now = self.latest().get(remark.trial)
        changed = (
            f"somebody has written here meanwhile (version {now.version if now else 0}); copy your text and reload"
        )
        if remark.version != (now.version if now else 0) + 1:
            raise RemarkChangedError(changed)
        try:
            with self._store._writing() as connection:
                connection.execute(sa.insert(schema.remarks).values(sweep=self._sweep, **values))
        except KeyTakenError as error:
            raise RemarkChangedError(changed) from error
