"""Writes rows of trials into Optuna's tables, which share our database.

``projection`` defines their content. Here they are written in bulk, under the lease, and idempotently.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from lora_tune.store.database import Store
from lora_tune.store.engine import upsert
from lora_tune.store.port import Lease

Row = Mapping[str, Any]


class NoStudyError(LookupError):
    """The tables or the study do not exist."""


CHILDREN = (
    "trial_params",
    "trial_user_attributes",
    "trial_system_attributes",
    "trial_intermediate_values",
    "trial_values",
)
"""Tables with several rows per trial; their second column is unique within a trial."""

ATTRIBUTES = ("trial_user_attributes", "trial_system_attributes")
"""Tables in which other programs have rows, too, so that rows are deleted only by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRows:
    """One trial. head: columns of its own row; children: rows by table, without the trial's id, in a fixed order.

    whole: delete rows that are not in ``children``.
    """

    number: int
    head: Row
    children: Mapping[str, Sequence[Row]]
    whole: bool = True

    def since(self, written: TrialRows | None) -> TrialRows:
        """What ``written``, an earlier version of the trial, lacks; the whole trial if rows were removed since."""
        if written is None or any(_keys(written.children[name]) - _keys(self.children[name]) for name in CHILDREN):
            return self
        had = {name: {tuple(row.values()) for row in rows} for name, rows in written.children.items()}
        new_rows = {
            name: [r for r in rows if tuple(r.values()) not in had[name]] for name, rows in self.children.items()
        }
        return TrialRows(number=self.number, head=self.head, children=new_rows, whole=False)


def _keys(rows: Sequence[Row]) -> set[Any]:
    """Keys of one trial's rows in a table: their first columns."""
    return {next(iter(row.values())) for row in rows}


class TrialTables:
    """The trials of one study, by number. Methods raise StoreError, SweepBusyError if the lease is lost."""

    def __init__(self, store: Store, lease: Lease, study: str, owned: Sequence[str]) -> None:
        """study: its name. owned: attribute names that only this program writes.

        Raises NoStudyError if the tables or the study do not exist.
        """
        self._store, self._lease, self._owned, self._name = store, lease, owned, study
        self._upserts: dict[str, Any] = {}
        with store._reading() as connection:
            if not sa.inspect(connection).has_table("studies"):
                raise NoStudyError("no tables")
            metadata = sa.MetaData()
            metadata.reflect(connection, only=("studies", "study_directions", "trials", *CHILDREN))
            self._tables = metadata.tables
            studies, heads = self._tables["studies"].c, self._tables["trials"].c
            study_id = connection.scalar(sa.select(studies.study_id).where(studies.study_name == study))
            if study_id is None:
                raise NoStudyError(f"no study {study}")
            self._study: int = study_id
            rows = connection.execute(sa.select(heads.number, heads.state).where(heads.study_id == study_id))
            self.states: dict[int, str] = {row.number: row.state for row in rows}
            """Initial state of every trial, by number."""
            directions = self._tables["study_directions"].c
            query = sa.select(directions.direction).where(directions.study_id == study_id)
            self.directions: list[str] = list(connection.scalars(query.order_by(directions.objective)))
            """Initial direction of each objective of the study."""

    def turn(self, directions: Sequence[str]) -> None:
        """Replace the study's directions."""
        table = self._tables["study_directions"]
        rows = [{"study_id": self._study, "objective": at, "direction": text} for at, text in enumerate(directions)]
        with self._store._fenced(self._lease) as connection:
            connection.execute(sa.delete(table).where(table.c.study_id == self._study))
            connection.execute(sa.insert(table), rows)

    def attributes(self, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
        """User and system attributes of these trials, by number."""
        known: dict[int, dict[str, Any]] = {}
        with self._store._reading() as connection:
            ids = self._known(connection, numbers)
            for name in ATTRIBUTES:
                table = self._tables[name].c
                query = sa.select(table.trial_id, table.key, table.value_json)
                rows = connection.execute(query.where(table.trial_id.in_([*ids.values()]))).all()
                for number, ids_of in ids.items():
                    texts = {row.key: json.loads(row.value_json) for row in rows if row.trial_id == ids_of}
                    known.setdefault(number, {}).update(texts)
        return known

    def forget(self, numbers: Sequence[int]) -> None:
        """Delete these trials."""
        with self._store._fenced(self._lease) as connection:
            ids = [*self._known(connection, numbers).values()]
            for name in (*CHILDREN, "trials"):
                table = self._tables[name]
                connection.execute(sa.delete(table).where(table.c.trial_id.in_(ids)))

    def write(self, trials: Sequence[TrialRows]) -> None:
        """Write the rows of these trials; rows of users and of other programs are kept.

        Raises NoStudyError if the study was deleted.
        """
        with self._store._fenced(self._lease) as connection:
            self._check_study(connection)
            ids = self._known(connection, [t.number for t in trials])
            self._clear(connection, [ids[t.number] for t in trials if t.whole and t.number in ids])
            if known := [t for t in trials if t.number in ids]:
                self._heads(connection, [{"of": ids[t.number], **_renamed(t.head)} for t in known])
            ids |= {t.number: self._insert(connection, t) for t in trials if t.number not in ids}
            for name in CHILDREN:
                rows = [{"trial_id": ids[t.number], **row} for t in trials for row in t.children[name]]
                if rows:
                    connection.execute(self._upsert(name, [*rows[0]]), rows)

    def _check_study(self, connection: sa.Connection) -> None:
        """Raise NoStudyError if the study was deleted; SQLite may reuse its id, so the name is compared."""
        studies = self._tables["studies"].c
        if connection.scalar(sa.select(studies.study_name).where(studies.study_id == self._study)) != self._name:
            raise NoStudyError(f"no study {self._name}")

    def _known(self, connection: sa.Connection, numbers: Iterable[int]) -> dict[int, int]:
        """Ids by number, read again: a commit whose confirmation was lost may have added rows."""
        heads, queried = self._tables["trials"].c, {*numbers}
        query = sa.select(heads.number, heads.trial_id).where(heads.study_id == self._study)
        rows = connection.execute(query.where(heads.number >= min(queried)))
        return {row.number: row.trial_id for row in rows if row.number in queried}

    def _clear(self, connection: sa.Connection, ids: Sequence[int]) -> None:
        """Delete all rows of these trials except attributes of other programs."""
        for name in CHILDREN if ids else ():
            table = self._tables[name]
            gone = sa.delete(table).where(table.c.trial_id.in_(ids))
            connection.execute(gone.where(table.c.key.in_(self._owned)) if name in ATTRIBUTES else gone)

    def _insert(self, connection: sa.Connection, trial: TrialRows) -> int:
        row = {"number": trial.number, "study_id": self._study, **trial.head}
        key = connection.execute(sa.insert(self._tables["trials"]).values(**row)).inserted_primary_key
        assert key is not None
        return int(key[0])

    def _heads(self, connection: sa.Connection, rows: list[dict[str, Any]]) -> None:
        table = self._tables["trials"]
        names = [name.removeprefix("new_") for name in rows[0] if name != "of"]
        changed = sa.update(table).where(table.c.trial_id == sa.bindparam("of"))
        connection.execute(changed.values({name: sa.bindparam(f"new_{name}") for name in names}), rows)

    def _upsert(self, name: str, columns: Sequence[str]) -> Any:
        """The cached INSERT-or-UPDATE of a table; building it takes longer than running it."""
        if name not in self._upserts:
            dialect = "sqlite" if self._store.url.startswith("sqlite") else "postgresql"
            self._upserts[name] = upsert(dialect, self._tables[name], columns[:2], columns[2:])
        return self._upserts[name]


def _renamed(head: Row) -> dict[str, Any]:
    return {f"new_{name}": value for name, value in head.items()}
