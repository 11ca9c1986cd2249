"""What people asked of a sweep, and what they wrote beside it and its trials, as its report shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune import store as stores
from lora_tune.base.errors import StoreError
from lora_tune.store.port import Remark, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class People:
    """What people asked of a sweep, and what they wrote beside it and its trials."""

    requests: Sequence[Request] = ()
    remarks: Sequence[Remark] = ()


NOBODY = People()


def people_of(store: stores.Store, name: str) -> People:
    """What people asked and wrote. Raises StoreError."""
    written = sorted(stores.Remarks(store, name).latest().values(), key=lambda remark: remark.trial)
    return People(requests=stores.Requests(store, name).all(), remarks=[r for r in written if r.text])


def people_if_known(store: stores.Store, name: str) -> People:
    """The same; nothing where the database is away, which its driver says by itself."""
    try:
        return people_of(store, name)
    except StoreError:
        return NOBODY
