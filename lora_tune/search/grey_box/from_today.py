"""The grey box of a user who has a configuration today: it stays until another is clearly better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from lora_tune.search.advantage import Advantage
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.incumbent import IncumbentChoice, choose, on_layout_of
from lora_tune.search.optuna_trials import annotate, usual_init_seconds
from lora_tune.search.proposed import Proposed
from lora_tune.search.sentences import TO_BE_SURE, staying


class FromTodaySampler(GreyBoxSampler):
    """A grey box that knows where the user stands.

    distributions: the search space. start: tuned values of what the user has today; None or a part of the space: nobody
    knows. nodes: of one trial. settings: of the grey box.
    """

    def __init__(
        self, distributions: Mapping[str, BaseDistribution], *, start: Mapping[str, Any] | None = None, nodes: int = 1,
        **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(distributions, **settings)
        self._space, self._nodes = dict(distributions), nodes
        whole = start is not None and start.keys() >= self._space.keys()
        self._start = {n: start[n] for n in self._space} if whole and start is not None else None

    @property
    def space(self) -> Mapping[str, BaseDistribution]:
        """What it searches."""
        return self._space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The grey box's proposal, or what may decide sooner whether the configuration of today is handed over."""
        if not search_space:
            return {}
        proposed = self.next_run(study, search_space, skip=trial.number)
        if proposed is None:
            return super().sample_relative(study, trial, search_space)
        annotate(study, trial, why=proposed.why, kind=proposed.kind)
        return proposed.values

    def next_run(
        self, study: optuna.Study, search_space: Mapping[str, BaseDistribution], skip: int = -1
    ) -> Proposed | None:
        """What to run next by all trials but ``skip``; None where trials record no samples to the target.

        A short run that shows whether a layout lives before it replaces the one of today has no price: its rate is
        infinite.
        """
        choice = self._choice(study)
        if choice is not None and self.probes:
            unsure = choice.unsure_of_memory(lambda values: self.alike(study, values))
            if unsure is not None:
                return Proposed(dict(unsure), "probe", math.inf, TO_BE_SURE)
        proposed = self.proposal(study, search_space, skip=skip)
        if proposed is None or choice is None:
            return proposed
        again = choice.deciding(study.get_trials(deepcopy=False), lambda values: self._hours(study, values))
        return again if again is not None and again.rate > proposed.rate else proposed

    def recommend(self, study: optuna.Study) -> tuple[dict[str, Any], float, str]:
        """The configuration believed best: values, expected seconds, a sentence.

        What the user has today stays, unless its run has failed here, until another is clearly better.
        """
        best = super().recommend(study)
        choice = self._choice(study, best[0])
        if choice is None or choice.replaced or choice.over is None:
            return best
        sentence = staying(best[1], choice.over, moved=choice.held != choice.start)
        return dict(choice.held), math.exp(self.forecast(study, choice.held)[0]), sentence

    def _choice(self, study: optuna.Study, best: Mapping[str, Any] | None = None) -> IncumbentChoice | None:
        """How what is believed best (None: by the model that proposes) stands beside what the user has today; None
        where that does not count."""
        trials, start = study.get_trials(deepcopy=False), self._start
        if start is None or not any(_counts(t) and t.params == start for t in trials):
            return None
        best = self.best_so_far(study) if best is None else best
        looks = sum(t.state is TrialState.COMPLETE for t in trials)

        def compared(values: Mapping[str, Any], other: Mapping[str, Any]) -> Advantage | None:
            known: Sequence[Advantage] = self.compared(study, values, [other])
            return replace(known[0], looks=looks) if known else None

        moved = on_layout_of(self.coordinates(self._space), start, best)
        return choose(start, moved, best, compared)

    def _hours(self, study: optuna.Study, values: Mapping[str, Any]) -> float:
        seconds = math.exp(self.forecast(study, values)[0]) + usual_init_seconds(study)
        return seconds * self._nodes / 3600


def _counts(trial: FrozenTrial) -> bool:
    """Whether it has reached the target, or may yet."""
    if trial.state is TrialState.RUNNING:
        return trial.user_attrs.get("kind") != "probe"
    return trial.state is TrialState.COMPLETE and trial.value is not None and trial.value > 0
