"""Parameters as features: which of them affect convergence, which speed, and the feature vectors of both models.

Convergence (samples to the target) depends on learning rate, batch, schedule and the like; speed (samples/s, seconds
per eval, memory) on layout and system switches. Only the global batch size affects both, so a layout measured once
serves every learning rate. A study may override this by ``role`` in its space.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from lora_tune.config.layout import parse_layout
from lora_tune.config.parameters import Conditions
from lora_tune.search.grey_box.gaussian import Array
from lora_tune.search.usual_names import BATCH, INTERVAL, RATE, STEPS, WARMUP

# Features of a layout for speed and memory.


@lru_cache(maxsize=4096)  # proposals use the same few hundred layouts
def layout_features(text: str) -> tuple[float, ...]:
    """log2 of the degrees, pipeline bubble, micro-batches and nodes; raises like ``parse_layout``."""
    layout = parse_layout(text)
    micro = max(1.0, layout.minibs / layout.mbs)
    degrees = (math.log2(v) for v in (layout.tp, layout.cp, layout.pp, layout.mbs, layout.vp))
    # Pipeline bubble (PP - 1) / (VP * micro-batches).
    idle = math.log1p((layout.pp - 1) / (layout.vp * micro))
    nodes = (math.log2(layout.nodes),) if layout.nodes else ()
    return (*degrees, idle, math.log2(micro) / 4, float(layout.sp), *nodes)


def layout_labels(text: str) -> tuple[str, ...]:
    """Names of this layout's features."""
    known = ("tp", "cp", "pp", "mbs", "vp", "bubble", "micro", "sp")
    return (*known, "nodes") if parse_layout(text).nodes else known


# Scaling of values to [-1, 1] and back.


DECAY = 30.0
"""If the distances of a range's ends from 1 differ by this factor, the scale is ln(1 - x): betas, discounts and
averages act by their horizon 1 / (1 - x), so that 0.99 and 0.999 are as far apart as 0.9 and 0.99."""
WIDE = 8.0
"""Ratio of largest to smallest positive choice from which on the scale is logarithmic."""


def unit(distribution: BaseDistribution, value: Any) -> float:
    """A number scaled to [-1, 1] over its range, on the parameter's scale."""
    return coder(distribution)(value)[0]


def is_ordered(distribution: BaseDistribution) -> bool:
    """Whether it is a choice of more than two numbers."""
    choices = distribution.choices if isinstance(distribution, CategoricalDistribution) else ()
    return len(choices) > 2 and _are_numbers(choices)


def has_feature(distribution: BaseDistribution, value: Any) -> bool:
    """Whether a value can be coded: any number for a numeric parameter, else one of the categories."""
    choices = distribution.choices if isinstance(distribution, CategoricalDistribution) else (0, 1)
    return _are_numbers([value]) if len(choices) > 1 and _are_numbers(choices) else value in choices


def ends(distribution: BaseDistribution) -> tuple[float, float] | None:
    """Minimum and maximum of a numeric parameter or choice of numbers; None for other choices."""
    if isinstance(distribution, FloatDistribution | IntDistribution):
        return float(distribution.low), float(distribution.high)
    if not (isinstance(distribution, CategoricalDistribution) and is_ordered(distribution)):
        return None
    return float(min(distribution.choices)), float(max(distribution.choices))  # type: ignore[type-var,arg-type]


@lru_cache(maxsize=256)
def coder(distribution: BaseDistribution) -> Callable[[Any], list[float]]:
    """Returns a function from a parameter's value to features: a number in [-1, 1], or one-hot for other categories."""
    if not isinstance(distribution, CategoricalDistribution):
        return _number_coder(distribution)
    choices = distribution.choices
    if not (len(choices) > 1 and _are_numbers(choices)):
        return one_hot(choices)
    low, high = float(min(choices)), float(max(choices))  # type: ignore[type-var,arg-type]
    log = low > 0 and high / low >= WIDE
    return _number_coder(FloatDistribution(low, high, log=log))


def one_hot(choices: Sequence[Any]) -> Callable[[Any], list[float]]:
    """One-hot features of a choice; none if it has one value."""
    width = len(choices) if len(choices) > 1 else 0
    places = {choice: at for at, choice in enumerate(choices[:width])}

    def coded(value: Any) -> list[float]:
        row = [0.0] * width
        if value in places:
            row[places[value]] = 0.7
        return row

    return coded


def _number_coder(distribution: BaseDistribution) -> Callable[[Any], list[float]]:
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    inward, _ = _scale(distribution)
    low, high = inward(distribution.low), inward(distribution.high)
    scale = 2 / (high - low) if high > low else 0.0
    return lambda value: [scale * (inward(value) - low) - 1 if scale else 0.0]


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _scale(distribution: FloatDistribution | IntDistribution) -> tuple[Callable[[Any], float], Callable[[Any], float]]:
    """Functions to the scale on which distances are uniform, and back."""
    low, high = distribution.low, distribution.high
    if distribution.log:
        return lambda value: math.log(max(float(value), 1e-300)), math.exp
    if not distribution.step and 0 <= low < high < 1 and (1 - low) >= DECAY * (1 - high):
        return lambda value: -math.log(max(1 - float(value), 1e-300)), lambda place: 1 - math.exp(-place)
    return float, float


def from_unit(distribution: BaseDistribution, u: float) -> Any:
    """The value at ``u`` in [-1, 1], on the grid of steps and integers."""
    if isinstance(distribution, CategoricalDistribution):
        count = len(distribution.choices)
        return distribution.choices[min(count - 1, max(0, int((u + 1) / 2 * count)))]
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return _number_at(distribution)(u)


@lru_cache(maxsize=256)  # a proposal needs thousands of values of the same few ranges
def _number_at(distribution: FloatDistribution | IntDistribution) -> Callable[[float], float]:
    """Returns a function from [-1, 1] to values."""
    low, high, step = float(distribution.low), float(distribution.high), distribution.step
    inward, outward = _scale(distribution)
    first, whole = inward(low), isinstance(distribution, IntDistribution)
    span = inward(high) - first

    def at(u: float) -> float:
        value = outward(first + min(1.0, max(0.0, (u + 1) / 2)) * span)
        if step:
            value = low + round((value - low) / step) * step
        value = min(high, max(low, value))
        return round(value) if whole else value

    return at


def at_random(
    distributions: Mapping[str, BaseDistribution], names: Iterable[str], rng: np.random.Generator
) -> dict[str, Any]:
    """A random point of the parameters ``names``, each uniform on [-1, 1] over its range."""
    return {name: from_unit(distributions[name], float(rng.uniform(-1, 1))) for name in names}


_SPELLED = {name: (name, name.lower()) for name in (*STEPS, *BATCH, *INTERVAL)}
SPEED = re.compile(
    r"TP$|PP$|CP$|VP$|SP$|MBS$|^TP_|^MC_TP|^NCCL|^NVTE|^CUDA|CUDA_GRAPH|^FP8_(?!$)|VBOOST|COMM_|WORKERS|OFFLOAD|"
    r"RECOMPUTE|^AC[GML]$|SHARP|_CTAS|^VAL_MBS|^CP_EVAL|GRAD_ACCUM|COMPILE|FUSED|ATTENTION_BACKEND|NUMA|BIND"
)
"""Names of switches that affect seconds and memory but not training arithmetic (see the public knob list)."""

NODES = "NODES"
PACE = re.compile(r"^bubble$|^micro$|^nodes$|OVERLAP|COMM_|DPA|WORKERS|NCCL|NUMA|BIND|VBOOST|SHARP|_CTAS")
"""Speed features with little or no effect on memory."""

LONGEST_WARMUP = 0.4
"""Share of a middle schedule beyond which a longer warm-up counts as equal, since it never helps."""

PRECISION = re.compile(r"^(NV|MX)?FP[48]$|^BF16$|PRECISION$")
"""Names of the precision of linear layers, which affects both speed and convergence."""

_OF_SWITCHES = {"switch": "speed", "precision": "both"}
"""Role of each kind of switch."""

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Coordinates:
    """Maps this study's parameters to features.

    distributions: the tuned parameters. gpus: per trial, which determine a layout's batch. fixed: constant values that
    are needed (GBS, MAX_STEPS, LR, ...). roles: "speed", "convergence" or "both" as stated by the study; others are
    guessed from the name. centre: values of the user or the published results. conditions: which parameters exist only
    under others' values; absent ones have their middle value. full_fine_tuning_lr: learning rate of full fine-tuning of
    the same base, if known.
    """

    distributions: Mapping[str, BaseDistribution]
    gpus: int = 1
    fixed: Values = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    centre: Values = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)
    full_fine_tuning_lr: float | None = None

    @cached_property
    def layout(self) -> str | None:
        """The parameter whose choices are layouts, or None."""
        for name, distribution in self.distributions.items():
            if isinstance(distribution, CategoricalDistribution):
                try:
                    parse_layout(str(distribution.choices[0]))
                except (ValueError, TypeError):
                    continue
                return name
        return None

    @cached_property
    def speed_names(self) -> tuple[str, ...]:
        """Parameters that affect speed, sorted."""
        return tuple(sorted(n for n in self.distributions if self.role(n) != "convergence"))

    @cached_property
    def convergence_names(self) -> tuple[str, ...]:
        """Parameters that affect convergence, sorted."""
        return tuple(sorted(n for n in self.distributions if self.role(n) != "speed"))

    def role(self, name: str) -> str:
        """Role of a parameter: as stated by the study, else guessed from its name."""
        if name in self.roles:
            return _OF_SWITCHES.get(self.roles[name], self.roles[name])
        if name.upper() in BATCH or PRECISION.search(name.upper()):
            return "both"
        return "speed" if name == self.layout or SPEED.search(name.upper()) else "convergence"

    @cached_property
    def batches_by_layout(self) -> dict[Any, float]:
        """Global batch size of each layout choice."""
        if self.layout is None:
            return {}
        return {c: float(parse_layout(str(c)).gbs(self.gpus)) for c in self._choices(self.layout)}

    def _choices(self, name: str) -> Sequence[Any]:
        distribution = self.distributions[name]
        assert isinstance(distribution, CategoricalDistribution)
        return distribution.choices

    def nodes(self, values: Values) -> int:
        """Nodes of a trial if they are tuned; else 1."""
        layout = parse_layout(str(values[self.layout])).nodes if self.layout is not None else 0
        return int(values.get(NODES, layout or 1))

    def batch(self, values: Values) -> float:
        """Global batch size of ``values``; NaN if unknown."""
        if self.layout is not None and self.layout in values:
            return self.batches_by_layout[values[self.layout]]
        return self._named(values, BATCH)

    def steps(self, values: Values) -> float:
        """Steps after which training ends; NaN if unknown."""
        return self._named(values, STEPS)

    def total_samples(self, values: Values) -> float:
        """Samples after which training ends; infinite if unknown."""
        total = self.steps(values) * self.batch(values)
        return total if math.isfinite(total) else math.inf

    @property
    def eval_interval(self) -> float:
        """Samples between evals if the study fixes them; else NaN."""
        return self._named({}, INTERVAL)

    def _named(self, values: Values, names: Sequence[str]) -> float:
        fixed = self.fixed
        for name in names:
            for known in _SPELLED[name]:
                value = values.get(known, fixed.get(known))
                if isinstance(value, int | float):
                    return float(value)
        return math.nan

    def convergence_features(self, values: Values) -> list[float]:
        """Features of the convergence model: scaled parameters, warm-up in samples, batch and schedule in octaves."""
        values = self.conditions.rested(values)
        batch = self.batch(values)
        row = [x for name, coded in self._convergence_coders for x in coded(name, values, batch)]
        row.append(math.log2(batch / self.reference_batch) / 2 if math.isfinite(batch) else 0.0)
        return row

    @cached_property
    def _convergence_coders(self) -> list[tuple[str, Callable[[str, Values, float], list[float]]]]:
        """Per parameter: (name, function of name, values and batch that returns its convergence features)."""
        kinds = {**dict.fromkeys(WARMUP, self._warmup), **dict.fromkeys(STEPS, self._schedule)}
        codings = {name: kinds.get(name.upper(), self._plain) for name in self.convergence_names}
        return [(name, coded if self._width(name) else self._plain) for name, coded in codings.items()]

    def _plain(self, name: str, values: Values, _batch: float) -> list[float]:
        return self._coders[name](values[name])

    def _schedule(self, name: str, values: Values, batch: float) -> list[float]:
        if not math.isfinite(batch):
            return self._coders[name](values[name])
        return [math.log(self.total_samples(values) / self.reference_samples) / math.log(4)]

    def _warmup(self, name: str, values: Values, batch: float) -> list[float]:
        """Warm-up samples relative to a middle schedule, from -1 for none to 1 at ``LONGEST_WARMUP``.

        Not relative to the run's own schedule: in two tables of real trials the delay by a warm-up of given steps is
        the same in schedules of 80, 200 and 320 steps (``python -m benchmarks.tables``).
        """
        if not (steps := self.steps(values)) > 0:
            return self._coders[name](values[name])
        samples = min(float(values[name]), steps) * (batch if math.isfinite(batch) else self.reference_batch)
        return [2 * min(samples / self.reference_samples / LONGEST_WARMUP, 1.0) - 1]

    @cached_property
    def reference_batch(self) -> float:
        """The smallest available batch: origin of the batch feature."""
        batches = sorted(self.batches_by_layout.values())
        return batches[0] if batches else max(1.0, self._smallest_batch())

    def _smallest_batch(self) -> float:
        for name, distribution in self.distributions.items():
            if name.upper() in BATCH:
                low = getattr(distribution, "low", None)
                return float(low if low is not None else min(distribution.choices))  # type: ignore[attr-defined]
        fixed = self._named({}, BATCH)
        return fixed if math.isfinite(fixed) else 1.0

    @cached_property
    def reference_samples(self) -> float:
        """Geometric mean of the available schedules at the smallest batch: origin of the schedule feature."""
        for name, distribution in self.distributions.items():
            if name.upper() in STEPS and isinstance(distribution, IntDistribution | FloatDistribution):
                return math.sqrt(float(distribution.low) * float(distribution.high)) * self.reference_batch
        steps = self._named({}, STEPS)
        return steps * self.reference_batch if math.isfinite(steps) else 1.0

    @cached_property
    def convergence_width(self) -> int:
        """Number of convergence features."""
        middle = {name: from_unit(distribution, 0.0) for name, distribution in self.distributions.items()}
        return len(self.convergence_features(middle))

    @cached_property
    def rate_feature(self) -> int | None:
        """Column of the learning rate among the convergence features, or None."""
        return self._column(RATE)

    @cached_property
    def warmup_feature(self) -> int | None:
        """Column of the warm-up among the convergence features; None if the length of schedules is unknown."""
        return self._column(WARMUP) if self.reference_samples > 1 else None

    @cached_property
    def other_features(self) -> dict[int, float]:
        """Columns of numbers other than rate, batch, schedule and warm-up, with the user's value in each."""
        places, column = {}, 0
        for name in self.convergence_names:
            spread = self.distributions[name]
            ordered = not isinstance(spread, CategoricalDistribution) or is_ordered(spread)
            if ordered and name.upper() not in (*RATE, *STEPS, *WARMUP, *BATCH):
                places[column] = self._coders[name](self.centre[name])[0] if name in self.centre else 0.0
            column += self._width(name)
        return places

    def _column(self, names: Sequence[str]) -> int | None:
        """First column of the first parameter with one of these names among the convergence features."""
        column = 0
        for name in self.convergence_names:
            if name.upper() in names:
                return column
            column += self._width(name)
        return None

    def speed_features(self, values: Values) -> list[float]:
        """Features of the speed and memory models: log2 of degrees, micro-batches, switches."""
        row: list[float] = []
        values = self.conditions.rested(values)
        for name in self.speed_names:
            if name == self.layout:
                row += layout_features(str(values[name]))
            elif name == NODES:
                row.append(math.log2(values[name]))
            else:
                row += self._coders[name](values[name])
        return row or [0.0]

    @cached_property
    def speed_labels(self) -> tuple[str, ...]:
        """Names of the speed features: a switch's name in capitals, with "=choice" if each choice is a feature."""
        labels: list[str] = []
        for name in self.speed_names:
            if name == self.layout:
                labels += layout_labels(str(self._choices(name)[0]))
            elif name == NODES:
                labels.append("nodes")
            else:
                labels += self._coded_labels(name)
        return tuple(labels) or ("",)

    def memory_features(self, values: Values) -> list[float]:
        """The speed features that affect memory, without the number of micro-batches."""
        row = self.speed_features(values)
        return [row[column] for column in self._memory_columns] or [0.0]

    @cached_property
    def _memory_columns(self) -> tuple[int, ...]:
        return tuple(at for at, label in enumerate(self.speed_labels) if not PACE.search(label))

    @cached_property
    def memory_labels(self) -> tuple[str, ...]:
        """Names of the memory features."""
        return tuple(self.speed_labels[column] for column in self._memory_columns) or ("",)

    def _coded_labels(self, name: str) -> list[str]:
        count, distribution = self._width(name), self.distributions[name]
        if count == 1 or not isinstance(distribution, CategoricalDistribution):
            return [name.upper()] * count
        return [f"{name.upper()}={choice}" for choice in distribution.choices[:count]]

    @cached_property
    def _coders(self) -> Mapping[str, Callable[[Any], list[float]]]:
        """Function from value to features, by parameter."""
        return {name: coder(distribution) for name, distribution in self.distributions.items()}

    def _width(self, name: str) -> int:
        """Number of features of a parameter."""
        return len(self._coders[name](from_unit(self.distributions[name], 0.0)))


def trend(x: Array, curved: Sequence[int]) -> Array:
    """Trend basis of feature rows ``x`` (n, d): 1, all features, and the squares of the ``curved`` columns."""
    columns = [np.ones((len(x), 1)), x, *(x[:, [c]] ** 2 for c in curved)]
    return np.hstack(columns)


# Features of many configurations: thousands of trials share a few dozen layouts.


def alike_once(
    coordinates: Coordinates, features: Callable[[Mapping[str, Any]], list[float]], points: Sequence[Mapping[str, Any]]
) -> list[list[float]]:
    """``features`` of each point, computed once per distinct speed setting.

    features: depends on speed parameters only. With conditions other values matter, too, so each point is computed.
    """
    if coordinates.conditions.of:
        return [features(values) for values in points]
    known: dict[tuple[Any, ...], list[float]] = {}
    names, rows = coordinates.speed_names, []
    for values in points:
        key = tuple([values[name] for name in names])
        if key not in known:
            known[key] = features(values)
        rows.append(known[key])
    return rows
