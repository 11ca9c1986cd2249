"""What a model proposes to run next, in the terms in which models are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Proposed:
    """What to run: values, "full" or "probe", ln(score) that it is expected to gain a node-hour, and why."""

    values: dict[str, Any]
    kind: str
    rate: float
    why: str
