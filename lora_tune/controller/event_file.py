"""``driver.log``: what the driver did and why, one JSON object a line."""

from __future__ import annotations

import json
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from lora_tune.logs.failures import redact

KEPT_LINES = 1000
"""Lines that wait in memory while the disk takes none; the oldest go first, and their number is written down."""


class EventFile:
    """Appends to a file; secrets in texts are hidden. A full disk does not stop who writes: lines wait for room."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[str] = deque()
        self._dropped = 0
        path.open("a", encoding="utf-8").close()  # a folder that cannot be written is said at once

    def write(self, now: float, event: str, **facts: Any) -> None:
        """One line: the time in epoch seconds, the event's name, and its facts."""
        clean = {key: redact(value) if isinstance(value, str) else value for key, value in facts.items()}
        self._waiting.append(_line({"at": round(now, 3), "event": event, **clean}))
        if len(self._waiting) > KEPT_LINES:
            self._waiting.popleft()
            self._dropped += 1
        lost = [_line({"at": round(now, 3), "event": "lines lost", "count": self._dropped})] if self._dropped else []
        if _append(self._path, "".join([*lost, *self._waiting])):
            self._waiting.clear()
            self._dropped = 0


def _append(path: Path, text: str) -> bool:
    """Append all of ``text``, or nothing: False where the disk takes none, which the driver says by itself."""
    before = -1
    try:
        with path.open("ab") as file:
            before = file.tell()
            file.write(text.encode("utf-8", errors="backslashreplace"))
    except OSError:
        with suppress(OSError):
            if before >= 0:
                os.truncate(path, before)
        return False
    return True


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"
