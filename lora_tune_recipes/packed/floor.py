"""The trials of a pack that train, and those that wait for room: their rounds, their evaluations, their ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from lora_tune_recipes.packed import adapter_file, interruption
from lora_tune_recipes.packed.admission import Admission, attempted, short_of_memory
from lora_tune_recipes.packed.alone import Speeds
from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.pack import Pack, numbers
from lora_tune_recipes.packed.shares import Shares
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.packed.tenant import Tenant


class Floor:
    """Where trials train over one base, once there is one. shares: told who had the time.

    tenants: those that train. waiting: those that wait for room. measured: whose speed is being measured.
    unrecorded: a trial has ended whose end nobody could write down.
    """

    def __init__(self, shares: Shares) -> None:
        self.tenants: list[Tenant] = []
        self.waiting: list[Tenant] = []
        self.measured: Tenant | None = None
        self.unrecorded = False
        self._shares = shares
        self.pack: Pack
        self.admission: Admission
        self._speeds: Speeds

    def use(self, base: PackedBase) -> None:
        """Train over ``base``; before anybody is admitted."""
        self.pack, self._speeds, self.admission = Pack(base), Speeds(base), Admission(base.device)

    def admit(self) -> None:
        """Give waiting trials a slot, in their order, as far as memory allows."""
        while self.waiting:
            tenant = self.waiting[0]
            with self.alone(tenant):
                if not self._enters(tenant):
                    break
        self.measured = None

    def _enters(self, tenant: Tenant) -> bool:
        """Give the trial a slot; False where there is none now. Raises what the trial itself is to blame for."""
        present = [other.bytes for other in self.tenants]
        if 0 < min((t.company for t in (*self.tenants, tenant) if t.company), default=0) <= len(present):
            return False  # more of them could not train side by side
        try:
            self.measured = tenant
            speed, self.measured = self._speeds.of(tenant.slot), None
            if self.tenants and not (speed.packs and all(t.packs for t in self.tenants)):
                return False  # company would only cost memory
            if not self.admission.fits(present, speed.bytes):
                return False
            self.pack.join(tenant.slot, tenant.left_at)
        except (RuntimeError, MemoryError) as error:
            if self.tenants and short_of_memory(error):
                return False  # tried again when others have gone
            raise
        self._shares.share(self.tenants)
        self.tenants.append(tenant)
        self.waiting.remove(tenant)
        tenant.begin(speed)
        if tenant.trial.evaluates:
            self._evaluate([tenant])
            self.end_over()
        return True

    def round(self) -> None:
        rates = {tenant: tenant.slot.rate() for tenant in self.tenants}
        done: dict[Slot, torch.Tensor] = {}
        try:
            whole = attempted(lambda: self.pack.round(done)) is not None
        except Exception as error:  # noqa: BLE001 - whatever it is, the trials that it is not about go on
            self.pack.rewind()
            self._blame(error)
            whole = True
        if not whole:
            self.pack.rewind()
        self._stepped([tenant for tenant in self.tenants if tenant.slot in done], done, rates)
        if not whole:
            self._shrink(self.tenants)

    def _stepped(
        self, tenants: Sequence[Tenant], done: Mapping[Slot, torch.Tensor], rates: Mapping[Tenant, float]
    ) -> None:
        """After a step of these: their logs, evaluations and ends."""
        losses = numbers({t: done[t.slot] for t in tenants if t.trial.wants_loss})
        for tenant in tenants:
            with self.alone(tenant):
                tenant.trial.stepped(rates[tenant], losses.get(tenant))
        self._evaluate([tenant for tenant in self.tenants if tenant in tenants and tenant.trial.evaluates])
        self.end_over()

    def end_over(self) -> None:
        """Let those go that have come to their own end."""
        for tenant in [tenant for tenant in self.tenants if tenant.trial.over]:
            with self.alone(tenant):
                self._finish(tenant)

    def _finish(self, tenant: Tenant) -> None:
        settings = tenant.slot.settings
        if settings.save_adapter:
            adapter_file.save(settings.save_adapter, self.pack.group(tenant.slot), tenant.slot)
        self.let_go(tenant)
        tenant.end(0)

    def _blame(self, error: Exception) -> None:
        """A round has failed: end the trials that are to blame. Raises ``error`` where the pack itself is."""
        guilty = interruption.to_blame(self.pack, self.tenants)
        if not guilty:
            raise error
        for tenant in guilty:
            self.let_go(tenant)
            tenant.fail(error)
        print(f"{len(guilty)} trials cannot train: {' '.join(str(error).split())}", flush=True)

    def _evaluate(self, due: Sequence[Tenant]) -> None:
        """Evaluate trials together, or by halves, or with others gone, as memory allows.

        Those that have made room meanwhile are evaluated when they come back.
        """
        due = [tenant for tenant in due if tenant in self.tenants]
        if not due:
            return
        try:
            losses = attempted(lambda: self.pack.evaluate([tenant.slot for tenant in due]))
        except Exception as error:
            if not self.pack.base.works():
                raise
            if len(due) == 1:
                self.let_go(due[0])
                due[0].fail(error)
                return
            losses = None
        if losses is not None:
            for tenant, loss in zip(due, losses, strict=True):
                with self.alone(tenant):
                    tenant.trial.evaluated(loss)
        elif len(due) > 1:
            self._evaluate(due[: len(due) // 2])
            self._evaluate(due[len(due) // 2 :])
        else:
            self._shrink([*due, *(tenant for tenant in self.tenants if tenant not in due)])
            self._evaluate(due)

    def _shrink(self, order: Sequence[Tenant]) -> None:
        """Memory was short: the last quarter of ``order`` waits, with what it has learnt; a single one has failed."""
        if len(order) == 1:
            self.let_go(order[0])
            order[0].fail(torch.OutOfMemoryError("CUDA out of memory: the trial does not fit on this device alone"))
            return
        self.admission.too_much([tenant.bytes for tenant in order])
        leaving = order[-max(1, len(order) // 4) :]
        for tenant in leaving:
            tenant.left_at = self.pack.group(tenant.slot).state(tenant.slot)
            self.let_go(tenant)
        self.waiting[:0] = leaving
        print(f"out of memory: {len(leaving)} trials wait, {len(self.tenants)} go on", flush=True)

    def let_go(self, tenant: Tenant) -> None:
        """Take a trial out of the pack, or of those that wait."""
        self._shares.share(self.tenants)
        if tenant in self.tenants:
            self.tenants.remove(tenant)
            self.pack.leave(tenant.slot)
        elif tenant in self.waiting:
            self.waiting.remove(tenant)

    @contextlib.contextmanager
    def alone(self, tenant: Tenant) -> Iterator[None]:
        """What one trial's knobs, data, size or files are to blame for ends that trial, and no other."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - data can raise anything, and the others train on
            self.let_go(tenant)
            self.unrecorded |= not tenant.fail(error)
