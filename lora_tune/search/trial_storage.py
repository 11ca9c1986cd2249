"""Optuna's storage for a study with one writer: read from memory, written to the database many rows at a time.

Optuna's own RDB storage writes each parameter, attribute and intermediate value in a transaction of its own and reads
every open trial again before most questions: 0.13 s a trial, and more the more trials are open. Here every trial is
in memory; :meth:`flush` writes what has changed since, in one transaction, into Optuna's own tables, so that
optuna-dashboard and every other Optuna program read the study as they are used to.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from optuna.distributions import distribution_to_json, json_to_distribution
from optuna.exceptions import StorageInternalError
from optuna.storages import InMemoryStorage, RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.dialects import postgresql, sqlite

UNANSWERED = (StorageInternalError, sa.exc.SQLAlchemyError)
"""What is raised when the database does not answer: by Optuna's own storage, and by :meth:`TrialStorage.flush`."""

_TABLES = (
    "trials",
    "trial_params",
    "trial_user_attributes",
    "trial_system_attributes",
    "trial_intermediate_values",
    "trial_values",
)


class TrialStorage(InMemoryStorage):
    """One study of a database, held in memory. Nobody else may write to that study meanwhile.

    Reading never touches the database. Changes of trials are in memory until :meth:`flush`; the study itself and its
    attributes are written at once. Trial ids are this object's own; numbers are the database's.
    """

    def __init__(self, url: str, name: str, tune: Callable[[sa.Engine], None]) -> None:
        """Open ``url`` and read the study ``name`` where it is there already. tune: prepares the engine."""
        super().__init__()
        self._rdb = RDBStorage(url)
        tune(self._rdb.engine)
        self._rdb.engine.dispose()  # connections made before tuning
        metadata = sa.MetaData()
        metadata.reflect(self._rdb.engine, only=_TABLES)
        self._tables = metadata.tables
        self._rdb_study = -1
        self._rdb_ids: list[int] = []  # by trial number
        self._upserts: dict[str, sa.Insert] = {}  # by table
        self._changed: dict[int, FrozenTrial | None] = {}  # trial number -> the trial as it is written, None: not yet
        self._doubtful = False  # a transaction failed, and may be in the database all the same
        if any(study.study_name == name for study in self._rdb.get_all_studies()):
            self._read(name)

    def _read(self, name: str) -> None:
        self._rdb_study = self._rdb.get_study_id_from_name(name)
        study = super().create_new_study(self._rdb.get_study_directions(self._rdb_study), name)
        for key, value in self._rdb.get_study_user_attrs(self._rdb_study).items():
            super().set_study_user_attr(study, key, value)
        for key, value in self._rdb.get_study_system_attrs(self._rdb_study).items():
            super().set_study_system_attr(study, key, value)
        with self._rdb.engine.begin() as connection:
            _fill_gaps(connection, self._tables["trials"], self._rdb_study)
            found = _trials(connection, self._tables, self._rdb_study)
        for row, trial in found:
            self._rdb_ids.append(row)
            # What create_new_trial does with a template, without copying it: seconds, for thousands of trials.
            self._max_trial_id = trial._trial_id
            self._trial_id_to_study_id_and_number[trial._trial_id] = (study, trial.number)
            self._studies[study].trials.append(trial)
            self._update_cache(trial._trial_id, study)
            self._studies[study].param_distribution.update(trial.distributions)

    # -- what the database hears of at once ------------------------------------------------------------------------

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        study = super().create_new_study(directions, study_name)  # raises when it is there
        self._rdb_study = self._rdb.create_new_study(directions, study_name)
        return study

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._rdb.set_study_user_attr(self._rdb_study, key, value)
        super().set_study_user_attr(study_id, key, value)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._rdb.set_study_system_attr(self._rdb_study, key, value)
        super().set_study_system_attr(study_id, key, value)

    # -- what it hears of with the next flush ----------------------------------------------------------------------

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        trial = super().create_new_trial(study_id, template_trial)
        self._changed[self.get_trial_number_from_id(trial)] = None
        return trial

    def _set_trial(self, trial_id: int, trial: FrozenTrial) -> None:
        # Every change of a trial in memory replaces it by another object, so the old one is what is written.
        if trial.number not in self._changed:
            written = copy.copy(self._get_trial(trial_id))
            # Optuna's Trial, and samplers, add to the dictionaries of a trial that they were given.
            written.params, written.user_attrs = dict(written.params), dict(written.user_attrs)
            written._system_attrs = dict(written._system_attrs)
            written.intermediate_values = dict(written.intermediate_values)
            self._changed[trial.number] = written
        super()._set_trial(trial_id, trial)

    def flush(self) -> None:
        """Write what has changed, in one transaction. What could not be written stays to be written.

        Raises one of UNANSWERED when the database does not take it.
        """
        if not self._changed:
            return
        with self._lock:
            trials = self._studies[0].trials
            doubtful, self._doubtful = self._doubtful, True
            with self._rdb.engine.begin() as connection:
                rows: dict[str, list[dict[str, Any]]] = {name: [] for name in _TABLES}
                there = self._unheard(connection) if doubtful else {}
                rows["trials"] += [{"trial_id": row, **_head(trials[number])} for number, row in there.items()]
                new = [trials[n] for n, old in self._changed.items() if old is None and n not in there]
                ids = there | self._new_rows(connection, new)
                for number, old in self._changed.items():
                    row = ids.get(number) or self._rdb_ids[number]
                    _add_rows(rows, row, old, trials[number])
                self._write(connection, rows)
            self._rdb_ids += [ids[number] for number in sorted(ids)]
            self._changed, self._doubtful = {}, False

    def _unheard(self, connection: sa.Connection) -> dict[int, int]:
        """Rows of new trials by number that were committed while the answer to that did not reach us.

        Optuna's tables would take them once more. A transaction that is still being committed is waited for: it holds
        the row of the study, to which its trials refer.
        """
        studies, trials = self._tables["studies"], self._tables["trials"]
        connection.execute(sa.select(studies).where(studies.c.study_id == self._rdb_study).with_for_update())
        of_ours = (trials.c.study_id == self._rdb_study) & (trials.c.number >= len(self._rdb_ids))
        return {row.number: row.trial_id for row in connection.execute(sa.select(trials).where(of_ours))}

    def _new_rows(self, connection: sa.Connection, trials: Sequence[FrozenTrial]) -> dict[int, int]:
        """Rows of new trials; their ids by trial number."""
        table, ids = self._tables["trials"], {}
        for trial in trials:
            row = {"number": trial.number, "study_id": self._rdb_study, **_head(trial)}
            inserted = connection.execute(sa.insert(table).values(**row)).inserted_primary_key
            assert inserted is not None
            ids[trial.number] = int(inserted[0])
        return ids

    def _write(self, connection: sa.Connection, rows: dict[str, list[dict[str, Any]]]) -> None:
        trials = self._tables["trials"]
        heads = [{f"new_{key}": value for key, value in row.items()} for row in rows.pop("trials")]
        if heads:
            names = ("state", "datetime_start", "datetime_complete")
            where = trials.c.trial_id == sa.bindparam("new_trial_id")
            connection.execute(
                sa.update(trials).where(where).values({n: sa.bindparam(f"new_{n}") for n in names}), heads
            )
        for name, new in rows.items():
            if new:
                connection.execute(self._upsert(name, tuple(new[0])), new)

    def _upsert(self, name: str, columns: tuple[str, ...]) -> sa.Insert:
        """Inserts rows of a table, or replaces them; making the statement takes longer than carrying it out."""
        if name not in self._upserts:
            insert = sqlite.insert if self._rdb.engine.dialect.name == "sqlite" else postgresql.insert
            statement = insert(self._tables[name])
            keys, values = columns[:2], columns[2:]  # the trial's id and what is unique within a trial, the rest
            replaced = {value: statement.excluded[value] for value in values}
            self._upserts[name] = statement.on_conflict_do_update(index_elements=keys, set_=replaced)
        return self._upserts[name]


def _fill_gaps(connection: sa.Connection, heads: sa.Table, study: int) -> None:
    """Numbers without a trial, as where parts of a database were put back, become failed ones: they teach nothing."""
    there = set(connection.scalars(sa.select(heads.c.number).where(heads.c.study_id == study)))
    lost = [{"number": n, "study_id": study, "state": "FAIL"} for n in range(max(there, default=-1)) if n not in there]
    if lost:
        connection.execute(sa.insert(heads), lost)


def _trials(connection: sa.Connection, tables: Mapping[str, sa.Table], study: int) -> list[tuple[int, FrozenTrial]]:
    """All trials of a study by number, each with its id in the database. Their own ids are their numbers.

    Optuna's own way through its object-relational mapper takes seconds and hundreds of MB for ten thousand trials.
    """
    heads = tables["trials"]

    def rows(name: str, order: str) -> dict[int, list[Any]]:
        table = tables[name]
        by_trial: dict[int, list[Any]] = {}
        joined = sa.select(table).join(heads, heads.c.trial_id == table.c.trial_id).where(heads.c.study_id == study)
        for row in connection.execute(joined.order_by(table.c[order])):
            by_trial.setdefault(row.trial_id, []).append(row)
        return by_trial

    params = rows("trial_params", "param_id")
    user = rows("trial_user_attributes", "trial_user_attribute_id")
    system = rows("trial_system_attributes", "trial_system_attribute_id")
    evals = rows("trial_intermediate_values", "step")
    values = rows("trial_values", "objective")
    distribution = functools.cache(json_to_distribution)  # one object for all trials
    found = []
    for head in connection.execute(sa.select(heads).where(heads.c.study_id == study).order_by(heads.c.number)):
        row = head.trial_id
        tuned = {p.param_name: distribution(p.distribution_json) for p in params.get(row, ())}
        trial = FrozenTrial(
            number=head.number,
            state=TrialState[head.state],
            value=None,
            values=[_float(v.value, v.value_type) for v in values[row]] if row in values else None,
            datetime_start=_local(head.datetime_start),
            datetime_complete=_local(head.datetime_complete),
            params={p.param_name: tuned[p.param_name].to_external_repr(p.param_value) for p in params.get(row, ())},
            distributions=tuned,
            user_attrs={a.key: json.loads(a.value_json) for a in user.get(row, ())},
            system_attrs={a.key: json.loads(a.value_json) for a in system.get(row, ())},
            intermediate_values={
                e.step: _float(e.intermediate_value, e.intermediate_value_type) for e in evals.get(row, ())
            },
            trial_id=head.number,
        )
        found.append((row, trial))
    return found


def _head(trial: FrozenTrial) -> dict[str, Any]:
    return {
        "state": trial.state.name,
        "datetime_start": _utc(trial.datetime_start),
        "datetime_complete": _utc(trial.datetime_complete),
    }


def _add_rows(rows: dict[str, list[dict[str, Any]]], row: int, old: FrozenTrial | None, new: FrozenTrial) -> None:
    """The rows that make the written trial ``old`` into ``new``, under the database's trial id ``row``."""
    if old is not None and _head(old) != _head(new):
        rows["trials"].append({"trial_id": row, **_head(new)})
    for name, value in _news(new.params, old.params if old else None):
        distribution = new.distributions[name]
        inside, text = distribution.to_internal_repr(value), distribution_to_json(distribution)
        rows["trial_params"].append(
            {"trial_id": row, "param_name": name, "param_value": inside, "distribution_json": text}
        )
    for table, before, after in (
        ("trial_user_attributes", old.user_attrs if old else None, new.user_attrs),
        ("trial_system_attributes", old._system_attrs if old else None, new._system_attrs),
    ):
        rows[table] += [{"trial_id": row, "key": k, "value_json": json.dumps(v)} for k, v in _news(after, before)]
    for step, value in _news(new.intermediate_values, old.intermediate_values if old else None):
        number, kind = _stored(value)
        rows["trial_intermediate_values"].append(
            {"trial_id": row, "step": step, "intermediate_value": number, "intermediate_value_type": kind}
        )
    if new.values is not None and (old is None or old.values != new.values):
        for objective, value in enumerate(new.values):
            number, kind = _stored(value)
            rows["trial_values"].append({"trial_id": row, "objective": objective, "value": number, "value_type": kind})


def _news(after: dict[Any, Any], before: dict[Any, Any] | None) -> list[tuple[Any, Any]]:
    """The items of ``after`` that are not in ``before`` with the same value."""
    if before is None:
        return list(after.items())
    return [(key, value) for key, value in after.items() if key not in before or before[key] is not value]


def _stored(value: float) -> tuple[float | None, str]:
    """A float as Optuna's tables hold it: the number, or none and the name of what it is."""
    if math.isfinite(value):
        return float(value), "FINITE"
    return None, "NAN" if math.isnan(value) else "INF_POS" if value > 0 else "INF_NEG"


def _float(value: float | None, kind: str) -> float:
    """The reverse of :func:`_stored`."""
    return {"NAN": math.nan, "INF_POS": math.inf, "INF_NEG": -math.inf}.get(kind, value)  # type: ignore[return-value]


def _local(moment: datetime.datetime | None) -> datetime.datetime | None:
    """The reverse of :func:`_utc`."""
    return None if moment is None else moment.replace(tzinfo=datetime.UTC).astimezone().replace(tzinfo=None)


def _utc(moment: datetime.datetime | None) -> datetime.datetime | None:
    """A naive local time, as Optuna's trials carry it, as the naive UTC of its tables."""
    return None if moment is None else moment.astimezone(datetime.UTC).replace(tzinfo=None)
