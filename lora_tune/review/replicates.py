"""The runs of a race, read from its records: what confirm decides by, and what its screen and its pages show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lora_tune.search.comparison import RunSummary
from lora_tune.search.race_scale import TIMES, RaceScale
from lora_tune.store.metrics import RunMetrics
from lora_tune.store.records import StudyRecords, Trial, Verdict

NOT_A_RESULT = (Verdict.FAILED, Verdict.CANCELLED)
"""Ends that say nothing about a configuration; such a replicate is run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """One run of a configuration that is over.

    of: the sweep's trial. trial, position: the race's trial and the run's place in its job. objective: what the study
    compares, infinite for a run that did not reach the target, or measured no value; seconds, samples: as the log
    states them. slower: of the machine, over its reference pace. node_hours: its share of its job's.
    """

    of: int
    trial: int
    position: int
    seed: int
    objective: float
    seconds: float | None
    samples: float | None
    node_hours: float
    slower: float = 1.0


def name_of(trial: int) -> str:
    """How a configuration is called in a race."""
    return f"trial {trial}"


def replicates(race: StudyRecords) -> dict[int, list[Replicate]]:
    """The runs that are over and count, by the trial whose configuration they repeat, in the order of their seeds."""
    runs: dict[int, list[Replicate]] = {}
    for trial in sorted(race.trials.values(), key=lambda t: t.number):
        if trial.replicate_of is not None and trial.verdict is not None and trial.verdict not in NOT_A_RESULT:
            runs.setdefault(trial.replicate_of, []).extend(_runs(trial))
    return runs


def _runs(trial: Trial) -> list[Replicate]:
    """The runs of one job. One that died of memory or blew up takes all its seeds with it."""
    assert trial.replicate_of is not None
    hours = trial.metrics.node_hours or 0.0
    drawn = trial.metrics.seed if trial.replicates == 1 else None  # by a launch script, as its log says
    begin = trial.seed if drawn is None else drawn
    listed = trial.metrics.runs or [
        RunMetrics(seed=begin + i, position=i, seconds=trial.seconds, samples=trial.samples, metrics=trial.metrics)
        for i in range(trial.replicates)
    ]
    return [
        Replicate(
            of=trial.replicate_of,
            trial=trial.number,
            position=run.position,
            seed=run.seed,
            objective=math.inf if run.metrics.objective is None else run.metrics.objective,
            seconds=run.seconds,
            samples=run.samples,
            node_hours=hours / len(listed),
            slower=run.metrics.slower or 1.0,
        )
        for run in listed
    ]


def results(runs: Mapping[int, Sequence[Replicate]], field: Iterable[int]) -> dict[str, list[RunSummary]]:
    """What the race is decided by: the runs of each contender, by its name. field: their numbers in the sweep."""
    return {name_of(n): [RunSummary(r.objective, r.node_hours) for r in runs.get(n, ())] for n in field}


def missed(runs: Iterable[Replicate]) -> int:
    """How many have no result."""
    return sum(not math.isfinite(run.objective) for run in runs)


def runs_words(runs: int, missed: int, scale: RaceScale = TIMES) -> str:
    """How many runs there are, and how many of them have no result, for people."""
    count = f"{runs} run{'s' if runs != 1 else ''}"
    if not missed:
        return count
    return f"{count}, {f'{missed} {scale.missed}' if missed < runs else f'none {scale.got}'}"
