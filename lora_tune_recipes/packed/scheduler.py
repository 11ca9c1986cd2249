"""The trials of a pack: admission, rounds, evaluations, ends, and which trial a failure is attributed to.

Admission uses each trial's memory use alone, corrected after out-of-memory errors.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from lora_tune.base.errors import InputError
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune_recipes.packed import checkpoint
from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.pack import Pack, numbers
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.packed.speed import Speeds
from lora_tune_recipes.packed.trial import ClaimedTrial
from lora_tune_recipes.step_graph import short_of_memory

Result = TypeVar("Result")
USED = 0.85
"""Share of the free memory to fill, because the allocator cannot use all of it."""
BYTES_OF_A_WEIGHT = 16
"""float32: the weight, its gradient and AdamW's two moments."""


def attempted(action: Callable[[], Result]) -> Result | None:
    """The action's result; None if it ran out of memory. The error and the memory it holds are released."""
    try:
        return action()
    except (RuntimeError, MemoryError) as error:
        if not short_of_memory(error):
            raise
    torch.cuda.empty_cache()  # no effect without a GPU
    return None


class Admission:
    """Memory of ``device`` with the base on it. On a CPU the number of slots is the only limit."""

    def __init__(self, device: torch.device) -> None:
        self.limit: float | None = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
            self.limit = USED * torch.cuda.mem_get_info()[0]

    def check(self, weights: int) -> None:
        """Raise InputError for an adapter of so many weights that it does not fit even alone."""
        needed = weights * BYTES_OF_A_WEIGHT
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if self.limit is None else self.limit
        if needed > there:
            raise InputError(
                f"LORA_RANK, LORA_TARGETS: the adapter has {weights:,} weights and takes {needed / 2**30:.1f} GiB with "
                f"its optimizer; allowed is what fits into {there / 2**30:.1f} GiB"
            )

    def fits(self, present: Sequence[int], new: int) -> bool:
        """Whether a trial of ``new`` bytes fits next to the others; always True for the first."""
        return self.limit is None or not present or sum(present) + new <= self.limit

    def too_much(self, present: Sequence[int]) -> None:
        """Lower the limit after these trials together ran out of memory."""
        most = sum(present) * (1 - 1 / (2 * len(present)))
        self.limit = most if self.limit is None else min(self.limit, most)


TELL_SECONDS = 2.0
"""Interval between reports of the pack's state."""


class Shares:
    """Splits a pack's time among its trials. packs: number of packs on the node."""

    def __init__(self, folder: PackFolder, packs: int) -> None:
        self._folder, self._packs = folder, packs
        self._shared_at = self._told_at = time.monotonic()

    def share(self, training: Sequence[ClaimedTrial]) -> None:
        """Charge the time since the last call to these trials, which trained in it."""
        now = time.monotonic()
        for tenant in training:
            tenant.share += (now - self._shared_at) / len(training) / self._packs
        self._shared_at = now

    def tell(self, training: Sequence[ClaimedTrial]) -> None:
        """Write the trials' shares to the pack folder, at most every TELL_SECONDS."""
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self._told_at = time.monotonic()
            self.share(training)
            try:
                self._folder.tell({tenant.name: tenant.share for tenant in training})
            except OSError as error:  # such as a full disk; the next report may succeed
                print(f"no report of {len(training)} trials: {error}", flush=True)


def save_all(pack: Pack, training: Sequence[ClaimedTrial], waiting: Sequence[ClaimedTrial]) -> None:
    """Save every trial that has begun, so that its next attempt resumes in another pack."""
    saved = 0
    for tenant in (*training, *waiting):
        rows = pack.group(tenant.slot).state(tenant.slot) if tenant in training else tenant.left_at
        if rows is None:
            continue
        try:
            tenant.save(pack.base.device.type, rows)
            saved += 1
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk; save the others
            print(f"{tenant.name} is not saved: {error}", flush=True)
    print(f"asked to end: {saved} trials are saved", flush=True)


def to_blame(pack: Pack, training: Sequence[ClaimedTrial]) -> list[ClaimedTrial]:
    """The trials of a failed round that also fail alone; empty if the pack itself is at fault.

    The pack is at fault if all trials fail; for a single trial, if the base fails, too.
    """
    guilty = [tenant for tenant in training if not pack.trains(tenant.slot)]
    alone = len(training) == 1 and pack.base.works()
    return guilty if len(guilty) < len(training) or alone else []


class Scheduler:
    """Schedules trials over one base, which :meth:`use` sets. shares: time accounting.

    tenants: trials that train. waiting: trials that wait for memory. unrecorded: the end of some trial could not be
    written.
    """

    def __init__(self, shares: Shares) -> None:
        self.tenants: list[ClaimedTrial] = []
        self.waiting: list[ClaimedTrial] = []
        self.unrecorded = False
        self._shares = shares
        self.pack: Pack
        self.admission: Admission
        self._speeds: Speeds

    def use(self, base: PackedBase) -> None:
        """Train over ``base``; call before the first admission."""
        self.pack, self._speeds, self.admission = Pack(base), Speeds(base), Admission(base.device)

    def admit(self) -> None:
        """Admit waiting trials, in order, as far as memory allows."""
        while self.waiting:
            tenant = self.waiting[0]
            with self.contained(tenant):
                if not self._enters(tenant):
                    break

    def _enters(self, tenant: ClaimedTrial) -> bool:
        """Admit the trial; False if there is no room now. Raises errors that the trial itself causes."""
        present = [other.bytes for other in self.tenants]
        try:
            self.pack.make_room(tenant.slot.settings)
            speed = self._speeds.of(tenant.slot)
            if self.tenants and not (speed.packs and all(t.packs for t in self.tenants)):
                return False  # sharing a pack gains no speed and costs memory
            if not self.admission.fits(present, speed.bytes):
                return False
            self.pack.join(tenant.slot, tenant.left_at)
        except (RuntimeError, MemoryError) as error:
            if self.tenants and short_of_memory(error):
                return False  # retried after others have left
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
        except Exception as error:  # noqa: BLE001 - whatever it is, trials that did not cause it continue
            self.pack.rewind()
            self._blame(error)
            whole = True
        if not whole:
            self.pack.rewind()
        self._stepped([tenant for tenant in self.tenants if tenant.slot in done], done, rates)
        if not whole:
            self._shrink(self.tenants)

    def _stepped(
        self, tenants: Sequence[ClaimedTrial], done: Mapping[Slot, torch.Tensor], rates: Mapping[ClaimedTrial, float]
    ) -> None:
        """Log, evaluate and end these trials after a step."""
        losses = numbers({t: done[t.slot] for t in tenants if t.trial.wants_loss})
        for tenant in tenants:
            with self.contained(tenant):
                tenant.trial.stepped(rates[tenant], losses.get(tenant))
        self._evaluate([tenant for tenant in self.tenants if tenant in tenants and tenant.trial.evaluates])
        self.end_over()

    def end_over(self) -> None:
        """Remove trials that have finished."""
        for tenant in [tenant for tenant in self.tenants if tenant.trial.over]:
            with self.contained(tenant):
                self._finish(tenant)

    def _finish(self, tenant: ClaimedTrial) -> None:
        settings = tenant.slot.settings
        if settings.save_adapter:
            checkpoint.save_adapter(settings.save_adapter, self.pack.group(tenant.slot), tenant.slot)
        self.let_go(tenant)
        tenant.end(0)

    def _blame(self, error: Exception) -> None:
        """End the trials that caused a failed round. Raises ``error`` if the pack itself is at fault."""
        guilty = to_blame(self.pack, self.tenants)
        if not guilty:
            raise error
        for tenant in guilty:
            self.let_go(tenant)
            tenant.fail(error)
        print(f"{len(guilty)} trials cannot train: {' '.join(str(error).split())}", flush=True)

    def _evaluate(self, due: Sequence[ClaimedTrial]) -> None:
        """Evaluate trials together, in halves, or after removing others, as memory allows.

        Trials removed meanwhile are evaluated when they return.
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
                with self.contained(tenant):
                    tenant.trial.evaluated(loss)
        elif len(due) > 1:
            self._evaluate(due[: len(due) // 2])
            self._evaluate(due[len(due) // 2 :])
        else:
            self._shrink([*due, *(tenant for tenant in self.tenants if tenant not in due)])
            self._evaluate(due)

    def _shrink(self, order: Sequence[ClaimedTrial]) -> None:
        """After out of memory, the last quarter of ``order`` waits with its state; a single trial fails."""
        if len(order) == 1:
            self.let_go(order[0])
            order[0].fail(torch.OutOfMemoryError("CUDA out of memory: the trial does not fit on this device alone"))
            return
        self.admission.too_much([tenant.bytes for tenant in order])
        leaving = order[-max(1, len(order) // 4) :]
        for tenant in leaving:
            tenant.left_at = self.pack.group(tenant.slot).state(tenant.slot)
            self.let_go(tenant)
        self.pack.give_up()
        self.waiting[:0] = leaving
        print(f"out of memory: {len(leaving)} trials wait, {len(self.tenants)} go on", flush=True)

    def let_go(self, tenant: ClaimedTrial) -> None:
        """Remove a trial from the pack or from the waiting ones."""
        self._shares.share(self.tenants)
        if tenant in self.tenants:
            self.tenants.remove(tenant)
            self.pack.leave(tenant.slot)
        elif tenant in self.waiting:
            self.waiting.remove(tenant)

    @contextlib.contextmanager
    def contained(self, tenant: ClaimedTrial) -> Iterator[None]:
        """Turn an error of one trial's knobs, data, size or files into the end of that trial alone."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - data can raise anything, and the other trials continue
            self.let_go(tenant)
            self.unrecorded |= not tenant.fail(error)
