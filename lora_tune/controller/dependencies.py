"""Everything outside that the driver speaks to, as it sees it."""

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
    """Time as the driver sees it; epoch seconds."""

    def now(self) -> float: ...

    def monotonic_now(self) -> float:
        """As ``now``, and never ahead of a clock that nobody sets: no time limit counted by it comes early.

        A job's start may be known by the clock as it was before somebody set it, or as it is since.
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
    """Somebody who watches. Neither call may fail the sweep."""

    def update(self, study: Study, sweep: StudyRecords, now: float) -> None: ...

    def line(self, text: str) -> None: ...


class Proposer(Protocol):
    """Who proposes and is told: the sampler of a sweep (``search.session``), or a race (``commands.confirm.race``).

    It is made from the records at each start and remembers nothing beyond them.
    """

    def ask(self) -> SearchPoint | str:
        """A proposal, or why there is none now, in words; with nothing open that ends the loop."""
        ...

    def report(self, number: int, evals: Sequence[Eval]) -> None:
        """All evals of a trial's newest attempt, of which some are new."""
        ...

    def tell(self, record: Trial) -> None: ...


@runtime_checkable
class Discards(Protocol):
    """A search that learns of a proposal of which no trial was made."""

    def discard(self, number: int) -> None:
        """The proposal of this number must fail, and is not run."""
        ...


class Projects(Protocol):
    """Who shows the records to other programs: ``projection.OptunaTables``."""

    def follow(self, sweep: StudyRecords) -> str:
        """Show what is new; returns why that failed, "" where it did not. Never raises: it comes after the records."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The driver's surroundings."""

    workload: Workload
    launcher: Launcher
    store: Records
    session: Proposer
    clock: Clock
    view: View
    requests: Requests | None = None
    projection: Projects | None = None
