"""What is driven: a study as its file says it, with what the command line or Python lay over it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_tune.base.errors import StudyError
from lora_tune.cli.options import sweep_paths
from lora_tune.config.kept_study import text_to_keep
from lora_tune.config.study import Study
from lora_tune.controller.runtime import DrivePlan
from lora_tune.controller.signatures import read_key
from lora_tune.workloads import load as load_workload

_MARK = re.compile(r"^\s*#.*\bEDIT:\s*(?P<what>.*\S)")


def mark_left(text: str) -> str:
    """What to do about the first comment in which ``init`` left ``EDIT`` in a study's text; "" where none is left."""
    for number, line in enumerate(text.splitlines(), start=1):
        if mark := _MARK.match(line):
            return f"line {number} still says EDIT: {mark['what']}; decide it, then delete the word EDIT"
    return ""


def refuse_marks(file: Path) -> None:
    """Raise StudyError where ``init`` left a decision to somebody who has not taken it."""
    if mark := mark_left(file.read_text(encoding="utf-8")):
        raise StudyError(file, "", mark)


def plan_of(
    file: Path,
    from_file: Study,
    options: Mapping[str, Mapping[str, Any]],
    output: Path | None = None,
    signing_key: Path | None = None,
) -> DrivePlan:
    """What is driven: the study as its file says it, and with ``options`` laid over its sections. Raises InputError."""
    study = from_file.with_options(options)
    return DrivePlan(
        file=file,
        text=text_to_keep(file.read_text(encoding="utf-8"), from_file, file),
        study=study,
        from_file=from_file,
        options=options,
        paths=sweep_paths(study.name, output),
        workload=load_workload(study, file),
        key=read_key(signing_key) if signing_key else None,
    )


def laid_over(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the command line lays over the study, by section; without what was not given."""
    laid = {
        "budget": {
            "trials": options["trials"],
            "parallel": options["parallel"],
            "node_hours": options["budget_node_hours"],
        },
        "site": {"launcher": options["launcher"]},
        "search": {"seed": options["seed"]},
    }
    return {
        part: known for part, values in laid.items() if (known := {k: v for k, v in values.items() if v is not None})
    }
