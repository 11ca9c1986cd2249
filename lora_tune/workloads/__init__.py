"""The kinds of trial program. ``load(study)`` gives the one that a study names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lora_tune.base.errors import StudyError
from lora_tune.config.study import Study, first_problem
from lora_tune.workloads.base import Workload

KINDS = {
    "peft": "lora_tune.workloads.recipe:PeftWorkload",
    "nemo": "lora_tune.workloads.recipe:NemoWorkload",
    "mlperf": "lora_tune.workloads.mlperf:MlperfWorkload",
    "mlperf_docker": "lora_tune.workloads.docker:DockerWorkload",
    "command": "lora_tune.workloads.command:CommandWorkload",
    "surface": "lora_tune.simulation.workload:SurfaceWorkload",
}
"""Workload kind -> module:class. A class has a pydantic model ``Settings`` and takes (study, settings)."""


def workload_class(kind: str) -> Any:
    """The class behind ``kind``; KeyError for an unknown one."""
    module, _, name = KINDS[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def load(study: Study, file: Path | str) -> Workload:
    """The study's workload, its own keys validated. Raises StudyError naming ``file`` and the key."""
    table = study.workload
    if table.kind not in KINDS:
        raise StudyError(file, "workload.kind", f"{table.kind!r} is unknown; one of {', '.join(sorted(KINDS))}")
    found = workload_class(table.kind)
    try:
        settings = found.Settings.model_validate(table.model_extra or {})
    except ValidationError as error:
        key, problem = first_problem(error, found.Settings)
        raise StudyError(file, f"workload.{key}", problem) from error
    try:
        workload: Workload = found(study, settings)
    except StudyError as error:  # a workload knows the study and not its file
        raise StudyError(file, error.key, error.problem) from error
    return workload
