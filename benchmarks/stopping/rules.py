"""Stopping rules as functions of a whole run: the samples at which each would have stopped it, or None."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.stopping.tables import Table, seen
from lora_tune.curves.conformal import FEWEST, compare, supported
from lora_tune.curves.overlay import ComparedRun
from lora_tune.curves.stopping import Evidence, verdict
from lora_tune.logs.run import Eval

Rule = Callable[[ComparedRun], float | None]
"""Takes a whole run, shows a rule what it had shown eval by eval, and returns where it was stopped."""


def ours(table: Table, references: Sequence[ComparedRun], rate: float) -> Rule:
    """The rule as shipped, from three references on (a study waits for eight by default).

    What it says of a run does not change as the run goes on, so one comparison tells where it would have been stopped.
    """
    evidence = Evidence(references=references, fewest=FEWEST, rate=rate)

    def rule(run: ComparedRun) -> float | None:
        shown = seen(run, table.target)
        if not len(shown.curve.samples) and not shown.blank:
            return None
        if len(references) >= FEWEST:
            found = compare(shown, references, target=table.target, rate=rate)
            return found.at if found.outside else None
        evals = evals_of(shown)
        stops = (
            e.samples
            for i, e in enumerate(evals)
            if verdict(evals[: i + 1], table.target, evidence, length=run.length, task=run.task, kind=run.kind).stop
        )
        return next(stops, None)

    return rule


def ours_supports(references: int, rate: float) -> float:
    """The rate that is stated to the user; 0 where no comparison takes place."""
    return supported(rate, references) if references >= FEWEST else 0.0


def evals_of(run: ComparedRun) -> list[Eval]:
    """The run's evals; its samples stand for seconds."""
    return [Eval(float(s), float(v), float(s)) for s, v in zip(*run.curve, strict=True)]
