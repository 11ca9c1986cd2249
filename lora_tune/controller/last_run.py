"""Runs of known configurations in addition to the search's: the leader again, and finally the recommended one.

A search without its own model repeats its leader once or twice. Before a sweep ends, the configuration that it will
recommend is run as a whole, if no trial has run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Protocol

from lora_tune.config.study import Study
from lora_tune.controller.dependencies import Discards, Proposer
from lora_tune.controller.steering import Enqueues
from lora_tune.logs.run import Eval
from lora_tune.search.objectives import objective_of
from lora_tune.search.samplers import repeats_leader, sampler_kind
from lora_tune.store.records import StudyRecords, Trial, TrialState, Value

if TYPE_CHECKING:
    from lora_tune.search.session import SearchPoint

WHY = "the configuration that is believed best, which no trial has run as a whole"
"""The reason of such a trial."""

MOST = 2
"""Most such trials of one sweep: each changes the estimate a little, and the budget is for the search."""


class Proposes(Proposer, Enqueues, Discards, Protocol):
    """A search that also accepts points from outside."""

    def points_wait(self) -> bool:
        """Whether requested points are still to be proposed."""
        ...

    def propose(self, tuned: Mapping[str, Value], why: str) -> SearchPoint:
        """A trial of these values, whatever the search would propose."""
        ...


def last(study: Study, sweep: StudyRecords, now: float) -> bool:
    """Whether the budget has room for one more trial after the running ones.

    False if all trials begin at once, because no result exists then.
    """
    budget = study.budget
    if budget.trials is not None and len(sweep.trials) >= budget.trials - 1:
        return budget.trials > budget.parallel
    usual = [t.finished_at - t.proposed_at for t in sweep.reached() if t.finished_at is not None]
    hours = [h for t in sweep.reached() if (h := sum(a.node_hours(now) for a in sweep.attempts_of(t.number))) > 0]
    if not usual or not hours:
        return False
    if budget.wall_hours is not None and sweep.began_at + 3600 * budget.wall_hours - now < 2 * median(usual):
        return True
    if budget.node_hours is None:
        return False
    going = [a.node_hours(now) for t in _open(sweep) for a in sweep.attempts_of(t.number)[-1:]]
    ahead = sum(max(0.0, median(hours) - spent) for spent in going)
    return sweep.charged_hours(now) + ahead + median(hours) >= budget.node_hours


def _open(sweep: StudyRecords) -> list[Trial]:
    return [t for t in sweep.trials.values() if t.state is not TrialState.FINISHED]


class LastRun:
    """A search whose last proposal is its recommendation, if that was never run as a whole.

    Requested points go before it.

    search: the source of other proposals. study: the present study, because users may change its budget. records: the
    present records. now: epoch seconds.
    """

    def __init__(
        self,
        search: Proposes,
        study: Callable[[], Study],
        records: Callable[[], StudyRecords],
        now: Callable[[], float],
    ) -> None:
        self._search, self._study, self._records, self._now = search, study, records, now

    def ask(self) -> SearchPoint | str:
        """The search's own proposal, or the recommended configuration; else why nothing is proposed now."""
        study = self._study()
        if (repeated := self._baseline_point(study)) is not None:
            return repeated
        beyond_runs = sampler_kind(study).recommends_unrun and objective_of(study).timed
        if not beyond_runs or not self._records().reached() or self._search.points_wait():
            return self._search.ask()
        if not last(study, self._records(), self._now()):
            proposal = self._search.ask()
            return proposal if not isinstance(proposal, str) else self._unrun() or proposal
        if going := len(_open(self._records())):
            return f"the last trial waits for the {going} that run, to be what is believed best then"
        return self._unrun() or self._search.ask()

    def _baseline_point(self, study: Study) -> SearchPoint | None:
        """The leader again, for a sampler that does not repeat configurations itself."""
        if not repeats_leader(study) or not self._records().reached() or self._search.points_wait():
            return None
        from lora_tune.search.noise import WHY as RERUN_REASON
        from lora_tune.search.noise import next_repeat

        tuned = next_repeat(study, self._records())
        return (
            None if tuned is None else self._search.propose(study.search_space.conditions.complete(tuned), RERUN_REASON)
        )

    def _unrun(self) -> SearchPoint | None:
        """A trial of the recommendation; None if one has run it, or while others run."""
        from lora_tune.search.recommendation import recommend

        sweep = self._records()
        if _open(sweep) or sum(t.why == WHY for t in sweep.trials.values()) >= MOST:
            return None
        study = self._study()
        recommendation = recommend(study, sweep)
        if recommendation is None or recommendation.ran:
            return None
        return self._search.propose(study.search_space.conditions.complete(recommendation.trial.tuned), WHY)

    def enqueue(self, values: Mapping[str, Value], why: str, request: int) -> None:
        """As of the search."""
        self._search.enqueue(values, why, request)

    def report(self, number: int, evals: Sequence[Eval]) -> None:
        """As of the search."""
        self._search.report(number, evals)

    def discard(self, number: int) -> None:
        """As of the search."""
        self._search.discard(number)

    def tell(self, record: Trial) -> None:
        """As of the search."""
        self._search.tell(record)
