"""The machine's own config in a study's names: the parameters of trial 0, and where in the space they lie. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lora_tune.base.errors import SetupError
from lora_tune.config.holding import holding
from lora_tune.config.layout import layout_of
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
from lora_tune.workloads.base_config import equal
from lora_tune.workloads.record import LAYOUT, NEUTRAL, Record, usual_name

EVALS = ("VAL_CHECK_INTERVAL", "SKIP_EVALS")
"""A config's own eval schedule: trial 0 keeps it, whatever the rules say."""

TRAINING = ("LR", "MAX_STEPS", "WARMUP_STEPS")
"""What a record should hold of every training, tuned or not."""

SIZES = frozenset({*LAYOUT, "VP", "MINIBS", "GBS", "NODES"})
"""Whose ranges say what fits and what the rules allow: a config outside them widens none."""


def starting_point(name: str, config: Record, space: Space) -> Start:
    """The config ``name`` as trial 0 of a study with ``space``. Raises SetupError for counts that are none."""
    single = (n for n, p in space.parameters.items() if not isinstance(p, LayoutParameter))
    searched = {usual_name(n, config.benchmark) for n in single}
    try:
        nodes, whole = config.nodes, config.count("GBS")
        parameters = _parameters(config, space, searched)
    except SetupError as error:
        raise SetupError(f"{name}: {error}") from error
    if space.varies_nodes:
        parameters["NODES"] = nodes
    # A warm-up may be stated as a share of the steps.
    apart = {*EVALS, "WARMUP_STEPS", *({"NODES"} if space.varies_nodes else ()), *_following(searched, whole)}
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


def _parameters(config: Record, space: Space, searched: Collection[str]) -> dict[str, Value]:
    """What a config states of a study's parameters, of training, layout and batch; what nobody states is left out.

    searched: our names of what the study tunes by itself. Under the tree's own name a value stands once: handed on
    under ours as well, it would set every trial back.
    """
    layout, whole, elsewhere = config.layout, config.count("GBS"), {*searched} - space.parameters.keys()
    layouts = any(isinstance(p, LayoutParameter) for p in space.parameters.values())
    known = {n for n in (*LAYOUT, "MINIBS") if config.value(n) is not None or (layouts and (n != "MINIBS" or whole))}
    known |= {"GBS"} if whole is not None or "MINIBS" in known else set()
    amounts = {n: getattr(layout, n.lower()) for n in (*LAYOUT, "MINIBS")}
    amounts["GBS"] = layout.gbs(config.gpus) if whole is None else whole
    stated = {n: config.value(n) for n in (*space.parameters, *TRAINING, *EVALS) if n not in elsewhere}
    parameters: dict[str, Value] = {n: v for n, v in stated.items() if v is not None}
    parameters |= {n: v for n, v in amounts.items() if n in known - elsewhere}
    return parameters | ({"VP": layout.vp} if layout.vp > 1 else {})


def parameters_at(begin: Start | None, space: Space, tuned: Mapping[str, Value]) -> dict[str, Value]:
    """What a trial at a point of the space runs with: what it leaves open is as in the configuration it begins from.

    With the batch that follows, where MINIBS or a degree is tuned by itself.
    """
    values = {**({} if begin is None else begin.inherited), **space.resolve(tuned)}
    usual = {usual_name(name): value for name, value in values.items()}
    if begin is None or "GBS" in usual or "GBS" not in begin.parameters or "MINIBS" not in usual:
        return values
    return {**values, "GBS": layout_of(usual).gbs(space.gpu_count(values))}


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
    number = Record(stated={name: value}).number(name)
    widens = usual_name(name) not in SIZES
    drawn = number is not None and (number > 0 or not parameter.log)
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
