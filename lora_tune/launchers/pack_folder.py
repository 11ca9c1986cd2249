"""Messages between a sweep and a pack through a shared folder, one file per message.

A request is a file in ``requests``, complete as soon as it appears. The pack takes it by renaming it, the sweep
withdraws it by removing it; the first of the two wins. So several packs of one job can share a folder, and one of them
takes each trial. A pack that closes checks once more for new requests, and a sweep that finds it closed withdraws its
request. So a trial is either in a pack or not.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_tune.base.files import SmallFile, number_of, read_json, text_of, whole_of, write_json
from lora_tune.base.host import steady
from lora_tune.base.paths import AttemptPaths, PackPaths
from lora_tune.workloads.base import Job

JSON = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRequest:
    """A trial for a pack to train. folder: of its attempt. knobs: the variables that a separate trial would read.

    token, sweep: of the attempt and of its sweep, or ""; the pack writes both into its records. company: maximum number
    of concurrent trials while it trains, including itself; 0: as many as fit.
    """

    name: str
    token: str
    sweep: str
    folder: str
    log: str
    knobs: Mapping[str, str]
    company: int = 0

    @property
    def attempt(self) -> AttemptPaths:
        return AttemptPaths(Path(self.folder))

    @property
    def ended(self) -> bool:
        """Whether the trial has an end record."""
        return self.attempt.ended.exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackState:
    """State that a pack reports. shares: node seconds used by each trial, by name.

    at: epoch seconds. steady: seconds of its machine's monotonic clock.
    """

    at: float
    steady: float
    shares: Mapping[str, float]


class PackFolder:
    """The messages in ``folder``. pack: index, within its job, of the pack that reads and writes them."""

    def __init__(self, folder: Path, pack: int = 0) -> None:
        self.paths, self._pack = PackPaths(folder), pack
        self._over: set[str] = set()  # requests that are known to have ended
        self._open: dict[str, PackRequest] | None = None  # requests of the sweep that are not known to have ended

    def make(self) -> None:
        """Make the folder. Raises FileExistsError if it exists."""
        self.paths.folder.mkdir(parents=True)
        for place in (self.paths.requests, self.paths.taken, self.paths.stops):
            place.mkdir()

    # Used by the sweep

    def ask(self, job: Job) -> bool:
        """Request the job's trial; False if the pack takes no more."""
        assert job.slot is not None, "only a trial that can share a job is asked for"
        if self.paths.closed.exists():
            return False
        request = PackRequest(
            name=job.name,
            token=job.token,
            sweep=job.sweep,
            folder=str(job.folder),
            log=str(job.log),
            knobs=dict(job.slot.knobs),
            company=job.slot.company,
        )
        # Record the pack before the request: after a crash between the two the trial is LOST and requested again.
        write_json(AttemptPaths(job.folder).slot, {"pack": str(self.paths.folder), "token": job.token})
        write_json(self._request(job.name), asdict(request))
        if self.paths.closed.exists() and self.withdraw(job.name):
            return False
        if self._open is not None:
            self._open[job.name] = request
        return True

    def occupied(self) -> int:
        """Number of trials in the pack without an end record, for the one sweep that sends requests here.

        The cost does not depend on the number of trials that have ended.
        """
        known = {r.name: r for r in self.open_requests()} if self._open is None else self._open
        self._open = {name: request for name, request in known.items() if not request.ended}
        return len(self._open)

    def withdraw(self, name: str) -> bool:
        """Withdraw a request; False if the pack has already taken it."""
        try:
            self._request(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def asked(self, name: str) -> bool:
        """Whether the request waits to be taken."""
        return self._request(name).exists()

    def stop(self, name: str, *, force: bool = False) -> None:
        """Ask the pack to end a trial; ``force``: even if the trial does not cooperate."""
        with contextlib.suppress(FileNotFoundError):  # the pack's folder was removed, and the trial with it
            write_json(self.paths.stops / name, {"force": force})

    def let_go(self) -> None:
        """Announce that no requests follow: the pack ends after the trials that it has."""
        with contextlib.suppress(FileNotFoundError):  # the pack's folder was removed
            self.paths.closed.touch()

    def trials(self) -> set[str]:
        """Names of all trials ever requested, except withdrawn ones."""
        places = self.paths.requests, self.paths.taken
        return {name.removesuffix(JSON) for place in places for name in _requests_in(place)}

    @property
    def untouched(self) -> bool:
        """Whether no trial was ever taken."""
        return not _requests_in(self.paths.taken)

    @property
    def gone(self) -> bool:
        """Whether the folder was removed, so that messages are impossible."""
        return not self.paths.taken.is_dir()

    def widen(self, slots: int) -> None:
        """Let each pack of the job train up to ``slots`` trials concurrently."""
        write_json(self.paths.slots, {"slots": slots})

    def open_requests(self) -> Iterator[PackRequest]:
        """Requested trials without an end record."""
        names = set()
        for place in (self.paths.requests, self.paths.taken):
            # Skips known ends, since a pack may have had thousands of trials; one just being taken may be in both
            # places.
            for name in sorted(name for name in _requests_in(place) if name not in self._over):
                request = None if name in names else _request_in(read_json(place / name))
                if request is None:
                    continue
                if request.ended:
                    self._over.add(name)
                else:
                    names.add(name)
                    yield request

    def states(self, packs: int) -> list[PackState]:
        """Last state of each of the job's ``packs``; an empty one if its file is absent or unreadable."""
        return [_state_in(read_json(self.paths.state(pack))) for pack in range(packs)]

    # Used by the pack

    def take(self, fits: Callable[[PackRequest], bool] = lambda _: True) -> Iterator[PackRequest]:
        """Take the waiting requests, oldest first, up to the first one that does not fit."""
        waiting = sorted(self.paths.requests.glob("*.json"), key=lambda file: (_age(file), file.name))
        for file in waiting:
            taken = self.paths.taken / file.name
            waits = _request_in(read_json(file))
            if waits is not None and not fits(waits):
                return
            with contextlib.suppress(FileNotFoundError):  # withdrawn in the meantime
                file.rename(taken)
                request = _request_in(read_json(taken))
                if request is not None:
                    yield request

    def stopped(self, trials: Collection[str]) -> dict[str, bool]:
        """Which of ``trials`` are to end, and whether by force; each message is read once."""
        stopped = {}
        with contextlib.suppress(FileNotFoundError):  # the pack's folder was removed
            for file in self.paths.stops.iterdir():
                if file.name in trials:
                    stopped[file.name] = (read_json(file).content or {}).get("force") is True
                    file.unlink(missing_ok=True)
        return stopped

    def slots(self) -> int:
        """Maximum number of concurrent trials, if changed since the pack's start; else 0."""
        return whole_of(read_json(self.paths.slots).content or {}, "slots") or 0

    def tell(self, shares: Mapping[str, float]) -> None:
        """Write the pack's state."""
        write_json(self.paths.state(self._pack), {"at": time.time(), "steady": steady(), "shares": dict(shares)})

    def ends(self, idle: float, limit: float) -> bool:
        """Close a pack without trials for ``idle`` seconds, after ``limit`` or if no requests follow; return success.

        One of several packs in a job has an infinite limit, and does not end before the others.
        """
        return not math.isinf(limit) and (idle > limit or self.paths.closed.exists()) and self.close()

    def close(self) -> bool:
        """Take no more requests; reopen and return False if one arrived in the meantime."""
        self.paths.closed.touch()
        if any(self.paths.requests.glob("*.json")):
            self.paths.closed.unlink()
            return False
        return True

    def _request(self, name: str) -> Path:
        return self.paths.requests / f"{name}.json"


def pack_of(folder: Path, token: str) -> PackFolder | None:
    """The pack to which the attempt in ``folder`` was assigned, or None."""
    content = read_json(AttemptPaths(folder).slot).content or {}
    place = text_of(content, "pack")
    return PackFolder(Path(place)) if place and token in ("", text_of(content, "token")) else None


def _requests_in(place: Path) -> list[str]:
    """Names of the requests in a folder; none if it was removed."""
    with contextlib.suppress(FileNotFoundError), os.scandir(place) as entries:
        return [entry.name for entry in entries if entry.name.endswith(JSON)]
    return []


def _state_in(file: SmallFile) -> PackState:
    content: Mapping[str, Any] = file.content or {}
    shares = content.get("shares")
    known = {} if not isinstance(shares, dict) else {k: number_of(shares, k) for k in shares}
    shares = {k: v for k, v in known.items() if v is not None and v >= 0}
    return PackState(at=number_of(content, "at") or 0.0, steady=number_of(content, "steady") or 0.0, shares=shares)


def _request_in(file: SmallFile) -> PackRequest | None:
    """The request in a file, or None; only a disk fault makes an invalid file."""
    content: Mapping[str, Any] = file.content or {}
    texts = {name: text_of(content, name) for name in ("name", "token", "sweep", "folder", "log")}
    knobs = content.get("knobs")
    if not all(texts[name] for name in ("name", "folder", "log")) or not isinstance(knobs, dict):
        return None
    company = whole_of(content, "company") or 0
    return PackRequest(**texts, knobs={str(k): str(v) for k, v in knobs.items()}, company=company)


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
