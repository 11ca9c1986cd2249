"""Simulated trials: nothing runs, a surface says what the log would be. For ``launcher = "simulated"``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from lora_tune.base.paths import AttemptPaths
from lora_tune.config.layout import config_file_name, layout_of
from lora_tune.config.study import Study
from lora_tune.launchers.simulated import SHIPPED
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import LogReader
from lora_tune.workloads.base import Export, Job, Proposal, Resources
from lora_tune.workloads.config_file import render
from lora_tune.workloads.mlperf_names import PROBE_STEPS
from lora_tune.workloads.record import Record

PARAMETERS = "parameters.json"
"""File of a job that holds its parameters and seed, for the launcher."""


class SurfaceSettings(BaseModel):
    """Keys of ``[workload]`` for ``kind = "surface"``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    surface: str = Field(description=f"path/to/module.py:function, or a shipped one: {', '.join(SHIPPED)}")
    cluster_nodes: int | None = Field(None, ge=1, description="nodes of the simulated cluster [enough for parallel]")
    queue_minutes: float = Field(0, ge=0, description="mean wait of a job in the queue beside waiting for nodes")
    node_failures_per_1000_hours: float = Field(0, ge=0, description="failures of one node in 1,000 hours of running")
    preemptions_per_1000_hours: float = Field(0, ge=0, description="preemptions of a job in 1,000 hours of running")


class SurfaceWorkload:
    """Trials of a surface."""

    Settings = SurfaceSettings
    ends_probes: ClassVar[bool] = True

    def __init__(self, study: Study, settings: SurfaceSettings) -> None:
        self._study = study
        self._settings = settings

    def job(self, proposal: Proposal, folder: Path) -> Job:
        """A job whose only file says what is simulated."""
        record = {"parameters": dict(self.written(proposal)), "seed": proposal.seed}
        site = self._study.site
        return Job(
            name=self._study.job_name(proposal.number, proposal.attempt),
            folder=folder,
            files={PARAMETERS: json.dumps(record, indent=1) + "\n"},
            argv=("simulated", self._settings.surface),
            log=AttemptPaths(folder).log,
            resources=Resources(
                nodes=self._nodes(proposal), gpus_per_node=site.gpus_per_node, minutes=self._study.budget.trial_minutes
            ),
        )

    def written(self, proposal: Proposal) -> Record:
        """What is simulated. A probe ends after two blocks, each with its eval.

        A block is as long as in MLPerf's probes, where VAL_CHECK_INTERVAL does not say how long.
        """
        parameters = dict(proposal.parameters)
        if proposal.probe:
            batch = int(parameters.get("GBS", 1))
            block = int(parameters.get("VAL_CHECK_INTERVAL") or PROBE_STEPS * batch)
            steps = math.ceil(block / batch)
            parameters |= {"MAX_STEPS": 2 * steps, "VAL_CHECK_INTERVAL": block, "SKIP_EVALS": 0}
        return Record(stated=parameters)

    def _nodes(self, proposal: Proposal) -> int:
        return self._study.search_space.node_count(proposal.parameters)

    def reader(self, proposal: Proposal | None = None) -> LogReader:
        """Surfaces print MLLOG."""
        return MllogReader()

    def export(self, proposal: Proposal, provenance: tuple[str, ...]) -> Export:
        """The configuration as exports, with a comment that it was only simulated."""
        site = self._study.site
        layout = layout_of(proposal.parameters)
        name = config_file_name(site.system, self._nodes(proposal), max(1, site.gpus_per_node), layout)
        notes = (*provenance, f"found on the simulated surface {self._settings.surface}, not on a machine")
        return Export(files={name: render(proposal.parameters, comments=notes)}, usage=f"source {name}")
