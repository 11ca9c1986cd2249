"""The stall test as an Optuna pruner, for anybody's study with eval losses reported at samples or seconds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from optuna.pruners import BasePruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lora_tune.curves.stall import Envelope, StallSettings, envelope_from, stalled
from lora_tune.logs.mllog import Eval

if TYPE_CHECKING:
    from optuna.study import Study

SENTENCE = "stall_verdict"
"""User attribute of a pruned trial that holds the verdict's sentence."""


class StallPruner(BasePruner):
    """Prunes trials whose eval curve has stalled or diverged.

    Report each eval as ``trial.report(loss, step)`` with ``step`` in samples (or seconds), not a running index: curves
    are compared at equal steps, whatever the eval schedule of each trial. The study minimises, and lower losses are
    better.

    target: the loss to reach. reference: a calibrated envelope, e.g. ``curves.published(8)``; None: the study's own
    finished trials that reached the target, once there are four, and each trial's own curve until then.
    false_prune_rate: share of good trials that may be pruned. no_verdict_before: step before which only NaN prunes.
    healing_step: where an FP4 trial changes precision, 0 when it does not (see ``curves.StallSettings``).
    max_steps: step at which a trial ends anyway, None when unknown.
    """

    def __init__(
        self,
        target: float,
        *,
        reference: Envelope | None = None,
        false_prune_rate: float = 0.01,
        no_verdict_before: float = 0.0,
        healing_step: float = 0.0,
        max_steps: float | None = None,
    ) -> None:
        if not 0 < false_prune_rate < 1:
            raise ValueError(f"false_prune_rate is a share between 0 and 1, not {false_prune_rate}")
        self._target = target
        self._settings = StallSettings(
            false_prune_rate=false_prune_rate, no_verdict_before=no_verdict_before,
            healing_samples=healing_step, max_samples=max_steps, reference=reference,
        )  # fmt: skip
        self._learned: tuple[int, Envelope | None] = (0, None)

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Whether the trial's reported curve says to stop; the reason goes to the user attribute ``stall_verdict``.

        Raises ValueError in a study that maximises: eval losses fall.
        """
        if len(study.directions) == 1 and study.direction == StudyDirection.MAXIMIZE:
            raise ValueError(
                "StallPruner compares losses, which fall; this study maximises: report losses and minimise"
            )
        evals = _evals(trial)
        if len(evals) < 2:
            return False
        settings = self._settings
        found = stalled(
            evals, self._target, reference=settings.reference or self._own_reference(study),
            false_prune_rate=settings.false_prune_rate, no_verdict_before=settings.no_verdict_before,
            healing_samples=settings.healing_samples, max_samples=settings.max_samples,
        )  # fmt: skip
        if found.stop:
            study._storage.set_trial_user_attr(trial._trial_id, SENTENCE, found.sentence)
        return found.stop

    def _own_reference(self, study: Study) -> Envelope | None:
        """The envelope of the study's finished trials, learned anew only when another one has finished."""
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(finished) != self._learned[0]:
            self._learned = (len(finished), envelope_from([_evals(t) for t in finished], self._target))
        return self._learned[1]


def _evals(trial: FrozenTrial) -> list[Eval]:
    return [Eval(float(step), float(loss), math.nan) for step, loss in sorted(trial.intermediate_values.items())]
