"""The sweep's Optuna study: ask, report, tell, and nothing that decides.

How trials appear to Optuna: waiting and running are RUNNING; reached is COMPLETE; pruned, capped, censored are PRUNED
(TPE ranks them behind the complete ones, by their last eval); infeasible is PRUNED with a violated constraint, since
FAIL teaches TPE nothing; failed and cancelled are FAIL, which the samplers ignore.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lora_tune.base.errors import StoreError
from lora_tune.config.study import Study
from lora_tune.logs.failures import is_refusal
from lora_tune.logs.mllog import Eval
from lora_tune.objectives import objectives_of
from lora_tune.search.samplers import KnowsGain, make_sampler
from lora_tune.search.trial_storage import UNANSWERED, TrialStorage
from lora_tune.search.worth import not_worth
from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import Sweep, Trial, Value, Verdict
from lora_tune.workloads.base import Start

MOST_STEPS = 2**31
"""Steps that fit into Optuna's tables on every database; a damaged log may name any number."""

PROBE = "probe"
"""The ``kind`` of a short run that only measured its layout's speed."""

BASE = "base"
"""User attribute of the trial that measures the configuration that is there before the sweep."""

REQUEST = "request"
"""User attribute of a trial that a person asked for: the number of the request."""

INFEASIBLE = "feasible"
"""Name of the Optuna constraint that an infeasible trial violates."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A proposal: its number, the tuned values, and why (a sentence, "" when the sampler gives none).

    Of a replicate also: the trial that it repeats, that trial's resolved parameters, and the runs in its one job.
    probe: a short run, only to measure the layout's speed. base: the name of the configuration that it measures as it
    stands, with its resolved parameters; "" for every other trial.
    """

    number: int
    tuned: Mapping[str, Value]
    why: str = ""
    replicate_of: int | None = None
    parameters: Mapping[str, Value] | None = None
    replicates: int = 1
    probe: bool = False
    base: str = ""


def _asked(trial: optuna.Trial | FrozenTrial, start: Start | None) -> Asked:
    known = trial.user_attrs
    if start is not None and BASE in known:
        return Asked(trial.number, dict(trial.params), start.why, parameters=start.parameters, base=start.name)
    probe = known.get("kind") == PROBE
    return Asked(trial.number, dict(trial.params), known.get("why", ""), probe=probe)


def expected_gain(known: optuna.Study) -> float | None:
    """Share of the score by which the next node-hour is expected to improve the best; None where nobody knows."""
    return known.sampler.expected_gain(known) if isinstance(known.sampler, KnowsGain) else None


def _outside(trial: FrozenTrial) -> bool:
    """Whether a trial measures a start that is no point of the space: no sampler can learn from it."""
    return BASE in trial.user_attrs and not trial.params


Method = TypeVar("Method", bound=Callable[..., Any])


def _translated(method: Method) -> Method:
    """Optuna's word for a database that does not answer, as ours."""

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except UNANSWERED as error:
            words = str(getattr(error, "orig", None) or error).splitlines()[0]
            raise StoreError(f"Optuna's database does not answer: {words}") from error

    return call  # type: ignore[return-value]  # same signature, by functools.wraps


_STATES = {
    None: TrialState.RUNNING,
    Verdict.REACHED: TrialState.COMPLETE,
    Verdict.FAILED: TrialState.FAIL,
    Verdict.CANCELLED: TrialState.FAIL,
}


def state_of(verdict: Verdict | None) -> TrialState:
    """How a verdict appears to Optuna: see above."""
    return _STATES.get(verdict, TrialState.PRUNED)


def attributes(record: Trial) -> dict[str, Any]:
    """What Optuna keeps with a trial: why it was proposed, what kind it is, and how it ended."""
    found: dict[str, Any] = {"why": record.why} if record.why else {}
    if record.probe:
        found["kind"] = PROBE
    if record.metrics.base is not None:
        found[BASE] = record.metrics.base
    if record.verdict is Verdict.INFEASIBLE and is_refusal(record.sentence):
        found["refused"] = True
    return found | ({**as_mapping(record.metrics), "verdict": str(record.verdict)} if record.verdict else {})


def directions(study: Study) -> list[StudyDirection]:
    """Optuna's word for each objective of the study."""
    return [StudyDirection.MAXIMIZE if o.maximise else StudyDirection.MINIMIZE for o in objectives_of(study)]


def values_of(study: Study, record: Trial, state: TrialState) -> list[float] | None:
    """The value of each objective of a trial that has them all."""
    if state is not TrialState.COMPLETE:
        return None
    values = (record.metrics.objective, record.metrics.second_objective)[: len(objectives_of(study))]
    return [value for value in values if value is not None]


class Session:
    """One Optuna study in the sweep's database.

    What :meth:`report` and :meth:`tell` say is in the database after the next :meth:`flush`; proposals are at once.
    """

    def __init__(
        self,
        study: Study,
        url: str | None,
        tune: Callable[[Any], None],
        sampler: BaseSampler | None = None,
        records: Sweep | None = None,
        start: Start | None = None,
    ) -> None:
        """Open or create it at ``url``, None: in memory. tune: prepares the database's engine. Raises StoreError.

        records: the sweep's own; trials of it that Optuna's tables lack, as in a fresh database, are taken in.
        start: what the first trial of a new sweep measures, before every other point.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._settings, self._start = study, start
        try:
            self._storage = InMemoryStorage() if url is None else TrialStorage(url, study.name, tune)
            self._study = optuna.create_study(
                study_name=study.name,
                storage=self._storage,
                sampler=sampler or make_sampler(study),
                directions=directions(study),
                load_if_exists=True,
            )
            self._distributions: dict[str, BaseDistribution] = study.search_space.distributions()
            fresh = not self._study.get_trials(deepcopy=False)
            if records is not None:
                self._restore(records)
            if start is not None and not self._study.get_trials(deepcopy=False):
                self._study.enqueue_trial(dict(start.tuned or {}), user_attrs={BASE: start.name})
            for point in study.search.enqueue if fresh else ():
                if not any(dict(point).items() <= trial.params.items() for trial in self._study.get_trials()):
                    self._study.enqueue_trial(dict(point))
            self.flush()
        except Exception as error:  # Optuna, alembic and the database driver each have a tree of their own
            raise StoreError(f"Optuna cannot use the database: {str(error).splitlines()[0]}") from error
        self._asked: Asked | None = None  # made, and not in the database yet

    def _restore(self, records: Sweep) -> None:
        """Take in the trials that Optuna's tables do not hold; those that are finished are told.

        A trial that does not fit the space of today, and a number that no record has, count as failed: they teach
        nothing, and later numbers stay right.
        """
        known = len(self._study.get_trials(deepcopy=False))
        for number in range(known, max(records.trials, default=-1) + 1):
            record = records.trials.get(number)
            if record is None or not self._add(record):
                self._study.add_trial(optuna.trial.create_trial(state=TrialState.FAIL))
                continue
            self.report(number, records.last_evals(number))
            if record.verdict is not None:
                self.tell(record)

    def _add(self, record: Trial) -> bool:
        """Add an open trial with the record's values; False where the space does not hold them any more."""
        values = self._settings.search_space.conditions.complete(record.tuned)
        if values.keys() != self._distributions.keys():
            return False
        try:
            made = optuna.trial.create_trial(
                state=TrialState.RUNNING,
                params=values,
                distributions=self._distributions,
                user_attrs=attributes(record),
            )
            self._study.add_trial(made)
        except ValueError:
            return False
        return True

    @_translated
    def flush(self) -> None:
        """Write what the database does not know yet, in one transaction. Raises StoreError; nothing is lost then."""
        if isinstance(self._storage, TrialStorage):
            self._storage.flush()

    @_translated
    def ask(self) -> Asked | str:
        """A new proposal; the trial is RUNNING in the database from here on. Or why none is worth its cost now."""
        if self._asked is None:
            if reason := self._not_worth():
                return reason
            # What is no point of the space has no values for the search to complete.
            trial = self._study.ask({} if self._outside_waits() else self._distributions)
            self._asked = _asked(trial, self._start)
        self.flush()
        asked, self._asked = self._asked, None
        return asked

    @_translated
    def enqueue(self, values: Mapping[str, Value], why: str, request: int) -> None:
        """Propose these tuned values next, once for each request; the sampler fills in what they leave out."""
        if not any(trial.user_attrs.get(REQUEST) == request for trial in self._study.get_trials(deepcopy=False)):
            self._study.enqueue_trial(dict(values), user_attrs={"why": why, REQUEST: request})
            self.flush()

    @_translated
    def propose(self, tuned: Mapping[str, Value], why: str) -> Asked:
        """A trial of these values, whatever the sampler would propose; it is RUNNING in the database from here on."""
        if self._asked is None:
            made = optuna.trial.create_trial(
                state=TrialState.RUNNING,
                params=dict(tuned),
                distributions=self._distributions,
                user_attrs={"why": why},
            )
            self._study.add_trial(made)
            self._asked = _asked(self._study.get_trials(deepcopy=False)[-1], self._start)
        self.flush()
        asked, self._asked = self._asked, None
        return asked

    @_translated
    def points_wait(self) -> bool:
        """Whether points of the study or of a person are still to be proposed."""
        return bool(self._waiting())

    def _waiting(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))

    def _outside_waits(self) -> bool:
        """Whether the next proposal is the start of a study whose space does not hold it."""
        if self._start is None or self._start.tuned is not None:
            return False
        waiting = self._waiting()
        return bool(waiting) and BASE in waiting[0].user_attrs

    def _not_worth(self) -> str:
        """Why the next node-hour is not worth its cost, by the study's limit; "" where it has none."""
        if self._settings.budget.stop_below is None:
            return ""
        return not_worth(self._settings, expected_gain(self._study))

    @_translated
    def unknown(self, known: Collection[int]) -> list[Asked]:
        """Proposals that Optuna holds as running and nobody wrote down: the driver died in between.

        Incomplete ones are told FAIL.
        """
        found = []
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.number in known:
                continue
            if trial.params.keys() == self._distributions.keys() or BASE in trial.user_attrs:
                found.append(_asked(trial, self._start))
            else:
                self._study.tell(trial.number, state=TrialState.FAIL)
        self.flush()
        return found

    @_translated
    def report(self, number: int, evals: Sequence[Eval]) -> None:
        """Evals as intermediate values, at the step of their samples; a step that is known already stays.

        None of an objective of which they say nothing, nor of two: Optuna keeps such values for one objective alone.
        """
        objectives = objectives_of(self._settings)
        if len(objectives) > 1:
            return
        trial, known = self._open(number), self._frozen(number).intermediate_values
        for point in evals:
            if 0 <= point.samples < MOST_STEPS and int(point.samples) not in known:
                value = objectives[0].reported(point.loss)
                if value is not None:
                    trial.report(value, int(point.samples))

    @_translated
    def tell(self, record: Trial) -> None:
        """The end of a trial, its metrics as user attributes first. Telling twice changes nothing."""
        frozen = self._frozen(record.number)
        if frozen.state.is_finished():
            return
        trial = self._open(record.number)
        for name, value in attributes(record).items():
            trial.set_user_attr(name, value)
        if record.verdict is Verdict.INFEASIBLE:
            trial.set_constraint(INFEASIBLE, 1.0)
        state = TrialState.FAIL if _outside(frozen) else state_of(record.verdict)
        self._study.tell(record.number, values_of(self._settings, record, state), state=state, skip_if_finished=True)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._trial_id(number))

    def _open(self, number: int) -> optuna.Trial:
        return optuna.Trial(self._study, self._trial_id(number))

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study._study_id, number)
