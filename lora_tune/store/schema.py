"""Our tables, and migrations of older databases."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from lora_tune.base.errors import StoreError, SweepBusyError
from lora_tune.base.paths import new_token
from lora_tune.store.port import LEASE_SECONDS

SCHEMA_VERSION = 7

metadata = sa.MetaData()
version = sa.Table("lora_tune_version", metadata, sa.Column("version", sa.Integer, primary_key=True))
sweeps = sa.Table(
    "lora_tune_sweep",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("digest", sa.String(12), nullable=False),
    sa.Column("study_toml", sa.Text, nullable=False),
    sa.Column("began_at", sa.Float, nullable=False),
    # Unique among all sweeps of all databases; stored in its folder and jobs.
    sa.Column("id", sa.String(32), nullable=False, server_default=""),
    # Registration: working directory, study file, sweep folder, and command line overrides as JSON.
    sa.Column("cwd", sa.Text, nullable=False, server_default=""),
    sa.Column("file", sa.Text, nullable=False, server_default=""),
    sa.Column("folder", sa.Text, nullable=False, server_default=""),
    sa.Column("options", sa.Text, nullable=False, server_default="{}"),
    # Why it is over; empty while it is not.
    sa.Column("ended", sa.Text, nullable=False, server_default=""),
)
leases = sa.Table(
    "lora_tune_lease",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("token", sa.Integer, nullable=False),
    sa.Column("renewed_at", sa.Float, nullable=False),
    # Token of the last driver that changed a record; unsaved changes of earlier drivers are obsolete.
    sa.Column("wrote", sa.Integer, nullable=False),
    # Number of writes by drivers: only decreases if the database is set back to an earlier state.
    sa.Column("saves", sa.Integer, nullable=False, server_default="0"),
)


def _records(table: str, key: tuple[str, ...], texts: tuple[str, ...], numbers: tuple[str, ...]) -> sa.Table:
    """A table of records: key columns, columns for queries, and the whole record as JSON."""
    return sa.Table(
        table,
        metadata,
        sa.Column("sweep", sa.String(64), primary_key=True),
        *(sa.Column(name, sa.Integer, primary_key=True, autoincrement=False) for name in key),
        *(sa.Column(name, sa.Text) for name in texts),
        *(sa.Column(name, sa.Float) for name in numbers),
        *([sa.Column("record", sa.Text, nullable=False)] if texts else []),
    )


trials = _records("lora_tune_trial", ("number",), ("state", "verdict"), ("seconds", "samples"))
attempts = _records(
    "lora_tune_attempt", ("trial", "number"), ("state", "job_name", "job_id"), ("started_at", "ended_at")
)
evals = _records("lora_tune_eval", ("trial", "attempt", "position"), (), ("samples", "loss", "seconds"))


# Users' requests to a running sweep, with the driver's answers, as JSON.
requests = sa.Table(
    "lora_tune_request",
    metadata,
    sa.Column("sweep", sa.String(64), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("record", sa.Text, nullable=False),
)


# Users' remarks on a sweep (trial -1) and its trials, in every version. Drivers do not read them.
remarks = sa.Table(
    "lora_tune_remark",
    metadata,
    sa.Column("sweep", sa.String(64), primary_key=True),
    sa.Column("trial", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("who", sa.Text, nullable=False),
    sa.Column("written_at", sa.Float, nullable=False),
)


def make(connection: sa.Connection, now: float) -> None:
    """Create the tables, or migrate those of an earlier release. The caller holds an exclusive transaction.

    now: epoch seconds. Raises StoreError for the schema of a later release, SweepBusyError while a driver of an
    earlier release is running.
    """
    if not sa.inspect(connection).has_table(version.name):
        metadata.create_all(connection)
        connection.execute(sa.insert(version).values(version=SCHEMA_VERSION))
        return
    stored = stored_version(connection)
    if stored > SCHEMA_VERSION:
        raise StoreError(f"{later(stored)}")
    for number in range(stored, SCHEMA_VERSION):
        _UPGRADES[number](connection, now)
        connection.execute(sa.update(version).values(version=number + 1))


def stored_version(connection: sa.Connection) -> int:
    """The schema version of the database."""
    return connection.scalar(sa.select(version.c.version)) or 0


def later(database_version: int) -> str:
    """Error text for a database of a later release."""
    return f"has schema {database_version}, this lora_tune knows up to {SCHEMA_VERSION}; use the release that wrote it"


_AT_WORK = (
    "sweep {name} is driven by {owner}, a lora_tune of an earlier release; stop that one first, "
    "so that the database can be brought up to date"
)


def _separate_lease_table(connection: sa.Connection, now: float) -> None:
    """1 to 2: leases in a separate table; sweeps have a registration and a reason of their end."""
    old = sa.table(
        "lora_tune_sweep", sa.column("name"), sa.column("owner"), sa.column("token"), sa.column("renewed_at")
    )
    held = (old.c.owner != "") & (old.c.renewed_at > now - LEASE_SECONDS)
    if (busy := connection.execute(sa.select(old).where(held)).first()) is not None:
        raise SweepBusyError(_AT_WORK.format(name=busy.name, owner=busy.owner))
    for column in ("cwd", "file", "folder", "options", "ended"):
        default = "{}" if column == "options" else ""
        statement = f"ALTER TABLE lora_tune_sweep ADD COLUMN {column} TEXT NOT NULL DEFAULT '{default}'"
        connection.exec_driver_sql(statement)
    leases.create(connection)
    connection.exec_driver_sql("ALTER TABLE lora_tune_lease DROP COLUMN saves")  # added by a later migration
    rows = sa.select(old.c.name, old.c.owner, old.c.token, old.c.renewed_at, old.c.token)
    connection.execute(leases.insert().from_select(["name", "owner", "token", "renewed_at", "wrote"], rows))
    for column in ("owner", "token", "renewed_at"):
        connection.exec_driver_sql(f"ALTER TABLE lora_tune_sweep DROP COLUMN {column}")


def _refuse_while_driven(connection: sa.Connection, now: float) -> None:
    """Raise SweepBusyError while a driver of an earlier release is running."""
    held = (leases.c.owner != "") & (leases.c.renewed_at > now - LEASE_SECONDS)
    if (busy := connection.execute(sa.select(leases.c.name, leases.c.owner).where(held)).first()) is not None:
        raise SweepBusyError(_AT_WORK.format(name=busy.name, owner=busy.owner))


def _sweeps_have_ids(connection: sa.Connection, now: float) -> None:
    """2 to 3: sweeps have unique ids."""
    _refuse_while_driven(connection, now)
    connection.exec_driver_sql("ALTER TABLE lora_tune_sweep ADD COLUMN id VARCHAR(32) NOT NULL DEFAULT ''")
    old = sa.table("lora_tune_sweep", sa.column("name"), sa.column("id"))
    for name in connection.scalars(sa.select(old.c.name)).all():
        connection.execute(sa.update(old).where(old.c.name == name).values(id=new_token()))


def _counts_and_signatures(connection: sa.Connection, now: float) -> None:
    """3 to 4: leases count writes; sweeps may be signed."""
    _refuse_while_driven(connection, now)
    connection.exec_driver_sql("ALTER TABLE lora_tune_lease ADD COLUMN saves INTEGER NOT NULL DEFAULT 0")
    connection.exec_driver_sql("ALTER TABLE lora_tune_sweep ADD COLUMN signature TEXT NOT NULL DEFAULT ''")


def _requests(connection: sa.Connection, now: float) -> None:
    """4 to 5: requests to a running sweep."""
    _refuse_while_driven(connection, now)
    requests.create(connection)


def _remarks(connection: sa.Connection, now: float) -> None:
    """5 to 6: remarks on a sweep and its trials."""
    _refuse_while_driven(connection, now)
    remarks.create(connection)


def _no_signatures(connection: sa.Connection, now: float) -> None:
    """6 to 7: signatures removed."""
    _refuse_while_driven(connection, now)
    connection.exec_driver_sql("ALTER TABLE lora_tune_sweep DROP COLUMN signature")


_UPGRADES: dict[int, Callable[[sa.Connection, float], None]] = {
    1: _separate_lease_table,
    2: _sweeps_have_ids,
    3: _counts_and_signatures,
    4: _requests,
    5: _remarks,
    6: _no_signatures,
}
"""Schema version -> migration to the next one."""
