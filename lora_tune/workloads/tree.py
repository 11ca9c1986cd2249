"""A folder of launch scripts as a workload: the variables that it sets and reads, and the user's own config."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from lora_tune.base.errors import SetupError
from lora_tune.config.parameters import TunedParameter
from lora_tune.config.study import Study
from lora_tune.config.tables import WorkloadTable
from lora_tune.mlperf.benchmark import LORA, check_name
from lora_tune.mlperf.gate import as_value
from lora_tune.mlperf.rulesets import rulesets, rulesets_with
from lora_tune.workloads.base import BY_THE_SITE, LAUNCH, Start, Value, Workload
from lora_tune.workloads.base_config import BaseConfig, read_base, recorded_base, starting_point
from lora_tune.workloads.implementation import (
    LIBRARY_PREFIXES,
    Implementation,
    files_reading,
    implementation_folder,
    read_implementation,
)
from lora_tune.workloads.record import ALIASES, SOME_ROUNDS, Record, record_of, spellings, usual_name
from lora_tune.workloads.script_needs import on_path

_RULESET = re.compile(r"MLPERF_RULESET:?[=-]\"?(\d+\.\d+\.\d+)")


class MlperfSettings(BaseModel):
    """Keys of ``[workload]`` for ``kind = "mlperf"``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    implementation: Path | None = Field(
        None, description="the implementation's folder; LORA_TUNE_IMPLEMENTATION when absent"
    )
    base: str | None = Field(
        None, description="the machine's own config in it, e.g. config_DGXH100_1x8x4xtp4pp1cp1.sh: trial 0 as it stands"
    )
    benchmark: Annotated[str, AfterValidator(check_name)] = Field(
        LORA, description="MLPerf benchmark whose rules the evals and the closed division follow"
    )
    script: str = Field("run.sub", description="the batch script in it")
    before: tuple[str, ...] = Field((), description="files in it to source before the config, e.g. env.sh")
    common: tuple[str, ...] = Field((), description="config files to source after config_common.sh, beside it")
    reads: Literal["folder", "container"] | tuple[str, ...] | None = Field(
        None,
        description='where the training code lies: "folder", or "container" (any variable may then have an effect), or '
        "names that it reads beside those found in the folder [found out]",
    )
    suffix: str = Field("", description="ends the config's name, before .sh [what ends the base's, e.g. fp4]")
    first_eval: int | None = Field(None, ge=1, description="samples before the first eval; open division only")
    eval_every: int | None = Field(None, ge=1, description="samples between evals; open division only")
    compliance: bool = Field(False, description="let run.sub call the compliance checker after each run")


class TreeWorkload(Workload):
    """Base class of workloads that run unchanged launch scripts. Reads the folder on first use."""

    Settings: ClassVar[type[MlperfSettings]] = MlperfSettings

    def __init__(self, study: Study, settings: MlperfSettings) -> None:
        self.study = study
        self.settings = settings
        self._recorded: tuple[str, Mapping[str, str]] = ("", {})

    @classmethod
    def stated_ruleset(cls, table: WorkloadTable, benchmark: str) -> str | None:
        """The value of MLPERF_RULESET in the launch script.

        None if that is not installed, or older than the benchmark, because some trees keep an old line; also None if
        the script or the study's table is unreadable, which is reported elsewhere.
        """
        try:
            settings = cls.Settings.model_validate(table.model_extra or {})
            script = implementation_folder(settings.implementation, settings.benchmark) / settings.script
            match = _RULESET.search(script.read_text(encoding="utf-8", errors="replace"))
        except (ValidationError, SetupError, OSError):
            return None
        known = rulesets_with(benchmark) or rulesets()  # a benchmark of another package is in no installed ruleset
        return match[1] if match and match[1] in known else None

    @functools.cached_property
    def base(self) -> BaseConfig | None:
        """The machine's own config, or as a sweep recorded it; None if there is none. Raises SetupError."""
        name, values = self._recorded
        if not (file := self.settings.base or name or self._usual_base()):
            return None
        folder, before = (
            implementation_folder(self.settings.implementation, self.settings.benchmark),
            self.settings.before,
        )
        return recorded_base(folder, file, before, values) if values else read_base(folder, file, before)

    def _usual_base(self) -> str:
        """The default base config, relative to the folder; "" for none."""
        return ""

    def as_recorded(self, name: str, values: Mapping[str, str]) -> Self:
        """The same workload with the base config as a sweep recorded it, even if its files changed or are gone.

        name, values: those of ``Start`` when the sweep began.
        """
        copy = type(self)(self.study, self.settings)
        copy._recorded = (name, dict(values))
        return copy

    def recorded_values(self, file: Path) -> Mapping[str, str] | None:
        """The exports of ``file`` when the sweep began, if it is the base config that the sweep recorded."""
        folder = implementation_folder(self.settings.implementation, self.settings.benchmark)
        if not self._recorded[1] or self.base is None or (folder / self.base.file).resolve() != file.resolve():
            return None
        return self.base.stable

    @functools.cached_property
    def implementation(self) -> Implementation:
        """The folder's present content. Raises SetupError if it does not exist."""
        settings = self.settings
        folder = implementation_folder(settings.implementation, settings.benchmark)
        base_values = None if self.base is None else self.base.values
        return read_implementation(
            folder, settings.script, settings.common, settings.before, settings.reads, base_values
        )

    def shell_values(self) -> dict[str, str]:
        """The environment of the launch script; a PATH extended by the base extends that of the starting shell."""
        path = "" if self.base is None else self.base.path
        search_path = os.environ.get("PATH", os.defpath)
        return {**self.implementation.values, **({"PATH": on_path(path, search_path)} if path else {})}

    @functools.cached_property
    def _start(self) -> Start | None:
        if self.base is None:
            return None
        start = starting_point(self.base.name, self.beneath, self.study.search_space, self.unread_switches())
        return replace(start, values=self.base.stable)

    @functools.cached_property
    def beneath(self) -> Record:
        """What trials modify: the base or common config, and the tree's defaults."""
        return self.record({})

    def record(self, stated: Mapping[str, Value]) -> Record:
        """The effective record of a trial that sets ``stated``; the site's environment takes precedence."""
        tree, space = self.implementation, self.study.search_space
        site = {name: as_value(text) for name, text in self.study.site.environment.items()}
        return record_of(
            {**stated, **site},
            tree.values,
            tree.literals,
            reads=() if tree.in_container else tree.reads,
            benchmark=self.settings.benchmark,
            site_nodes=space.nodes,
            gpus_per_node=space.gpus_per_node,
        )

    def unread_switches(self) -> tuple[str, ...]:
        """Switches, and tuned parameters that only some rounds have, that the folder does not read under any name.

        Trials do not set them. If the training code is in the container, a parameter of some rounds that no config
        of the folder exports counts as unread, unless the study says that the container reads it.
        """
        tree, benchmark, space = self.implementation, self.settings.benchmark, self.study.search_space
        tuned = (n for n, p in space.parameters.items() if isinstance(p, TunedParameter))
        some_rounds = [] if self.settings.reads == "container" else [n for n in tuned if usual_name(n) in SOME_ROUNDS]
        unread = (n for n in some_rounds if not tree.mentions(*spellings(benchmark, n)))
        switches = (n for n in space.switches() if tree.spelling((n, *ALIASES.get(n, ()))) is None)
        return tuple(dict.fromkeys([*switches, *unread]))

    def start(self) -> Start | None:
        """The base config as trial 0 measures it. Raises SetupError if it is unreadable."""
        return self._start

    def start_values(self) -> Mapping[str, str]:
        """The values that the base config's files set now, without volatile ones; empty without a base."""
        if (known := self.base) is None:
            return {}
        folder, before = (
            implementation_folder(self.settings.implementation, self.settings.benchmark),
            self.settings.before,
        )
        now = read_base(folder, known.file, before)
        return replace(now, volatile=now.volatile | known.volatile).stable

    @property
    def config_place(self) -> Path:
        """The folder where configs are sourced, relative to the implementation: next to the files that they source."""
        return Path(*self.implementation.common[:1]).parent if self.base is None else self.base.place

    def scripts_folder(self) -> Path:
        """The folder of launch scripts. Raises SetupError if it does not exist."""
        return self.implementation.folder

    def config_folder(self) -> Path:
        """The folder in it where configs are sourced."""
        return self.implementation.folder / self.config_place

    def values_of(self, file: Path) -> Mapping[str, str] | None:
        """The present exports of a config in the implementation's folder. Raises SetupError if sourcing fails."""
        root = self.implementation.folder
        if not file.is_relative_to(root):
            return None
        return read_base(root, str(file.relative_to(root)), self.settings.before).values

    def readers(self, names: Iterable[str]) -> dict[str, str]:
        """What reads each variable, in words; "" if nothing does."""
        tree, by_file = self.implementation, files_reading(self.implementation.folder)

        def reader(name: str) -> str:
            if name in by_file:
                more = f" and {len(by_file[name]) - 1} more" if len(by_file[name]) > 1 else ""
                return f"{by_file[name][0]}{more}"
            if name in BY_THE_SITE:
                return LAUNCH
            if name.startswith(LIBRARY_PREFIXES):
                return "a library in the container, as its name says"
            if name in tree.reads:
                return "the container, as workload.reads says"
            if tree.in_container:
                return "only the container can tell: the training code is not here"
            return "no file here; the config that it sources sets it" if name in tree.values else ""

        return {name: reader(name) for name in names}
