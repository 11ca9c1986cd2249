"""Types of the store's interface: leases, registrations, requests, remarks, and the driver's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lora_tune.store.records import Changes, StudyRecords

LEASE_SECONDS = 20.0
"""A lease that was not renewed for this long may be taken by another host."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The exclusive right to drive one sweep; ``token`` increases with every owner."""

    sweep: str
    owner: str
    token: int


@dataclass(frozen=True, slots=True)
class Held:
    """A lease as in the database. owner: "" if none. renewed_at: by its owner's clock."""

    owner: str = ""
    token: int = 0
    renewed_at: float = 0.0

    @property
    def who(self) -> str:
        """The owner for display, without the process start time and place that make it unique."""
        return self.owner.partition(" start ")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """Where a sweep is driven. cwd: working directory, for relative paths.

    options: overrides of the command line by section. ended: why it is over, "" while it is not.
    """

    name: str
    study_toml: str
    cwd: Path
    file: Path
    folder: Path
    options: Mapping[str, Mapping[str, Any]]
    ended: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a user to a sweep.

    number: its index among the sweep's requests. kind: a name of ``controller.steering.KINDS``. what: arguments of that
    kind. who: the user, as user@host. asked_at: epoch seconds. answered_at: likewise; None while unanswered.
    accepted: whether the driver did it. answer: what it did, or why it did not.
    """

    number: int = -1
    kind: str
    what: Mapping[str, Any]
    who: str
    asked_at: float
    answered_at: float | None = None
    accepted: bool = False
    answer: str = ""


SWEEP = -1
"""Trial number of remarks on the sweep itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One version of a remark.

    trial: its number, or SWEEP. version: from 1. who: as user@host. written_at: epoch seconds.
    """

    trial: int
    version: int
    text: str
    who: str
    written_at: float


class Records(Protocol):
    """The store's methods that a driver needs."""

    def load(self, name: str, known: StudyRecords | None = None) -> StudyRecords | None: ...

    def save(self, lease: Lease, changes: Changes, now: float) -> None: ...

    def rescue(self, path: Path, sweep: StudyRecords, now: float) -> None: ...
