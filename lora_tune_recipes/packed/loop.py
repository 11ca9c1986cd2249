"""The loop of a pack: read requests, run a round, write results, and remove finished trials."""

from __future__ import annotations

import time

from lora_tune.launchers.pack_folder import PackFolder, PackRequest
from lora_tune_recipes import settings as knobs
from lora_tune_recipes.packed import checkpoint
from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.scheduler import Scheduler, Shares, save_all
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.packed.trial import STOPPED, ClaimedTrial

LOOK_SECONDS = 0.2
"""Interval between checks for requests and stops."""
PAUSE = 0.05


class PackLoop:
    """Serves the requests in ``folder`` until none came for ``idle`` seconds.

    packs: number of packs that share the folder and the node. slots: most trials of this one if there are others.
    """

    def __init__(self, folder: PackFolder, idle: float, *, packs: int = 1, slots: int = 1) -> None:
        self._folder, self._idle, self._packs, self._slots = folder, idle, packs, slots
        self._base: PackedBase | None = None
        self._ending = False
        self._shares = Shares(folder, packs)
        self._scheduler = Scheduler(self._shares)
        self._looked_at = self._busy_at = time.monotonic()

    def stop(self) -> None:
        """End after the round in progress; may be called from a signal handler."""
        self._ending = True

    def serve(self) -> bool:
        """Train requested trials; False if stopped before all were done.

        Reraises errors of training, after writing them to each trial's log.
        """
        try:
            # A job of several packs ends when all trials have ended, so it must not wait for one without end record.
            while not (self._ending or (self._packs > 1 and self._scheduler.unrecorded)):
                self._look()
                self._shares.tell(self._scheduler.tenants)
                self._scheduler.admit()
                if self._scheduler.tenants:
                    self._scheduler.round()
                    self._busy_at = time.monotonic()
                elif not self._scheduler.waiting:
                    if self._folder.ends(time.monotonic() - self._busy_at, self._idle):
                        return True
                    time.sleep(PAUSE)
        except Exception as error:
            # Each trial's log must name the reason of its end; a machine's fault is retried.
            for tenant in (*self._scheduler.tenants, *self._scheduler.waiting):
                tenant.fail(error)
            raise
        if self._base is not None:
            save_all(self._scheduler.pack, self._scheduler.tenants, self._scheduler.waiting)
        return False

    def _look(self) -> None:
        """Admit new trials, and end those with a stop request."""
        if self._scheduler.tenants and time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        self._ending |= self._folder.gone  # without the folder no requests can arrive: trials continue elsewhere
        requests = self._folder.take(self._fits)
        while self._wants_more() and (request := next(requests, None)) is not None:
            self._busy_at = time.monotonic()
            tenant = ClaimedTrial.claim(request)
            if tenant is not None:
                with self._scheduler.contained(tenant):
                    self._house(tenant)
            else:
                self._scheduler.unrecorded |= not request.ended
        own = {tenant.name: tenant for tenant in (*self._scheduler.tenants, *self._scheduler.waiting)}
        for name in self._folder.stopped(own):
            self._scheduler.let_go(own[name])
            with self._scheduler.contained(own[name]):
                own[name].end(STOPPED)

    def _wants_more(self) -> bool:
        """Whether to take another trial; next to other packs only one that can train at once."""
        if self._packs == 1:
            return True
        self._scheduler.admit()
        return not self._scheduler.waiting and len(self._scheduler.tenants) < max(self._slots, self._folder.slots())

    def _fits(self, request: PackRequest) -> bool:
        """Whether it respects the pack-size limits of itself and the present trials; else its request is kept."""
        here = (*self._scheduler.tenants, *self._scheduler.waiting)
        limits = [company for company in (request.company, *(t.request.company for t in here)) if company]
        return not limits or len(here) < min(limits)

    def _house(self, tenant: ClaimedTrial) -> None:
        """Read a trial's settings and data; it then waits for memory."""
        settings = knobs.read(tenant.request.knobs)
        if self._base is None:
            self._base = PackedBase(settings)
            self._scheduler.use(self._base)
        self._base.check(settings)
        # Refuses missing modules, and adapters that never fit.
        self._scheduler.admission.check(self._scheduler.pack.weights(settings))
        left = checkpoint.of_earlier_attempt(tenant.request, self._base.device.type)
        slot = Slot(settings, self._base.texts(settings), left.progress.step if left else 0)
        tenant.open(slot, self._base.device_name, left)
        self._scheduler.waiting.append(tenant)
