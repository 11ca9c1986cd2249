"""What a pack does for its trials where it ends before them, and which of them a failure is about."""

from __future__ import annotations

from collections.abc import Sequence

from lora_tune_recipes.packed.admission import short_of_memory
from lora_tune_recipes.packed.lockstep import PassLost
from lora_tune_recipes.packed.pack import Pack
from lora_tune_recipes.packed.tenant import Tenant


def leave_behind(pack: Pack, training: Sequence[Tenant], waiting: Sequence[Tenant]) -> None:
    """Save every trial that has begun: the next attempt of each goes on from there, in another pack."""
    saved = 0
    for tenant in (*training, *waiting):
        rows = pack.group(tenant.slot).state(tenant.slot) if tenant in training else tenant.left_at
        if rows is None:
            continue
        try:
            tenant.save(pack.base.device.type, rows)
            saved += 1
        except (OSError, RuntimeError) as error:  # torch's word for a full disk; the others' attempts may go on
            print(f"{tenant.name} is not saved: {error}", flush=True)
    print(f"asked to end: {saved} trials are saved", flush=True)


def to_blame(pack: Pack, training: Sequence[Tenant]) -> list[Tenant]:
    """The trials of a failed round that fail by themselves, too; none where the pack itself is to blame.

    It is where nothing trains any more; of a single trial, where the base does not compute either.
    """
    guilty = [tenant for tenant in training if not pack.trains(tenant.slot)]
    alone = len(training) == 1 and pack.base.works()
    return guilty if len(guilty) < len(training) or alone else []


def learn(lost: PassLost, training: Sequence[Tenant], measured: Tenant | None) -> Tenant | None:
    """What the next pack of these trials is to know of a pass that this one lost; the trial that alone is to blame.

    measured: the trial whose speed was measured just then. Where memory was short, a quarter fewer train side by side
    next time; after any other error one by one, until the one that it is about is alone with it.
    """
    print(f"a pass failed half way, and no other can follow: {lost}", flush=True)
    if not lost.own:
        return None
    if len(training) == 1 and measured is None:
        return training[0]
    if not training:
        return measured
    cause = lost.__cause__
    fewer = len(training)
    if measured is None:
        fewer = fewer - max(1, fewer // 4) if cause is not None and short_of_memory(cause) else 1
    for tenant in training:
        tenant.company = fewer
    return None
