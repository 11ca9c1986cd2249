"""Whether the machine's own config still is what a sweep's trials were compared with.

Every trial builds on that file, which others may edit or remove while a sweep goes on. The sweep has what it set on
record, with the trial that measured it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lora_tune.base.errors import InputError, SetupError
from lora_tune.config.holding import study_holding
from lora_tune.config.study import Study
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.workloads.base import Start, Starts, Workload, start
from lora_tune.workloads.base_config import differences

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
    begin = start(workload)
    if begin is None or not isinstance(workload, Starts):
        return ""
    try:
        now = workload.start_values()
    except SetupError as error:
        return str(error)
    return _words(begin.name, begin.values, now)


def departed(sweep: StudyRecords, workload: Workload) -> str:
    """What the config's files set otherwise than when the sweep measured it; "" for nothing, and where it did not."""
    base = base_trial(sweep)
    if base is None or not base.base_values or not isinstance(workload, Starts):
        return ""
    try:
        now = workload.start_values()
    except SetupError as error:
        return str(error)
    return _words(str(base.metrics.base), base.base_values, now)


def refuse_departed(sweep: StudyRecords, workload: Workload, remedy: str = REMEDY) -> None:
    """Raise InputError where trials from now on would build on another config than the one that trial 0 measured."""
    if sentence := departed(sweep, workload):
        raise InputError(f"{sentence}; {remedy}")


def _words(name: str, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    changes = [str(change).strip() for change in differences(before, now)]
    more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return f"{name} is not what this sweep began with: {', '.join(changes[:SHOWN])}{more}" if changes else ""
