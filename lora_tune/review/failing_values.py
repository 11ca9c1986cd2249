"""Values of a knob at which trials do not reach the target, counted: which no importance can show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import eq, ge, le

from lora_tune.base.format import visible
from lora_tune.config.study import Study
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import StudyRecords, Trial, Value, Verdict

FAILS = (Verdict.CENSORED, Verdict.PRUNED, Verdict.INFEASIBLE, Verdict.FAILED)
"""Ends without a result. One that was capped, or ended by a person, says nothing of whether it would have had one."""

CHANCE = 0.01
"""The chance, over all values that are looked at, of such a table where a knob has nothing to do with it."""

MOST_SHARE = 0.34
"""The share of trials with a result at such a value, at most, relative to that of the others."""

FEWEST = 3
"""Failures at a value before it is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingValue:
    """A value, or a side of a number, at which trials fail. at: ``RANK=4``. good, all: trials with a result there, and
    all. others_good, others: the same elsewhere. chance: of such a table by luck. trials: that failed there."""

    at: str
    name: str
    good: int
    all: int
    others_good: int
    others: int
    chance: float
    trials: tuple[int, ...] = ()

    def sentence(self, study: Study) -> str:
        """For people."""
        what = "reached the target" if objective_of(study).has_target else "measured a value"
        never = "never" if not self.good else "seldom"
        return f"{self.at} {never} {what}: {self.good} of {self.all}, others {self.others_good} of {self.others}"


def failing_values(sweep: StudyRecords) -> list[FailingValue]:
    """At most one of each knob, the surest first; [] where failures go with no value. Fisher's exact test, one-sided,
    times the number of tables that were looked at."""
    ended = [t for t in sweep.trials.values() if t.tuned and not t.probe and (_good(t) or t.verdict in FAILS)]
    tables = [_table(name, at, holds, ended) for name in _names(ended) for at, holds in _splits(name, ended)]
    sure: dict[str, FailingValue] = {}
    for table in sorted(tables, key=lambda t: t.chance):
        rare = table.good * table.others <= MOST_SHARE * table.others_good * table.all
        likely = min(1.0, table.chance * len(tables))
        if rare and table.all - table.good >= FEWEST and likely <= CHANCE:
            sure.setdefault(table.name, replace(table, chance=likely))
    return list(_of_their_own(sure.values()))


def explained(values: list[FailingValue]) -> frozenset[int]:
    """Trials whose failure goes with a value other than a learning rate's: their curves say nothing of the rest."""
    rates = ("LR", "learning_rate", "lr")
    return frozenset(number for value in values if value.name not in rates for number in value.trials)


def _good(trial: Trial) -> bool:
    return trial.verdict is Verdict.REACHED


def _names(ended: list[Trial]) -> list[str]:
    return list(dict.fromkeys(name for trial in ended for name in trial.tuned))


Split = tuple[str, Callable[[Value], bool]]


def _splits(name: str, ended: list[Trial]) -> Iterator[Split]:
    """Each value, and for numbers the sides of each gap between two neighbours, ten at most."""
    values = list(dict.fromkeys(t.tuned[name] for t in ended if name in t.tuned))
    if len(values) < 2:
        return
    numbers = sorted(v for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    if len(values) <= 12:
        for value in values:
            yield f"{name}={visible(_text(value))}", partial(eq, value)
    if len(numbers) == len(values) and len(numbers) > 2:
        gaps = list(pairwise(numbers))
        for low, high in gaps[:: 1 + (len(gaps) - 1) // 10]:
            yield f"{name} of {_text(low)} or less", partial(ge, low)
            yield f"{name} of {_text(high)} or more", partial(le, high)


def _text(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(name: str, at: str, holds: Callable[[Value], bool], ended: list[Trial]) -> FailingValue:
    from scipy.stats import hypergeom

    here = [t for t in ended if name in t.tuned and holds(t.tuned[name])]
    good, every = sum(map(_good, here)), sum(map(_good, ended))
    chance = float(hypergeom.cdf(good, len(ended), every, len(here))) if here else 1.0
    failed = tuple(t.number for t in here if not _good(t))
    return FailingValue(
        at=at, name=name, good=good, all=len(here), others_good=every - good, others=len(ended) - len(here),
        chance=chance, trials=failed,
    )  # fmt: skip


def _of_their_own(surest: Iterable[FailingValue]) -> Iterator[FailingValue]:
    """Those that explain failures which a surer one does not."""
    known: set[int] = set()
    for value in surest:
        if len(set(value.trials) - known) >= FEWEST:
            yield value
            known.update(value.trials)
