"""A sweep's records as an in-memory Optuna study, for the sampler and all other readers of the search.

States in Optuna: waiting and running are RUNNING; reached is COMPLETE; pruned, capped and censored are PRUNED (TPE
ranks them behind the complete ones, by their last eval); infeasible is PRUNED with a violated constraint, since TPE
ignores FAIL; failed and cancelled are FAIL, which the samplers ignore. So are numbers without a record and NaN results.
A trial older than the space has only those values that the current space contains.
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
from lora_tune.search.observations import Observation, first_number
from lora_tune.search.usual_names import TREE
from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import StudyRecords, Trial, Verdict

MOST_STEPS = 2**31
"""Largest step in Optuna's tables on every database; a damaged log may have any number."""

STEP_SCALE = "epoch_in_steps"
"""User attribute of a trial with intermediate values at fractions of an epoch: steps per epoch."""

PROBE = "probe"
"""The ``kind`` of a probe, a short run that only measures its layout's speed."""

BASE = "base"
"""User attribute of the trial that measures the configuration from before the sweep."""

REQUEST = "request"
"""User attribute of a requested trial: the number of the request."""

FIXED = "fixed_params"
"""Optuna's system attribute of an enqueued trial: the values with which it was enqueued."""

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
    """Optuna's direction of each objective of the study."""
    return [StudyDirection.MAXIMIZE if o.maximise else StudyDirection.MINIMIZE for o in objectives_of(study)]


def attributes(record: Trial) -> dict[str, Any]:
    """User attributes of a trial: why it was proposed, its kind, the sampler's attributes, its result.

    Speeds and times are at the reference pace.
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
    """Evals as intermediate values, at their step in samples or fractions of an epoch; the first of two at one step.

    Empty if evals are no evidence on the objective, or with two objectives, which Optuna does not support.
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
    """User attribute with the scale of the steps; empty if steps are the log's own units."""
    scale = steps_of_one(study.progress_unit)
    return {STEP_SCALE: scale} if steps and scale != 1 else {}


def ending(study: Study, record: Trial) -> tuple[TrialState, list[float] | None]:
    """State of a trial with this record, and its values if it has all of them.

    A start outside the space counts as failed, since no sampler can use it.
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


def trial_at(study: Study, sweep: StudyRecords, number: int, space: Space) -> FrozenTrial:
    """The trial of a number as Optuna sees it; a failed one without a record, since Optuna's numbers have no gaps.

    space: of :func:`space_of`.
    """
    if (record := sweep.trials.get(number)) is None:
        failed = create_trial(state=TrialState.FAIL)
        failed.number = number
        return failed
    distributions, conditions = space
    state, values = ending(study, record)
    params = conditions.complete(record.tuned)
    if not _fits(params, distributions):
        params = {n: v for n, v in params.items() if n in distributions and _fits({n: v}, {n: distributions[n]})}
    steps = reported(study, sweep.last_evals(number))
    if state is TrialState.PRUNED and steps and not math.isnan(last := steps[max(steps)]):
        values = [last]  # as Optuna's ``tell`` does
    ended = record.proposed_at if record.finished_at is None else record.finished_at
    frozen = FrozenTrial(
        number=number,
        trial_id=number,
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
        frozen.set_constraint(INFEASIBLE, 1.0)
    return frozen


def space_of(study: Study) -> Space:
    """The study's distributions and conditions, which are slow to compute."""
    return study.search_space.distributions(), study.search_space.conditions


def recorded_trials(study: Study, sweep: StudyRecords) -> list[FrozenTrial]:
    """All trials by number, without gaps."""
    space = space_of(study)
    return [trial_at(study, sweep, number, space) for number in range(sweep.next_number)]


def fitting(study: Study) -> Callable[[Trial], bool]:
    """Returns a predicate: whether the study's space contains a trial's values.

    It may not, for the machine's own config, a commit (which has other code), or a trial older than the space.
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
    """The sweep as an Optuna study in this process. storage: an empty one to use."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kept = storage or InMemoryStorage()
    rebuilt = optuna.create_study(study_name=study.name, storage=kept, directions=directions(study), sampler=sampler)
    rebuilt.add_trials(recorded_trials(study, sweep))
    at = kept.get_study_id_from_name(study.name)
    for number in sorted(sweep.trials):
        for key, value in sweep.trials[number].sampler_attributes.get("study", {}).items():
            kept.set_study_system_attr(at, key, value)
    return rebuilt


# Observations for the search models from Optuna trials of any study with these user attributes (all optional):
#
# ==================== ==================================================================================
# samples_per_second   warm training throughput, samples/s
# seconds_per_eval     length of one eval, s
# crossing_samples     samples at which the curve crosses the target; without intermediate values also
#                      ``stop_samples`` (samples of the first eval at the target) or ``samples_to_target``
# last_samples         samples after which a run ended without reaching the target (a lower bound); also
#                      ``censored_at_samples``
# refused              True if the trial's program rejects its values; the verdict is then "infeasible"
# verdict              "infeasible" (out of memory), "pruned", "censored", "capped", "reached", "failed", ...
# diverged             True if the loss diverged
# node_hours           cost of the trial; ``init_seconds``: start-up before ``run_start``
# peak_gib             peak memory of a GPU, GiB
# kind                 "probe" for a run that only measured speed
# epoch_in_steps       steps per epoch, if intermediate values are at fractions of an epoch (1000)
# source               origin of an observation from elsewhere, which gets a separate offset
# ==================== ==================================================================================
#
# Intermediate values, reported at the step of the samples consumed, are the eval curve. Steps are integers: a trial
# that counts epochs reports fractions of them and states the scale.


def of_trial(trial: FrozenTrial, space: frozenset[str], target: float) -> Observation | None:
    """The observation of an Optuna trial; None if it lacks parameters of the space or has no usable data."""
    if not space <= trial.params.keys() or trial.state is TrialState.WAITING:
        return None
    facts = trial.user_attrs
    verdict = str(facts.get("verdict", ""))
    if trial.state is TrialState.FAIL and verdict != "infeasible":
        return None
    evals = tuple(Eval(s, float(x), math.nan) for s, x in sorted(curve_of(trial).items()))
    reached = first_number(facts, "stop_samples", "samples_to_target")
    if math.isnan(reached):
        reached = next((e.samples for e in evals if e.loss <= target), math.nan)
    return Observation(
        number=trial.number,
        values=trial.params,
        open=trial.state is TrialState.RUNNING,
        source=str(facts.get("source", "")),
        evals=evals,
        reached=reached,
        bound=first_number(facts, "last_samples", "censored_at_samples"),
        samples_per_second=first_number(facts, "samples_per_second"),
        seconds_per_eval=first_number(facts, "seconds_per_eval"),
        node_hours=first_number(facts, "node_hours"),
        init_seconds=first_number(facts, "init_seconds"),
        peak_gib=first_number(facts, "peak_gib"),
        refused=bool(facts.get("refused")),
        infeasible=verdict == "infeasible" or any(c > 0 for c in trial.constraints.values()),
        diverged=bool(facts.get("diverged")) or any(math.isnan(e.loss) for e in evals[-2:]),
        probe=facts.get("kind") == "probe",
        attributes=facts,
    )


class TrialReader:
    """Observations of one study's trials; a trial is read again only if it has changed."""

    def __init__(self, space: frozenset[str], target: float) -> None:
        """space, target: as of :func:`of_trial`."""
        self._space, self._target = space, target
        self._known: dict[int, tuple[FrozenTrial, object, Observation | None]] = {}

    def read(self, trial: FrozenTrial) -> Observation | None:
        """:func:`of_trial` with a cache.

        An in-memory storage creates a new object for a changed trial, except for values reported by a running trial and
        times at a new reference pace; other storages keep the objects of ended trials.
        """
        stage = (trial.state, len(trial.intermediate_values), len(trial.user_attrs), trial.user_attrs.get("slower"))
        known = self._known.get(trial.number)
        if known is None or known[0] is not trial or known[1] != stage:
            known = self._known[trial.number] = (trial, stage, of_trial(trial, self._space, self._target))
        return known[2]


def curve_of(trial: FrozenTrial) -> dict[float, float]:
    """Intermediate values by the log's units: samples, steps or epochs, including fractions."""
    scale = first_number(trial.user_attrs, STEP_SCALE)
    scale = scale if scale > 0 else 1.0
    return {step / scale: value for step, value in trial.intermediate_values.items()}


def annotate(study: optuna.Study, trial: FrozenTrial, **attributes: str) -> None:
    """Set user attributes of a trial while the sampler samples for it."""
    # There is no public way for a sampler to annotate its trial; Optuna's own samplers use the storage, too.
    for name, value in attributes.items():
        study._storage.set_trial_user_attr(trial._trial_id, name, value)
    trial.user_attrs.update(attributes)
