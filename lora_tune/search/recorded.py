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
from lora_tune.search.observations import Observation, first_number
from lora_tune.search.usual_names import TREE
from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import StudyRecords, Trial, Verdict

MOST_STEPS = 2**31
"""Steps that fit into Optuna's tables on every database; a damaged log may name any number."""

STEP_SCALE = "epoch_in_steps"
"""User attribute of a trial whose intermediate values stand at parts of an epoch: how many make one."""

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


def trial_at(study: Study, sweep: StudyRecords, number: int, space: Space) -> FrozenTrial:
    """The trial of a number as Optuna shows it, a failed one where no record has it: Optuna's numbers have no gap.

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
        values = [last]  # as Optuna's ``tell`` has it
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
    """The study's distributions and conditions, which are slow to make."""
    return study.search_space.distributions(), study.search_space.conditions


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
    rebuilt = optuna.create_study(study_name=study.name, storage=kept, directions=directions(study), sampler=sampler)
    rebuilt.add_trials(recorded_trials(study, sweep))
    at = kept.get_study_id_from_name(study.name)
    for number in sorted(sweep.trials):
        for key, value in sweep.trials[number].sampler_attributes.get("study", {}).items():
            kept.set_study_system_attr(at, key, value)
    return rebuilt


# And what Optuna's trials teach, as observations that the search models take in, of any study that records them.
#
# User attributes read (all optional; what is not there is not learned):
#
# ==================== ==================================================================================
# samples_per_second   warm training throughput, samples/s
# seconds_per_eval     length of one eval, s
# crossing_samples     samples at which the curve crosses the target; without intermediate values also
#                      ``stop_samples`` (samples of the first eval at the target) or ``samples_to_target``
# last_samples         samples after which a run ended without reaching the target (a lower bound); also
#                      ``censored_at_samples``
# refused              True where the trial's own program does not take its values, which is "infeasible" too
# verdict              "infeasible" (out of memory), "pruned", "censored", "capped", "reached", "failed", ...
# diverged             True when the loss blew up
# node_hours           what the trial cost; ``init_seconds``: start-up before the clock runs
# peak_gib             the most memory that a GPU held, GiB
# kind                 "probe" for a run that only measured speed
# epoch_in_steps       steps that make one epoch, where intermediate values stand at parts of it (1000)
# source               where an observation comes from, when not from this study; its level is then not trusted
# ==================== ==================================================================================
#
# Intermediate values, reported at the step of the samples consumed, are the eval curve. Steps are whole numbers: a
# trial that counts epochs reports at parts of them, and says at how many.


def of_trial(trial: FrozenTrial, space: frozenset[str], target: float) -> Observation | None:
    """The observation in an Optuna trial; None when it has none of the space's parameters, or says nothing."""
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
    """Observations of one study's trials, each trial read again only when it has more to say."""

    def __init__(self, space: frozenset[str], target: float) -> None:
        """space, target: as of :func:`of_trial`."""
        self._space, self._target = space, target
        self._known: dict[int, tuple[FrozenTrial, object, Observation | None]] = {}

    def read(self, trial: FrozenTrial) -> Observation | None:
        """What :func:`of_trial` says of it.

        A storage in memory makes a new object of a trial that changes, but of what is reported to one that runs, and of
        a time that is at another reference pace; others keep the objects of those that have ended.
        """
        stage = (trial.state, len(trial.intermediate_values), len(trial.user_attrs), trial.user_attrs.get("slower"))
        known = self._known.get(trial.number)
        if known is None or known[0] is not trial or known[1] != stage:
            known = self._known[trial.number] = (trial, stage, of_trial(trial, self._space, self._target))
        return known[2]


def curve_of(trial: FrozenTrial) -> dict[float, float]:
    """The intermediate values by what the trial's log counts: samples, steps or epochs, parts of them included."""
    scale = first_number(trial.user_attrs, STEP_SCALE)
    scale = scale if scale > 0 else 1.0
    return {step / scale: value for step, value in trial.intermediate_values.items()}


def annotate(study: optuna.Study, trial: FrozenTrial, **attributes: str) -> None:
    """User attributes of a trial, set by the sampler that samples for it."""
    # Samplers have no public way to annotate the trial that they sample for; Optuna's own use the storage too.
    for name, value in attributes.items():
        study._storage.set_trial_user_attr(trial._trial_id, name, value)
    trial.user_attrs.update(attributes)
