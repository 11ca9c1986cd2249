"""What the driver says: to ``driver.log``, one JSON object a line, and to whoever watches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_tune.diagnose import redact


class Journal:
    """Appends to a file; secrets in texts are hidden."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, now: float, event: str, **facts: Any) -> None:
        """One line: the time in epoch seconds, the event's name, and its facts."""
        clean = {key: redact(value) if isinstance(value, str) else value for key, value in facts.items()}
        self._file.write(json.dumps({"at": round(now, 3), "event": event, **clean}, ensure_ascii=False) + "\n")


class Voice:
    """Both at one time. show: told each text. now: epoch seconds."""

    def __init__(self, path: Path, show: Callable[[str], None], now: Callable[[], float]) -> None:
        self._journal, self._show, self._now = Journal(path), show, now
        self._troubles: dict[str, str] = {}

    def log(self, event: str, **facts: Any) -> None:
        """To the log only."""
        self._journal.write(self._now(), event, **facts)

    def note(self, text: str, event: str, **facts: Any) -> None:
        """An event, in words."""
        self.log(event, **facts, text=text)
        self._show(text)

    def trouble(self, about: str, text: str) -> None:
        """Trouble that may last is said when it begins or changes, not every tick. "": it is over."""
        if text and text != self._troubles.get(about):
            self.note(text, "trouble")
        self._troubles[about] = text
