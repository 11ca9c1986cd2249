"""Whether a study's file still says what it said when its sweep began, and what to do where it does not."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from lora_tune.base.errors import InputError, SetupError
from lora_tune.config.holding import study_holding
from lora_tune.config.study import Study, parse_study, study_changes
from lora_tune.controller.conclusion import PLAUSIBLE_VERDICTS
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.workloads.base import Start, Workload
from lora_tune.workloads.base_config import differences

# Whether the machine's own config still is what a sweep's trials were compared with.
#
# Every trial builds on that file, which others may edit or remove while a sweep goes on. The sweep has what it set on
# record, with the trial that measured it.

REMEDY = "put it back, use another --output, or resume with --accept-changes"
SHOWN = 4
"""Variables that a sentence names."""


def base_trial(sweep: StudyRecords) -> Trial | None:
    """The trial that measured the machine's own config as it stands; None where the study names none."""
    return next((t for t in sweep.trials.values() if t.metrics.base is not None and t.replicate_of is None), None)


def with_base(
    study: Study, sweep: StudyRecords, begin: Start | None = None, unread: Collection[str] = (), *, anew: bool = False
) -> Study:
    """The study with a space that holds the machine's own config as the sweep's records have it.

    begin: that config as trial 0 will measure it, for a sweep that has no trial yet, or ``anew``: none that counts.
    unread: switches that trials do not read, which are not swept.
    """
    measured = None if anew and begin is not None else base_trial(sweep)
    first = begin.tuned if begin is not None and (anew or not sweep.trials) else None
    return study_holding(study, first if measured is None else measured.tuned, unread)


def edited(workload: Workload) -> str:
    """What of the config's files has changed since the workload read them; "" for nothing, and where it has none."""
    begin = workload.start()
    if begin is None:
        return ""
    try:
        now = workload.start_values()
    except SetupError as error:
        return str(error)
    return _change_text(begin.name, begin.values, now)


def departed(sweep: StudyRecords, workload: Workload) -> str:
    """What the config's files set otherwise than when the sweep measured it; "" for nothing, and where it did not."""
    base = base_trial(sweep)
    if base is None or not base.base_values:
        return ""
    try:
        now = workload.start_values()
    except SetupError as error:
        return str(error)
    return _change_text(str(base.metrics.base), base.base_values, now)


def refuse_departed(sweep: StudyRecords, workload: Workload, remedy: str = REMEDY) -> None:
    """Raise InputError where trials from now on would build on another config than the one that trial 0 measured."""
    if sentence := departed(sweep, workload):
        raise InputError(f"{sentence}; {remedy}")


def _change_text(name: str, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    changes = [str(change).strip() for change in differences(before, now)]
    more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return f"{name} is not what this sweep began with: {', '.join(changes[:SHOWN])}{more}" if changes else ""


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


def unacceptable(changes: Sequence[str], sweep: StudyRecords) -> str:
    """Why nobody can accept these changes, or "": trials that have ended were judged by another goal.

    Their verdicts and times would stand beside those of trials that went for the new one, and be called the same.
    """
    goal = [change for change in changes if _GOAL.match(change)]
    if not goal or all(trial.verdict not in PLAUSIBLE_VERDICTS for trial in sweep.trials.values()):
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
