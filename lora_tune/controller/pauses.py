"""When a job stood still: as its runner noted it, else as the driver saw it beside what the scheduler counts."""

from __future__ import annotations

from dataclasses import replace

from lora_tune.base.text import duration
from lora_tune.launchers.base import JobStatus
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.run import RunLog

UNPLACED_SECONDS = 4.0
"""Of its pauses that nobody places a trial may have so many: schedulers count whole seconds, and looks are seconds
apart."""


class SeenPauses:
    """Pauses of one job without a runner of ours, as the driver's looks show them; never longer than they were."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._goes_on = False

    def look(self, status: JobStatus, now: float) -> JobStatus:
        """The status with what was seen, where it names no pauses itself. now: epoch seconds of the look."""
        if status.paused:
            begin = self._spans.pop()[0] if self._goes_on else now
            self._spans.append((begin, now))
        self._goes_on = status.paused
        return status if status.pauses else replace(status, pauses=tuple(self._spans))


def placed(status: JobStatus) -> float:
    """For how many seconds the job stood still, of which is known when."""
    return sum(end - begin for begin, end in status.pauses)


def unplaced(status: JobStatus, run: RunLog, *, left_out: bool) -> Diagnosis | None:
    """Why the times of a run may hold a pause of its job, or None. left_out: the run is without those known to it."""
    known = max(status.paused_seconds, placed(status))
    rest = status.paused_seconds - run.paused_seconds if left_out else known
    if rest <= UNPLACED_SECONDS:
        return None
    return Diagnosis(
        FailureKind.CLOCK,
        f"its job stood still for {duration(known)} (suspended, or processes of it stopped), of which {duration(rest)} "
        "cannot be told from its training",
        "the trial is measured again; ask who suspends jobs there (scontrol suspend, preemption, gang scheduling, "
        "kill -STOP)",
    )


def suspended_words(status: JobStatus) -> str:
    """What a person should know of a job that stands still just now; "" for all others."""
    return (
        f"job {status.job_id} is suspended ({status.reason}): it goes on when it is resumed, and the time in between "
        "does not count"
        if status.paused
        else ""
    )
