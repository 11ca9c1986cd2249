"""MLPerf implementations that start their own container: ``run_with_docker.sh`` of AMD's and partners' trees.

The script looks for ``config_${DGXSYSTEM}.sh`` in its own folder and passes only the variables that this file exports
to the container. A trial therefore has an unchanged copy of the launch scripts in its folder, with its config; the
implementation's folder is only read. It runs on one node, by Slurm or on a bare host.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from lora_tune.base.errors import SetupError, StudyError
from lora_tune.base.paths import AttemptPaths
from lora_tune.base.registry import on_this_machine
from lora_tune.config.study import Study
from lora_tune.workloads.base import Export, Job, Proposal, Resources, some_proposal
from lora_tune.workloads.config_file import render, value_text
from lora_tune.workloads.implementation import config_files, implementation_folder
from lora_tune.workloads.mlperf import MlperfWorkload, about_base, same_machine, takes_changes
from lora_tune.workloads.run_sub import exported
from lora_tune.workloads.script_needs import script_warnings
from lora_tune.workloads.tree import MlperfSettings

ENGINE = "docker"
"""The command that the scripts call; the package ``podman-docker`` provides it, too."""

_CONFIG_PLACE = re.compile(r"^readonly _config_file=\"?(?:\./)?([\w./-]*?)config_\$\{?DGXSYSTEM", re.MULTILINE)


class DockerSettings(MlperfSettings):
    """Keys of ``[workload]`` for ``kind = "mlperf_docker"``."""

    script: str = Field("run_with_docker.sh", description="the launch script in it")
    base: str | None = Field(
        None,
        description="the config that trials start from, e.g. config_MI355X_1x8x1.sh [the folder's one for the system]",
    )


class DockerWorkload(MlperfWorkload):
    """Trials of ``run_with_docker.sh``. The script chooses the seeds; the log's ``seed`` is authoritative."""

    Settings = DockerSettings
    engine = ENGINE

    def __init__(self, study: Study, settings: DockerSettings) -> None:
        super().__init__(study, settings)
        self._docker = settings
        if study.search_space.nodes > 1 or study.search_space.varies_nodes:
            raise StudyError(
                f"study {study.name}", "site.nodes", f"{settings.script} runs on the one node where it starts; set 1"
            )

    def _usual_base(self) -> str:
        """The folder's only config for the system."""
        return base_for(
            implementation_folder(self._docker.implementation, self._docker.benchmark), self.study.site.system
        )

    @functools.cached_property
    def _script(self) -> str:
        return (self.implementation.folder / self._docker.script).read_text(encoding="utf-8", errors="replace")

    def job(self, proposal: Proposal, folder: Path) -> Job:
        """The attempt's config, the launch scripts next to it, and the script with its exact environment."""
        site, tree = self.study.site, self.implementation.folder
        name = self.study.job_name(proposal.number, proposal.attempt)
        exports = self.exports(proposal)
        place = _CONFIG_PLACE.search(self._script)
        logs = site.log_folder / name if site.log_folder else folder / "results"
        environment = {
            **self.shell_values(),
            **{key: value_text(value) for key, value in exports.items()},
            "DGXSYSTEM": self.file_name(proposal).removeprefix("config_").removesuffix(".sh"),
            "SEED": str(proposal.seed),
            "NEXP": str(proposal.replicates),
            "LOGDIR": str(logs),
            "CHECK_COMPLIANCE": str(int(self.settings.compliance)),
            **self.places(),
            **site.environment,
        }
        return Job(
            name=name,
            folder=folder,
            files={
                **{file.name: file.read_text(encoding="utf-8", errors="replace") for file in _launch_scripts(tree)},
                f"{place[1] if place else ''}{self.file_name(proposal)}": render(exports, before=self.sources()),
            },
            argv=("bash", self._docker.script),
            environment=environment,
            secrets=site.secrets,
            cwd=folder,
            contained=False,
            log=AttemptPaths(folder).log,
            run_logs=tuple(logs / f"result_{i}.txt" for i in range(proposal.replicates)),
            resources=Resources(
                nodes=self.nodes(proposal), gpus_per_node=site.gpus_per_node, minutes=float(self._walltime(proposal))
            ),
        )

    def check(self) -> list[str]:
        """Check the implementation's folder, its image and data, and on a bare host the container engine.

        Raises SetupError if one is missing; returns a sentence for each possible problem.
        """
        job = self.job(some_proposal(self.study), Path("/tmp/check"))
        for name, key in (("CONT", "container"), ("DATADIR", "data")):
            if not job.environment.get(name):
                raise SetupError(
                    f"{name} is not set, and {self._docker.script} needs it; set site.{key}, or export {name}"
                )
        if on_this_machine(self.study.site.launcher) and shutil.which(ENGINE) is None:
            raise SetupError(
                f"{ENGINE} is not on PATH, and {self._docker.script} calls it; install Docker, or podman-docker"
            )
        same_machine(self)
        takes_changes(self)
        warnings = script_warnings(self.implementation.folder / self._docker.script, job.environment)
        return [*about_base(self), *warnings]

    def known_places(self) -> Mapping[str, str]:
        """As of ``run.sub``; the scripts mount two subfolders of DATADIR, data and model."""
        known = super().known_places()
        return {"MODEL": known["DATADIR"], **known} if "DATADIR" in known else known

    def export(self, proposal: Proposal, provenance: tuple[str, ...]) -> Export:
        """The config as a file next to the base config, which it sources from its own folder."""
        return exported(self, proposal, provenance, submit=f"bash {self._docker.script}")


def base_for(folder: Path, system: str) -> str:
    """A folder's config for ``system``, or its only one, relative to it.

    Raises SetupError with the existing configs if the choice is ambiguous.
    """
    configs = [file for file in config_files(folder) if "common" not in file.name] if folder.is_dir() else []
    of_system = [file for file in configs if file.name.startswith(f"config_{system}_")]
    for candidates in (of_system, configs):
        if len(candidates) == 1:
            return str(candidates[0].relative_to(folder))
    names = ", ".join(str(file.relative_to(folder)) for file in configs) or "none"
    raise SetupError(f'{folder}: which config do trials start from? workload.base = "..."; there are: {names}')


def _launch_scripts(tree: Path) -> list[Path]:
    """The shell scripts that the launch script may call in its folder."""
    return [file for file in sorted(tree.glob("*.sh")) if not file.name.startswith("config_")]
