"""One sweep out of the database's rows, whole or as far as it has news."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from lora_tune.logs.run import Eval
from lora_tune.store import rows, schema
from lora_tune.store.records import StudyRecords, TrialState


def read_sweep(connection: sa.Connection, name: str, known: StudyRecords | None) -> StudyRecords | None:
    """Everything that is on record of a sweep, or None; ``known`` itself when nothing is new.

    known: the sweep as it was read before: only the trials that were not finished then are read again.
    """
    head = connection.execute(sa.select(schema.sweeps).where(schema.sweeps.c.name == name)).one_or_none()
    if head is None:
        return None
    trials, attempts = schema.trials.c, schema.attempts.c
    texts = connection.scalars(_of(trials.record, name).where(_news(trials.number, known)))
    read_trials = sorted(map(rows.trial_from, texts), key=lambda t: t.number)
    texts = connection.scalars(_of(attempts.record, name).where(_news(attempts.trial, known)))
    read_attempts = [rows.attempt_from(text) for text in texts]
    read_evals = _evals(connection, name, known)
    if known is not None and not read_trials and head.digest == known.digest:
        return known
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
        sweep.keep_made(known)
    return sweep


def _evals(connection: sa.Connection, name: str, known: StudyRecords | None) -> dict[tuple[int, int], tuple[Eval, ...]]:
    evals = schema.evals.c
    wanted = (evals.sweep == name) & _news(evals.trial, known)
    order = (evals.trial, evals.attempt, evals.position)
    curves: dict[tuple[int, int], list[Eval]] = {}
    for row in connection.execute(sa.select(schema.evals).where(wanted).order_by(*order)):
        point = Eval(rows.number(row.samples), rows.number(row.loss), rows.number(row.seconds))
        curves.setdefault((row.trial, row.attempt), []).append(point)
    return {key: tuple(points) for key, points in curves.items()}


def _of(column: sa.Column[Any], sweep: str) -> Any:
    return sa.select(column).where(column.table.c.sweep == sweep)


def _news(number: sa.Column[Any], known: StudyRecords | None) -> Any:
    """Rows of trials that are not finished in ``known``, or not in it."""
    if known is None:
        return sa.true()
    unfinished = [n for n, t in known.trials.items() if t.state is not TrialState.FINISHED]
    return (number > max(known.trials, default=-1)) | number.in_(unfinished)
