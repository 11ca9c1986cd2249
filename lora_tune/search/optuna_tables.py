"""Mirrors the records to Optuna's tables in the sweep's database. Our code never reads them back.

A trial is written when it is proposed, with its new evals, and when it ends. Ended trials with the same state in both
are skipped, so that a start catches up after a killed driver or an earlier release. The study's attributes, in which
optuna-dashboard keeps notes, and attributes of other programs are never changed.
"""

from __future__ import annotations

import datetime
import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import optuna
from optuna.distributions import distribution_to_json
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial

from lora_tune.base.errors import LoraTuneError
from lora_tune.config.study import Study
from lora_tune.logs.run import Eval
from lora_tune.search.recorded import BASE, FIXED, REQUEST, directions, ending, space_of, trial_at
from lora_tune.store import Lease, Requests, Store, tune_sqlite
from lora_tune.store.port import Request
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.store.records import TrialState as OurState
from lora_tune.store.trial_tables import NoStudyError, TrialRows, TrialTables

# Rows of an Optuna trial in the tables of Optuna 5.


def rows_of(trial: FrozenTrial, texts: Mapping[str, str]) -> TrialRows:
    """All rows of a trial. texts: distributions of its parameters as JSON, which are slow to compute."""
    head = {
        "state": trial.state.name,
        "datetime_start": _utc(trial.datetime_start),
        "datetime_complete": _utc(trial.datetime_complete),
    }
    children = {
        "trial_params": [_param(trial, name, texts[name]) for name in trial.params],
        "trial_user_attributes": _attributes(trial.user_attrs),
        "trial_system_attributes": _attributes(trial.system_attrs),
        "trial_intermediate_values": [
            {"step": step, **_number("intermediate_value", value)} for step, value in trial.intermediate_values.items()
        ],
        "trial_values": [
            {"objective": at, **_number("value", value)} for at, value in enumerate(trial.values or ())
        ],
    }  # fmt: skip
    return TrialRows(number=trial.number, head=head, children=children)


def _param(trial: FrozenTrial, name: str, text: str) -> dict[str, Any]:
    inside = trial.distributions[name].to_internal_repr(trial.params[name])
    return {"param_name": name, "param_value": inside, "distribution_json": text}


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value_json": json.dumps(value)} for key, value in attributes.items()]


def _number(name: str, value: float) -> dict[str, Any]:
    """Columns of a float: the number or NULL, and ``value_type`` for non-finite values."""
    kind = "FINITE" if math.isfinite(value) else "NAN" if math.isnan(value) else "INF_POS" if value > 0 else "INF_NEG"
    return {name: float(value) if kind == "FINITE" else None, f"{name}_type": kind}


def _utc(moment: datetime.datetime | None) -> datetime.datetime | None:
    """Naive local time of an Optuna trial to the naive UTC of its tables."""
    return None if moment is None else moment.astimezone(datetime.UTC).replace(tzinfo=None)


MOST = 500
"""Trials per transaction; a new database of a long study is filled in several."""

EVALS_SECONDS = 5.0
"""Minimum seconds between writes of evals of running trials, in one transaction; starts and ends are written at
once."""

OWNED_ATTRIBUTES = ("why", "kind", BASE, REQUEST, "verdict", "refused", FIXED)
"""Attributes determined by a trial's record; those left from another proposal of the same number are wrong."""

ENQUEUED = "study.enqueue_trial"
"""Author of requests that came through Optuna."""

_OPEN = ("RUNNING", "WAITING")

Snapshot = tuple[Trial | None, tuple[Eval, ...]]


class OptunaTables:
    """One Optuna study in a store's database, written under the lease of its sweep."""

    def __init__(
        self, study: Study, store: Store, lease: Lease, meaning: Mapping[str, Any] | None = None,
        requests: Requests | None = None,
    ) -> None:  # fmt: skip
        """Opens nothing before the first :meth:`follow`.

        meaning: attributes that explain the numbers, set when the study is created. requests: table of requests, to
        which points enqueued through Optuna are added.
        """
        self._meaning, self._requests = meaning or {}, requests
        self._study, self._store, self._lease = study, store, lease
        self._space = space_of(study)
        self._texts = {name: distribution_to_json(distribution) for name, distribution in self._space[0].items()}
        self._tables: TrialTables | None = None
        self._next = 0  # trials before it have been handled
        self._wrote_at = -math.inf
        self._open: dict[int, tuple[Snapshot, TrialRows]] = {}  # rows written of each trial that has not ended
        self._slower: dict[int, float | None] = {}  # the slowdown with which each ended trial was written

    def follow(self, sweep: StudyRecords) -> str:
        """Write what is new in the records; returns the reason of a failure, else "". Later calls catch up."""
        try:
            try:
                self._catch_up(sweep)
            except NoStudyError:  # the study was deleted
                self._tables, self._next, self._open = None, 0, {}
                self._catch_up(sweep)
        except Exception as error:  # noqa: BLE001 - the sweep must go on without these tables; reported
            kind = "" if isinstance(error, LoraTuneError) else f"{type(error).__name__}: "
            return f"Optuna's tables could not be brought up to date: {kind}{str(error).partition(chr(10))[0]}"
        return ""

    def _catch_up(self, sweep: StudyRecords) -> None:
        self._tables = self._tables or self._opened(sweep)
        while self._write(self._tables, sweep):
            pass

    def _opened(self, sweep: StudyRecords) -> TrialTables:
        """The tables, created if necessary, with the study and without trials that have no record."""
        try:
            tables = TrialTables(self._store, self._lease, self._study.name, OWNED_ATTRIBUTES)
        except NoStudyError:
            self._make()
            tables = TrialTables(self._store, self._lease, self._study.name, OWNED_ATTRIBUTES)
        expected = [direction.name for direction in directions(self._study)]
        end = sweep.next_number
        # Proposals and waiting points that an earlier release wrote here first.
        if stale := [n for n, state in tables.states.items() if n >= end and state in _OPEN]:
            self._take_in(tables, [n for n in stale if tables.states[n] == "WAITING"])
            tables.forget(stale)
        if tables.directions != expected:
            tables.turn(expected)
            tables.states.clear()  # values of ended trials have changed, too
        return tables

    def _take_in(self, tables: TrialTables, numbers: Sequence[int]) -> None:
        """Convert points from Optuna's ``study.enqueue_trial`` to requests for the driver.

        Skips points of the study file, and those that an earlier release stored for its own requests.
        """
        if self._requests is None or not numbers:
            return
        known = [request.what for request in self._requests.all() if request.kind == "enqueue"]
        for number, attributes in sorted(tables.attributes(numbers).items()):
            values, marks = attributes.get(FIXED), {BASE, REQUEST} & attributes.keys()
            what = {"values": values, "clone_of": None, "optuna_trial": number}
            points = [dict(point) for point in self._study.search.enqueue]
            if isinstance(values, dict) and values and not marks and values not in points and what not in known:
                self._requests.ask(Request(kind="enqueue", what=what, who=ENQUEUED, asked_at=time.time()))

    def _make(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        storage = RDBStorage(self._store.url)
        try:
            tune_sqlite(storage.engine)
            storage.engine.dispose()  # connections made before tuning
            created = optuna.create_study(
                study_name=self._study.name, storage=storage, directions=directions(self._study)
            )
            for name, value in self._meaning.items():
                created.set_user_attr(name, value)
        finally:
            storage.remove_session()
            storage.engine.dispose()

    def _write(self, tables: TrialTables, sweep: StudyRecords) -> bool:
        """Write at most ``MOST`` trials; True if more may be due."""
        end = sweep.next_number
        due: dict[int, Snapshot] = {}
        upto = self._next
        rested = time.monotonic() - self._wrote_at >= EVALS_SECONDS
        urgent = end > upto or any(_ended(sweep.trials.get(n)) for n in self._open)
        for number in self._open if rested or urgent else ():
            snapshot = _snapshot(sweep, number)
            if not _same(self._open[number][0], snapshot):
                due[number] = snapshot
        while upto < end and len(due) < MOST:
            if self._out_of_date(sweep.trials.get(upto), tables.states.get(upto)):
                due[upto] = _snapshot(sweep, upto)
            upto += 1
        retried = (
            n for n, t in sweep.trials.items() if n < upto and _ended(t) and self._slower.get(n) != t.metrics.slower
        )
        due |= {n: _snapshot(sweep, n) for n in islice(retried, MOST) if n not in due}
        if due:
            rows = {number: rows_of(trial_at(self._study, sweep, number, self._space), self._texts) for number in due}
            before = {number: written for number, (_, written) in self._open.items()}
            tables.write([trial_rows.since(before.get(number)) for number, trial_rows in rows.items()])
            self._open |= {number: (due[number], rows[number]) for number in due}
            for number, (trial, _) in due.items():
                if trial is not None and _ended(trial):
                    del self._open[number]
                    self._slower[number] = trial.metrics.slower
            self._wrote_at = time.monotonic()
        self._next = upto
        return upto < end

    def _out_of_date(self, record: Trial | None, state: str | None) -> bool:
        """Whether a trial must be written. state: its state in the tables, None if missing."""
        if record is None:
            return state is None or state in _OPEN
        return not _ended(record) or state != ending(self._study, record)[0].name


def _snapshot(sweep: StudyRecords, number: int) -> Snapshot:
    return sweep.trials.get(number), sweep.last_evals(number)


def _same(one: Snapshot, other: Snapshot) -> bool:
    """Whether nothing changed: a changed record is a new object."""
    return one[0] is other[0] and one[1] is other[1]


def _ended(record: Trial | None) -> bool:
    return record is not None and record.state is OurState.FINISHED
