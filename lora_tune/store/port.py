"""What a store hands over and takes: leases, registrations, what people ask and write, what a driver needs of it."""

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
    """The right to drive one sweep; ``token`` grows with every owner."""

    sweep: str
    owner: str
    token: int


@dataclass(frozen=True, slots=True)
class Held:
    """A lease as the database shows it. owner: "" when nobody has it. renewed_at: by its owner's clock."""

    owner: str = ""
    token: int = 0
    renewed_at: float = 0.0

    @property
    def who(self) -> str:
        """The owner as people know it; when and where its process began tells programs apart."""
        return self.owner.partition(" start ")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """From where a sweep is driven. cwd: the working folder, where relative paths start.

    options: sections of the study with what the command line laid over them. ended: why it is over, "" while it is not.
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
    """One wish.

    Parameters
    ----------
    number : int
        Its place among the requests of its sweep, from 0.
    kind : str
        A name of ``controller.steering.KINDS``.
    what : mapping
        What that kind needs.
    who : str
        Who asked, as user@host.
    asked_at : float
        Epoch seconds.
    answered_at : float or None
        Epoch seconds at which the driver answered; None while it has not.
    accepted : bool
        Whether the driver did as asked.
    answer : str
        What it did, or why it did not.
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
"""In the place of a trial's number: the sweep itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One text, as it stands after its ``version``-th change.

    trial: its number, or SWEEP. version: from 1. who: as user@host. written_at: epoch seconds.
    """

    trial: int
    version: int
    text: str
    who: str
    written_at: float


class Records(Protocol):
    """What a driver needs of a store."""

    def load(self, name: str, known: StudyRecords | None = None) -> StudyRecords | None: ...

    def save(self, lease: Lease, changes: Changes, now: float) -> None: ...

    def rescue(self, path: Path, sweep: StudyRecords, now: float) -> None: ...
