"""The loop of a pack: take what is asked, make a round, write what came of it, and let go what is over."""

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
"""Between two looks for requests and stops."""
PAUSE = 0.05


class PackLoop:
    """Serves the requests in ``folder`` until none came for ``idle`` seconds.

    packs: how many share the folder, and the node. slots: trials that this one has at most where others share it.
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
        """Train what is asked for; False where it was told to stop before nothing was left to do.

        Raises what the arithmetic raises; each trial's log says what it was.
        """
        try:
            # The job of several packs ends when no trial is without an end: it must not wait for one that has none.
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
            # Whoever reads a trial's log must find there why it ended; a machine's fault is tried again.
            for tenant in (*self._scheduler.tenants, *self._scheduler.waiting):
                tenant.fail(error)
            raise
        if self._base is not None:
            save_all(self._scheduler.pack, self._scheduler.tenants, self._scheduler.waiting)
        return False

    def _look(self) -> None:
        """Take in new trials, and end those that are to be stopped."""
        if self._scheduler.tenants and time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        self._ending |= self._folder.gone  # nobody can ask for a trial or stop one: those that train go on elsewhere
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
        """Whether to take a further trial; beside other packs only what trains at once, and they have the rest."""
        if self._packs == 1:
            return True
        self._scheduler.admit()
        return not self._scheduler.waiting and len(self._scheduler.tenants) < max(self._slots, self._folder.slots())

    def _fits(self, request: PackRequest) -> bool:
        """Whether it may train beside those that are here, and they beside it; else it is left untouched."""
        here = (*self._scheduler.tenants, *self._scheduler.waiting)
        limits = [company for company in (request.company, *(t.request.company for t in here)) if company]
        return not limits or len(here) < min(limits)

    def _house(self, tenant: ClaimedTrial) -> None:
        """Read a trial's knobs and data; it waits for room then."""
        settings = knobs.read(tenant.request.knobs)
        if self._base is None:
            self._base = PackedBase(settings)
            self._scheduler.use(self._base)
        self._base.check(settings)
        # Refuses modules that the model lacks, and what fits nowhere.
        self._scheduler.admission.check(self._scheduler.pack.weights(settings))
        left = checkpoint.of_earlier_attempt(tenant.request, self._base.device.type)
        slot = Slot(settings, self._base.texts(settings), left.progress.step if left else 0)
        tenant.open(slot, self._base.device_name, left)
        self._scheduler.waiting.append(tenant)
