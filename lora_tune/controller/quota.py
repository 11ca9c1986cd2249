"""Several studies under one cap of nodes: who may start a trial now. Pure, but for the gate that drivers pass."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lora_tune.config.study import Study
from lora_tune.controller import budgets
from lora_tune.store.records import StudyRecords, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one study could use. nodes: of its largest trial. trials: that it could have open at one time, those that
    are open included. used: nodes of its open trials. had: nodes of all trials that it started before."""

    name: str
    nodes: int
    trials: int
    open: int = 0
    used: int = 0
    had: int = 0


def shares(demands: Sequence[Demand], cap: int) -> dict[str, int]:
    """How many trials each study may have open at one time.

    Trials are dealt out one at a time, each to the study with the fewest nodes so far whose next trial still fits; of
    equals to the one that had the fewest nodes before. So a study gets less than an equal part only where it cannot
    use it, no node stays idle that somebody could use, and a study of large trials gets its turn.
    """
    granted = {demand.name: 0 for demand in demands}
    free = cap
    while True:
        wanting = [d for d in demands if granted[d.name] < d.trials and d.nodes <= free]
        if not wanting:
            return granted
        first = min(wanting, key=lambda d: (granted[d.name] * d.nodes, d.had, d.name))
        granted[first.name] += 1
        free -= first.nodes


def demand(study: Study, sweep: StudyRecords, now: float) -> Demand:
    """What the study has open, and could have."""
    open_trials = [t for t in sweep.trials.values() if t.state is not TrialState.FINISHED]
    newest = [attempts[-1] for t in open_trials if (attempts := sweep.attempts_of(t.number))]
    more = 0
    if not budgets.may_propose(study, sweep, now):
        left = (study.budget.trials or len(sweep.trials) + study.budget.parallel) - len(sweep.trials)
        more = min(study.budget.parallel - len(open_trials), left)
    return Demand(
        name=study.name,
        nodes=study.search_space.most_nodes,
        trials=len(open_trials) + max(0, more),
        open=len(open_trials),
        used=sum(attempt.node_count for attempt in newest),
    )


class NodeQuota:
    """The cap of nodes that all drivers of a process share. cap: None, no cap. Safe for threads."""

    def __init__(self, cap: int | None) -> None:
        self.cap = cap
        self._lock = threading.Lock()
        self._demands: dict[str, Demand] = {}

    def note(self, demand: Demand) -> None:
        """What a study has and wants, as of its last tick."""
        with self._lock:
            before = self._demands.get(demand.name)
            # One that comes later does not make up for the time before it came.
            had = before.had if before else min((d.had for d in self._demands.values()), default=0)
            self._demands[demand.name] = replace(demand, had=had)

    def forget(self, name: str) -> None:
        """The study is not driven here any more."""
        with self._lock:
            self._demands.pop(name, None)

    def admit(self, name: str) -> bool:
        """Whether the study may start a trial now; its nodes count as taken from here on."""
        if self.cap is None:
            return True
        with self._lock:
            mine = self._demands[name]
            used = sum(d.used for d in self._demands.values())
            allowed = shares(list(self._demands.values()), self.cap)[name]
            if mine.open >= allowed or used + mine.nodes > self.cap:
                return False
            self._demands[name] = replace(
                mine, open=mine.open + 1, used=mine.used + mine.nodes, had=mine.had + mine.nodes
            )
        return True

    def used(self) -> Mapping[str, int]:
        """Nodes of open trials by study."""
        with self._lock:
            return {name: d.used for name, d in self._demands.items()}
