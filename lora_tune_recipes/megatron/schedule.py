"""The eval schedule: MLPerf's rule, or any other interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

RULE_INTERVAL = 384
"""Samples between two evaluations by MLPerf's rules for llama2_70b_lora."""


def rule_skipped(batch: int) -> int:
    """Evaluations that MLPerf's rules skip at the start, at a global batch of ``batch``: floor(0.125*GBS + 2)."""
    return math.floor(0.125 * batch + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSchedule:
    """Evaluate every ``interval`` optimizer steps, except the first ``skipped`` times."""

    interval: int
    skipped: int

    @property
    def first(self) -> int:
        """Optimizer steps before the first evaluation."""
        return (self.skipped + 1) * self.interval

    def steps(self, max_steps: int) -> list[int]:
        """All optimizer steps after which a run of ``max_steps`` evaluates."""
        return list(range(self.first, max_steps + 1, self.interval))

    def by_rule(self, batch: int) -> bool:
        """Whether this is MLPerf's schedule at a global batch of ``batch``."""
        return self == rule_schedule(batch)


def rule_schedule(batch: int) -> EvalSchedule:
    """MLPerf's schedule: every ceil(384/GBS)*GBS samples, skipping the first floor(0.125*GBS + 2)."""
    return EvalSchedule(interval=math.ceil(RULE_INTERVAL / batch), skipped=rule_skipped(batch))


def schedule(batch: int, samples: int, skipped: int | None) -> EvalSchedule:
    """Evaluate every ``samples`` samples, rounded up to whole steps; ``skipped`` None: by MLPerf's rule."""
    return EvalSchedule(
        interval=math.ceil(samples / batch), skipped=rule_skipped(batch) if skipped is None else skipped
    )
