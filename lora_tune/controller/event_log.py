"""What the driver says: to its log, and to whoever watches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_tune.controller.event_file import EventFile


class EventLog:
    """Both at one time. path: the log. show: told each text. now: epoch seconds."""

    def __init__(self, path: Path, show: Callable[[str], None], now: Callable[[], float]) -> None:
        self._journal, self._show, self._now = EventFile(path), show, now
        self._troubles: dict[str, str] = {}

    def log(self, event: str, **facts: Any) -> None:
        """To the log only."""
        self._journal.write(self._now(), event, **facts)

    def note(self, text: str, event: str, *, shown: str = "", **facts: Any) -> None:
        """An event, in words. shown: what is said to who watches, where that is not the whole text."""
        self.log(event, **facts, text=text)
        self._show(shown or text)

    def trouble(self, about: str, text: str, *, kind: str = "") -> None:
        """Trouble that may last is said when it begins or changes, not every tick. "": it is over.

        kind: what makes it another trouble, where its words grow with what is seen; the text itself by default.
        """
        known = text and (kind or text)
        if text and known != self._troubles.get(about):
            self.note(text, "trouble")
        self._troubles[about] = known
