"""What each trial of a pack has had of the node."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lora_tune.launchers.pack_folder import PackFolder
from lora_tune_recipes.packed.tenant import Tenant

TELL_SECONDS = 2.0
"""Between two reports of the pack's state."""


class Shares:
    """Shares a pack's time among its trials. packs: how many share the node."""

    def __init__(self, folder: PackFolder, packs: int) -> None:
        self._folder, self._packs = folder, packs
        self._shared_at = self._told_at = time.monotonic()

    def share(self, training: Sequence[Tenant]) -> None:
        """The time since this was last called belongs to these trials, which trained meanwhile."""
        now = time.monotonic()
        for tenant in training:
            tenant.share += (now - self._shared_at) / len(training) / self._packs
        self._shared_at = now

    def tell(self, training: Sequence[Tenant]) -> None:
        """Write down now and then what the trials have had."""
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self._told_at = time.monotonic()
            self.share(training)
            try:
                self._folder.tell({tenant.name: tenant.share for tenant in training})
            except OSError as error:  # a full disk, say: the next report may find room
                print(f"no report of {len(training)} trials: {error}", flush=True)
