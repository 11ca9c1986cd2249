"""A sweep's records as an Optuna study in memory: to ask what its model thinks, without touching the database."""

from __future__ import annotations

import math
from datetime import datetime

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from lora_tune.config.study import Study
from lora_tune.search.session import INFEASIBLE, attributes, state_of
from lora_tune.store.records import Sweep, Trial, Verdict


def recorded_trials(study: Study, sweep: Sweep) -> list[FrozenTrial]:
    """Every trial as the session tells it to Optuna, by number."""
    distributions = study.search_space.distributions()
    found = []
    for trial in sweep.trials.values():
        outside = not trial.tuned and bool(distributions)  # a start that is no point of the space
        state = TrialState.FAIL if outside else state_of(trial.verdict)
        made = create_trial(
            state=state,
            value=_value(sweep, trial, state),
            params=dict(trial.tuned),
            distributions={} if outside else distributions,
            user_attrs=attributes(trial),
            intermediate_values={
                int(e.samples): e.loss for e in sweep.last_evals(trial.number) if math.isfinite(e.samples)
            },
            constraints={INFEASIBLE: 1.0} if trial.verdict is Verdict.INFEASIBLE else None,
        )
        made.number = trial.number
        made.datetime_start = datetime.fromtimestamp(trial.proposed_at)
        made.datetime_complete = datetime.fromtimestamp(trial.finished_at) if trial.finished_at else None
        found.append(made)
    return found


def _value(sweep: Sweep, trial: Trial, state: TrialState) -> float | None:
    """The objective; of a pruned trial, as Optuna's ``tell`` has it, the last value it reported: an eval loss."""
    if state is TrialState.COMPLETE:
        return trial.objective
    losses = [e.loss for e in sweep.last_evals(trial.number) if math.isfinite(e.loss)]
    return losses[-1] if losses and state is TrialState.PRUNED else None


def in_memory(study: Study, sweep: Sweep, sampler: BaseSampler | None = None) -> optuna.Study:
    """The sweep as an Optuna study that lives in this process only."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    direction = optuna.study.StudyDirection.MAXIMIZE if study.maximise else optuna.study.StudyDirection.MINIMIZE
    made = optuna.create_study(study_name=study.name, direction=direction, sampler=sampler)
    made.add_trials(recorded_trials(study, sweep))
    return made
