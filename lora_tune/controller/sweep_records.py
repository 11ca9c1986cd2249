"""Writing a sweep down: what the database has not taken waits here, and what it lost goes into a fresh one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lora_tune.base.errors import DatabaseChangedError, StoreError
from lora_tune.base.paths import SweepPaths
from lora_tune.controller.event_log import EventLog
from lora_tune.controller.rescue import Rescue
from lora_tune.store import Changes, Lease
from lora_tune.store.port import Records, Request
from lora_tune.store.records import StudyRecords


class SweepRecords:
    """One sweep in the database, written under a lease.

    away: the database took nothing when it was last asked, at ``asked_at`` (epoch seconds). sweep: the records as they
    are, a live view. requests: what people asked, as far as the driver has read it.
    """

    def __init__(
        self,
        store: Records,
        lease: Lease,
        sweep: StudyRecords,
        paths: SweepPaths,
        events: EventLog,
        now: Callable[[], float],
        requests: Callable[[], Sequence[Request]],
    ) -> None:
        self._store, self._lease, self._sweep, self._events, self._now = store, lease, sweep, events, now
        self._requests = requests
        self._rescue = Rescue(paths.rescued, store)
        self.unsaved = Changes()
        self.away = False
        self.asked_at = -math.inf

    @property
    def lost(self) -> str:
        """What to do where the database has lost the sweep; "" while it has not."""
        return self._rescue.advice if self._rescue.lost else ""

    def save(self, changes: Changes) -> bool:
        """Whether everything is on record. Raises SweepBusyError when the lease is lost."""
        self.unsaved = self.unsaved + changes
        try:
            self._store.save(self._lease, self.unsaved, self._now())
        except DatabaseChangedError as error:
            if changes or not self._rescue.lost:
                self._keep_elsewhere(error)
            self.away = True
            return False
        except StoreError as error:
            sentence = f"{error}; continuing, {len(self.unsaved.trials)} trial changes wait to be written"
            self._events.trouble("database", sentence)
            self.away = True
            return False
        finally:
            self.asked_at = self._now()
        self._events.trouble("database", "")
        self._rescue.forget()
        self.unsaved, self.away = Changes(), False
        return True

    def _keep_elsewhere(self, error: DatabaseChangedError) -> None:
        """All that is known goes into a fresh database: the sweep's own was deleted, replaced or set back."""
        try:
            self._rescue.keep(str(error), self._sweep, self._requests(), self._now())
        except (StoreError, OSError) as second:
            self._events.trouble("database", f"{error}; {second}: what is known is in memory only")
            return
        self._events.trouble("database", self._rescue.advice)
