"""Any training script as a workload: a command line, its environment, and how its log is read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lora_tune.errors import StudyError
from lora_tune.layout import config_file_name
from lora_tune.mllog import LogReader
from lora_tune.paths import AttemptPaths
from lora_tune.readers import make_reader
from lora_tune.study import Study
from lora_tune.workloads.base import Export, Job, Proposal, Resources, Value
from lora_tune.workloads.config_file import render, value_text
from lora_tune.workloads.recipe import layout_of

_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


class CommandSettings(BaseModel):
    """Keys of ``[workload]`` for ``kind = "command"``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    argv: tuple[str, ...] = Field(
        min_length=1,
        description="the command, one string a word; {NAME} becomes a parameter's value, {folder} the attempt's folder",
    )
    environment: dict[str, str] = Field(default_factory=dict, description="further variables; {NAME} as in argv")
    cwd: Path | None = Field(None, description="working folder [where the sweep was started]")
    script: bool = Field(False, description="argv is an sbatch script with its arguments, submitted unchanged")
    log: dict[str, Any] = Field(
        default_factory=lambda: {"kind": "mllog"},
        description="how the output is read: kind = mllog, hf_trainer, jsonl or regex, and that kind's settings",
    )


class CommandWorkload:
    """Runs ``argv`` with every parameter in its environment."""

    Settings = CommandSettings

    def __init__(self, study: Study, settings: CommandSettings) -> None:
        self._study = study
        self._settings = settings
        self._check_places()
        self.reader()

    def _check_places(self) -> None:
        space = self._study.search_space
        known = {*space.resolve(space.corner()), *_OWN_NAMES}
        for text in (*self._settings.argv, *self._settings.environment.values()):
            for name in _PLACE.findall(text):
                if name not in known:
                    allowed = ", ".join(sorted(known))
                    raise StudyError(
                        f"study {self._study.name}", "workload", f"{{{name}}} is unknown; known are {allowed}"
                    )

    def job(self, proposal: Proposal, folder: Path) -> Job:
        """The command with its places filled. Parameters also arrive as environment variables."""
        values = self._values(proposal, folder)
        site = self._study.site
        return Job(
            name=f"{self._study.name}-{proposal.number:04d}-{proposal.attempt}",
            folder=folder,
            argv=tuple(fill(word, values) for word in self._settings.argv),
            environment=self._environment(values),
            cwd=self._settings.cwd,
            log=AttemptPaths(folder).log,
            resources=Resources(
                nodes=site.nodes, gpus_per_node=site.gpus_per_node, minutes=self._study.budget.trial_minutes
            ),
            script=self._settings.script,
        )

    def reader(self) -> LogReader:
        """The reader that ``log`` names."""
        settings = dict(self._settings.log)
        try:
            return make_reader(settings.pop("kind", "mllog"), **settings)
        except (TypeError, ValueError, KeyError) as error:
            raise StudyError(f"study {self._study.name}", "workload.log", str(error)) from error

    def export(self, proposal: Proposal, provenance: tuple[str, ...]) -> Export:
        """The environment as a config file, and the command to run under it."""
        site = self._study.site
        layout = layout_of(proposal.parameters)
        name = config_file_name(site.system, site.nodes, max(1, site.gpus_per_node), layout)
        values = self._values(proposal, Path())
        command = shlex.join(fill(word, values) for word in self._settings.argv)
        text = render(self._environment(values), comments=(*provenance, f"Run: source {name} && {command}"))
        return Export(files={name: text}, usage=f"source {name} && {command}")

    def _values(self, proposal: Proposal, folder: Path) -> dict[str, Value]:
        own: dict[str, Value] = {
            "SEED": proposal.seed,
            "TARGET": self._study.objective.target,
            "folder": str(folder),
            "NODES": self._study.site.nodes,
            "GPUS": self._study.search_space.gpus,
        }
        return {**own, **proposal.parameters}

    def _environment(self, values: Mapping[str, Value]) -> dict[str, str]:
        site = self._study.site
        named = {name: value_text(value) for name, value in values.items() if name != "folder"}
        return {**site.environment, **named, **{k: fill(v, values) for k, v in self._settings.environment.items()}}


_OWN_NAMES = ("SEED", "TARGET", "folder", "NODES", "GPUS")


def fill(text: str, values: Mapping[str, Value]) -> str:
    """``{NAME}`` replaced by the value's text; other braces stay. The result is one word, never a shell's."""
    return _PLACE.sub(lambda m: value_text(values[m[1]]) if m[1] in values else m[0], text)
