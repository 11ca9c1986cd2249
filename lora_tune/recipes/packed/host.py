"""The loop of a pack: take what is asked, make a round, write what came of it, and let go what is over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from lora_tune.launchers.pack_folder import PackFolder
from lora_tune.recipes import settings as knobs
from lora_tune.recipes.packed import adapter_file, checkpoint, interruption
from lora_tune.recipes.packed.admission import Admission, attempted, short_of_memory
from lora_tune.recipes.packed.alone import Speeds
from lora_tune.recipes.packed.base import Meeting, PackedBase
from lora_tune.recipes.packed.lockstep import PassLost
from lora_tune.recipes.packed.pack import Pack, numbers
from lora_tune.recipes.packed.sharded import ShardedBase
from lora_tune.recipes.packed.shares import Shares
from lora_tune.recipes.packed.slot import Slot
from lora_tune.recipes.packed.tenant import STOPPED, Tenant
from lora_tune.recipes.packed.together import Together

LOOK_SECONDS = 0.2
"""Between two looks for requests and stops."""
PAUSE = 0.05


class Host:
    """Serves the requests in ``folder`` until none came for ``idle`` seconds.

    packs: how many share the folder, and the node. slots: trials that this one has at most where others share it.
    together: how they share their base, too.
    """

    def __init__(
        self, folder: PackFolder, idle: float, *, packs: int = 1, slots: int = 1, together: Together | None = None
    ) -> None:
        self._folder, self._idle, self._packs, self._slots = folder, idle, packs, slots
        self._together = together
        self._base: PackedBase | None = None
        self._unusable: Exception | None = None
        self._tenants: list[Tenant] = []
        self._waiting: list[Tenant] = []
        self._measured: Tenant | None = None
        self._ending = self._others_train = False
        self._shares = Shares(folder, packs)
        self._looked_at = self._busy_at = time.monotonic()

    def stop(self) -> None:
        """End after the round in progress; may be called from a signal handler."""
        self._ending = True

    def serve(self) -> bool:
        """Train what is asked for; False where it was told to stop before nothing was left to do.

        Raises what the arithmetic raises; each trial's log says what it was.
        """
        try:
            self._begin_together()
            over = False
            while not over:
                self._look()
                self._shares.tell(self._tenants)
                self._admit()
                self._measured = None
                if self._tenants:
                    self._round()
                    self._busy_at = time.monotonic()
                elif not self._waiting and self._folder.ends(time.monotonic() - self._busy_at, self._idle):
                    return True
                over = self._meet()
        except PassLost as lost:
            self._give_up(lost)
        except Exception as error:
            # Whoever reads a trial's log must find there why it ended; a machine's fault is tried again.
            for tenant in (*self._tenants, *self._waiting):
                tenant.fail(error)
            raise
        if self._base is not None:
            interruption.leave_behind(self._pack, self._tenants, self._waiting)
        return False

    def _begin_together(self) -> None:
        """Make the base that the packs of the job share, all at the same time."""
        if self._together is not None:
            try:
                self._use(ShardedBase(knobs.read(self._together.base_knobs), self._together))
            except Exception as error:  # noqa: BLE001 - every trial is told, whatever it was
                self._unusable = error

    def _use(self, base: PackedBase) -> None:
        self._base, self._pack, self._speeds = base, Pack(base), Speeds(base)
        self._admission = Admission(base.device)

    def _meet(self) -> bool:
        """After a round: join in what other packs over this base still do; whether this pack is to end now."""
        alone = Meeting(passes=False, ending=self._ending)
        met = alone if self._base is None else self._base.meet(ending=self._ending)
        self._others_train = met.passes
        if not (met.passes or self._tenants or self._waiting):
            time.sleep(PAUSE)
        return met.ending

    def _give_up(self, lost: PassLost) -> None:
        """No pass can follow: what is over ends, and so does the trial that is to blame, where that is one alone."""
        self._end_over()
        guilty = interruption.learn(lost, self._tenants, self._measured)
        if guilty is not None:
            self._let_go(guilty)
            guilty.fail(lost.__cause__ or lost)

    def _look(self) -> None:
        """Take in new trials, and end those that are to be stopped."""
        if (self._tenants or self._others_train) and time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        requests = self._folder.take()
        while self._wants_more() and (request := next(requests, None)) is not None:
            self._busy_at = time.monotonic()
            tenant = Tenant.claim(request)
            if tenant is not None:
                with self._alone(tenant):
                    self._house(tenant)
            else:
                self._ending |= self._packs > 1 and not request.ended  # as in _alone: nobody records its end
        own = {tenant.name: tenant for tenant in (*self._tenants, *self._waiting)}
        for name in self._folder.stopped(own):
            self._let_go(own[name])
            with self._alone(own[name]):
                own[name].end(STOPPED)

    def _wants_more(self) -> bool:
        """Whether to take a further trial; beside other packs only what trains at once, and they have the rest."""
        if self._packs == 1:
            return True
        self._admit()
        return not self._waiting and len(self._tenants) < max(self._slots, self._folder.slots())

    def _house(self, tenant: Tenant) -> None:
        """Read a trial's knobs and data; it waits for room then."""
        settings = knobs.read(tenant.request.knobs)
        if self._unusable is not None:
            raise self._unusable
        if self._base is None:
            self._use(PackedBase(settings))
        assert self._base is not None
        self._base.check(settings)
        # Refuses modules that the model lacks, and what fits nowhere.
        self._admission.check(self._pack.weights(settings))
        left = checkpoint.of_earlier_attempt(tenant.request, self._base.device.type)
        slot = Slot(settings, self._base.texts(settings), left.progress.step if left else 0)
        tenant.open(slot, self._base.device_name, left)
        self._waiting.append(tenant)

    def _admit(self) -> None:
        """Give waiting trials a slot, in their order, as far as memory allows."""
        while self._waiting:
            tenant = self._waiting[0]
            with self._alone(tenant):
                if not self._enters(tenant):
                    return

    def _enters(self, tenant: Tenant) -> bool:
        """Give the trial a slot; False where there is none now. Raises what the trial itself is to blame for."""
        present = [other.bytes for other in self._tenants]
        if 0 < min((t.company for t in (*self._tenants, tenant) if t.company), default=0) <= len(present):
            return False  # more of them could not train side by side
        try:
            self._measured = tenant
            speed, self._measured = self._speeds.of(tenant.slot), None
            if self._tenants and not (speed.packs and all(t.packs for t in self._tenants)):
                return False  # company would only cost memory
            if not self._admission.fits(present, speed.bytes):
                return False
            self._pack.join(tenant.slot, tenant.left_at)
        except (RuntimeError, MemoryError) as error:
            if self._tenants and short_of_memory(error):
                return False  # tried again when others have gone
            raise
        self._shares.share(self._tenants)
        self._tenants.append(tenant)
        self._waiting.remove(tenant)
        tenant.begin(speed)
        if tenant.trial.evaluates:
            self._evaluate([tenant])
            self._end_over()
        return True

    def _round(self) -> None:
        rates = {tenant: tenant.slot.rate() for tenant in self._tenants}
        done: dict[Slot, torch.Tensor] = {}
        try:
            whole = attempted(lambda: self._pack.round(done)) is not None
        except Exception as error:  # noqa: BLE001 - whatever it is, the trials that it is not about go on
            self._pack.rewind()
            self._blame(error)
            whole = True
        if not whole:
            self._pack.rewind()
        self._stepped([tenant for tenant in self._tenants if tenant.slot in done], done, rates)
        if not whole:
            self._shrink(self._tenants)

    def _stepped(
        self, tenants: Sequence[Tenant], done: Mapping[Slot, torch.Tensor], rates: Mapping[Tenant, float]
    ) -> None:
        """After a step of these: their logs, evaluations and ends."""
        losses = numbers({t: done[t.slot] for t in tenants if t.trial.wants_loss})
        for tenant in tenants:
            with self._alone(tenant):
                tenant.trial.stepped(rates[tenant], losses.get(tenant))
        self._evaluate([tenant for tenant in self._tenants if tenant in tenants and tenant.trial.evaluates])
        self._end_over()

    def _end_over(self) -> None:
        """Let those go that have come to their own end."""
        for tenant in [tenant for tenant in self._tenants if tenant.trial.over]:
            with self._alone(tenant):
                self._finish(tenant)

    def _finish(self, tenant: Tenant) -> None:
        settings = tenant.slot.settings
        if settings.save_adapter:
            adapter_file.save(settings.save_adapter, self._pack.group(tenant.slot), tenant.slot)
        self._let_go(tenant)
        tenant.end(0)

    def _blame(self, error: Exception) -> None:
        """A round has failed: end the trials that are to blame. Raises ``error`` where the pack itself is."""
        guilty = interruption.to_blame(self._pack, self._tenants)
        if not guilty:
            raise error
        for tenant in guilty:
            self._let_go(tenant)
            tenant.fail(error)
        print(f"{len(guilty)} trials cannot train: {' '.join(str(error).split())}", flush=True)

    def _evaluate(self, due: Sequence[Tenant]) -> None:
        """Evaluate trials together, or by halves, or with others gone, as memory allows.

        Those that have made room meanwhile are evaluated when they come back.
        """
        due = [tenant for tenant in due if tenant in self._tenants]
        if not due:
            return
        try:
            losses = attempted(lambda: self._pack.evaluate([tenant.slot for tenant in due]))
        except Exception as error:
            if not self._pack.base.works():
                raise
            if len(due) == 1:
                self._let_go(due[0])
                due[0].fail(error)
                return
            losses = None
        if losses is not None:
            for tenant, loss in zip(due, losses, strict=True):
                with self._alone(tenant):
                    tenant.trial.evaluated(loss)
        elif len(due) > 1:
            self._evaluate(due[: len(due) // 2])
            self._evaluate(due[len(due) // 2 :])
        else:
            self._shrink([*due, *(tenant for tenant in self._tenants if tenant not in due)])
            self._evaluate(due)

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
        self._shares.share(self._tenants)
        if tenant in self._tenants:
            self._tenants.remove(tenant)
            self._pack.leave(tenant.slot)
        elif tenant in self._waiting:
            self._waiting.remove(tenant)

    @contextlib.contextmanager
    def _alone(self, tenant: Tenant) -> Iterator[None]:
        """What one trial's knobs, data, size or files are to blame for ends that trial, and no other."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - data can raise anything, and the others train on
            self._let_go(tenant)
            # The job of several packs ends when no trial is without an end: it must not wait for this one's.
            self._ending |= not tenant.fail(error) and self._packs > 1
