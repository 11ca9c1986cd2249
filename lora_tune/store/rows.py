"""Records as rows and JSON, and back."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from lora_tune.logs.run import Eval
from lora_tune.store.metrics import as_mapping, from_mapping
from lora_tune.store.records import Attempt, StopKind, Trial, TrialState, Verdict


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


def trial_row(sweep: str, trial: Trial) -> dict[str, Any]:
    verdict = trial.verdict.value if trial.verdict else None
    row = {"sweep": sweep, "number": trial.number, "state": trial.state.value, "verdict": verdict}
    return row | {"seconds": trial.seconds, "samples": trial.samples, "record": to_json(trial)}


def attempt_row(sweep: str, attempt: Attempt) -> dict[str, Any]:
    plain = ("trial", "number", "state", "job_name", "job_id", "started_at", "ended_at")
    return {"sweep": sweep, "record": to_json(attempt)} | {name: getattr(attempt, name) for name in plain}


def eval_row(sweep: str, trial: int, attempt: int, position: int, point: Eval) -> dict[str, Any]:
    key = {"sweep": sweep, "trial": trial, "attempt": attempt, "position": position}
    return key | {"samples": point.samples, "loss": point.loss, "seconds": point.seconds}


def to_json(record: Trial | Attempt) -> str:
    plain = {f.name: getattr(record, f.name) for f in fields(record)}
    if isinstance(record, Trial):
        del plain["metrics"]
        plain |= {"tuned": dict(record.tuned), "parameters": dict(record.parameters)}
        plain["base_values"] = dict(record.base_values)
        plain["point"] = None if record.point is None else dict(record.point)
        plain["sampler_attributes"] = {
            where: dict(attributes) for where, attributes in record.sampler_attributes.items()
        }
        plain[METRICS] = as_mapping(record.metrics)
    return json.dumps(plain)  # in ASCII: half a surrogate pair from a log could not be stored as it is


METRICS = "facts"
"""Where a trial's metrics stand in its row: by the name that all releases read and write."""


def trial_from(text: str) -> Trial:
    """The reverse of :func:`to_json`; fields that a later release added are passed over, further metrics are kept.

    Raises StoreError for metrics of a wrong kind.
    """
    data = json.loads(text)
    data["metrics"] = from_mapping(data.get(METRICS, {}))
    data["state"] = TrialState(data["state"])
    data["verdict"] = Verdict(data["verdict"]) if data["verdict"] else None
    return Trial(**_known(Trial, data))


def attempt_from(text: str) -> Attempt:
    """The reverse of :func:`to_json`; fields that a later release added are passed over."""
    data = json.loads(text)
    data["stop"] = StopKind(data["stop"])
    data["nodes"], data["exclude_nodes"] = tuple(data["nodes"]), tuple(data["exclude_nodes"])
    return Attempt(**_known(Attempt, data))


def _known(kind: type[Trial] | type[Attempt], data: dict[str, Any]) -> dict[str, Any]:
    return {f.name: data[f.name] for f in fields(kind) if f.name in data}


def number(value: float | None) -> float:
    """A column's number; databases hand NaN back as nothing."""
    return float("nan") if value is None else value
