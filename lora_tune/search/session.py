"""The search of a sweep: an in-memory Optuna study, built from the records, with ask, report and tell.

It has no state beyond the records: a sampler's attributes are stored in the record of the trial that it proposed, and
pending points follow from the study, the requests and the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from lora_tune.config.parameters import Conditions
from lora_tune.config.study import Study
from lora_tune.logs.run import Eval
from lora_tune.search.capping import gain_below_threshold
from lora_tune.search.recorded import (
    BASE,
    FIXED,
    INFEASIBLE,
    PROBE,
    REQUEST,
    attributes,
    ending,
    in_memory,
    reported,
    step_attributes,
)
from lora_tune.search.samplers import EstimatesGain, make_sampler, sampler_kind
from lora_tune.search.sizes import smaller
from lora_tune.store.records import StudyRecords, Trial, Value, Verdict
from lora_tune.workloads.base import Start

_OF_PROPOSAL = ("why", BASE, REQUEST, FIXED)
"""Attributes that the record stores under other names."""


@dataclass(frozen=True, slots=True)
class SearchPoint:
    """A proposal: number, tuned values, and why (a sentence, "" if the sampler has none).

    For a replicate also: the repeated trial, that trial's resolved parameters, and the number of runs in its job.
    probe: a short run that only measures the layout's speed. base: name of the configuration measured unchanged, with
    its resolved parameters; "" for other trials. request, point, sampler_attributes: as in a record.
    """

    number: int
    tuned: Mapping[str, Value]
    why: str = ""
    replicate_of: int | None = None
    parameters: Mapping[str, Value] | None = None
    replicates: int = 1
    probe: bool = False
    base: str = ""
    request: int | None = None
    point: Mapping[str, Value] | None = None
    sampler_attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def expected_gain(known: optuna.Study) -> float | None:
    """Expected improvement of the best by the next node-hour, as a share of the score; None if unknown."""
    return known.sampler.expected_gain(known) if isinstance(known.sampler, EstimatesGain) else None


def unproposed(
    points: Sequence[Mapping[str, Value]], records: StudyRecords, conditions: Conditions
) -> Iterator[Mapping[str, Value]]:
    """The study's enqueued points that have no trial in the records, each trial counted for one point. Pure.

    A record without a point, as of an earlier release, is matched by its values.
    """
    trials = [trial for trial in records.trials.values() if trial.metrics.base is None]
    for point in points:
        by_name = (t for t in trials if t.point is not None and dict(t.point) == dict(point))
        by_value = (t for t in trials if t.point is None and t.request is None and conditions.agrees(t.tuned, point))
        if (trial := next(by_name, None) or next(by_value, None)) is None:
            yield point
        else:
            trials.remove(trial)


def _values(distribution: BaseDistribution) -> Sequence[Any]:
    """The possible values of a parameter; () for a continuous one."""
    if isinstance(distribution, CategoricalDistribution):
        return [c for c in distribution.choices if isinstance(c, int | float)]
    if isinstance(distribution, IntDistribution) and not distribution.log:
        return range(distribution.low, distribution.high + 1, distribution.step)
    if isinstance(distribution, IntDistribution):
        return range(distribution.low, distribution.high + 1)
    return ()


class Session:
    """Proposes the next trials of a sweep."""

    def __init__(
        self,
        study: Study,
        records: StudyRecords | None = None,
        sampler: BaseSampler | None = None,
        start: Start | None = None,
    ) -> None:
        """Build the study from the sweep's records; None: of a new sweep.

        start: configuration of the first trial of a new sweep, before all other points.
        """
        known = records or StudyRecords(name=study.name, digest="", study_toml="", began_at=0.0)
        self._settings, self._start = study, start
        self._storage = InMemoryStorage()
        sampler_of_study = sampler or make_sampler(study, begun=len(known.trials), start=start.tuned if start else None)
        self._study = in_memory(study, known, sampler_of_study, self._storage)
        self._id = self._storage.get_study_id_from_name(study.name)
        self._distributions: dict[str, BaseDistribution] = study.search_space.distributions()
        self._of_study = self._storage.get_study_system_attrs(self._id)
        if start is not None and not known.trials:
            self._study.enqueue_trial(dict(start.tuned or {}), user_attrs={BASE: start.name})
        for point in unproposed(study.search.enqueue, known, study.search_space.conditions):
            self._study.enqueue_trial(dict(point))

    def ask(self) -> SearchPoint | str:
        """A new proposal, RUNNING in the study from now on; or the reason why none is worth its cost now."""
        if self._settings.budget.stop_below is not None and (
            reason := gain_below_threshold(self._settings, expected_gain(self._study))
        ):
            return reason
        if not sampler_kind(self._settings).proposes and not self.points_wait():
            return 'every point that was asked for is proposed; search.sampler = "requests" proposes no other'
        # A start outside the space has no values for the sampler to complete.
        number = self._study.ask({} if self._outside_waits() else self._distributions).number
        if self._settings.workload.kind == "command":
            self._within_memory(number)
        return self._point(number)

    def _within_memory(self, number: int) -> None:
        """For a script without a memory model: reduce sizes of a sampler's proposal below those that ran out of
        memory."""
        trial = self._frozen(number)
        if FIXED in trial.system_attrs or not trial.params:
            return
        ended = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        known = [(t.params, t.user_attrs.get("verdict") == str(Verdict.INFEASIBLE)) for t in ended
                 if not t.user_attrs.get("refused")]  # fmt: skip
        died, lived = ([params for params, dead in known if dead is which] for which in (True, False))
        choices = {name: _values(self._distributions[name]) for name in trial.params} if died else {}
        moved = smaller(trial.params, choices, died, lived)
        for name, value in moved.items():
            distribution = self._distributions[name]
            self._storage.set_trial_param(
                self._trial_id(number), name, distribution.to_internal_repr(value), distribution
            )
        if moved:
            why = f"{', '.join(moved)} below what ran out of memory"
            self._storage.set_trial_user_attr(self._trial_id(number), "why", why)

    def propose(self, tuned: Mapping[str, Value], why: str) -> SearchPoint:
        """A trial with these values, regardless of the sampler."""
        created = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=dict(tuned),
            distributions=self._distributions,
            user_attrs={"why": why},
        )
        self._study.add_trial(created)
        return self._point(len(self._study.get_trials(deepcopy=False)) - 1)

    def _point(self, number: int) -> SearchPoint:
        trial = self._frozen(number)
        known, start = trial.user_attrs, self._start
        of_study = self._storage.get_study_system_attrs(self._id)
        stored = {
            "user": {key: value for key, value in known.items() if key not in _OF_PROPOSAL},
            "system": {key: value for key, value in trial.system_attrs.items() if key not in _OF_PROPOSAL},
            "study": {k: v for k, v in of_study.items() if k not in self._of_study or self._of_study[k] != v},
        }
        self._of_study = of_study
        kept = {where: values for where, values in stored.items() if values}
        if start is not None and BASE in known:
            return SearchPoint(
                number, dict(trial.params), start.why, parameters=start.parameters, base=start.name,
                sampler_attributes=kept,
            )  # fmt: skip
        return SearchPoint(
            number,
            dict(trial.params),
            known.get("why", ""),
            probe=known.get("kind") == PROBE,
            request=known.get(REQUEST),
            point=None if REQUEST in known else trial.system_attrs.get(FIXED),
            sampler_attributes=kept,
        )

    def enqueue(self, values: Mapping[str, Value], why: str, request: int) -> None:
        """Propose these tuned values next; the sampler fills in missing ones. request: its number."""
        self._study.enqueue_trial(dict(values), user_attrs={"why": why, REQUEST: request})

    def plan(self) -> list[str]:
        """Cost and possible gain of each stage of the search, one line each; empty without stages."""
        from lora_tune.search.stages.sampler import StagesSampler  # imports scipy

        return self._study.sampler.plan() if isinstance(self._study.sampler, StagesSampler) else []

    def points_wait(self) -> bool:
        """Whether points of the study or of requests are still to be proposed."""
        return bool(self._waiting())

    def _waiting(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))

    def _outside_waits(self) -> bool:
        """Whether the next proposal is a start outside the space."""
        if self._start is None or self._start.tuned is not None:
            return False
        waiting = self._waiting()
        return bool(waiting) and BASE in waiting[0].user_attrs

    def report(self, number: int, evals: Sequence[Eval]) -> None:
        """Report all evals of a trial's newest attempt as intermediate values."""
        steps, known = reported(self._settings, evals), self._frozen(number).intermediate_values
        for step in known.keys() - steps.keys():
            del known[step]  # of an earlier attempt; the trial object belongs to the storage
        for step, value in steps.items():
            if known.get(step) != value:
                self._storage.set_trial_intermediate_value(self._trial_id(number), step, value)
        for name, scale in step_attributes(self._settings, steps).items():
            self._storage.set_trial_user_attr(self._trial_id(number), name, scale)

    def tell(self, record: Trial) -> None:
        """Record the end of a trial, with its metrics as user attributes. A repeated call only updates values at a new
        reference pace."""
        known = self._frozen(record.number)
        state, values = ending(self._settings, record)
        if known.state.is_finished():
            if known.state is state is TrialState.COMPLETE and known.values != values:
                known.values = values  # the storage's own object, which accepts no updates after the end
            if known.user_attrs.get("slower") != record.metrics.slower:
                known.user_attrs.update({"slower": None} | attributes(record))
            return
        trial = self._trial_id(record.number)
        for name, value in attributes(record).items():
            self._storage.set_trial_user_attr(trial, name, value)
        if record.verdict is Verdict.INFEASIBLE:
            optuna.Trial(self._study, trial).set_constraint(INFEASIBLE, 1.0)
        self._study.tell(record.number, values, state=state)

    def discard(self, number: int) -> None:
        """Drop a proposal that cannot run: the sampler sees it as infeasible."""
        trial = self._trial_id(number)
        self._storage.set_trial_user_attr(trial, "refused", True)
        self._storage.set_trial_user_attr(trial, "verdict", Verdict.INFEASIBLE.value)
        optuna.Trial(self._study, trial).set_constraint(INFEASIBLE, 1.0)
        self._study.tell(number, state=TrialState.PRUNED)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._trial_id(number))

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
