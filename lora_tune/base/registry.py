"""Registries of kinds by the names in study files: shipped ones, those of installed packages, and users' files.

To add a kind, an installed package declares an entry point in the registry's group, or a study names
``path/to/file.py:attribute``. docs/extending.md shows both for each group.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_tune.base.errors import InputError

if TYPE_CHECKING:
    from importlib import metadata


class Registry:
    """Looks kinds up by name, and imports them on use.

    group: entry point group of installed packages' kinds, such as ``lora_tune.launchers``. kind: name of a kind in
    messages, such as "launcher". shipped: this package's own kinds, name to ``module:attribute``. needs: required
    methods of the objects that a kind makes.
    """

    def __init__(self, group: str, kind: str, shipped: Mapping[str, str], needs: tuple[str, ...] = ()) -> None:
        self.group, self.kind, self._shipped, self._needs = group, kind, dict(shipped), needs
        self._files: dict[tuple[str, Path], Any] = {}
        self._outside: dict[str, str] = {}  # third-party modules -> the kind for which each was imported

    def names(self) -> tuple[str, ...]:
        """Every known name, shipped ones first."""
        return (*self._shipped, *sorted(e.name for e in self._installed() if e.name not in self._shipped))

    def known(self, name: str) -> str:
        """``name``, if it is known or a file, without importing it. Raises ValueError, which pydantic expects."""
        if name in self._shipped or self._is_file(name) or any(e.name == name for e in self._installed()):
            return name
        raise ValueError(self._unknown(name))

    def load(self, name: str) -> Any:
        """The object with this name, or in ``path/to/file.py:attribute`` relative to the working directory.

        Raises InputError if the name is unknown (the message proposes the nearest), its module fails, or lacks the
        attribute.
        """
        if name in self._shipped:
            module, _, attribute = self._shipped[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        if self._is_file(name):
            key = (name, Path.cwd())
            if key not in self._files:
                self._files[key] = self._from_file(name)
            return self._files[key]
        for entry in self._installed():
            if entry.name == name:
                return self._of_entry(entry)
        raise InputError(self._unknown(name))

    def make(self, name: str, factory: Any, *arguments: Any, **settings: Any) -> Any:
        """What ``factory`` of the kind ``name`` returns.

        Raises InputError if the factory is not callable, or its result lacks a required method.
        """
        if not callable(factory):
            raise InputError(f"{self.kind} {name!r} is {factory!r:.60}; name a class or a function that makes one")
        instance = factory(*arguments, **settings)
        lacking = next((method for method in self._needs if not callable(getattr(instance, method, None))), "")
        if not lacking:
            return instance
        code = getattr(factory, "__code__", None)
        where = f": {code.co_filename}, line {code.co_firstlineno}, in {code.co_name}" if code else ""
        raise InputError(
            f"{self.kind} {name!r} gives {instance!r:.60}, which has no {lacking}(){where}; return a {self.kind}"
        )

    def fault(self, error: BaseException) -> str:
        """Error text with the innermost line of a third-party kind's code that raised ``error``; "" if none did."""
        for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
            module = str(frame.f_globals.get("__name__", ""))
            kind = self._outside.get(module) or self._outside.get(module.partition(".")[0])
            if kind is not None:
                code = frame.f_code
                return f"{kind} fails: {code.co_filename}, line {line}, in {code.co_name}: {_reason(error)}"
        return ""

    def _installed(self) -> metadata.EntryPoints:
        from importlib import metadata  # takes as long to import as all of this package that --help needs

        return metadata.entry_points(group=self.group)

    def _of_entry(self, entry: metadata.EntryPoint) -> Any:
        package = entry.module.partition(".")[0]
        self._outside.setdefault(package, f"{self.kind} {entry.name!r}")
        try:
            return entry.load()
        except (Exception, SystemExit) as error:  # an imported module may raise anything
            where = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
            raise InputError(f"{self.kind} {entry.name!r} of {where} cannot be loaded: {_reason(error)}") from error

    @staticmethod
    def _is_file(name: str) -> bool:
        file, _, attribute = name.rpartition(":")
        return bool(file and attribute) and file.endswith(".py") and Path(file).is_file()

    def _from_file(self, name: str) -> Any:
        file, _, attribute = name.rpartition(":")
        path = Path(file)
        spec = importlib.util.spec_from_file_location(f"lora_tune_{self.kind.replace(' ', '_')}_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        self._outside[spec.name] = f"{self.kind} {name!r}"
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # a user's file may raise anything
            raise InputError(f"{self.kind} {name!r}: {path} cannot be loaded: {_reason(error)}") from error
        if not hasattr(module, attribute):
            raise InputError(f"{self.kind} {name!r}: {path} has no {attribute!r}; define it or name another")
        return getattr(module, attribute)

    def _unknown(self, name: str) -> str:
        file, _, attribute = name.rpartition(":")
        if attribute and file.endswith(".py"):
            return f"{self.kind} {name!r}: there is no file {file!r} in {Path.cwd()}, where this command runs"
        known = self.names()
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        return f"{self.kind} {name!r} is unknown{hint}; known are {', '.join(known)}, or path/to/file.py:name"


def _reason(error: BaseException) -> str:
    """The error with its type; the text of a SyntaxError includes file and line."""
    return f"{type(error).__name__}: {error}"


# All registries, one per key of a study file. To add a kind: docs/extending.md.


LAUNCHERS = Registry(
    "lora_tune.launchers",
    "launcher",
    {
        "local": "lora_tune.launchers.local:KIND",
        "slurm": "lora_tune.launchers.slurm.launcher:KIND",
        "outside": "lora_tune.launchers.outside:KIND",
    },
    needs=("submit", "poll", "cancel", "jobs_below"),
)
"""``site.launcher``: a :class:`lora_tune.launchers.base.LauncherKind`. "simulated" is in ``lora_tune_simulation``."""


def on_this_machine(launcher: str) -> bool:
    """Whether a launcher's jobs run only on this machine, so files must exist here. Raises InputError."""
    return bool(getattr(LAUNCHERS.load(launcher), "one_machine", False))


WORKLOADS = Registry(
    "lora_tune.workloads",
    "workload",
    {
        "mlperf": "lora_tune.workloads.mlperf:MlperfWorkload",
        "mlperf_docker": "lora_tune.workloads.docker:DockerWorkload",
        "command": "lora_tune.workloads.command:CommandWorkload",
    },
)
"""``workload.kind``: a class with a pydantic model ``Settings``, constructed from (study, settings). The trainers of
``lora_tune_recipes`` (peft, nemo, bridge) and the surface of ``lora_tune_simulation`` use entry points."""

SAMPLERS = Registry(
    "lora_tune.samplers",
    "sampler",
    {
        "auto": "lora_tune.search.samplers:AUTO",
        "tpe": "lora_tune.search.samplers:TPE",
        "random": "lora_tune.search.samplers:RANDOM",
        "requests": "lora_tune.search.samplers:REQUESTS",
        "gp": "lora_tune.search.samplers:GP",
        "cmaes": "lora_tune.search.samplers:CMAES",
        "grey_box": "lora_tune.search.samplers:GREY_BOX",
    },
    needs=("sample_relative", "sample_independent"),
)
"""``search.sampler``: a :class:`lora_tune.search.samplers.SamplerKind`."""

LOG_READERS = Registry(
    "lora_tune.log_readers",
    "log format",
    {
        "mllog": "lora_tune.logs.mllog:KIND",
        "hf_trainer": "lora_tune.logs.readers:HF_TRAINER",
        "jsonl": "lora_tune.logs.readers:JSONL",
        "regex": "lora_tune.logs.readers:REGEX",
        "named": "lora_tune.logs.readers:NAMED",
    },
    needs=("feed", "run"),
)
"""``workload.log.kind``: a :class:`lora_tune.logs.lines.ReaderKind`."""

OBJECTIVES = Registry(
    "lora_tune.objectives",
    "objective",
    {
        "time_to_target": "lora_tune.search.objectives:TimeToTarget",
        "mlperf_score": "lora_tune.search.objectives:MlperfScore",
        "throughput": "lora_tune.search.objectives:Throughput",
        "best_value": "lora_tune.search.objectives:BestValue",
        "final_value": "lora_tune.search.objectives:FinalValue",
        "node_hours": "lora_tune.search.objectives:NodeHours",
    },
    needs=("stop", "value", "measured"),
)
"""``objective.score`` and ``second``: a class constructed from a study, see
``lora_tune.search.objectives.Objective``."""


def fault(error: BaseException) -> str:
    """Error text for a third-party kind that raised ``error``; "" if none did."""
    registries = (LAUNCHERS, WORKLOADS, SAMPLERS, LOG_READERS, OBJECTIVES)
    return next((message for registry in registries if (message := registry.fault(error))), "")
