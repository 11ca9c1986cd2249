"""The machine's own config in a study's names: the parameters of trial 0, and where in the space they lie. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from lora_tune.base.errors import SetupError
from lora_tune.config.holding import holding
from lora_tune.config.layout import Layout, layout_of
from lora_tune.config.parameters import (
    SWITCHES,
    CategoricalParameter,
    DerivedParameter,
    FixedParameter,
    FloatParameter,
    IntParameter,
    LayoutParameter,
    Parameter,
)
from lora_tune.config.space import Space
from lora_tune.workloads.base import Start, Value
from lora_tune.workloads.base_config import as_value, equal
from lora_tune.workloads.mlperf_names import ALIASES, NEUTRAL

EVALS = ("VAL_CHECK_INTERVAL", "SKIP_EVALS")
"""A config's own eval schedule: trial 0 keeps it, whatever the rules say."""

TRAINING = ("LR", "MAX_STEPS", "WARMUP_STEPS")
"""What a record should hold of every training, tuned or not."""

LAYOUT = ("TP", "PP", "CP", "SP", "MBS")

SIZES = frozenset({*LAYOUT, "VP", "MINIBS", "GBS", "NODES"})
"""Whose ranges say what fits and what the rules allow: a config outside them widens none."""

NULLS = ("null", "None")
"""How a config writes YAML's null."""


@dataclass(frozen=True, slots=True)
class Effective:
    """What a config amounts to.

    exported: its variables. defaults: what the implementation takes for others. batch_names: variables that state the
    global batch in its benchmark, beside the names that do so in any.
    """

    exported: Mapping[str, str]
    defaults: Mapping[str, str]
    batch_names: tuple[str, ...] = ()

    def value(self, name: str) -> Value | None:
        """The value under any of the names that the rounds have for it; None where nobody states one.

        A config that exports ``null`` states that there is none, whatever the implementation's default is.
        """
        names = (name, *ALIASES.get(name, ()), *(self.batch_names if name == "GBS" else ()))
        for known in (self.exported, self.defaults):
            texts = [text for alias in names if (text := known.get(alias, ""))]
            if (text := next((text for text in texts if text not in NULLS), "")) != "":
                return _switch(as_value(text)) if name == "SP" else as_value(text)
            if texts:
                return None
            if name == "WARMUP_STEPS" and (ratio := known.get("WARMUP_RATIO")):
                share, steps = _number(ratio), _number(self.value("MAX_STEPS"))
                warmup = math.nan if share is None or steps is None else share * steps
                return round(warmup) if math.isfinite(warmup) else None
        return None

    def count(self, name: str) -> int | None:
        """The value as a whole number; None where nobody states one, or 0. Raises SetupError for anything else."""
        value = self.value(name)
        if value is None or value == 0:
            return None
        number = _number(value)
        if number is None or not number.is_integer() or number < 1:
            raise SetupError(f"{name} is {value!r}, which is no whole number from 1 on; correct it there")
        return int(number)

    @property
    def batch(self) -> int | None:
        """The global batch that it states; None where that follows from MINIBS, which it exports itself."""
        own = replace(self, defaults={})
        return own.count("GBS") if own.value("MINIBS") is not None else self.count("GBS")

    def layout(self, gpus: int) -> Layout:
        """Its parallel layout on ``gpus`` GPUs; degrees that nobody states change nothing."""
        degrees = {name.lower(): self.count(name) or int(NEUTRAL.get(name, 1)) for name in LAYOUT}
        whole = self.batch
        ranks = max(1, gpus // (degrees["tp"] * degrees["pp"] * degrees["cp"]))
        minibs = self.count("MINIBS") if whole is None else whole // ranks
        return Layout(**degrees, vp=self.count("VP") or 1, minibs=minibs or 1)


def starting_point(name: str, config: Effective, space: Space) -> Start:
    """The config ``name`` as trial 0 of a study with ``space``. Raises SetupError for counts that are none."""
    single = (n for n, p in space.parameters.items() if not isinstance(p, LayoutParameter))
    searched = {_usual(n, config.batch_names) for n in single}
    try:
        nodes = config.count("DGXNNODES") or space.nodes
        parameters = _parameters(config, space, searched, max(1, nodes * max(1, space.gpus_per_node)))
    except SetupError as error:
        raise SetupError(f"{name}: {error}") from error
    if space.varies_nodes:
        parameters["NODES"] = nodes
    # A warm-up may be stated as a share of the steps.
    apart = {*EVALS, "WARMUP_STEPS", *({"NODES"} if space.varies_nodes else ()), *_following(searched, config.batch)}
    common = {n: v for n, v in parameters.items() if n not in apart}
    try:
        absent = space.conditions.absent(parameters)
        tuned = {
            n: _coordinate(n, p, space, parameters)
            for n, p in space.parameters.items()
            if _searched(p) and n not in absent
        }
        _same_elsewhere(space, tuned, parameters)
    except OutsideError as error:
        return Start(name=name, parameters=parameters, inherited=common, outside=str(error))
    return Start(name=name, parameters=parameters, inherited=common, tuned=tuned)


def _parameters(config: Effective, space: Space, searched: Collection[str], gpus: int) -> dict[str, Value]:
    """What a config states of a study's parameters, of training, layout and batch; what nobody states is left out.

    searched: our names of what the study tunes by itself. Under the tree's own name a value stands once: handed on
    under ours as well, it would set every trial back.
    """
    layout, whole, elsewhere = config.layout(gpus), config.batch, {*searched} - space.parameters.keys()
    layouts = any(isinstance(p, LayoutParameter) for p in space.parameters.values())
    known = {n for n in (*LAYOUT, "MINIBS") if config.value(n) is not None or (layouts and (n != "MINIBS" or whole))}
    known |= {"GBS"} if whole is not None or "MINIBS" in known else set()
    amounts = {n: getattr(layout, n.lower()) for n in (*LAYOUT, "MINIBS")}
    amounts["GBS"] = layout.gbs(gpus) if whole is None else whole
    stated = {n: config.value(n) for n in (*space.parameters, *TRAINING, *EVALS) if n not in elsewhere}
    parameters: dict[str, Value] = {n: v for n, v in stated.items() if v is not None}
    parameters |= {n: v for n, v in amounts.items() if n in known - elsewhere}
    return parameters | ({"VP": layout.vp} if layout.vp > 1 else {})


def parameters_at(begin: Start | None, space: Space, tuned: Mapping[str, Value]) -> dict[str, Value]:
    """What a trial at a point of the space runs with: what it leaves open is as in the configuration it begins from.

    With the batch that follows, where MINIBS or a degree is tuned by itself.
    """
    values = {**({} if begin is None else begin.inherited), **space.resolve(tuned)}
    usual = {_usual(name): value for name, value in values.items()}
    if begin is None or "GBS" in usual or "GBS" not in begin.parameters or "MINIBS" not in usual:
        return values
    return {**values, "GBS": layout_of(usual).gbs(space.gpu_count(values))}


def _usual(name: str, batch_names: Collection[str] = ()) -> str:
    """The name that this package has for what a tree calls ``name``."""
    if name in ALIASES or name in batch_names:
        return name if name in ALIASES else "GBS"
    return next((usual for usual, others in ALIASES.items() if name in others), name)


def _following(searched: Collection[str], whole: int | None) -> set[str]:
    """What of a config's batch is another in every trial, since what it follows from is tuned.

    whole: the batch that the config states by itself; else it follows from MINIBS and the degrees.
    """
    if "GBS" in searched:
        return {"GBS", "MINIBS"}
    if {"TP", "PP", "CP", "MINIBS", "NODES"}.isdisjoint(searched):
        return set()
    return {"GBS"} if whole is None else {"MINIBS"} - {*searched}


class OutsideError(ValueError):
    """A config that is no point of a space; its words say why."""


def _searched(parameter: Parameter) -> bool:
    return not isinstance(parameter, FixedParameter | DerivedParameter)


def _coordinate(name: str, parameter: Parameter, space: Space, parameters: Mapping[str, Value]) -> Value:
    """Where on one axis of the space a config lies. Raises OutsideError."""
    if isinstance(parameter, LayoutParameter):
        for layout in space.layouts(name).layouts:
            if all(equal(v, parameters.get(n, NEUTRAL.get(n))) for n, v in parameter.values(layout).items()):
                return str(layout)
        degrees = " ".join(f"{n}={parameters[n]}" for n in (*LAYOUT, "MINIBS", "GBS") if n in parameters)
        raise OutsideError(f"space.{name} does not offer its layout {degrees}")
    value = parameters.get(name)
    if isinstance(parameter, CategoricalParameter) and parameter.role in SWITCHES:  # its own value is a choice more
        return next((c for c in parameter.choices if equal(c, value)), parameter.choices[0] if value is None else value)
    if value is None:
        raise OutsideError(f"neither it nor a file of the implementation states {name}")
    if isinstance(parameter, CategoricalParameter):
        choice = next((c for c in parameter.choices if equal(c, value)), None)
        if choice is None:
            raise OutsideError(f"{name}={value} is none of {', '.join(map(str, parameter.choices))}")
        return choice
    assert isinstance(parameter, FloatParameter | IntParameter)
    number = _number(value)
    widens = _usual(name) not in SIZES
    drawn = number is not None and math.isfinite(number) and (number > 0 or not parameter.log)
    if number is None or not drawn or not (widens or parameter.low <= number <= parameter.high):
        raise OutsideError(f"{name}={value} is not in {parameter.low:g} to {parameter.high:g}")
    if isinstance(parameter, FloatParameter):
        return number
    if (number - parameter.low) % (1 if widens else parameter.step):
        raise OutsideError(f"{name}={value} is not a step of {parameter.step} from {parameter.low}")
    return int(number)


def _same_elsewhere(space: Space, tuned: Mapping[str, Value], parameters: Mapping[str, Value]) -> None:
    """Raise OutsideError where the study fixes or derives another value for every trial."""
    resolved = holding(space, tuned).resolve(tuned)
    for name, parameter in space.parameters.items():
        if not _searched(parameter) and name in resolved and not equal(parameters.get(name), resolved[name]):
            there = parameters.get(name, "not set")
            raise OutsideError(f"{name} is {there} there and {resolved[name]} in every other trial")


def _number(value: Value | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _switch(value: Value) -> Value:
    return {"true": 1, "false": 0}.get(str(value).lower(), value)
