"""The driver's external dependencies, as interfaces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lora_tune.base.host import steady
from lora_tune.config.study import Study
from lora_tune.launchers.base import Launcher
from lora_tune.logs.run import Eval
from lora_tune.store import Records
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.workloads.base import Workload

if TYPE_CHECKING:
    from lora_tune.search.session import SearchPoint
    from lora_tune.store.requests import Requests


class Clock(Protocol):
    """The driver's clock; epoch seconds."""

    def now(self) -> float: ...

    def monotonic_now(self) -> float:
        """``now``, at most the start time plus the monotonic clock, so that no clock jump triggers a time limit early.

        The smaller of the two, because a job's start may be known by the clock from before or after a change.
        """
        ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """This machine's clock."""

    def __init__(self) -> None:
        self._began = time.time() - steady()

    def now(self) -> float:
        return time.time()

    def monotonic_now(self) -> float:
        return min(self.now(), self._began + steady())

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class View(Protocol):
    """A display of the sweep. Neither call may make the sweep fail."""

    def update(self, study: Study, sweep: StudyRecords, now: float) -> None: ...

    def line(self, text: str) -> None: ...


class Proposer(Protocol):
    """The source of proposals: the sampler of a sweep (``search.session``), or a race (``commands.confirm.race``).

    It is restored from the records at each start and keeps no other state.
    """

    def ask(self) -> SearchPoint | str:
        """A proposal, or why there is none now; with nothing open that ends the loop."""
        ...

    def report(self, number: int, evals: Sequence[Eval]) -> None:
        """All evals of a trial's newest attempt, of which some are new."""
        ...

    def tell(self, record: Trial) -> None: ...


@runtime_checkable
class Discards(Protocol):
    """A search that is notified of proposals for which no trial is created."""

    def discard(self, number: int) -> None:
        """The proposal of this number is doomed, and not run."""
        ...


class Projects(Protocol):
    """Publishes the records to other programs: ``projection.OptunaTables``."""

    def follow(self, sweep: StudyRecords) -> str:
        """Publish new records; returns why that failed, "" if it did not. Never raises, as the records are safe."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The driver's external dependencies."""

    workload: Workload
    launcher: Launcher
    store: Records
    session: Proposer
    clock: Clock
    view: View
    requests: Requests | None = None
    projection: Projects | None = None
