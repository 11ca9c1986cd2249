"""Our tables beside Optuna's, in one database; the only SQLAlchemy user.

The driver keeps the sweep in memory and hands over what changed, once a tick, in one transaction. A write
carries the lease's token: a driver that lost its lease cannot write.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from lora_tune.errors import StoreError, SweepBusyError
from lora_tune.mllog import Eval
from lora_tune.records import Attempt, StopKind, Sweep, Trial, TrialState, Verdict

SCHEMA_VERSION = 1
LEASE_SECONDS = 20.0
"""A lease that was not renewed for this long may be taken by another host."""

_metadata = sa.MetaData()
_version = sa.Table("lora_tune_version", _metadata, sa.Column("version", sa.Integer, primary_key=True))
_sweeps = sa.Table(
    "lora_tune_sweep",
    _metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("digest", sa.String(12), nullable=False),
    sa.Column("study_toml", sa.Text, nullable=False),
    sa.Column("began_at", sa.Float, nullable=False),
    sa.Column("owner", sa.Text, nullable=False, default=""),
    sa.Column("token", sa.Integer, nullable=False, default=0),
    sa.Column("renewed_at", sa.Float, nullable=False, default=0.0),
)


def _records(table: str, key: tuple[str, ...], texts: tuple[str, ...], numbers: tuple[str, ...]) -> sa.Table:
    """A table of records: its key columns, columns worth querying, and the whole record as JSON."""
    return sa.Table(
        table,
        _metadata,
        sa.Column("sweep", sa.String(64), primary_key=True),
        *(sa.Column(name, sa.Integer, primary_key=True, autoincrement=False) for name in key),
        *(sa.Column(name, sa.Text) for name in texts),
        *(sa.Column(name, sa.Float) for name in numbers),
        *([sa.Column("record", sa.Text, nullable=False)] if texts else []),
    )


_trials = _records("lora_tune_trial", ("number",), ("state", "verdict"), ("seconds", "samples"))
_attempts = _records(
    "lora_tune_attempt", ("trial", "number"), ("state", "job_name", "job_id"), ("started_at", "ended_at")
)
_evals = _records("lora_tune_eval", ("trial", "attempt", "position"), (), ("samples", "loss", "seconds"))


@dataclass(frozen=True, slots=True)
class Changes:
    """What one tick changed."""

    trials: tuple[Trial, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    evals: tuple[tuple[int, int, int, Eval], ...] = ()
    """(trial, attempt, position, eval)"""

    def __bool__(self) -> bool:
        return bool(self.trials or self.attempts or self.evals)

    def __add__(self, later: Changes) -> Changes:
        return Changes(self.trials + later.trials, self.attempts + later.attempts, self.evals + later.evals)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to drive one sweep; ``token`` grows with every owner."""

    sweep: str
    owner: str
    token: int


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return f"sqlite:///{path.resolve()}"


def tune_sqlite(engine: sa.Engine) -> None:
    """Write-ahead log and one sync a checkpoint: a commit costs microseconds, readers never wait.

    A power cut may lose the last commits but never corrupts; the jobs' logs hold the facts either way.
    """
    if engine.dialect.name != "sqlite":
        return

    @sa.event.listens_for(engine, "connect")
    def _(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA busy_timeout=10000")


class Store:
    """One database. Methods raise StoreError when it cannot be read or written.

    read_only: for those who watch. Nothing is created or written, not even a lock that a driver could meet.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self.url = url
        _refuse_broken_sqlite(url)
        try:
            if read_only:
                self._engine = _reading_engine(url)
            else:
                self._engine = sa.create_engine(url)
                tune_sqlite(self._engine)
                _metadata.create_all(self._engine)
            self._check_version(read_only)
        except (sa.exc.SQLAlchemyError, ModuleNotFoundError) as error:
            raise StoreError(f"the database {safe_url(url)} cannot be used: {_words(error)}") from error

    def _check_version(self, read_only: bool) -> None:
        with self._engine.begin() as connection:
            if read_only and not sa.inspect(connection).has_table(_version.name):
                raise StoreError(f"{safe_url(self.url)} holds no sweep; check the URL")
            found = connection.scalar(sa.select(_version.c.version))
            if found is None and not read_only:
                connection.execute(sa.insert(_version).values(version=SCHEMA_VERSION))
            elif found != SCHEMA_VERSION:
                raise StoreError(
                    f"{safe_url(self.url)} has schema {found}, this lora_tune writes {SCHEMA_VERSION}; "
                    "use the version that made it, or another database"
                )

    def close(self) -> None:
        """Release all connections."""
        self._engine.dispose()

    def begin(self, name: str, digest: str, study_toml: str, now: float) -> None:
        """Create the sweep's row where it is not there yet."""
        row = {"name": name, "digest": digest, "study_toml": study_toml, "began_at": now}
        with self._writing() as connection:
            connection.execute(self._insert(_sweeps).values(**row).on_conflict_do_nothing())

    def accept_study(self, name: str, digest: str, study_toml: str) -> None:
        """Go on with another study text."""
        with self._writing() as connection:
            row = _sweeps.c.name == name
            connection.execute(sa.update(_sweeps).where(row).values(digest=digest, study_toml=study_toml))

    def names(self) -> list[str]:
        """The sweeps of this database."""
        with self._reading() as connection:
            return list(connection.scalars(sa.select(_sweeps.c.name).order_by(_sweeps.c.name)))

    def load(self, name: str, known: Sweep | None = None) -> Sweep | None:
        """Everything that is remembered of a sweep, or None.

        known: the sweep as it was loaded before; only the trials that were not finished then are read again, so that
        watching a long sweep costs the database next to nothing. When nothing is new, ``known`` itself comes back.
        """
        with self._reading() as connection:
            head = connection.execute(sa.select(_sweeps).where(_sweeps.c.name == name)).one_or_none()
            if head is None:
                return None
            trials = connection.scalars(_of(_trials.c.record, name).where(_news(_trials.c.number, known)))
            attempts = connection.scalars(_of(_attempts.c.record, name).where(_news(_attempts.c.trial, known)))
            order = (_evals.c.trial, _evals.c.attempt, _evals.c.position)
            wanted = (_evals.c.sweep == name) & _news(_evals.c.trial, known)
            rows = connection.execute(sa.select(_evals).where(wanted).order_by(*order)).all()
            read_trials, read_attempts = [_trial(r) for r in trials], [_attempt(r) for r in attempts]
        if known is not None and not read_trials and head.digest == known.digest:
            return known
        evals: dict[tuple[int, int], list[Eval]] = {}
        for row in rows:
            evals.setdefault((row.trial, row.attempt), []).append(Eval(row.samples, _nan(row.loss), _nan(row.seconds)))
        before = known or Sweep(name=name, digest="", study_toml="", began_at=0.0)
        return Sweep(
            name=name,
            digest=head.digest,
            study_toml=head.study_toml,
            began_at=head.began_at,
            trials={**before.trials, **{t.number: t for t in sorted(read_trials, key=lambda t: t.number)}},
            attempts={**before.attempts, **{(a.trial, a.number): a for a in read_attempts}},
            evals={**before.evals, **{key: tuple(found) for key, found in evals.items()}},
        )

    def owner(self, name: str) -> str:
        """Who drives the sweep, "" when nobody holds the lease."""
        with self._reading() as connection:
            return connection.scalar(sa.select(_sweeps.c.owner).where(_sweeps.c.name == name)) or ""

    def driver(self, name: str) -> tuple[str, float]:
        """Who drives the sweep ("": nobody) and the epoch second of its last sign of life (0: none)."""
        with self._reading() as connection:
            row = sa.select(_sweeps.c.owner, _sweeps.c.renewed_at).where(_sweeps.c.name == name)
            found = connection.execute(row).one_or_none()
        return (found.owner or "", found.renewed_at or 0.0) if found is not None else ("", 0.0)

    def take_lease(self, name: str, owner: str, now: float, *, dead: bool = False) -> Lease:
        """The right to drive ``name``. Raises SweepBusyError while somebody else holds it.

        dead: the caller knows that the present owner is gone (a process of this host that ended).
        """
        with self._writing() as connection:
            head = connection.execute(sa.select(_sweeps).where(_sweeps.c.name == name)).one()
            held = head.owner and head.owner != owner and not dead and now - head.renewed_at < LEASE_SECONDS
            if held:
                raise SweepBusyError(
                    f"sweep {name} is driven by {head.owner} (last sign {now - head.renewed_at:.0f} s ago); "
                    "stop that one first, or watch it with: python -m lora_tune.status --study " + name
                )
            mine = (_sweeps.c.name == name) & (_sweeps.c.token == head.token)
            lease = Lease(name, owner, head.token + 1)
            values = {"owner": owner, "token": lease.token, "renewed_at": now}
            if connection.execute(sa.update(_sweeps).where(mine).values(**values)).rowcount != 1:
                raise SweepBusyError(f"sweep {name} was taken by another driver at the same moment")
        return lease

    def release(self, lease: Lease) -> None:
        """Give the lease back, if it is still ours."""
        with self._writing() as connection:
            connection.execute(sa.update(_sweeps).where(_held(lease)).values(owner="", renewed_at=0.0))

    def save(self, lease: Lease, changes: Changes, now: float) -> None:
        """Renew the lease and write ``changes``, in one transaction. Raises SweepBusyError when the lease is lost."""
        name = lease.sweep
        with self._writing() as connection:
            renewed = connection.execute(sa.update(_sweeps).where(_held(lease)).values(renewed_at=now))
            if renewed.rowcount != 1:
                raise SweepBusyError(f"sweep {name} was taken over by another driver; this one stops")
            self._upsert(connection, _trials, [_trial_row(name, t) for t in changes.trials])
            self._upsert(connection, _attempts, [_attempt_row(name, a) for a in changes.attempts])
            self._upsert(connection, _evals, [_eval_row(name, *e) for e in changes.evals])

    def _upsert(self, connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        keys = [column.name for column in table.primary_key]
        latest = {tuple(row[k] for k in keys): row for row in rows}  # one statement may touch a row once
        insert = self._insert(table)
        rest = {c.name: insert.excluded[c.name] for c in table.columns if c.name not in keys}
        connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=rest), list(latest.values()))

    def _insert(self, table: sa.Table) -> Any:
        return sqlite.insert(table) if self._engine.dialect.name == "sqlite" else postgresql.insert(table)

    def _reading(self) -> _Translated:
        return _Translated(self._engine.connect(), self.url)

    def _writing(self) -> _Translated:
        return _Translated(self._engine.begin(), self.url)


class _Translated:
    """A connection context whose database errors come out as StoreError."""

    def __init__(self, inner: Any, url: str) -> None:
        self._inner = inner
        self._url = url

    def __enter__(self) -> sa.Connection:
        try:
            connection: sa.Connection = self._inner.__enter__()
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the database {safe_url(self._url)} does not answer: {_words(error)}") from error
        return connection

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._inner.__exit__(kind, error, trace)
        except sa.exc.SQLAlchemyError as late:
            raise StoreError(f"the database {safe_url(self._url)} does not answer: {_words(late)}") from late
        if isinstance(error, sa.exc.SQLAlchemyError):
            raise StoreError(f"the database {safe_url(self._url)} does not answer: {_words(error)}") from error


def safe_url(url: str) -> str:
    """The URL without its password."""
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except sa.exc.ArgumentError:
        return "(an unreadable URL)"


def _refuse_broken_sqlite(url: str) -> None:
    """SQLAlchemy would open a damaged file and fail later, half-way; look first, and never write to it."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise StoreError("the storage URL is unreadable; write sqlite:///FILE or postgresql+psycopg://...") from error
    if not parsed.drivername.startswith("sqlite") or not parsed.database:
        return
    path = Path(parsed.database)
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        with sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True) as connection:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as error:
        verdict = str(error)
    if verdict != "ok":
        raise StoreError(f"{path} is damaged ({verdict}); move it away to start anew, it is left as it is")


def _reading_engine(url: str) -> sa.Engine:
    """An engine that cannot write. A SQLite file whose folder we may not write is read as it lies, when at rest."""
    parsed = sa.make_url(url)
    if not parsed.drivername.startswith("sqlite") or not parsed.database:
        return sa.create_engine(url, execution_options={"postgresql_readonly": True})
    path = Path(parsed.database).resolve()
    if not path.exists():
        raise StoreError(f"there is no database at {path}; check --storage, --output or the present folder")
    at_rest = not path.with_name(path.name + "-wal").exists() and not os.access(path.parent, os.W_OK)
    address = f"file:{quote(str(path))}?mode=ro{'&immutable=1' if at_rest else ''}"
    return sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(address, uri=True, timeout=10.0))


def _held(lease: Lease) -> Any:
    return (_sweeps.c.name == lease.sweep) & (_sweeps.c.token == lease.token)


def _of(column: sa.Column[Any], sweep: str) -> Any:
    return sa.select(column).where(column.table.c.sweep == sweep)


def _news(number: sa.Column[Any], known: Sweep | None) -> Any:
    """Rows of trials that are not finished in ``known``, or not in it."""
    if known is None:
        return sa.true()
    unfinished = [n for n, t in known.trials.items() if t.state is not TrialState.FINISHED]
    return (number > max(known.trials, default=-1)) | number.in_(unfinished)


def _words(error: BaseException) -> str:
    return str(getattr(error, "orig", None) or error).splitlines()[0]


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _trial_row(sweep: str, trial: Trial) -> dict[str, Any]:
    verdict = trial.verdict.value if trial.verdict else None
    row = {"sweep": sweep, "number": trial.number, "state": trial.state.value, "verdict": verdict}
    return row | {"seconds": trial.seconds, "samples": trial.samples, "record": _json(trial)}


def _attempt_row(sweep: str, attempt: Attempt) -> dict[str, Any]:
    plain = ("trial", "number", "state", "job_name", "job_id", "started_at", "ended_at")
    return {"sweep": sweep, "record": _json(attempt)} | {name: getattr(attempt, name) for name in plain}


def _eval_row(sweep: str, trial: int, attempt: int, position: int, point: Eval) -> dict[str, Any]:
    key = {"sweep": sweep, "trial": trial, "attempt": attempt, "position": position}
    return key | {"samples": point.samples, "loss": point.loss, "seconds": point.seconds}


def _json(record: Trial | Attempt) -> str:
    return json.dumps(asdict(record), ensure_ascii=False)


def _known(kind: type[Trial] | type[Attempt], data: dict[str, Any]) -> dict[str, Any]:
    return {f.name: data[f.name] for f in fields(kind) if f.name in data}


def _trial(text: str) -> Trial:
    data = json.loads(text)
    data["state"] = TrialState(data["state"])
    data["verdict"] = Verdict(data["verdict"]) if data["verdict"] else None
    return Trial(**_known(Trial, data))


def _attempt(text: str) -> Attempt:
    data = json.loads(text)
    data["stop"] = StopKind(data["stop"])
    data["nodes"], data["exclude_nodes"] = tuple(data["nodes"]), tuple(data["exclude_nodes"])
    return Attempt(**_known(Attempt, data))


def merged(changes: Iterable[Changes]) -> Changes:
    """Several ticks' changes as one, oldest first."""
    total = Changes()
    for change in changes:
        total = total + change
    return total
