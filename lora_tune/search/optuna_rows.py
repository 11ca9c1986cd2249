"""An Optuna trial as rows of Optuna's tables, as Optuna 5 keeps them."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from typing import Any

from optuna.trial import FrozenTrial

from lora_tune.store.trial_tables import TrialRows


def rows_of(trial: FrozenTrial, texts: Mapping[str, str]) -> TrialRows:
    """All that is known of a trial. texts: the distributions of its parameters as JSON, which are slow to make."""
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
    """A float as the tables hold it: the number, or none and the name of what it is. ``value_type`` beside it."""
    kind = "FINITE" if math.isfinite(value) else "NAN" if math.isnan(value) else "INF_POS" if value > 0 else "INF_NEG"
    return {name: float(value) if kind == "FINITE" else None, f"{name}_type": kind}


def _utc(moment: datetime.datetime | None) -> datetime.datetime | None:
    """A naive local time, as Optuna's trials carry it, as the naive UTC of its tables."""
    return None if moment is None else moment.astimezone(datetime.UTC).replace(tzinfo=None)
