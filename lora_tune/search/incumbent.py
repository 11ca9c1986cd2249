"""What is handed over in place of the configuration of today, and which further runs would decide it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from lora_tune.search.advantage import MOST_SURVIVALS, Advantage, Decision
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.proposed import Proposed
from lora_tune.search.sentences import TO_BE_SURE, why_decides

Values = Mapping[str, Any]
Compare = Callable[[Values, Values], Advantage | None]


@dataclass(frozen=True, kw_only=True)
class IncumbentChoice:
    """Who may be handed over.

    start: the configuration of today. moved: the same on the layout of ``best``, the one believed best. held: of the
    first two the one that stands. over: the best beside it, None where nobody can say. compared: of any two.
    """

    start: Values
    moved: Values
    held: Values
    best: Values
    over: Advantage | None
    compared: Compare

    @property
    def replaced(self) -> bool:
        """Whether the best is handed over: it is clearly better, or what is held."""
        return self.over is None or self.best == self.held or self.over.is_clear

    def wanted(self, trials: Sequence[FrozenTrial]) -> tuple[Values, Decision] | None:
        """Further runs of one of the two that may decide, and what they are worth; None where enough of them are open
        or nothing is to be decided. trials: of the study."""
        if self.replaced or self.over is None:
            return None
        decision = self.over.decision()
        values = self.held if decision.of_other else self.best
        running = sum(t.state is TrialState.RUNNING and t.params == values for t in trials)
        return (values, decision) if running < decision.runs and decision.worth > 0 else None

    def deciding(self, trials: Sequence[FrozenTrial], node_hours: Callable[[Values], float]) -> Proposed | None:
        """A run of those that are :meth:`wanted`, valued by what it may decide. node_hours: of a run of a
        configuration."""
        if (wanted := self.wanted(trials)) is None:
            return None
        values, decision = wanted
        return Proposed(
            dict(values), "full", decision.worth / node_hours(values), why_decides(of_other=decision.of_other)
        )  # fmt: skip

    def unsure_of_memory(self, alike: Callable[[Values], Sequence[FrozenTrial]]) -> Values | None:
        """What would be handed over in place of the start, had its layout lived more often; None where nothing is.

        alike: the trials with the memory of a configuration.
        """
        for values in (self.moved, self.best):
            advantage = self.compared(values, self.start) if values != self.start else None
            if advantage is not None and (more := advantage.survivals_wanted()) is not None:
                return values if more and _may_tell_more(alike(values)) else None
        return None


def choose(start: Values, moved: Values, best: Values, compared: Compare) -> IncumbentChoice:
    """Who stands. moved: the start on another layout; compared: the first configuration beside the second.

    Each step is taken where it alone is clear: a faster layout speaks for no learning rate.
    """
    held = start
    if moved != start and (step := compared(moved, start)) is not None and step.is_clear:
        held = moved
    return IncumbentChoice(
        start=start,
        moved=moved,
        held=held,
        best=best,
        over=compared(best, held) if best != held else None,
        compared=compared,
    )


def on_layout_of(coordinates: Coordinates, start: Values, other: Values) -> Values:
    """The start with what only decides speed as in ``other``: few runs settle that, and many the rest."""
    speed = set(coordinates.speed_names) - set(coordinates.convergence_names)
    return {name: other[name] if name in speed else value for name, value in start.items()}


def _may_tell_more(alike: Sequence[FrozenTrial]) -> bool:
    """Whether one more short run may tell whether a layout lives, after all trials of it.

    Not while one of them has yet to show that, nor where a short run said nothing of it: that failed, or they were too
    many.
    """
    short = [t for t in alike if t.user_attrs.get("why") == TO_BE_SURE]
    failed = any(t.state is TrialState.FAIL for t in short)
    silent = any(not t.state.is_finished() and not t.intermediate_values for t in alike)
    return not failed and len(short) < MOST_SURVIVALS and not silent
