"""Whether a study's file has changed since its sweep began, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from lora_tune.base.errors import InputError, SetupError
from lora_tune.config.holding import with_extended_space
from lora_tune.config.study import Study, parse_study, study_changes
from lora_tune.controller.conclusion import PLAUSIBLE_VERDICTS
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.workloads.base import Start, Workload
from lora_tune.workloads.base_config import differences

# Whether the machine's own config is still the one that a sweep's trials were compared with.
#
# Every trial builds on that file, which may be edited or removed during a sweep. The sweep records its values with the
# trial that measured it.

REMEDY = "put it back, use another --output, or resume with --accept-changes"
SHOWN = 4
"""Most variables in a sentence."""


def base_trial(sweep: StudyRecords) -> Trial | None:
    """The trial that measured the unchanged base config; None if the study names none."""
    return next((t for t in sweep.trials.values() if t.metrics.base is not None and t.replicate_of is None), None)


def with_base(
    study: Study, sweep: StudyRecords, begin: Start | None = None, unread: Collection[str] = (), *, anew: bool = False
) -> Study:
    """The study with a space that contains the base config as recorded by the sweep.

    begin: that config as trial 0 will measure it, for a sweep without a trial, or ``anew``: without one that counts.
    unread: switches that trials do not read, which are not tuned.
    """
    measured = None if anew and begin is not None else base_trial(sweep)
    first = begin.tuned if begin is not None and (anew or not sweep.trials) else None
    return with_extended_space(study, first if measured is None else measured.tuned, unread)


def edited(workload: Workload) -> str:
    """Changes of the config's files since the workload read them; "" for none, or without a config."""
    begin = workload.start()
    if begin is None:
        return ""
    try:
        now = workload.start_values()
    except SetupError as error:
        return str(error)
    return _change_text(begin.name, begin.values, now)


def departed(sweep: StudyRecords, workload: Workload) -> str:
    """Changes of the config's files since the sweep measured it; "" for none, or if it did not."""
    base = base_trial(sweep)
    if base is None or not base.base_values:
        return ""
    try:
        now = workload.start_values()
    except SetupError as error:
        return str(error)
    return _change_text(str(base.metrics.base), base.base_values, now)


def refuse_departed(sweep: StudyRecords, workload: Workload, remedy: str = REMEDY) -> None:
    """Raise InputError if new trials would build on another config than the one that trial 0 measured."""
    if sentence := departed(sweep, workload):
        raise InputError(f"{sentence}; {remedy}")


def _change_text(name: str, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    changes = [str(change).strip() for change in differences(before, now)]
    more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return f"{name} is not what this sweep began with: {', '.join(changes[:SHOWN])}{more}" if changes else ""


_GOAL = re.compile(r"objective\.(?!curves\b)|workload\.benchmark\b")
"""Keys that define which runs are good, and what is measured; not published curves, which only stop runs."""

_BUDGET = {"budget.trials": "--trials", "budget.parallel": "--parallel", "budget.node_hours": "--budget-node-hours"}
"""Budget keys that command-line options may change without a change of the study."""


def changes_since(sweep: StudyRecords, file: Path, study: Study) -> Sequence[str]:
    """Differences between ``study``, as in its ``file`` now, and the sweep's recorded study; a sentence each.

    Both texts are parsed by this release, because a release that reads more keys gives the same text another hash.
    """
    if sweep.digest == study.digest:
        return ()
    return study_changes(parse_study(sweep.study_toml, file), study)


def unacceptable(changes: Sequence[str], sweep: StudyRecords) -> str:
    """Why these changes cannot be accepted, or "": finished trials were judged by another goal.

    Their verdicts and times are not comparable with those of trials under the new goal.
    """
    goal = [change for change in changes if _GOAL.match(change)]
    if not goal or all(trial.verdict not in PLAUSIBLE_VERDICTS for trial in sweep.trials.values()):
        return ""
    return f"the results so far are by what it said before ({'; '.join(goal)})"


def remedy(changes: Sequence[str], study: Study) -> str:
    """What to do about a changed study; for changes of the budget alone, the option that makes them."""
    keys = [change.partition(":")[0] for change in changes]
    values = study.model_dump(mode="json")["budget"]
    if all(key in _BUDGET and values[key.partition(".")[2]] is not None for key in keys):
        options = " ".join(f"{_BUDGET[key]} {values[key.partition('.')[2]]:g}" for key in keys)
        return f"undo that and add {options} to the command, or take the file as it is with --accept-changes"
    return "undo that, use another --output, or resume with --accept-changes"
