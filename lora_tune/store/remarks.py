"""What people write beside a sweep and its trials: theirs alone, never read by the driver, kept in every version."""

from __future__ import annotations

import sqlalchemy as sa

from lora_tune.base.errors import KeyTakenError, RemarkChangedError
from lora_tune.store import schema
from lora_tune.store.database import Store
from lora_tune.store.port import Remark


class Remarks:
    """The remarks of one sweep. Anybody may add one; nothing is overwritten."""

    def __init__(self, store: Store, sweep: str) -> None:
        self._store, self._sweep = store, sweep

    def latest(self) -> dict[int, Remark]:
        """By trial what is written there now. Raises StoreError."""
        return {remark.trial: remark for remark in sorted(self.history(), key=lambda r: r.version)}

    def history(self) -> list[Remark]:
        """Every version of every remark, the oldest first. Raises StoreError."""
        table = schema.remarks
        wanted = sa.select(table).where(table.c.sweep == self._sweep).order_by(table.c.written_at, table.c.version)
        with self._store._reading() as connection:
            rows = connection.execute(wanted).mappings().all()
        return [Remark(**{k: v for k, v in row.items() if k != "sweep"}) for row in rows]

    def write(self, remark: Remark) -> None:
        """Add a version. Raises RemarkChangedError where somebody was quicker, StoreError."""
        values = {name: getattr(remark, name) for name in ("trial", "version", "text", "who", "written_at")}
        now = self.latest().get(remark.trial)
        changed = (
            f"somebody has written here meanwhile (version {now.version if now else 0}); copy your text and reload"
        )
        if remark.version != (now.version if now else 0) + 1:
            raise RemarkChangedError(changed)
        try:
            with self._store._writing() as connection:
                connection.execute(sa.insert(schema.remarks).values(sweep=self._sweep, **values))
        except KeyTakenError as error:
            raise RemarkChangedError(changed) from error
