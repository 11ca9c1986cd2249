"""Old runs as prior observations: contents of logs under the study's parameter names, stored beside the sweep.

The file has one JSON object per line and run. A run keeps its source and its evals, so that its noise is estimated from
its own curve. Runs of one source share an offset from this study, and sources that contradict the study's own runs are
dropped (``model._weighed``).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lora_tune import curves
from lora_tune.base.errors import InputError
from lora_tune.base.text import counted
from lora_tune.config.study import Study
from lora_tune.logs.run import Eval, RunLog
from lora_tune.logs.trackers import TrackedRun, plain
from lora_tune.search.observations import Observation
from lora_tune.search.usual_names import (
    ALIKE,
    ALPHA,
    BATCH,
    CLIP,
    DECAY,
    RANK,
    RATE,
    STEPS,
    WARMUP,
    WARMUP_SHARE,
)
from lora_tune.store.records import PriorRun, Value

ANNOUNCED: Mapping[str, tuple[str, ...]] = {
    "opt_base_learning_rate": RATE,
    "opt_learning_rate_training_steps": STEPS,
    "global_batch_size": BATCH,
    "opt_learning_rate_warmup_factor": WARMUP_SHARE,
    "gradient_accumulation_steps": ("MINIBS",),
    "opt_adamw_weight_decay": DECAY,
    "opt_gradient_clip_norm": CLIP,
    "lora_rank": RANK,
    "lora_alpha": ALPHA,
}
"""MLLOG key -> names under which studies tune it. A key that is itself a parameter's name (any case) needs no entry."""


def values_of(announced: Mapping[str, object], names: Iterable[str]) -> dict[str, Value]:
    """Values of parameters ``names`` as announced in a log; also GBS, which a layout could otherwise contradict."""
    values: dict[str, Value] = {}
    required = {*names, "GBS"}
    factor, steps = announced.get("opt_learning_rate_warmup_factor"), announced.get("opt_learning_rate_training_steps")
    for name in required:
        keys = [key for key, known in ANNOUNCED.items() if name.upper() in known]
        keys += [key for key in announced if key.upper() == name.upper()]
        value = next((announced[key] for key in keys if key in announced), None)
        if value is None and name.upper() in WARMUP and _number(factor) and _number(steps):
            value = round(float(str(factor)) * float(str(steps)))
        if isinstance(value, str | int | float | bool):
            values[name] = value
    return values


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def source_of(announced: Mapping[str, object]) -> str:
    """Submitter and platform from the log; "" if missing."""
    parts = (str(announced.get(key, "")) for key in ("submission_org", "submission_platform"))
    return " ".join(p for p in parts if p and "PLACEHOLDER" not in p)


def prior_run(run: RunLog, values: Mapping[str, Value], origin: tuple[str, str, str], now: float) -> PriorRun | None:
    """A run of an old log; None without evidence on convergence. origin: source, log, digest of its bytes."""
    evals = tuple(e for e in run.evals if math.isfinite(e.samples) and e.samples > 0)
    blown = bool(run.train) and not math.isfinite(run.train[-1].loss)
    if not evals and not blown:
        return None
    timing = curves.timing(run)
    source, log, digest = origin
    return PriorRun(
        source=source, log=log, digest=digest, taken_at=now, values=dict(values), evals=evals,
        last_samples=max([e.samples for e in evals] + [t.samples for t in run.train[-1:]]),
        samples_per_second=timing.samples_per_second if math.isfinite(timing.samples_per_second) else None,
        diverged=blown or any(not math.isfinite(e.loss) for e in evals[-2:]),
    )  # fmt: skip


def observations(runs: Sequence[PriorRun], target: float) -> tuple[Observation, ...]:
    """The runs as observations for this study's target, with negative numbers to differ from trials."""
    observed = []
    for at, run in enumerate(runs):
        reached = next((e.samples for e in run.evals if e.loss <= target), math.nan)
        observed.append(
            Observation(
                number=-100_000 - at,
                values=run.values,
                source=run.source,
                evals=run.evals,
                reached=reached,
                bound=run.last_samples,
                diverged=run.diverged and not math.isfinite(reached),
            )
        )
    return tuple(observed)


def read(path: Path) -> tuple[PriorRun, ...]:
    """The runs in a file of :func:`write`; empty without a file. Raises InputError naming a broken line."""
    if not path.exists():
        return ()
    runs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            data = json.loads(line)
            evals = tuple(Eval(float(s), float(x), float(t)) for s, x, t in data["evals"])
            runs.append(PriorRun(**{**data, "evals": evals}))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path}, line {number}: is not a prior run ({error}); delete the line or the file"
            ) from error
    return tuple(runs)


def write(path: Path, runs: Sequence[PriorRun]) -> None:
    """Replace the file atomically, since a driver may be reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs), encoding="utf-8")
    part.replace(path)


def live(path: Path, target: float) -> Callable[[], tuple[Observation, ...]]:
    """Returns a function for the current observations in the file, which is read again only if it has changed."""
    cached: list[tuple[int, tuple[Observation, ...]]] = [(-1, ())]

    def newest() -> tuple[Observation, ...]:
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        if stamp != cached[0][0]:
            cached[0] = (stamp, observations(read(path), target))
        return cached[0][1]

    return newest


def describe(runs: Sequence[PriorRun]) -> str:
    """Numbers of runs and sources, for people; "" for none."""
    if not runs:
        return ""
    return f"{counted(len(runs), 'old runs')} of {counted(len({run.source for run in runs}), 'sources')}"


# Runs of other programs: mapping of their columns to this study's parameters and of a metric to the eval.


EVAL = "eval"
"""``--map eval=COLUMN`` selects the metric."""

EVALS = ("eval_loss", "val_loss", "valid_loss", "validation_loss", "value", "intermediate_values")
"""Metric names that mean evals of a loss. A plain ``loss`` is usually the training loss, so it is never guessed."""


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
    """The columns of a source, by the user's mapping, else by their names.

    names: parameters that a run must state. stated: the user's values for all runs. Raises InputError for a mapped
    column that does not exist.
    """
    values = list(dict.fromkeys(column for run in runs for column in run.values))
    metrics = list(dict.fromkeys(column for run in runs for column in run.series))
    for name, column in mapped.items():
        row = metrics if name == EVAL else values
        if column not in row:
            raise InputError(f"--map {name}={column}: there is no such column; there are {', '.join(row) or 'none'}")
        if name != EVAL and name not in names:
            raise InputError(
                f"--map {name}={column}: the study's parameters are {', '.join(names)}; {EVAL} is the metric"
            )
    known = {name: mapped.get(name) or _alike(name, values) for name in names}
    parameters = {name: column for name, column in known.items() if column is not None}
    used = set(parameters.values())
    usual = (study.objective.metric or "", *EVALS)
    metric = mapped.get(EVAL) or next((c for u in usual for c in metrics if plain(c) == plain(u) and c not in used), "")
    lacking = tuple(name for name in names if name not in parameters and name not in stated)
    return Columns(parameters, metric, lacking)


def _alike(name: str, columns: Sequence[str]) -> str | None:
    same = {plain(n) for group in ALIKE for n in group if plain(name) in map(plain, group)}
    exact = next((c for c in columns if plain(c) == plain(name)), None)
    return exact or next((c for c in columns if plain(c) in same), None)


def described(study: Study, columns: Columns, runs: Sequence[TrackedRun], stated: Mapping[str, Value]) -> list[str]:
    """The mapping for people, one line per parameter, with the values that would be used."""
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


def tracked_prior(
    run: TrackedRun, columns: Columns, study: Study, stated: Mapping[str, Value], now: float
) -> PriorRun | str:
    """A run as a prior run, or the reason why it cannot be used.

    A maximised metric is stored as the study's ceiling minus its value, like evals of the study's own trials.
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
