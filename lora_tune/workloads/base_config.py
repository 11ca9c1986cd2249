"""The machine's own ``config_<SYSTEM>_....sh``: its exports when sourced, and the starting point of a sweep.

The knobs of a system (VBOOST_VALUE, FP8_DPA, TP_COMM_OVERLAP, NCCL_...) are in such a file, not in the common one that
it sources. This module never changes it.
"""

from __future__ import annotations

import glob
import re
import shlex
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_tune.base.errors import SetupError
from lora_tune.base.text import HIDDEN, names_secret, redact
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
from lora_tune.workloads.config_file import source_lines
from lora_tune.workloads.record import LAYOUT, NEUTRAL, Record, usual_name
from lora_tune.workloads.script_needs import Sourced, source_files

_MISSING = re.compile(r": line \d+: (?P<path>.*\.sh): No such file or directory$")
_UNSET = re.compile(r"\b([A-Za-z_]\w*): (?:unbound variable|parameter (?:null or )?not set)$")
_FIELDS_NAME = re.compile(r"config_(.+?)_\d+x\d+x[^_]*(?:_(.+?))?(?:\.sh)?")
_SKIPPED = frozenset({".git", "results", "logs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseConfig:
    """A config as its user sources it.

    file: relative to the implementation's folder. values: its exports, by name. volatile: those that differ each time,
    such as a log folder named by the date. beside: files that it sources from its own folder but that are elsewhere in
    the implementation, relative as ``file``; they are sourced first. absent: files that it sources and that are missing
    or ambiguous; bash reports them and continues. path: the PATH that it sets (``on_path``), "" if unchanged.
    """

    file: str
    values: Mapping[str, str]
    volatile: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    path: str = ""

    @property
    def name(self) -> str:
        return Path(self.file).name

    @property
    def place(self) -> Path:
        """Its folder, relative to the implementation's."""
        return Path(self.file).parent

    @property
    def system(self) -> str:
        """The system in its name, "" if the name has another form than MLPerf's."""
        match = _FIELDS_NAME.fullmatch(self.name)
        return match[1] if match else ""

    def suffix(self, parameters: Mapping[str, Value]) -> str:
        """The suffix of an MLPerf config name, such as ``fp4``, without the switches that a trial turns off."""
        match = _FIELDS_NAME.fullmatch(self.name)
        off = {name.lower() for name, value in parameters.items() if equal(value, False)}
        parts = (match[2] or "").split("_") if match else []
        return "_".join(part for part in parts if part.lower() not in off)

    @property
    def stable(self) -> dict[str, str]:
        """The values that a sweep records: without volatile ones, and with secrets hidden."""
        return {
            name: HIDDEN if names_secret(name) else redact(value)
            for name, value in self.values.items()
            if name not in self.volatile and name.isidentifier()  # bash exports functions under special names
        }


def read_base(folder: Path, file: str, before: Sequence[str] = ()) -> BaseConfig:
    """The config ``file`` of the implementation in ``folder``, sourced in a clean shell after ``before``.

    file: a path in the folder, or a unique file name. Raises SetupError with what is missing.
    """
    path = _find(folder, file)
    first = [folder / name for name in before]
    try:
        sourced = _sourced(path, first)
    except SetupError as error:
        raise _windows_error([*first, path]) or error from error
    beside: list[Path] = []
    absent: list[str] = []
    for missing in _missing(sourced):
        candidates = [p for p in _tree(folder, missing.name) if p != path]
        if len(candidates) == 1:
            beside += candidates
        else:
            absent.append(missing.name)
    sourced = _sourced(path, first, beside) if beside else sourced
    if spoiled := [name for name, value in sourced.values.items() if value.endswith("\r")]:
        scripts = (file for file in _tree(folder, "*.sh") if re.search(rf"\b{spoiled[0]}=", _read(file)))
        raise _windows_error([*first, path, *beside, *scripts]) or SetupError(
            f"{path}: {spoiled[0]} ends with a carriage return"
        )
    later = _sourced(path, first, beside, another_day=True)
    return BaseConfig(
        file=str(path.relative_to(folder)),
        values=sourced.values,
        volatile=frozenset(n for n, value in sourced.values.items() if later.values.get(n) != value),
        beside=tuple(str(p.relative_to(folder)) for p in beside),
        absent=tuple(absent),
        path=sourced.path,
    )


def computed_from(folder: Path, base: BaseConfig, before: Sequence[str], kept: Mapping[str, str]) -> dict[str, str]:
    """The other exports of the config that change if these variables have other values.

    kept: variables that it exports, with other values. Empty if it cannot be sourced so. bash drops the whole line or
    branch of an assignment to a readonly variable, and any other statement in it; so the comparison is with a run that
    keeps the variables at their own values.
    """
    first, beside = ([folder / name for name in names] for names in (before, base.beside))
    try:
        with_kept, with_base = (
            _sourced(folder / base.file, first, beside, kept=values).values
            for values in (kept, {n: base.values[n] for n in kept})
        )
    except SetupError:  # it rejects those values
        return {}
    apart = {**kept, **dict.fromkeys(base.volatile, "")}
    return {n: v for n, v in base.values.items() if n not in apart and with_kept.get(n) != with_base.get(n)}


def recorded_base(folder: Path, file: str, before: Sequence[str], values: Mapping[str, str]) -> BaseConfig:
    """The config ``file`` as a sweep recorded it, with ``values``; its place and hidden values are the present ones.

    A config that can no longer be read is assumed to be at its recorded path.
    """
    try:
        now = read_base(folder, file, before)
    except SetupError:
        return BaseConfig(file=file, values=values)
    apart = {n: v for n, v in now.values.items() if n in now.volatile or values.get(n) == HIDDEN}
    return replace(now, values={**values, **apart})


def _windows_error(files: Sequence[Path]) -> SetupError | None:
    """The error for the first file with Windows line ends; None if there is none."""
    windows_file = next((file for file in files if file.is_file() and "\r\n" in _read(file)), None)
    if windows_file is None:
        return None
    return SetupError(
        f"{windows_file} has Windows line ends, which bash takes for a part of each value; remove them: "
        f"sed -i 's/\\r$//' {shlex.quote(str(windows_file))}"
    )


def _read(file: Path) -> str:
    return file.read_bytes().decode(errors="replace")  # line ends as they are


def _sourced(path: Path, first: Sequence[Path], beside: Sequence[Path] = (), **options: Any) -> Sourced:
    """``path`` sourced after files that it needs; a common file takes its system's name from its sourcing file."""
    if not beside:
        try:
            return source_files([*first, path], **options)
        except SetupError as error:
            if match := _UNSET.search(str(error)):
                missing = f"a file that exports {match[1]} and that workload.before names is sourced first"
                raise SetupError(f"{error}; where you set it in your shell, {missing}") from error
            raise
    with tempfile.TemporaryDirectory() as scratch:
        wrapper = Path(scratch) / path.name
        wrapper.write_text("\n".join([*source_lines([*first, *beside, path]), ""]), encoding="utf-8")
        return source_files([wrapper], **options)


def _find(folder: Path, file: str) -> Path:
    path = folder / file
    if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
        return path
    named = _tree(folder, glob.escape(Path(file).name))
    if len(named) == 1:
        return named[0]
    several = ", ".join(str(p.relative_to(folder)) for p in named)
    scripts = ", ".join(sorted(p.name for p in _configs(folder))[:12])
    hint = f"; which of {several}?" if named else f"; it holds {scripts}" if scripts else "; it holds no config_*.sh"
    outside = " (that file lies elsewhere: copy it there, beside what it sources)" if path.is_file() else ""
    raise SetupError(f"workload.base: {folder} holds no {file}{outside}{hint}")


def _tree(folder: Path, name: str) -> list[Path]:
    files = (p for p in folder.rglob(name) if p.is_file())
    return sorted(p for p in files if _SKIPPED.isdisjoint(p.relative_to(folder).parts))


def _missing(sourced: Sourced) -> list[Path]:
    """The bash files that were sourced but do not exist, by bash's messages."""
    matches = (_MISSING.search(line) for line in sourced.printed)
    return list(dict.fromkeys(Path(match["path"]) for match in matches if match))


def _configs(folder: Path) -> list[Path]:
    """The configs of systems, without the common ones that they source."""
    return [p for p in _tree(folder, "config_*.sh") if "common" not in p.name and p.name != "config_mounts.sh"]


def fitting_configs(folder: Path, system: str, nodes: int, gpus_per_node: int) -> list[str]:
    """Configs for this system by their names, or else for its number of nodes and GPUs; relative to ``folder``.

    Only a suggestion, because names may be wrong. DGXH100 and H100 are the same system.
    """
    configs = _configs(folder)
    names = {f"config_{dgx}{system.removeprefix('DGX')}" for dgx in ("", "DGX")} if system else set()
    matching = [p for p in configs if p.name.startswith(tuple(f"{name}{end}" for name in names for end in "_."))]
    shaped = [p for p in configs if f"_{nodes}x{gpus_per_node}x" in p.name]
    both = [p for p in matching if p in shaped]
    return [str(p.relative_to(folder)) for p in both or matching or shaped]


@dataclass(frozen=True, slots=True)
class Difference:
    """One variable with different values in two configs; None: not set there."""

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.name} = {self.after}"
        if self.after is None:
            return f"- {self.name} = {self.before}"
        return f"  {self.name}: {self.before} -> {self.after}"


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[Difference]:
    """The variables that change, by name. Equal numbers in different notation do not differ."""
    return [
        Difference(name, before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if not equal(before.get(name), after.get(name))
    ]


def equal(one: object, other: object) -> bool:
    """Whether two values are the same to a script: ``0.0004`` and ``4e-4``, ``1`` and ``True``."""
    if one is None or other is None:
        return one is other
    first, second = (_TRUTH.get(str(v).lower(), str(v)) for v in (one, other))
    if first == second:
        return True
    try:
        return float(first) == float(second)
    except ValueError:
        return False


_TRUTH = {"true": "1", "false": "0"}


# The machine's own config in a study's names: the parameters of trial 0, and their point in the space. Pure.


EVALS = ("VAL_CHECK_INTERVAL", "SKIP_EVALS")
"""A config's own eval schedule, which trial 0 keeps whatever the rules."""

TRAINING = ("LR", "MAX_STEPS", "WARMUP_STEPS")
"""Variables recorded of every training, tuned or not."""

SIZES = frozenset({*LAYOUT, "VP", "MINIBS", "GBS", "NODES"})
"""Parameters whose ranges never grow for a config, because they state what fits and what the rules allow."""


def starting_point(name: str, config: Record, space: Space, unread: Collection[str] = ()) -> Start:
    """The config ``name`` as trial 0 of a study with ``space``. Raises SetupError for invalid counts.

    unread: parameters that nothing reads; their values do not matter for the config's point.
    """
    single = (n for n, p in space.parameters.items() if not isinstance(p, LayoutParameter))
    searched = {usual_name(n, config.benchmark) for n in single}
    try:
        nodes, whole = config.nodes, config.count("GBS")
        parameters = _parameters(config, space, searched)
    except SetupError as error:
        raise SetupError(f"{name}: {error}") from error
    if space.varies_nodes:
        parameters["NODES"] = nodes
    # A warm-up may be given as a share of the steps.
    apart = {*EVALS, "WARMUP_STEPS", *({"NODES"} if space.varies_nodes else ()), *_following(searched, whole)}
    common = {n: v for n, v in parameters.items() if n not in apart}
    corner = space.corner()
    try:
        absent = space.conditions.absent(parameters)
        tuned = {
            n: corner[n] if n in unread else _coordinate(n, p, space, parameters)
            for n, p in space.parameters.items()
            if _searched(p) and n not in absent
        }
        _same_elsewhere(space, tuned, parameters)
    except OutsideError as error:
        return Start(name=name, parameters=parameters, inherited=common, outside=str(error))
    return Start(name=name, parameters=parameters, inherited=common, tuned=tuned)


def _parameters(config: Record, space: Space, searched: Collection[str]) -> dict[str, Value]:
    """The config's values of a study's parameters, training, layout and batch; unknown ones are left out.

    searched: our names of the parameters that the study tunes separately. A value under the tree's own name is not
    repeated under ours, because it would override every trial's.
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
    """A trial's values at a point of the space; values that the space leaves open come from the starting configuration.

    Includes the batch that follows, if MINIBS or a degree is tuned separately.
    """
    values = {**({} if begin is None else begin.inherited), **space.resolve(tuned)}
    usual = {usual_name(name): value for name, value in values.items()}
    if begin is None or "GBS" in usual or "GBS" not in begin.parameters or "MINIBS" not in usual:
        return values
    return {**values, "GBS": layout_of(usual).gbs(space.gpu_count(values))}


def _following(searched: Collection[str], whole: int | None) -> set[str]:
    """The config's batch variables that differ in every trial, because what they follow from is tuned.

    whole: the batch that the config states itself; None: it follows from MINIBS and the degrees.
    """
    if "GBS" in searched:
        return {"GBS", "MINIBS"}
    if {"TP", "PP", "CP", "MINIBS", "NODES"}.isdisjoint(searched):
        return set()
    return {"GBS"} if whole is None else {"MINIBS"} - {*searched}


class OutsideError(ValueError):
    """A config is not a point of a space, for the reason in the message."""


def _searched(parameter: Parameter) -> bool:
    return not isinstance(parameter, FixedParameter | DerivedParameter)


def _coordinate(name: str, parameter: Parameter, space: Space, parameters: Mapping[str, Value]) -> Value:
    """The config's coordinate on one axis of the space. Raises OutsideError."""
    if isinstance(parameter, LayoutParameter):
        for layout in space.layouts(name).layouts:
            if all(equal(v, parameters.get(n, NEUTRAL.get(n))) for n, v in parameter.values(layout).items()):
                return str(layout)
        return _own_layout(name, parameter, space, parameters)
    value = parameters.get(name)
    if isinstance(parameter, CategoricalParameter) and parameter.role in SWITCHES:  # its value becomes another choice
        return next((c for c in parameter.choices if equal(c, value)), parameter.choices[0] if value is None else value)
    if value is None:
        raise OutsideError(f"neither it nor a file of the implementation states {name}")
    if isinstance(parameter, CategoricalParameter):
        return next((c for c in parameter.choices if equal(c, value)), value)
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


def _own_layout(name: str, parameter: LayoutParameter, space: Space, parameters: Mapping[str, Value]) -> str:
    """The config's layout as an additional one of the space. Raises OutsideError if it does not fit the space's GPUs.

    Values that the space's layouts do not set are the config's own in every trial, and not part of it.
    """
    degrees = {n.lower(): int(parameters.get(n, NEUTRAL.get(n, 1))) for n in (*LAYOUT, "VP", "EP", "MINIBS")}
    degrees |= {n: v for n, v in {"sp": 0, "vp": 1, "ep": 1}.items() if getattr(parameter, n) == (v,)}
    layout = Layout(**degrees, nodes=int(parameters.get("NODES", 0)) if parameter.nodes else 0)
    gpus = space.gpu_count(parameters)
    whole = layout.gbs(gpus)
    if gpus % (layout.tp * layout.pp * layout.cp) or not whole or parameters.get("GBS", whole) != whole:
        stated = " ".join(f"{n}={parameters[n]}" for n in (*LAYOUT, "MINIBS", "GBS") if n in parameters)
        raise OutsideError(f"space.{name} does not offer its layout {stated}, which is none of {gpus} GPUs")
    return str(layout)


def _same_elsewhere(space: Space, tuned: Mapping[str, Value], parameters: Mapping[str, Value]) -> None:
    """Raise OutsideError if the study fixes or derives a different value for every trial."""
    resolved = holding(space, tuned).resolve(tuned)
    for name, parameter in space.parameters.items():
        if not _searched(parameter) and name in resolved and not equal(parameters.get(name), resolved[name]):
            candidates = parameters.get(name, "not set")
            raise OutsideError(f"{name} is {candidates} there and {resolved[name]} in every other trial")
