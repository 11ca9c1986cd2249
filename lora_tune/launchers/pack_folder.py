"""The folder by which a sweep and a pack tell each other what to do: one file a message.

A request is a file in ``requests``, there from the moment it is whole. The pack takes it by renaming it, the sweep
withdraws it by removing it: whoever does so first has it. So several packs of one job can share its folder: each trial
is taken by one of them. A pack that closes looks once more for requests that came meanwhile, and a sweep that finds it
closed withdraws its own. So a trial is in a pack, or it is not; never half.
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
    """A trial that a pack is to train. folder: its attempt's. knobs: what a trial of its own would read.

    token, sweep: of the attempt and of its sweep, "" where there is none; the pack writes both into what it records.
    company: how many may train side by side while it does, itself counted; 0: as many as there is room for.
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
        """Whether the trial's end is on record."""
        return self.attempt.ended.exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackState:
    """What a pack says of itself. shares: seconds of the node that each trial has had, by name.

    at: epoch seconds. steady: seconds by its machine's clock that nobody sets.
    """

    at: float
    steady: float
    shares: Mapping[str, float]


class PackFolder:
    """The messages in ``folder``. pack: the number of the pack that reads and writes them, of those in one job."""

    def __init__(self, folder: Path, pack: int = 0) -> None:
        self.paths, self._pack = PackPaths(folder), pack
        self._over: set[str] = set()  # requests whose end was seen
        self._open: dict[str, PackRequest] | None = None  # what the sweep asked for and has not seen the end of

    def make(self) -> None:
        """Make the folder. Raises FileExistsError where another one has."""
        self.paths.folder.mkdir(parents=True)
        for place in (self.paths.requests, self.paths.taken, self.paths.stops):
            place.mkdir()

    # The sweep's side

    def ask(self, job: Job) -> bool:
        """Ask for the job's trial; False where the pack takes no more."""
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
        # First where it is, then the request: after a crash between the two it is LOST, and asked for again.
        write_json(AttemptPaths(job.folder).slot, {"pack": str(self.paths.folder), "token": job.token})
        write_json(self._request(job.name), asdict(request))
        if self.paths.closed.exists() and self.withdraw(job.name):
            return False
        if self._open is not None:
            self._open[job.name] = request
        return True

    def occupied(self) -> int:
        """How many trials the one sweep that asks here has in the pack: no matter how many it has had."""
        known = {r.name: r for r in self.open_requests()} if self._open is None else self._open
        self._open = {name: request for name, request in known.items() if not request.ended}
        return len(self._open)

    def withdraw(self, name: str) -> bool:
        """Take a request back; False where the pack was faster."""
        try:
            self._request(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def asked(self, name: str) -> bool:
        """Whether the request waits to be taken."""
        return self._request(name).exists()

    def stop(self, name: str, *, force: bool = False) -> None:
        """Ask the pack to end a trial; ``force``: whatever the trial makes of it."""
        with contextlib.suppress(FileNotFoundError):  # somebody removed the pack's folder: the trial is gone as well
            write_json(self.paths.stops / name, {"force": force})

    def let_go(self) -> None:
        """Nothing follows: the pack ends when it has trained what it was asked for."""
        with contextlib.suppress(FileNotFoundError):  # somebody removed the pack's folder
            self.paths.closed.touch()

    def trials(self) -> set[str]:
        """The names of all trials that the pack was asked for, but for those that were withdrawn."""
        places = self.paths.requests, self.paths.taken
        return {name.removesuffix(JSON) for place in places for name in _requests_in(place)}

    @property
    def untouched(self) -> bool:
        """Whether no trial was ever taken."""
        return not _requests_in(self.paths.taken)

    @property
    def gone(self) -> bool:
        """Whether somebody has removed it: nothing can be said here any more."""
        return not self.paths.taken.is_dir()

    def widen(self, slots: int) -> None:
        """Let each pack of the job train so many trials side by side."""
        write_json(self.paths.slots, {"slots": slots})

    def open_requests(self) -> Iterator[PackRequest]:
        """The trials that the pack was given and that have no end on record."""
        names = set()
        for place in (self.paths.requests, self.paths.taken):
            # A pack may have had thousands of trials; and it may take one just now, which then is in both places.
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
        """What each of the job's ``packs`` wrote last; of one whose file is absent or unreadable, nothing."""
        return [_state_in(read_json(self.paths.state(pack))) for pack in range(packs)]

    # The pack's side

    def take(self, fits: Callable[[PackRequest], bool] = lambda _: True) -> Iterator[PackRequest]:
        """Take every request that waits, oldest first, up to the first one that does not fit."""
        waiting = sorted(self.paths.requests.glob("*.json"), key=lambda file: (_age(file), file.name))
        for file in waiting:
            taken = self.paths.taken / file.name
            waits = _request_in(read_json(file))
            if waits is not None and not fits(waits):
                return
            with contextlib.suppress(FileNotFoundError):  # withdrawn just now
                file.rename(taken)
                request = _request_in(read_json(taken))
                if request is not None:
                    yield request

    def stopped(self, trials: Collection[str]) -> dict[str, bool]:
        """Those of the trials ``trials`` that are to end, with whether by force; each message is read once."""
        stopped = {}
        with contextlib.suppress(FileNotFoundError):  # somebody removed the pack's folder
            for file in self.paths.stops.iterdir():
                if file.name in trials:
                    stopped[file.name] = (read_json(file).content or {}).get("force") is True
                    file.unlink(missing_ok=True)
        return stopped

    def slots(self) -> int:
        """How many trials the pack may train side by side, as it was told since it began; 0 where it was not."""
        return whole_of(read_json(self.paths.slots).content or {}, "slots") or 0

    def tell(self, shares: Mapping[str, float]) -> None:
        """Write down what the pack is doing."""
        write_json(self.paths.state(self._pack), {"at": time.time(), "steady": steady(), "shares": dict(shares)})

    def ends(self, idle: float, limit: float) -> bool:
        """Whether a pack without a trial for ``idle`` seconds takes no more: after ``limit``, or where it is let go.

        One of several packs in a job has no limit, and does not end before the others.
        """
        return not math.isinf(limit) and (idle > limit or self.paths.closed.exists()) and self.close()

    def close(self) -> bool:
        """Take no more from now on; False, and open again, where a request came meanwhile."""
        self.paths.closed.touch()
        if any(self.paths.requests.glob("*.json")):
            self.paths.closed.unlink()
            return False
        return True

    def _request(self, name: str) -> Path:
        return self.paths.requests / f"{name}.json"


def pack_of(folder: Path, token: str) -> PackFolder | None:
    """The pack that the attempt in ``folder`` was given to; None where it was given to none."""
    content = read_json(AttemptPaths(folder).slot).content or {}
    place = text_of(content, "pack")
    return PackFolder(Path(place)) if place and token in ("", text_of(content, "token")) else None


def _requests_in(place: Path) -> list[str]:
    """The names of the requests in a folder; none where somebody removed it."""
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
    """The request that a file holds; None where it holds none. Only a broken disk writes such a file."""
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
