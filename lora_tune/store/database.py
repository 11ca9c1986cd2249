"""Records of sweeps in a database, and the leases under which they are written.

The driver keeps the sweep in memory and saves its changes once a tick, in one transaction. Each write checks the
lease's token, so that a driver which lost its lease cannot write.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from lora_tune.base.errors import DatabaseChangedError, NoSweepError, StoreError, SweepBusyError
from lora_tune.base.paths import new_token
from lora_tune.logs.run import Eval
from lora_tune.store import engine, records, schema
from lora_tune.store.port import LEASE_SECONDS, Held, Lease, Registered
from lora_tune.store.records import Changes, StudyRecords, TrialState

# Reading a sweep, whole or incrementally.


def read_sweep(connection: sa.Connection, name: str, known: StudyRecords | None) -> StudyRecords | None:
    """All records of a sweep, or None; ``known`` itself if nothing is new.

    known: the sweep from an earlier read. Only trials that were unfinished then are read again; if one has finished,
    also those with a slowdown factor.
    """
    head = connection.execute(sa.select(schema.sweeps).where(schema.sweeps.c.name == name)).one_or_none()
    if head is None:
        return None
    trials, attempts = schema.trials.c, schema.attempts.c
    texts = connection.scalars(_of(trials.record, name).where(_changed_rows(trials.number, known)))
    read_trials = sorted(map(records.trial_from, texts), key=lambda t: t.number)
    texts = connection.scalars(_of(attempts.record, name).where(_changed_rows(attempts.trial, known)))
    read_attempts = [records.attempt_from(text) for text in texts]
    read_evals = _evals(connection, name, known)
    if known is not None and not read_trials and head.digest == known.digest:
        return known
    if known is not None and any(t.state is TrialState.FINISHED for t in read_trials):
        # Its end may have changed the reference pace of others.
        slower = [n for n, t in known.trials.items() if t.metrics.slower is not None]
        moved = trials.number.in_(slower) | trials.record.contains('"slower"')
        read_trials += map(records.trial_from, connection.scalars(_of(trials.record, name).where(moved)))
        read_trials.sort(key=lambda t: t.number)
    before = known or StudyRecords(name=name, digest="", study_toml="", began_at=0.0)
    sweep = StudyRecords(
        name=name,
        digest=head.digest,
        study_toml=head.study_toml,
        began_at=head.began_at,
        id=head.id,
        folder=head.folder,
        trials={**before.trials, **{t.number: t for t in read_trials}},
        attempts={**before.attempts, **{(a.trial, a.number): a for a in read_attempts}},
        evals={**before.evals, **read_evals},
        priors=before.priors,
    )
    if known is not None and head.digest == known.digest and all(t.verdict is None for t in read_trials):
        sweep.carry_cache(known)
    return sweep


def _evals(connection: sa.Connection, name: str, known: StudyRecords | None) -> dict[tuple[int, int], tuple[Eval, ...]]:
    evals = schema.evals.c
    query = (evals.sweep == name) & _changed_rows(evals.trial, known)
    order = (evals.trial, evals.attempt, evals.position)
    curves: dict[tuple[int, int], list[Eval]] = {}
    for row in connection.execute(sa.select(schema.evals).where(query).order_by(*order)):
        point = Eval(records.number(row.samples), records.number(row.loss), records.number(row.seconds))
        curves.setdefault((row.trial, row.attempt), []).append(point)
    return {key: tuple(points) for key, points in curves.items()}


def _of(column: sa.Column[Any], sweep: str) -> Any:
    return sa.select(column).where(column.table.c.sweep == sweep)


def _changed_rows(number: sa.Column[Any], known: StudyRecords | None) -> Any:
    """Rows of trials that are unfinished or missing in ``known``."""
    if known is None:
        return sa.true()
    unfinished = [n for n, t in known.trials.items() if t.state is not TrialState.FINISHED]
    return (number > max(known.trials, default=-1)) | number.in_(unfinished)


class Store:
    """One database. Methods raise StoreError if it cannot be read or written.

    read_only: create and write nothing, and take no lock that could block a driver.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        parsed = engine.parse_url(url)
        self.url = engine.full_url(url)
        self._saves: dict[str, int] = {}  # by sweep: lower bound of the save count in its database
        self._placed: dict[str, Registered] = {}  # by sweep: its registration, as this process wrote it
        with engine.translated(url):
            if read_only:
                self._engine = engine.reading_engine(parsed)
                self._check_version()
            else:
                self._engine = engine.writing_engine(parsed)
                with engine.exclusive(self._engine) as connection:
                    schema.make(connection, time.time())

    def _check_version(self) -> None:
        with engine.reading(self._engine, self.url) as connection:
            if not sa.inspect(connection).has_table(schema.version.name):
                raise NoSweepError(f"{engine.safe_url(self.url)} holds no sweep; check the URL")
            version = schema.stored_version(connection)
        if version != schema.SCHEMA_VERSION:
            old = f"has schema {version} of an earlier release; resuming the sweep brings it up to date"
            problem = old if version < schema.SCHEMA_VERSION else schema.later(version)
            raise StoreError(f"{engine.safe_url(self.url)} {problem}")

    def close(self) -> None:
        """Release all connections."""
        self._engine.dispose()

    # -- sweeps ----------------------------------------------------------------------------------------------------

    def begin(self, name: str, digest: str, study_toml: str, now: float) -> None:
        """Create the sweep's row, with a new id, if it does not exist."""
        row = {"name": name, "digest": digest, "study_toml": study_toml, "began_at": now, "id": new_token()}
        with self._writing() as connection:
            connection.execute(self._insert(schema.sweeps).values(**row).on_conflict_do_nothing())

    def rescue(self, path: Path, sweep: StudyRecords, now: float) -> None:
        """Write a whole sweep into a new SQLite file that can replace this database."""
        path.unlink(missing_ok=True)
        fresh = Store(engine.sqlite_url(path))
        try:
            fresh.copy_in(sweep, now, self.counted(sweep.name) + 1, self._placed.get(sweep.name))
        finally:
            fresh.close()

    def copy_in(self, sweep: StudyRecords, now: float, saves: int, where: Registered | None = None) -> None:
        """Write a whole sweep into this database, which must not contain it; leaves it without an owner.

        saves: its save count. where: its registration, which also says whether it is over.
        """
        row = {"name": sweep.name, "digest": sweep.digest, "study_toml": sweep.study_toml, "id": sweep.id}
        row |= {"folder": sweep.folder} if where is None else {**_place_columns(where), "ended": where.ended}
        with self._writing() as connection:
            connection.execute(self._insert(schema.sweeps).values(**row, began_at=sweep.began_at))
        lease = self.take_lease(sweep.name, "a copy", now)
        evals = tuple((*key, i, e) for key, curve in sweep.evals.items() for i, e in enumerate(curve))
        self.save(lease, Changes(tuple(sweep.trials.values()), tuple(sweep.attempts.values()), evals), now)
        with self._fenced(lease) as connection:
            this_sweep = sa.update(schema.leases).where(schema.leases.c.name == sweep.name)
            connection.execute(this_sweep.values(owner="", renewed_at=0.0, saves=saves))

    def accept_study(self, lease: Lease, digest: str, study_toml: str) -> None:
        """Record a changed study text. Raises SweepBusyError if the lease is lost."""
        self._change(lease, digest=digest, study_toml=study_toml)

    def place(self, lease: Lease, where: Registered) -> None:
        """Record where the sweep is driven, and that it is not over. Raises SweepBusyError if the lease is lost."""
        self._change(lease, **_place_columns(where), ended="")
        self._placed[lease.sweep] = replace(where, ended="")

    def finish(self, lease: Lease, reason: str) -> None:
        """Record that the sweep is over, and why. Raises SweepBusyError if the lease is lost."""
        self._change(lease, ended=reason)
        if (where := self._placed.get(lease.sweep)) is not None:
            self._placed[lease.sweep] = replace(where, ended=reason)

    def _change(self, lease: Lease, **values: str) -> None:
        with self._fenced(lease) as connection:
            connection.execute(sa.update(schema.sweeps).where(schema.sweeps.c.name == lease.sweep).values(**values))

    def names(self) -> list[str]:
        """The sweeps of this database."""
        with self._reading() as connection:
            return list(connection.scalars(sa.select(schema.sweeps.c.name).order_by(schema.sweeps.c.name)))

    def registered(self) -> list[Registered]:
        """Registrations of all sweeps by name, except those that only an earlier release has driven."""
        with self._reading() as connection:
            sweeps = connection.execute(sa.select(schema.sweeps).order_by(schema.sweeps.c.name)).all()
        return [
            Registered(
                name=row.name,
                study_toml=row.study_toml,
                cwd=Path(row.cwd),
                file=Path(row.file),
                folder=Path(row.folder),
                options=json.loads(row.options),
                ended=row.ended,
            )
            for row in sweeps
            if row.folder
        ]

    def load(self, name: str, known: StudyRecords | None = None) -> StudyRecords | None:
        """All records of a sweep, or None.

        known: the sweep from an earlier load; only trials that were unfinished then are read again, so that watching a
        long sweep is cheap. If nothing is new, returns ``known`` itself.
        """
        with self._reading() as connection:
            return read_sweep(connection, name, known)

    # -- leases ----------------------------------------------------------------------------------------------------

    def held(self, name: str) -> Held:
        """The current lease of ``name``."""
        with self._reading() as connection:
            return _held(connection, name)

    def take_lease(
        self, name: str, owner: str, now: float, *, dead: bool = False, unchanged: Held | None = None
    ) -> Lease:
        """Take the lease of ``name``. Raises SweepBusyError while another owner holds it.

        dead: the caller knows that the current owner has ended (a process of this host). unchanged: the lease that the
        caller has seen unchanged for LEASE_SECONDS by its monotonic clock, so that host clocks need not agree.
        """
        table = schema.leases
        with self._writing() as connection:
            connection.execute(
                self._insert(table)
                .values(name=name, owner="", token=0, renewed_at=0.0, wrote=0)
                .on_conflict_do_nothing()
            )
            held_now = _held(connection, name)
            age = now - held_now.renewed_at
            free = not held_now.owner or held_now.owner == owner or dead or held_now == unchanged
            if not free and age < LEASE_SECONDS:
                sign = f"last sign {age:.0f} s ago" if age >= 0 else f"its clock is {-age:.0f} s ahead of this host's"
                raise SweepBusyError(
                    f"sweep {name} is driven by {held_now.who} ({sign}); stop that one first, watch it with: "
                    f"python -m lora_tune.status --study {name}, or wait for its end with --standby"
                )
            lease = Lease(name, owner, held_now.token + 1)
            same = (
                (table.c.name == name) & (table.c.token == held_now.token) & (table.c.renewed_at == held_now.renewed_at)
            )
            values = {"owner": owner, "token": lease.token, "renewed_at": now}
            if connection.execute(sa.update(table).where(same).values(**values)).rowcount != 1:
                raise SweepBusyError(f"sweep {name} was taken, or its lease renewed, by another driver at this moment")
        return lease

    def release(self, lease: Lease) -> None:
        """Release the lease, if still held."""
        with self._writing() as connection:
            connection.execute(sa.update(schema.leases).where(_is_lease(lease)).values(owner="", renewed_at=0.0))

    @contextlib.contextmanager
    def _fenced(self, lease: Lease, **values: Any) -> Iterator[sa.Connection]:
        """A transaction that locks the lease's row and sets ``values`` in it.

        Raises SweepBusyError if the lease is lost, DatabaseChangedError if an earlier write of this process is missing.
        """
        table, least = schema.leases, self._saves.get(lease.sweep, 0)
        this_sweep = _is_lease(lease) & (table.c.saves >= least)
        with self._writing() as connection:
            counted = (
                sa.update(table).where(this_sweep).values(saves=table.c.saves + 1, **values).returning(table.c.saves)
            )
            saves = connection.execute(counted).scalar_one_or_none()
            if saves is None:
                raise self._lost(connection, lease)
            yield connection
        self._saves[lease.sweep] = max(saves, self._saves.get(lease.sweep, 0))  # another thread may have saved later

    def _lost(self, connection: sa.Connection, lease: Lease) -> SweepBusyError | DatabaseChangedError:
        """The error that explains why a lease is no longer valid."""
        if _held(connection, lease.sweep).token > lease.token:
            return SweepBusyError(f"sweep {lease.sweep} was taken over by another driver; this one stops")
        return self._set_back(lease.sweep)

    def _set_back(self, name: str) -> DatabaseChangedError:
        return DatabaseChangedError(
            f"the database {engine.safe_url(self.url)} was set back to an earlier state, or emptied, while a driver "
            f"was using it: what was written for {name} last is not in it"
        )

    # -- records ---------------------------------------------------------------------------------------------------

    def save(self, lease: Lease, changes: Changes, now: float) -> None:
        """Renew the lease and write ``changes``, in one transaction.

        Raises SweepBusyError if the lease is lost, DatabaseChangedError if an earlier save of this process is missing.
        """
        name = lease.sweep
        with self._fenced(lease, renewed_at=now, **({"wrote": lease.token} if changes else {})) as connection:
            self._upsert(connection, schema.trials, [records.trial_row(name, t) for t in changes.trials])
            self._upsert(connection, schema.attempts, [records.attempt_row(name, a) for a in changes.attempts])
            self._upsert(connection, schema.evals, [records.eval_row(name, *e) for e in changes.evals])

    def saves(self, name: str) -> tuple[str, int]:
        """The id and the save count of the sweep ``name``; ("", 0) if it does not exist."""
        both = sa.select(schema.sweeps.c.id, schema.leases.c.saves).where(schema.sweeps.c.name == name)
        with self._reading() as connection:
            row = connection.execute(both.join(schema.leases, schema.leases.c.name == name)).one_or_none()
        return (row.id, row.saves) if row else ("", 0)

    def counted(self, name: str) -> int:
        """The save count as this process knows it, whatever happened to the database since."""
        return self._saves.get(name, 0)

    def refuse_set_back(self, name: str) -> None:
        """Raise DatabaseChangedError if an earlier write of this process for ``name`` is missing."""
        if self.saves(name)[1] < self.counted(name):
            raise self._set_back(name)

    def wrote(self, name: str) -> int:
        """The token of the last driver that changed a record of ``name``; 0 if none has."""
        with self._reading() as connection:
            return connection.scalar(sa.select(schema.leases.c.wrote).where(schema.leases.c.name == name)) or 0

    def _upsert(self, connection: sa.Connection, table: sa.Table, new: list[dict[str, Any]]) -> None:
        if not new:
            return
        keys = [column.name for column in table.primary_key]
        latest = {tuple(row[k] for k in keys): row for row in new}  # a statement may touch each row only once
        values = [column.name for column in table.columns if column.name not in keys]
        connection.execute(engine.upsert(self._engine.dialect.name, table, keys, values), list(latest.values()))

    def _insert(self, table: sa.Table) -> Any:
        return engine.insert(self._engine.dialect.name, table)

    def _reading(self) -> Any:
        return engine.reading(self._engine, self.url)

    def _writing(self) -> Any:
        return engine.writing(self._engine, self.url)


def _held(connection: sa.Connection, name: str) -> Held:
    columns = (schema.leases.c.owner, schema.leases.c.token, schema.leases.c.renewed_at)
    row = connection.execute(sa.select(*columns).where(schema.leases.c.name == name)).one_or_none()
    return Held(*row) if row is not None else Held()


def _place_columns(where: Registered) -> dict[str, str]:
    """Registration columns of a sweep's row."""
    places = {"cwd": str(where.cwd), "file": str(where.file), "folder": str(where.folder)}
    return {**places, "options": json.dumps(where.options)}


def _is_lease(lease: Lease) -> Any:
    return (schema.leases.c.name == lease.sweep) & (schema.leases.c.token == lease.token)
