"""The stopping rule as an Optuna pruner, for any study with a metric reported at samples, steps or seconds."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import TYPE_CHECKING

from optuna.pruners import BasePruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lora_tune.curves.comparison import FEWEST, ComparedRun, compared_run, needed, supported
from lora_tune.curves.stopping import Evidence, for_rising_metric, verdict
from lora_tune.logs.follower import EACH, due
from lora_tune.logs.run import Eval

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from optuna.study import Study

SENTENCE = "stall_verdict"
"""User attribute of a pruned trial with the verdict's sentence."""

KIND, LENGTH = "stall_kind", "stall_length"
"""User attributes that a trial may set: a key shared by comparable trials, and the step at which it ends anyway."""


class StallPruner(BasePruner):
    """Prunes trials that would not have become the best, at a risk that the finished trials support.

    Report each eval as ``trial.report(value, step)`` with ``step`` in samples, steps or seconds, not a running index:
    curves are compared at equal shares of training, whatever each trial's eval schedule. A trial with more than a
    thousand values is judged again only when it has 1% more. The study minimises or maximises one value.

    Parameters
    ----------
    target
        The value to reach. Trials that have reached it are not pruned; divergence is relative to the distance to it.
    false_prune_rate
        Share of the trials that would have become one of the best that may be pruned over their whole lives. n
        references support no rate below 1/(n + 1), which is used if it is higher.
    references
        Number of best finished trials, by the study's value, with which a trial is compared; at least 3. One more
        must have ended. A rate of 5% needs 19; with fewer a warning states the supported rate.
    max_steps
        Step at which a trial ends anyway; None if unknown. A trial with another length sets its user attribute
        ``stall_length`` before it reports. Trials with different ``stall_kind`` (batch, precision) are not compared.
    no_verdict_before
        Step before which only divergence prunes.

    Raises
    ------
    ValueError
        If a share, a step, a count or a trial's ``stall_length`` is out of range.
    """

    def __init__(
        self,
        target: float,
        *,
        false_prune_rate: float = 0.01,
        references: int = FEWEST,
        max_steps: float | None = None,
        no_verdict_before: float = 0.0,
    ) -> None:
        if not 0 < false_prune_rate < 1:
            raise ValueError(f"false_prune_rate is a share between 0 and 1, not {false_prune_rate}")
        if not math.isfinite(target):
            raise ValueError(f"target is a finite number, not {target}")
        if references < FEWEST or references % 1:
            raise ValueError(f"references is a count of 3 or more, not {references}: two others are compared with each")
        if not no_verdict_before >= 0:
            raise ValueError(f"no_verdict_before is a step of 0 or more, not {no_verdict_before}")
        if max_steps is not None and not 0 < max_steps < math.inf:
            raise ValueError(f"max_steps is a step above 0, or None where it is not known, not {max_steps}")
        self._target, self._max_steps, self._count = target, max_steps, int(references)
        self._rate, self._silent = false_prune_rate, no_verdict_before
        self._references_checked = False
        if (kept := supported(false_prune_rate, self._count)) > false_prune_rate:
            warnings.warn(
                f"StallPruner: {self._count} references support a false-prune rate of {100 * kept:.1f}%, not "
                f"{100 * false_prune_rate:g}%; references={needed(false_prune_rate)} support it",
                stacklevel=2,
            )
        self._judged: dict[tuple[str, int], int] = {}  # number of values at the last judgement of a long trial
        self._learned: tuple[Hashable, Sequence[ComparedRun]] = ((), ())

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Whether to stop the trial; the reason is stored in the user attribute ``stall_verdict``.

        Raises ValueError in a study with several objectives.
        """
        if len(study.directions) != 1:
            raise ValueError(f"StallPruner compares one value with one target; this study has {len(study.directions)}")
        if not self._due(study.study_name, trial):
            return False
        self._check_references(study, trial)
        sign = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0
        evidence = Evidence(
            finished=self._finished(study, sign), count=self._count, rate=self._rate,
            no_verdict_before=self._silent, unit="steps",
        )  # fmt: skip
        stall = verdict(
            _evals(trial, sign), sign * self._target, evidence, length=self._length(trial), task=_kind(trial)
        )
        if stall.stop:
            kept = sign * self._target
            sentence = stall.sentence if sign > 0 else for_rising_metric(stall.sentence, kept, self._target)
            study._storage.set_trial_user_attr(trial._trial_id, SENTENCE, sentence)
        return stall.stop

    def _check_references(self, study: Study, trial: FrozenTrial) -> None:
        """Warn once if the target or the length seems to have another unit than the trial's reports."""
        values, length = trial.intermediate_values, self._length(trial)
        if not values or self._references_checked:
            return
        rising, shown = study.direction == StudyDirection.MAXIMIZE, [v for v in values.values() if math.isfinite(v)]
        problem = ""
        if rising and self._target > 1 and len(shown) > 1 and all(0 <= v <= 1 for v in shown):
            share = self._target / 100
            problem = f"target={self._target:g}, but trials report shares such as {shown[-1]:g}; write {share:g}"
        elif shown and (shown[0] > self._target if rising else shown[0] < self._target):
            side = "above" if rising else "below"
            problem = (
                f"target={self._target:g}, but a trial's first value, {shown[0]:g}, lies {side} it; "
                "is the study's direction right?"
            )
        elif length is not None and max(values) > length:
            problem = f"max_steps={length:g}, but a trial reports at step {max(values)}; state both in the same unit"
        if problem:
            self._references_checked = True
            warnings.warn(f"StallPruner: {problem}", stacklevel=4)

    def _due(self, study: str, trial: FrozenTrial) -> bool:
        """Whether to judge the trial now; a trial with very many values is not judged at each."""
        key, values = (study, trial.number), len(trial.intermediate_values)
        if not due(values, values - self._judged.get(key, 0)):
            return False
        if values > EACH:
            self._judged[key] = values
        return True

    def _finished(self, study: Study, sign: float) -> Sequence[ComparedRun]:
        """The study's finished trials, best first; rebuilt only after another one has ended."""
        trials = study.get_trials(deepcopy=False)
        ended = [(t.number, t.datetime_complete) for t in trials if t.state.is_finished()]
        known, learned = (study.study_name, len(ended), *ended[-1:]), self._learned
        if known != learned[0]:
            learned = self._learned = (known, self._learn(trials, sign))
        return learned[1]

    def _learn(self, trials: Sequence[FrozenTrial], sign: float) -> Sequence[ComparedRun]:
        done = [t for t in trials if t.state == TrialState.COMPLETE and t.value is not None and t.intermediate_values]
        ranked = sorted(done, key=lambda t: sign * (t.value or 0.0))
        return [compared_run(_evals(t, sign), length=self._length(t), task=_kind(t)) for t in ranked]

    def _length(self, trial: FrozenTrial) -> float | None:
        length = trial.user_attrs.get(LENGTH, self._max_steps)
        if length is None:
            return None
        if isinstance(length, numbers.Real) and 0 < float(length) < math.inf:
            return float(length)
        raise ValueError(
            f"user attribute '{LENGTH}' of trial {trial.number} is a step above 0, or not set where it is not known, "
            f"not {length!r}"
        )


def _kind(trial: FrozenTrial) -> Hashable:
    return str(trial.user_attrs.get(KIND, ""))


def _evals(trial: FrozenTrial, sign: float) -> list[Eval]:
    return [Eval(float(step), sign * float(v), math.nan) for step, v in sorted(trial.intermediate_values.items())]
