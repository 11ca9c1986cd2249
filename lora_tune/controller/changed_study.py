"""Whether a study's file still says what it said when its sweep began, and what to do where it does not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lora_tune.config.study import Study, parse_study, study_changes
from lora_tune.controller.conclusion import BELIEVED
from lora_tune.store.records import StudyRecords

_GOAL = re.compile(r"objective\.(?!curves\b)|workload\.benchmark\b")
"""What says which runs are good, and what is measured of them. Published curves only stop runs."""

_BUDGET = {"budget.trials": "--trials", "budget.parallel": "--parallel", "budget.node_hours": "--budget-node-hours"}
"""What a command line may change of a sweep's budget, without a change of its study."""


def changes_since(sweep: StudyRecords, file: Path, study: Study) -> Sequence[str]:
    """What ``study``, as its ``file`` says it now, says other than when the sweep began; a sentence each.

    By what is read from both texts today: the same text has another hash in a release that reads more keys of it.
    """
    if sweep.digest == study.digest:
        return ()
    return study_changes(parse_study(sweep.study_toml, file), study)


def lasting(changes: Sequence[str], sweep: StudyRecords) -> str:
    """Why nobody can accept these changes, or "": trials that have ended were judged by another goal.

    Their verdicts and times would stand beside those of trials that went for the new one, and be called the same.
    """
    goal = [change for change in changes if _GOAL.match(change)]
    if not goal or all(trial.verdict not in BELIEVED for trial in sweep.trials.values()):
        return ""
    return f"the results so far are by what it said before ({'; '.join(goal)})"


def remedy(changes: Sequence[str], study: Study) -> str:
    """What to do about a study that changed since its sweep began; of a budget alone, the option that changes it."""
    keys = [change.partition(":")[0] for change in changes]
    values = study.model_dump(mode="json")["budget"]
    if all(key in _BUDGET and values[key.partition(".")[2]] is not None for key in keys):
        options = " ".join(f"{_BUDGET[key]} {values[key.partition('.')[2]]:g}" for key in keys)
        return f"undo that and add {options} to the command, or take the file as it is with --accept-changes"
    return "undo that, use another --output, or resume with --accept-changes"
