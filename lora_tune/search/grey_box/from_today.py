"""The grey box of a user who has a configuration today: it stays until another is clearly better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from lora_tune.base.text import duration
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.sampler import Advantage, GreyBoxSampler

Values = Mapping[str, Any]


class FromTodaySampler(GreyBoxSampler):
    """A grey box that knows where the user stands.

    distributions: the search space. start: tuned values of what the user has today; None or a part of the space: nobody
    knows. settings: of the grey box.
    """

    def __init__(
        self, distributions: Mapping[str, BaseDistribution], *, start: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        super().__init__(distributions, **settings)
        self._space = dict(distributions)
        whole = start is not None and start.keys() >= self._space.keys()
        self._start = {n: start[n] for n in self._space} if whole and start is not None else None

    @property
    def space(self) -> Mapping[str, BaseDistribution]:
        """What it searches."""
        return self._space

    def recommend(self, study: optuna.Study) -> tuple[dict[str, Any], float, str]:
        """The configuration believed best: values, expected seconds, a sentence.

        What the user has today stays, unless its run has failed here, until another is clearly better. Each step is
        taken where it alone is clear: a faster layout speaks for no learning rate.
        """
        best, start = super().recommend(study), self._start
        if start is None or not any(_counts(t) and t.params == start for t in study.get_trials(deepcopy=False)):
            return best
        held: Values = start
        moved = _on_layout_of(self.coordinates(self._space), start, best[0])
        if moved != start and (step := self._over(study, moved, start)) is not None and step.is_clear:
            held = moved
        over = self._over(study, best[0], held) if best[0] != held else None
        if over is None or over.is_clear:
            return best
        sentence = _staying(best[1], over, moved=held != start)
        return dict(held), math.exp(self.forecast(study, held)[0]), sentence

    def _over(self, study: optuna.Study, values: Values, other: Values) -> Advantage | None:
        """The first configuration beside the second; None where nobody can say."""
        return next(iter(self.compared(study, values, [other])), None)


def _on_layout_of(coordinates: Coordinates, start: Values, other: Values) -> Values:
    """The start with what only decides speed as in ``other``: few runs settle that, and many the rest."""
    speed = set(coordinates.speed_names) - set(coordinates.convergence_names)
    return {name: other[name] if name in speed else value for name, value in start.items()}


def _staying(seconds: float, best: Advantage, *, moved: bool) -> str:
    """That the configuration of today stays, on its layout or a faster one; seconds, best: of the one believed best."""
    today = "the configuration of today" + (" on a faster layout" if moved else "")
    return (
        f"{today}: the one believed best is expected to take {duration(seconds)} and to save {100 * best.share:.1f}% "
        f"(give or take {100 * best.sd:.1f}%), which is not yet clear"
    )


def _counts(trial: FrozenTrial) -> bool:
    """Whether it has reached the target, or may yet."""
    if trial.state is TrialState.RUNNING:
        return trial.user_attrs.get("kind") != "probe"
    return trial.state is TrialState.COMPLETE and trial.value is not None and trial.value > 0
