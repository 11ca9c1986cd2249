"""Leases of a sweep: taking one, waiting for one as a standby, and renewing it."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lora_tune.base.errors import StoreError, SweepBusyError
from lora_tune.base.host import Process
from lora_tune.store import LEASE_SECONDS, Held, Lease

if TYPE_CHECKING:
    from lora_tune.store import BufferedStore, Store

RENEW_SECONDS = LEASE_SECONDS / 5
STUCK_SECONDS = 300.0
"""A driver whose loop is stuck for this long stops renewing its lease."""


def take_lease(store: Store, name: str, now: float, unchanged: Held | None = None, gone: str = "") -> Lease:
    """The lease of this sweep, also from an owner on this host whose process has ended.

    unchanged: as in :meth:`Store.take_lease`. gone: an owner that is known to have ended. Raises SweepBusyError while
    another driver holds it.
    """
    owner, this = store.held(name).owner, Process.of(os.getpid())
    dead = (bool(gone) and owner == gone) or is_gone(owner)
    owner_text = f"{this.host} pid {this.pid} start {this.start_ticks} in {this.place}"
    return store.take_lease(name, owner_text, now, dead=dead, unchanged=unchanged)


def is_gone(owner: str) -> bool:
    """Whether an owner was a process of this host and container that has ended. Owners of earlier releases name only
    hosts."""
    known = _OWNER.fullmatch(owner)
    if known is None:
        return False
    host, pid, ticks, place = known.groups(default="")
    return Process(pid=int(pid), start_ticks=int(ticks), host=host, place=place).gone


_OWNER = re.compile(r"(\S+) pid ([0-9]{1,9}) start ([0-9]+)(?: in (\S+))?")


class StaleLeaseDetector:
    """Detects leases, or claims of jobs, that are no longer renewed, by the monotonic clock: host clocks may differ.

    A lease with the same token and renewal time for LEASE_SECONDS has no living owner.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[object, float]] = {}

    def dead(self, name: str, sign: object, steady: float) -> bool:
        """Record the ``sign`` of ``name`` at the ``steady`` second; True if unchanged for LEASE_SECONDS."""
        before, since = self._seen.get(name, (None, steady))
        if before != sign:
            since = steady
        self._seen[name] = (sign, since)
        return steady - since >= LEASE_SECONDS


def try_lease(store: Store, name: str, patience: StaleLeaseDetector, now: float, gone: str = "") -> Lease | None:
    """The lease, or None while another driver holds it; ``gone`` as in :func:`take_lease`. Raises StoreError."""
    held = store.held(name)
    dead = patience.dead(name, held, time.monotonic())
    try:
        return take_lease(store, name, now, held if dead else None, gone)
    except SweepBusyError:
        return None


def wait_for_lease(store: Store, name: str, now: Callable[[], float], echo: Callable[[str], None]) -> tuple[Lease, str]:
    """Wait until ``name`` has no owner, and take its lease; returns it and the previous owner, "" if there was none.

    Also waits for a database that does not answer.
    """
    patience, printed, before = StaleLeaseDetector(), "", ""
    while True:
        try:
            held = store.held(name)
            before = held.owner
            lease = try_lease(store, name, patience, now())
            sentence = f"standby: {name} is driven by {held.who}" if lease is None else ""
        except StoreError as error:
            # The lease may have been renewed while it could not be read.
            lease, sentence, patience = None, f"standby: {error}", StaleLeaseDetector()
        if lease is not None:
            return lease, before
        if sentence != printed:
            echo(sentence)
        printed = sentence
        time.sleep(1.0)


@contextlib.contextmanager
def keeping(
    store: BufferedStore,
    lease: Lease,
    now: Callable[[], float],
    renewed: Callable[[], None] = lambda: None,
    touch: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Renew the lease in a thread, so that slow cluster commands do not cost it.

    renewed: called after each renewal. touch: updates the driver's sign of life in the sweep's folder; may raise
    SweepBusyError and OSError. The thread ends with the block, or when the lease is lost, which the next write reports.
    """
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_SECONDS):
            if store.idle_seconds() > STUCK_SECONDS:
                continue
            try:
                with contextlib.suppress(OSError):  # the disk may be back before the lease expires
                    touch()
                store.renew(lease, now())
                renewed()
            except SweepBusyError:
                return
            except StoreError:
                continue  # the driver's next write reports the error

    thread = threading.Thread(target=renew, name=f"lease of {lease.sweep}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
