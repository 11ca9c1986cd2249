"""Workloads of the shipped trainers: ``peft``, ``nemo`` and ``bridge``.

A trial is a config file of exports and the recipe's module. The attempt's config file has the same form as the
exported one, so the exported file is what was measured.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from lora_tune.base.errors import SetupError, StudyError
from lora_tune.base.paths import AttemptPaths
from lora_tune.base.registry import OBJECTIVES, on_this_machine
from lora_tune.config.layout import config_file_name, layout_of
from lora_tune.config.study import Study
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import LogReader
from lora_tune.workloads.base import (
    BY_THE_SITE,
    LAUNCH,
    Export,
    Job,
    Proposal,
    Resources,
    SlotTerms,
    Value,
    Workload,
    missing_paths,
    reader_of,
)
from lora_tune.workloads.config_file import render, value_text
from lora_tune_recipes.kept_worker import kept_worker
from lora_tune_recipes.pack_gain import packing_warnings
from lora_tune_recipes.peft_refusals import refuse_in_packs, refuse_without_library

TINY_UNTRAINED = 1.8634
"""Eval loss of the shipped tiny base on the shipped text before training (checked by a test)."""

_RUN_UNDER_CONFIG = 'source "$0" && exec "$@"'


class RecipeSettings(BaseModel):
    """Keys of ``[workload]`` for the shipped recipes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: int = Field(1, ge=1, description="CPU threads of one process")
    warm_worker: bool = Field(
        False, description="trials on this machine share one process's imports: a warm worker runs while the sweep does"
    )


class PeftSettings(RecipeSettings):
    """Keys of ``[workload]`` of kind ``peft``."""

    save_adapter: bool = Field(
        False, description="keep each trial's adapter, in peft's format, in the folder of its attempt"
    )


class RecipeWorkload(Workload):
    """Runs ``python -m <module>``, one process per GPU under torchrun if there are several."""

    module: ClassVar[str]
    imports: ClassVar[str]
    """The module that a warm worker imports in advance."""
    packed: ClassVar[str | None] = None
    """The module that trains several trials in one process; None if there is none."""
    ends_probes: ClassVar[bool] = True
    Settings: ClassVar[type[RecipeSettings]] = RecipeSettings

    def __init__(self, study: Study, settings: RecipeSettings) -> None:
        self._study = study
        self._settings = settings
        self._site = study.site
        if (nodes := study.search_space.most_nodes) > 1:
            problem = (
                f'trials of {nodes} nodes, and this recipe starts its processes on one; use 1, or kind = "command"'
            )
            raise StudyError(f"study {study.name}", "site.nodes", problem)
        if study.site.slots is not None and (self.packed is None or study.site.nodes * study.site.gpus_per_node > 1):
            problem = 'allowed is workload.kind "peft" on at most one GPU a trial (site.gpus_per_node = 1); take it out'
            raise StudyError(f"study {study.name}", "site.slots", problem)

    def check(self) -> list[str]:
        """One sentence for each path of the site (data, model, container, mounts) that is not visible here.

        Raises SetupError instead if trials run on this machine.
        """
        site = self._site
        named = {"site.data": site.data, "site.model": site.model, "site.container": site.container}
        named |= {f"site.container_mounts.{i}": m.split(":")[0] for i, m in enumerate(site.container_mounts)}
        # Relative paths are relative to the working folder; a container may be a registry's image.
        places = {key: str(value) for key, value in named.items() if value}
        doubts = missing_paths(places)
        if doubts and on_this_machine(site.launcher):
            raise SetupError(doubts[0])
        return doubts

    def job(self, proposal: Proposal, folder: Path) -> Job:
        """A job in which ``bash`` sources the attempt's config file and execs the recipe."""
        name = self._file_name(proposal)
        attempt = AttemptPaths(folder)
        values = self._values(proposal) | self._of_attempt(folder)
        return Job(
            name=self._study.job_name(proposal.number, proposal.attempt),
            folder=folder,
            files={name: render(values)},
            argv=("bash", "-euc", _RUN_UNDER_CONFIG, str(folder / name), *self._command()),
            slot=self._slot(values),
            environment=dict(self._site.environment),
            secrets=self._site.secrets,
            log=attempt.log,
            resources=Resources(
                gpus_per_node=self._site.gpus_per_node,
                minutes=self._study.budget.trial_minutes,
            ),
        )

    def beside(self, folder: Path) -> AbstractContextManager[None]:
        """The sweep's warm worker, if the study asks for one and trials run on this machine; else a no-op."""
        site = self._site
        if not self._settings.warm_worker or site.slots is not None or not on_this_machine(site.launcher):
            return contextlib.nullcontext()
        return kept_worker(folder, self.imports, site.python)

    def readers(self, names: Iterable[str]) -> dict[str, str]:
        """What reads each variable, in words; "" if nothing does."""
        known = _recipe_variables()
        return {n: "the recipe" if n in known else LAUNCH if n in BY_THE_SITE else "" for n in names}

    def _of_attempt(self, folder: Path) -> dict[str, Value]:
        """Variables of the attempt that are not exported with its configuration."""
        return {}

    def _slot(self, values: Mapping[str, Value]) -> SlotTerms | None:
        if self._site.slots is None or self.packed is None:
            return None
        knobs = {name: value_text(value) for name, value in values.items()}
        return SlotTerms(argv=(self._site.python or sys.executable, "-m", self.packed), knobs=knobs)

    def reader(self, proposal: Proposal | None = None) -> LogReader:
        """A reader of MLLOG, which the recipes print."""
        return reader_of(self._study, MllogReader())

    def export(self, proposal: Proposal, provenance: tuple[str, ...]) -> Export:
        """The config file and its command line."""
        name = self._file_name(proposal)
        command = " ".join(self._command(python="python"))
        text = render(self._values(proposal), comments=(*provenance, f"Run: source {name} && {command}"))
        return Export(files={name: text}, usage=f"source {name} && {command}")

    def _file_name(self, proposal: Proposal) -> str:
        site = self._site
        return config_file_name(site.system, 1, max(1, site.gpus_per_node), layout_of(proposal.parameters))

    def _command(self, python: str | None = None) -> tuple[str, ...]:
        interpreter = python or self._site.python or sys.executable
        processes = self._site.gpus_per_node
        if processes <= 1:
            return (interpreter, "-m", self.module)
        launch = ("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
        return (interpreter, "-m", *launch, "-m", self.module)

    def _values(self, proposal: Proposal) -> dict[str, Value]:
        site = self._site
        # The recipes compute GBS from MINIBS and the layout and do not read it.
        values: dict[str, Value] = {name: value for name, value in proposal.parameters.items() if name != "GBS"}
        values |= {
            "SEED": proposal.seed,
            "TARGET": self._study.target,
            "THREADS": self._settings.threads,
            "CONFIG_FILENAME": self._file_name(proposal),
            "DGXSYSTEM": site.system,
            "DGXNNODES": 1,
            "DGXNGPU": max(1, site.gpus_per_node),
        }
        if site.data is not None:
            values["DATADIR"] = str(site.data.resolve())  # absolute, because each job has its own working folder
        if site.model is not None:
            values["MODEL"] = str(site.model.resolve())
        if proposal.probe:
            values["PROBE"] = 1
        return values


@functools.cache
def _recipe_variables() -> frozenset[str]:
    """All quoted capital names in the recipes' sources, read as text, because importing them imports torch."""
    names: set[str] = set()
    waiting = [resources.files("lora_tune_recipes")]
    while waiting:
        for entry in waiting.pop().iterdir():
            if entry.is_dir():
                waiting.append(entry)
            elif entry.name.endswith(".py"):
                names |= set(re.findall(r"\"([A-Z][A-Z0-9_]+)\"", entry.read_text(encoding="utf-8")))
    return frozenset(names)


class PeftWorkload(RecipeWorkload):
    """transformers + peft + accelerate; by default the shipped tiny task."""

    module = "lora_tune_recipes.peft_lora"
    imports = "lora_tune_recipes.training"
    packed = "lora_tune_recipes.packed_lora"
    Settings = PeftSettings

    def __init__(self, study: Study, settings: PeftSettings) -> None:
        super().__init__(study, settings)
        self._save_adapter = settings.save_adapter
        if study.site.slots is not None:
            refuse_in_packs(study)
        target = study.target
        shipped = (
            study.site.model is None and study.site.data is None and not {"SEQ", "EVAL_SAMPLES"} & set(study.space)
        )
        if shipped and OBJECTIVES.load(study.objective.score).has_target and target >= TINY_UNTRAINED:
            problem = f"{target:g} is met before training: the untrained base has {TINY_UNTRAINED:g}; give a lower one"
            raise StudyError(f"study {study.name}", "objective.target", problem)

    def check(self) -> list[str]:
        """As for any recipe, plus missing libraries of the space, and packing that gains nothing."""
        if on_this_machine(self._site.launcher) and self._site.python is None:
            refuse_without_library(self._study)
        return [*super().check(), *packing_warnings(self._study)]

    def _of_attempt(self, folder: Path) -> dict[str, Value]:
        return {"SAVE_ADAPTER": str(folder / "adapter")} if self._save_adapter else {}


class NemoWorkload(RecipeWorkload):
    """NVIDIA NeMo 2."""

    module = "lora_tune_recipes.nemo_lora"
    imports = "lora_tune_recipes.nemo.trial"


class BridgeWorkload(RecipeWorkload):
    """NVIDIA Megatron-Bridge, which MLPerf v6.0's implementation trains with."""

    module = "lora_tune_recipes.bridge_lora"
    imports = "lora_tune_recipes.bridge.trial"
