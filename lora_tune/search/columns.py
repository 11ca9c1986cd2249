"""Which column of another program's runs is which parameter of this study, and which of its metrics is the eval."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_tune.base.errors import InputError
from lora_tune.config.study import Study
from lora_tune.logs.run import Eval
from lora_tune.logs.trackers import TrackedRun, plain
from lora_tune.search.usual_names import BATCH, RATE, STEPS, WARMUP
from lora_tune.store.records import PriorRun, Value

EVAL = "eval"
"""``--map eval=COLUMN`` names the metric."""

ALIKE = (RATE, STEPS, WARMUP, BATCH, ("RANK", "LORA_RANK", "LORA_R", "R"), ("ALPHA", "LORA_ALPHA"))
EVALS = ("eval_loss", "val_loss", "valid_loss", "validation_loss", "value", "intermediate_values")
"""Metrics that are evals of a loss by their name. A ``loss`` alone is mostly the training's: it is never guessed."""


@dataclass(frozen=True, slots=True)
class Columns:
    """parameters: column by parameter. metric: the eval's. lacking: parameters without a column or a stated value."""

    parameters: Mapping[str, str]
    metric: str
    lacking: tuple[str, ...]


def columns_of(
    study: Study,
    names: Sequence[str],
    runs: Sequence[TrackedRun],
    mapped: Mapping[str, str],
    stated: Mapping[str, Value],
) -> Columns:
    """The columns of a source by what the user mapped, else by their names.

    names: parameters that a run must state. stated: values that the user gives for all runs. Raises InputError for a
    mapped column that is not there.
    """
    values = list(dict.fromkeys(column for run in runs for column in run.values))
    metrics = list(dict.fromkeys(column for run in runs for column in run.series))
    for name, column in mapped.items():
        there = metrics if name == EVAL else values
        if column not in there:
            raise InputError(f"--map {name}={column}: there is no such column; there are {', '.join(there) or 'none'}")
        if name != EVAL and name not in names:
            raise InputError(
                f"--map {name}={column}: the study's parameters are {', '.join(names)}; {EVAL} is the metric"
            )
    known = {name: mapped.get(name) or _alike(name, values) for name in names}
    parameters = {name: column for name, column in known.items() if column is not None}
    used = set(parameters.values())
    wanted = (study.objective.metric or "", *EVALS)
    metric = mapped.get(EVAL) or next(
        (c for w in wanted for c in metrics if plain(c) == plain(w) and c not in used), ""
    )
    lacking = tuple(name for name in names if name not in parameters and name not in stated)
    return Columns(parameters, metric, lacking)


def _alike(name: str, columns: Sequence[str]) -> str | None:
    groups = [{plain(n) for n in group} for group in ALIKE]
    same = {plain(name)} | next((group for group in groups if plain(name) in group), set())
    exact = next((c for c in columns if plain(c) == plain(name)), None)
    return exact or next((c for c in columns if plain(c) in same), None)


def described(study: Study, columns: Columns, runs: Sequence[TrackedRun], stated: Mapping[str, Value]) -> list[str]:
    """The mapping for a reader, a line a parameter, with the values that would be taken."""
    lines = [f"{len(runs)} runs of {', '.join(dict.fromkeys(run.source for run in runs))}"]
    for name, column in columns.parameters.items():
        lines.append(f"  {name} is {column}: {_range([run.values[column] for run in runs if column in run.values])}")
    lines += [f"  {name} is {value}, as stated" for name, value in stated.items()]
    lines += [f"  {name} has no column: map it, or state it with --set {name}=VALUE" for name in columns.lacking]
    metric = [value for run in runs for _, value in run.series.get(columns.metric, ())]
    what = f"{columns.metric}: {_range(metric)}" if columns.metric else f"not there: --map {EVAL}=COLUMN names it"
    return [*lines, f"  {study.measure} is {what}; progress counts as {study.progress_unit}"]


def _range(values: Sequence[object]) -> str:
    numbers = [v for v in values if isinstance(v, int | float)]
    if values and len(numbers) == len(values) and len({*numbers}) > 4:
        return f"{min(numbers):.6g} to {max(numbers):.6g}"
    distinct = list(dict.fromkeys(str(v) for v in (sorted(numbers) if len(numbers) == len(values) else values)))
    return ", ".join(distinct[:6]) + (", ..." if len(distinct) > 6 else "")


def prior_of(
    run: TrackedRun, columns: Columns, study: Study, stated: Mapping[str, Value], now: float
) -> PriorRun | str:
    """A run as this study's search starts from it, or why it teaches nothing.

    A metric that the study maximises is kept as what it lacks of the study's ceiling, as evals of its own trials are.
    """
    values = {**{n: run.values[c] for n, c in columns.parameters.items() if c in run.values}, **stated}
    if lacking := [name for name in columns.parameters if name not in values]:
        return f"it does not state {lacking[0]}"
    points = run.series.get(columns.metric, ())
    if not points:
        return f"it has no {columns.metric or 'metric that is mapped'}"
    if columns.metric in run.maximised and not study.rising:
        return f"its {columns.metric} was maximised, and this study minimises {study.measure}"
    evals = tuple(
        Eval(1.0 if math.isnan(step) else step, study.ceiling - value if study.rising else value, math.nan)
        for step, value in points
        if step > 0 or math.isnan(step)
    )
    content = json.dumps([run.source, run.name, dict(values), evals], default=str).encode()
    return PriorRun(
        source=run.source,
        log=run.name,
        digest=hashlib.sha256(content).hexdigest(),
        taken_at=now,
        values=values,
        evals=evals,
        last_samples=max((e.samples for e in evals), default=0.0),
        diverged=any(not math.isfinite(e.loss) for e in evals[-2:]),
    )
