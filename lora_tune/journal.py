"""``driver.log``: what the driver did and why, one JSON object a line."""

from __future__ import annotations

import json
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
