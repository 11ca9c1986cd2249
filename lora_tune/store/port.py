"""What a store hands over and takes: leases, registrations, and what a driver needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lora_tune.store.records import StudyRecords
from lora_tune.store.rows import Changes


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """From where a sweep is driven. cwd: the working folder, where relative paths start.

    options: sections of the study with what the command line laid over them. ended: why it is over, "" while it is not.
    signature: of one who may run programs as a service's user, "" where nobody signed.
    """

    name: str
    study_toml: str
    cwd: Path
    file: Path
    folder: Path
    options: Mapping[str, Mapping[str, Any]]
    ended: str = ""
    signature: str = ""


class Records(Protocol):
    """What a driver needs of a store."""

    def load(self, name: str, known: StudyRecords | None = None) -> StudyRecords | None: ...

    def save(self, lease: Lease, changes: Changes, now: float) -> None: ...

    def rescue(self, path: Path, sweep: StudyRecords, now: float) -> None: ...
