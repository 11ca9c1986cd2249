"""Metrics of a trial, and their form as plain data in the database, in Optuna and in tables."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args, get_type_hints

from lora_tune.base.errors import StoreError


class ConfirmedChoice(enum.StrEnum):
    """Outcome of a confirmation for a trial's configuration."""

    CHOSEN = "chosen"
    PASSED_OVER = "passed over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """The confirmation of a trial's configuration by further runs.

    runs, missed: number of runs, and of those without a result. seconds, low, high: mean of the objective (seconds to
    the target, or a metric's value) with 90% interval, None if no run has a result. seeds: of all runs. each: results
    of the runs that have one. score: as text.
    """

    choice: ConfirmedChoice
    runs: int
    missed: int
    node_hours: float
    sentence: str
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: tuple[int, ...] = ()
    each: tuple[float, ...] = ()
    score: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMetrics:
    """Metrics of one trial; None if unknown.

    objective, second_objective: values by which trials are compared (see ``lora_tune.search.objectives``), if the
    target was reached or there is none. stop_samples, stop_seconds: of the first eval at the target.
    crossing_samples, _low, _high: where the fitted curve crosses the target, with 90% interval; crossing_method: how it
    was estimated. eval_samples: samples between evals. evals: their number. last_loss, last_samples: of the newest
    eval. init_seconds: start-up before the clock starts. packed_seconds: in its pack, if the objective is the time
    alone. slower: slowdown factor against the reference pace, that of ``pace_of``, at which ``objective`` is stated;
    clock_objective, clock_second_objective: by the clock. None at that pace.
    estimated_seconds: part of the time that was not observed. paused_seconds: suspension of its job, not part of its
    time. pace_spread: between the run's own blocks, in ln(pace).
    peak_gib: peak GPU memory as logged, in GiB.
    mlperf_score: seconds after RCP normalisation. seed: as logged, if it differs from the trial's.

    precision, healing_steps, healing_samples: lowest precision stated, and steps or samples after which it changes;
    healed_samples_per_second, healed_seconds_per_eval, switch_seconds: pace from there on, and duration of the switch.
    base: name of the base config that the trial measures. audited, audited_samples: why and where the stopping rule
    would have stopped an audit trial. runs: of a job with several. confirmed: outcome of a confirmation.
    others: metrics of a later release, kept unchanged.
    """

    objective: float | None = None
    second_objective: float | None = None
    clock_objective: float | None = None
    clock_second_objective: float | None = None
    slower: float | None = None
    pace_of: str | None = None
    samples_per_second: float | None = None
    seconds_per_eval: float | None = None
    crossing_samples: float | None = None
    crossing_low: float | None = None
    crossing_high: float | None = None
    crossing_method: str | None = None
    eval_samples: float | None = None
    pace_spread: float | None = None
    init_seconds: float | None = None
    packed_seconds: float | None = None
    peak_gib: float | None = None
    estimated_seconds: float | None = None
    paused_seconds: float | None = None
    evals: float | None = None
    last_loss: float | None = None
    last_samples: float | None = None
    node_hours: float | None = None
    stop_samples: float | None = None
    stop_seconds: float | None = None
    mlperf_score: float | None = None
    seed: int | None = None
    precision: str | None = None
    healing_steps: float | None = None
    healing_samples: float | None = None
    healed_samples_per_second: float | None = None
    healed_seconds_per_eval: float | None = None
    switch_seconds: float | None = None
    base: str | None = None
    audited: str | None = None
    audited_samples: float | None = None
    runs: tuple[RunMetrics, ...] = ()
    confirmed: Confirmed | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def at_reference_pace(self) -> TrialMetrics:
        """These metrics with every speed and time at the reference pace."""
        ratio = self.slower
        if ratio is None:
            return self
        speeds = {n: v * ratio for n in _SPEEDS if (v := getattr(self, n)) is not None}
        times = {n: v / ratio for n in _TIMES if (v := getattr(self, n)) is not None}
        return replace(self, **speeds, **times)

    def __or__(self, later: TrialMetrics) -> TrialMetrics:
        """These metrics, updated with the known ones of ``later``."""
        known = {f.name: getattr(later, f.name) for f in fields(later)}
        return replace(self, **{name: value for name, value in known.items() if value not in (None, (), {})})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """One of a job's several runs, at index ``position``. seconds, samples: None if it missed the target."""

    seed: int
    position: int
    seconds: float | None = None
    samples: float | None = None
    metrics: TrialMetrics = field(default_factory=TrialMetrics)


_SPEEDS = ("samples_per_second", "healed_samples_per_second")
_TIMES = ("seconds_per_eval", "healed_seconds_per_eval", "switch_seconds", "stop_seconds")
_NESTED = ("runs", "confirmed", "others")
_HINTS = get_type_hints(TrialMetrics)
_PLAIN = tuple(f.name for f in fields(TrialMetrics) if f.name not in _NESTED)
_RUN = ("seed", "position", "seconds", "samples")
_CONFIRMED = tuple(f.name for f in fields(Confirmed) if f.name != "choice")


def as_mapping(metrics: TrialMetrics) -> dict[str, Any]:
    """All known metrics, flat: a confirmation as ``confirmed`` and ``confirmed_...``, runs as a list of mappings."""
    known = {name: value for name in _PLAIN if (value := getattr(metrics, name)) is not None}
    if metrics.runs:
        known["runs"] = [as_mapping(run.metrics) | {name: getattr(run, name) for name in _RUN} for run in metrics.runs]
    if (race := metrics.confirmed) is not None:
        parts = {f"confirmed_{name}": getattr(race, name) for name in _CONFIRMED} | {
            "confirmed_each": list(race.each),
            "confirmed_seeds": list(race.seeds) or None,
        }
        known |= {"confirmed": race.choice.value} | {name: v for name, v in parts.items() if v is not None}
    return known | dict(metrics.others)


def from_mapping(data: Mapping[str, Any]) -> TrialMetrics:
    """The inverse of :func:`as_mapping`; unknown names are kept in ``others``.

    Raises StoreError for a value of a wrong type.
    """
    rest = dict(data)
    known: dict[str, Any] = {name: _checked(name, rest.pop(name)) for name in _PLAIN if name in rest}
    try:
        runs = tuple(_run(run) for run in rest.pop("runs", ()))
        confirmed = _confirmed(rest) if "confirmed" in rest else None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise StoreError(f"a trial's record holds runs that cannot be read ({error!r}); {_REMEDY}") from error
    return TrialMetrics(**known, runs=runs, confirmed=confirmed, others=rest)


_REMEDY = "another program has changed the database: restore it from a copy"


def _checked(name: str, value: Any) -> Any:
    hint = _HINTS[name]
    if isinstance(value, bool) or not isinstance(value, hint | int if float in get_args(hint) else hint):
        kind = "a text" if str in get_args(hint) else "a number"
        raise StoreError(f"a trial's record holds {name} = {value!r}, which is not {kind}; {_REMEDY}")
    return value


def _run(data: Mapping[str, Any]) -> RunMetrics:
    rest = {name: value for name, value in data.items() if name not in _RUN}
    ends = {name: data.get(name) for name in ("seconds", "samples")}
    return RunMetrics(seed=int(data["seed"]), position=int(data["position"]), **ends, metrics=from_mapping(rest))


def _confirmed(rest: dict[str, Any]) -> Confirmed:
    """The confirmation, removed from ``rest``."""
    parts = {name: rest.pop(f"confirmed_{name}") for name in _CONFIRMED if f"confirmed_{name}" in rest}
    return Confirmed(
        choice=ConfirmedChoice(rest.pop("confirmed")), **parts | {n: tuple(parts.get(n, ())) for n in ("each", "seeds")}
    )
