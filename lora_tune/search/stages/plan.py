"""What each stage of a search costs and can win, before any run: what ``--dry-run`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_tune.base.text import counted
from lora_tune.search.stages.screening import EFFECTS, Switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage. what: it does, in words. probes, whole_runs: how many. node_hours: of them all, the most that is
    expected. gain: share of the score that it can win, as expected. skipped: why it is not begun, "" where it is.
    """

    name: str
    what: str
    probes: int = 0
    whole_runs: int = 0
    node_hours: float = 0.0
    gain: float = 0.0
    skipped: str = ""

    @property
    def words(self) -> str:
        """For people, one line."""
        if self.skipped:
            return f"{self.name}: skipped: {self.skipped}"
        counts = [counted(self.probes, "probes")] if self.probes else []
        counts += [counted(self.whole_runs, "whole runs")] if self.whole_runs else []
        won = f"; can win about {100 * self.gain:.1f}%" if self.gain else ""
        return f"{self.name}: {self.what}; {' and '.join(counts)}, at most {self.node_hours:.1f} node-hours{won}"


def gain_of(switches: Sequence[Switch], sd: float = EFFECTS[1]) -> float:
    """Expected ln(seconds) that the best level of each switch saves: levels differ from the base by N(0, sd)."""
    from scipy.special import ndtr

    x = np.linspace(0, 6, 1201)
    counts = [len(s.levels) - 1 for s in switches]
    return sd * sum(float(np.trapezoid(1 - ndtr(x) ** n, x)) for n in counts)


def improvement(saved: float, sd: float) -> float:
    """E max(0, N(saved, sd))."""
    from scipy.special import ndtr

    z = saved / max(sd, 1e-9)
    return saved * float(ndtr(z)) + sd * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def names(values: Sequence[str] | Mapping[str, Any], most: int = 4) -> str:
    """The first of some names, and how many more there are."""
    known = list(values)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more
