"""The kinds of trial program. ``load(study)`` returns a study's workload."""

from __future__ import annotations

from inspect import isabstract
from pathlib import Path

from pydantic import ValidationError

from lora_tune.base.errors import InputError, StudyError
from lora_tune.base.registry import WORKLOADS
from lora_tune.config.problems import first_problem
from lora_tune.config.study import Study
from lora_tune.workloads.base import Workload


def load(study: Study, file: Path | str) -> Workload:
    """The study's workload, with its own keys validated. Raises StudyError with ``file`` and the key."""
    table = study.workload
    try:
        workload_class = WORKLOADS.load(table.kind)
    except InputError as error:
        raise StudyError(file, "workload.kind", str(error)) from error
    is_workload = isinstance(workload_class, type) and issubclass(workload_class, Workload)
    if not is_workload or not hasattr(workload_class, "Settings") or isabstract(workload_class):
        needed = "extend lora_tune.workloads.base.Workload: a pydantic model Settings, job, reader, export"
        raise StudyError(file, "workload.kind", f"{table.kind!r} is {workload_class!r:.60}; {needed}")
    try:
        settings = workload_class.Settings.model_validate(table.model_extra or {})
    except ValidationError as error:
        key, problem = first_problem(error, workload_class.Settings)
        raise StudyError(file, f"workload.{key}", problem) from error
    try:
        workload: Workload = workload_class(study, settings)
    except StudyError as error:  # a workload does not know the study's file
        raise StudyError(file, error.key, error.problem) from error
    return workload
