"""The loop of a pack: take what is asked, make a round, write what came of it, and let go what is over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from lora_tune.base.errors import InputError, LoraTuneError
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune.recipes import settings as knobs
from lora_tune.recipes.packed import adapter_file, checkpoint
from lora_tune.recipes.packed.admission import Admission
from lora_tune.recipes.packed.alone import Speeds
from lora_tune.recipes.packed.base import OF_BASE, PackedBase, check_packable
from lora_tune.recipes.packed.pack import Pack
from lora_tune.recipes.packed.slot import Slot
from lora_tune.recipes.packed.tenant import STOPPED, Tenant
from lora_tune.recipes.settings import Settings

Result = TypeVar("Result")
LOOK_SECONDS = 0.2
"""Between two looks for requests and stops."""
TELL_SECONDS = 2.0
"""Between two reports of the pack's state."""
PAUSE = 0.05


class Host:
    """Serves the requests in ``folder`` until none came for ``idle`` seconds."""

    def __init__(self, folder: PackFolder, idle: float) -> None:
        self._folder, self._idle = folder, idle
        self._base: PackedBase | None = None
        self._tenants: list[Tenant] = []
        self._waiting: list[Tenant] = []
        self._ending = False
        self._looked_at = self._told_at = self._shared_at = self._busy_at = time.monotonic()

    def stop(self) -> None:
        """End after the round in progress; may be called from a signal handler."""
        self._ending = True

    def serve(self) -> bool:
        """Train what is asked for; False where it was told to stop before nothing was left to do.

        Raises what the arithmetic raises; each trial's log says what it was.
        """
        try:
            while not self._ending:
                self._look()
                self._tell()
                self._admit()
                if self._tenants:
                    self._round()
                    self._busy_at = time.monotonic()
                elif not self._waiting:
                    if time.monotonic() - self._busy_at > self._idle and self._folder.close():
                        return True
                    time.sleep(PAUSE)
            self._leave_behind()
            return False
        except Exception as error:
            # Whoever reads a trial's log must find there why it ended; a machine's fault is tried again.
            for tenant in (*self._tenants, *self._waiting):
                tenant.fail(error)
            raise

    def _leave_behind(self) -> None:
        """Save every trial that has begun: the next attempt of each goes on from there, in another pack."""
        for tenant in self._tenants:
            tenant.save(self._pack.base.device.type, self._pack.group(tenant.slot).state(tenant.slot))
        for tenant in self._waiting:
            if tenant.left_at is not None:
                tenant.save(self._pack.base.device.type, tenant.left_at)
        print(f"asked to end: {len(self._tenants)} trials are saved", flush=True)

    def _look(self) -> None:
        """Take in new trials, and end those that are to be stopped."""
        if self._tenants and time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        for request in self._folder.take():
            self._busy_at = time.monotonic()
            tenant = Tenant.claim(request)
            if tenant is not None:
                with _refused_alone(tenant, self._waiting):
                    self._house(tenant)
        for name in self._folder.stopped():
            for tenant in [t for t in (*self._tenants, *self._waiting) if t.name == name]:
                self._let_go(tenant)
                tenant.end(STOPPED)

    def _house(self, tenant: Tenant) -> None:
        """Read a trial's knobs and data; it waits for room then."""
        settings = knobs.read(tenant.request.knobs)
        if self._base is None:
            self._base = PackedBase(settings)
            self._pack, self._speeds = Pack(self._base), Speeds(self._base)
            self._admission = Admission(self._base.device)
        _check_base(settings, self._base.settings)
        self._base.widths(settings)  # refuses modules that the model lacks
        left = checkpoint.of_earlier_attempt(tenant.request, self._base.device.type)
        slot = Slot(settings, self._base.texts(settings), left.step if left else 0)
        tenant.open(slot, self._base.device_name, left)
        self._waiting.append(tenant)

    def _admit(self) -> None:
        """Give waiting trials a slot, in their order, as far as memory allows."""
        while self._waiting:
            tenant = self._waiting[0]
            with _refused_alone(tenant, self._waiting):
                try:
                    speed = self._speeds.of(tenant.slot)
                except torch.OutOfMemoryError:
                    if not self._tenants:
                        raise
                    return  # measured when others have gone
                if self._tenants and not (speed.packs and all(t.packs for t in self._tenants)):
                    return  # company would only cost memory
                if not self._admission.fits([t.bytes for t in self._tenants], speed.bytes):
                    return
                self._share()
                self._pack.join(tenant.slot, tenant.left_at)
                tenant.begin(speed)
                self._tenants.append(tenant)
                self._waiting.pop(0)

    def _round(self) -> None:
        rates = {tenant: tenant.slot.rate() for tenant in self._tenants}
        done = self._attempt(self._pack.round)
        if done is None:
            self._pack.rewind()
            self._shrink(self._tenants)
            return
        stepped = [tenant for tenant in self._tenants if tenant.slot in done]
        losses = _read({t: done[t.slot] for t in stepped if t.trial.wants_loss})
        for tenant in stepped:
            tenant.trial.stepped(rates[tenant], losses.get(tenant))
        self._evaluate([tenant for tenant in stepped if tenant.trial.wants_evaluation])
        for tenant in [tenant for tenant in self._tenants if tenant.trial.over]:
            settings = tenant.slot.settings
            if settings.save_adapter:
                adapter_file.save(settings.save_adapter, settings, self._pack.group(tenant.slot).adapter(tenant.slot))
            self._let_go(tenant)
            tenant.end(0)

    def _evaluate(self, due: Sequence[Tenant]) -> None:
        """Evaluate trials together, or by halves, or with others gone, as memory allows."""
        if not due:
            return
        losses = self._attempt(lambda: self._pack.evaluate([tenant.slot for tenant in due]))
        if losses is not None:
            for tenant, loss in zip(due, losses, strict=True):
                tenant.trial.evaluated(loss)
        elif len(due) > 1:
            self._evaluate(due[: len(due) // 2])
            self._evaluate(due[len(due) // 2 :])
        else:
            self._shrink([*due, *(tenant for tenant in self._tenants if tenant not in due)])
            self._evaluate([tenant for tenant in due if tenant in self._tenants])

    def _attempt(self, action: Callable[[], Result]) -> Result | None:
        """None where the memory was short. What the action held is free again then: its error is gone, too."""
        try:
            return action()
        except torch.OutOfMemoryError:
            pass
        if self._pack.base.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _shrink(self, order: Sequence[Tenant]) -> None:
        """Memory was short: the last quarter of ``order`` waits, with what it has learnt; a single one has failed."""
        if len(order) == 1:
            self._let_go(order[0])
            order[0].fail(torch.OutOfMemoryError("CUDA out of memory: the trial does not fit on this device alone"))
            return
        self._admission.too_much([tenant.bytes for tenant in order])
        leaving = order[-max(1, len(order) // 4) :]
        for tenant in leaving:
            tenant.left_at = self._pack.group(tenant.slot).state(tenant.slot)
            self._let_go(tenant)
        self._waiting[:0] = leaving
        print(f"out of memory: {len(leaving)} trials wait, {len(self._tenants)} go on", flush=True)

    def _let_go(self, tenant: Tenant) -> None:
        """Take a trial out of the pack, or of those that wait."""
        self._share()
        if tenant in self._tenants:
            self._tenants.remove(tenant)
            self._pack.leave(tenant.slot)
        else:
            self._waiting.remove(tenant)

    def _share(self) -> None:
        """Share the time since this was last called among the trials that train."""
        now = time.monotonic()
        for tenant in self._tenants:
            tenant.share += (now - self._shared_at) / len(self._tenants)
        self._shared_at = now

    def _tell(self) -> None:
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self._told_at = time.monotonic()
            self._share()
            self._folder.tell({tenant.name: tenant.share for tenant in self._tenants})


def _check_base(settings: Settings, shared: Settings) -> None:
    """Raise InputError for a trial that does not go with the pack's base, or that no pack can train."""
    for name in OF_BASE:
        if getattr(settings, name) != getattr(shared, name):
            raise InputError(
                f"{name.upper()}={getattr(settings, name)!s}: this pack has {getattr(shared, name)!s}; "
                "trials of one pack share it: fix it in [space], or take site.slots out"
            )
    check_packable(settings)


def _read(losses: dict[Tenant, torch.Tensor]) -> dict[Tenant, float]:
    """The numbers of several losses, in one transfer from the device."""
    if not losses:
        return {}
    return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))


@contextlib.contextmanager
def _refused_alone(tenant: Tenant, waiting: list[Tenant]) -> Iterator[None]:
    """What a trial's own knobs, data or size are to blame for ends that trial, and no other."""
    try:
        yield
    except (LoraTuneError, torch.OutOfMemoryError) as error:
        if tenant in waiting:
            waiting.remove(tenant)
        tenant.fail(error)
