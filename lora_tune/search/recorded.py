"""A sweep's records as an Optuna study in memory: what the sampler is asked with, and every other reader of a search.

How trials appear to Optuna: waiting and running are RUNNING; reached is COMPLETE; pruned, capped, censored are PRUNED
(TPE ranks them behind the complete ones, by their last eval); infeasible is PRUNED with a violated constraint, since
FAIL teaches TPE nothing; failed and cancelled are FAIL, which the samplers ignore. So are a number that no record has
and a result that is no number. A trial that is older than the space has those values that the space of today holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from lora_tune.base.text import steps_of_one, whole_step
from lora_tune.config.parameters import Conditions
from lora_tune.config.study import Study
from lora_tune.logs.failures import is_refusal
from lora_tune.logs.run import Eval
from lora_tune.search.objectives import objectives_of
from lora_tune.search.optuna_trials import STEP_SCALE
from lora_tune.search.usual_names import TREE
from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import StudyRecords, Trial, Verdict

MOST_STEPS = 2**31
"""Steps that fit into Optuna's tables on every database; a damaged log may name any number."""

PROBE = "probe"
"""The ``kind`` of a short run that only measured its layout's speed."""

BASE = "base"
"""User attribute of the trial that measures the configuration that is there before the sweep."""

REQUEST = "request"
"""User attribute of a trial that a person asked for: the number of the request."""

FIXED = "fixed_params"
"""System attribute that Optuna gives a trial that was enqueued: the values that it was enqueued with."""

INFEASIBLE = "feasible"
"""Name of the Optuna constraint that an infeasible trial violates."""

Space = tuple[Mapping[str, BaseDistribution], Conditions]

_STATES = {
    None: TrialState.RUNNING,
    Verdict.REACHED: TrialState.COMPLETE,
    Verdict.FAILED: TrialState.FAIL,
    Verdict.CANCELLED: TrialState.FAIL,
}


def directions(study: Study) -> list[StudyDirection]:
    """Optuna's word for each objective of the study."""
    return [StudyDirection.MAXIMIZE if o.maximise else StudyDirection.MINIMIZE for o in objectives_of(study)]


def attributes(record: Trial) -> dict[str, Any]:
    """The user attributes of a trial: why it was proposed, what kind it is, what the sampler added, how it ended.

    Speeds and times are those at the reference pace.
    """
    known = dict(record.sampler_attributes.get("user", {}))
    known |= {"why": record.why} if record.why else {}
    known |= {"kind": PROBE} if record.probe else {}
    known |= {BASE: record.metrics.base} if record.metrics.base is not None else {}
    known |= {REQUEST: record.request} if record.request is not None else {}
    if record.verdict is Verdict.INFEASIBLE and is_refusal(record.sentence):
        known["refused"] = True
    return known | (
        {**as_mapping(record.metrics.at_reference_pace()), "verdict": str(record.verdict)} if record.verdict else {}
    )


def reported(study: Study, evals: Iterable[Eval]) -> dict[int, float]:
    """Evals as intermediate values, at the step of their samples or part of an epoch; of two at one step the first.

    None of an objective of which they say nothing, nor of two: Optuna keeps such values for one objective alone.
    """
    objective, *others = objectives_of(study)
    steps: dict[int, float] = {}
    unit = study.progress_unit
    most = (MOST_STEPS - 1) / steps_of_one(unit)
    for point in () if others else evals:
        value = objective.reported(point.loss) if 0 <= point.samples <= most else None
        if value is not None:
            steps.setdefault(whole_step(point.samples, unit), value)
    return steps


def step_attributes(study: Study, steps: Mapping[int, float]) -> dict[str, int]:
    """The user attribute that says what the steps of intermediate values are; empty where they are what is counted."""
    scale = steps_of_one(study.progress_unit)
    return {STEP_SCALE: scale} if steps and scale != 1 else {}


def ending(study: Study, record: Trial) -> tuple[TrialState, list[float] | None]:
    """The state of a trial with this record, and the value of each objective where it has them all.

    A start that is no point of the space counts as failed: no sampler can learn from it.
    """
    objectives = objectives_of(study)
    values = (record.metrics.objective, record.metrics.second_objective)[: len(objectives)]
    state = _STATES.get(record.verdict, TrialState.PRUNED)
    if not record.tuned and record.metrics.base is not None and record.verdict is not None:
        state = TrialState.FAIL
    if state is not TrialState.COMPLETE:
        return state, None
    known = [value for value in values if value is not None and not math.isnan(value)]
    return (state, known) if len(known) == len(objectives) else (TrialState.FAIL, None)


def recorded_trial(study: Study, sweep: StudyRecords, record: Trial, space: Space) -> FrozenTrial:
    """One trial as Optuna shows it. space: of :func:`space_of`."""
    distributions, conditions = space
    state, values = ending(study, record)
    params = conditions.complete(record.tuned)
    if not _fits(params, distributions):
        params = {n: v for n, v in params.items() if n in distributions and _fits({n: v}, {n: distributions[n]})}
    steps = reported(study, sweep.last_evals(record.number))
    if state is TrialState.PRUNED and steps and not math.isnan(last := steps[max(steps)]):
        values = [last]  # as Optuna's ``tell`` has it
    ended = record.proposed_at if record.finished_at is None else record.finished_at
    made = FrozenTrial(
        number=record.number,
        trial_id=record.number,
        state=state,
        value=None,
        values=values,
        datetime_start=datetime.fromtimestamp(record.proposed_at),
        datetime_complete=datetime.fromtimestamp(ended) if state.is_finished() else None,
        params=params,
        distributions={name: distributions[name] for name in params},
        user_attrs=attributes(record) | step_attributes(study, steps),
        system_attrs=dict(record.sampler_attributes.get("system", {})),
        intermediate_values=steps,
    )
    if record.verdict is Verdict.INFEASIBLE:
        made.set_constraint(INFEASIBLE, 1.0)
    return made


def space_of(study: Study) -> Space:
    """The study's distributions and conditions, which are slow to make."""
    return study.search_space.distributions(), study.search_space.conditions


def trial_at(study: Study, sweep: StudyRecords, number: int, space: Space) -> FrozenTrial:
    """The trial of a number, a failed one where no record has it: Optuna's numbers have no gap."""
    if (record := sweep.trials.get(number)) is not None:
        return recorded_trial(study, sweep, record, space)
    made = create_trial(state=TrialState.FAIL)
    made.number = number
    return made


def recorded_trials(study: Study, sweep: StudyRecords) -> list[FrozenTrial]:
    """Every trial by number, without a gap."""
    space = space_of(study)
    return [trial_at(study, sweep, number, space) for number in range(sweep.next_number)]


def fitting(study: Study) -> Callable[[Trial], bool]:
    """Tells of a trial whether the study's space holds its values.

    It may not: the trial may be of the machine's own config, of a commit, whose code is another, or older than the
    space.
    """
    space, conditions = space_of(study)
    return lambda trial: TREE not in trial.parameters and _fits(conditions.complete(trial.tuned), space)


def _fits(values: Mapping[str, Any], space: Mapping[str, BaseDistribution]) -> bool:
    if values.keys() != space.keys():
        return False
    try:
        create_trial(state=TrialState.RUNNING, params=dict(values), distributions=dict(space))
    except ValueError:
        return False
    return True


def in_memory(
    study: Study, sweep: StudyRecords, sampler: BaseSampler | None = None, storage: InMemoryStorage | None = None
) -> optuna.Study:
    """The sweep as an Optuna study that lives in this process only. storage: an empty one to make it in."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kept = storage or InMemoryStorage()
    made = optuna.create_study(study_name=study.name, storage=kept, directions=directions(study), sampler=sampler)
    made.add_trials(recorded_trials(study, sweep))
    at = kept.get_study_id_from_name(study.name)
    for number in sorted(sweep.trials):
        for key, value in sweep.trials[number].sampler_attributes.get("study", {}).items():
            kept.set_study_system_attr(at, key, value)
    return made
