"""A sweep's records as an Optuna study in memory: to ask what its model thinks, without touching the database."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from lora_tune.config.study import Study
from lora_tune.objectives import objectives_of
from lora_tune.search.session import INFEASIBLE, attributes, directions, state_of, values_of
from lora_tune.store.records import Sweep, Trial, Verdict


def recorded_trials(study: Study, sweep: Sweep) -> list[FrozenTrial]:
    """Every trial as the session tells it to Optuna, by number."""
    distributions, conditions = study.search_space.distributions(), study.search_space.conditions
    found = []
    for trial in sweep.trials.values():
        outside = not trial.tuned and bool(distributions)  # a start that is no point of the space
        state = TrialState.FAIL if outside else state_of(trial.verdict)
        made = create_trial(
            state=state,
            values=_values(study, sweep, trial, state),
            params=conditions.complete(trial.tuned),
            distributions={} if outside else distributions,
            user_attrs=attributes(trial),
            intermediate_values=_reported(study, sweep, trial),
            constraints={INFEASIBLE: 1.0} if trial.verdict is Verdict.INFEASIBLE else None,
        )
        made.number = trial.number
        made.datetime_start = datetime.fromtimestamp(trial.proposed_at)
        made.datetime_complete = datetime.fromtimestamp(trial.finished_at) if trial.finished_at else None
        found.append(made)
    return found


def fitting(study: Study) -> Callable[[Trial], bool]:
    """Tells of a trial whether the study's space holds its values.

    It may not: the trial may be of the machine's own config, or older than the space.
    """
    space, conditions = study.search_space.distributions(), study.search_space.conditions
    return lambda trial: _fits(conditions.complete(trial.tuned), space)


def _fits(values: Mapping[str, Any], space: Mapping[str, BaseDistribution]) -> bool:
    if values.keys() != space.keys():
        return False
    try:
        create_trial(state=TrialState.RUNNING, params=dict(values), distributions=dict(space))
    except ValueError:
        return False
    return True


def _reported(study: Study, sweep: Sweep, trial: Trial) -> dict[int, float]:
    """The trial's evals as the session reports them."""
    objectives = objectives_of(study)
    if len(objectives) > 1:
        return {}
    told = ((e.samples, objectives[0].reported(e.loss)) for e in sweep.last_evals(trial.number))
    return {int(at): value for at, value in told if value is not None and math.isfinite(at)}


def _values(study: Study, sweep: Sweep, trial: Trial, state: TrialState) -> list[float] | None:
    """The objectives; of a pruned trial, as Optuna's ``tell`` has it, the last value that it reported."""
    if state is TrialState.COMPLETE:
        return values_of(study, trial, state)
    reported = [v for v in _reported(study, sweep, trial).values() if math.isfinite(v)]
    return reported[-1:] or None if state is TrialState.PRUNED else None


def in_memory(study: Study, sweep: Sweep, sampler: BaseSampler | None = None) -> optuna.Study:
    """The sweep as an Optuna study that lives in this process only."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    made = optuna.create_study(study_name=study.name, directions=directions(study), sampler=sampler)
    made.add_trials(recorded_trials(study, sweep))
    return made
