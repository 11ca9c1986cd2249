"""Which failures are a node's and not a trial's: pure functions of the records.

A fault of the machine (infrastructure, flaky) is always taken for the node's. Any other failure is taken for it when it
sits on that node alone: other nodes run trials, and none of them fails like this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from lora_tune.launchers.base import JobState
from lora_tune.store.records import Attempt, StopKind, StudyRecords

IN_A_ROW = 2
"""Failures in a row, of different trials, after which a node is left out."""

LEFT_OUT_SECONDS = 24 * 3600.0
"""How long a node is left out: it may have been repaired since."""

MACHINE = ("infrastructure", "flaky")
"""Classes of failure that a machine alone explains."""

ANY = (*MACHINE, "configuration", "unknown", "infeasible")
"""Classes of failure that a machine explains where no other machine shows them."""


def suspect_nodes(sweep: StudyRecords, now: float) -> dict[str, str]:
    """Nodes to leave out for a while, each with the reason in words: their last trials all failed.

    A job that was cancelled or lost says nothing about its node. now: epoch seconds.
    """
    recent = _recent(sweep.attempts.values(), now)
    if not any(a.failure for a in recent):  # asked before every submission: the common case is quick
        return {}
    return {
        node: f"{len(failed)} trials in a row failed there, last: {list(failed.values())[-1].line}"
        for node, failed in _failed_in_a_row(recent).items()
        if len(failed) >= IN_A_ROW
        and (all(a.failure in MACHINE for a in failed.values()) or _sits_on(node, failed, recent, now))
    }


def may_be_the_nodes(sweep: StudyRecords, attempt: Attempt, now: float) -> bool:
    """Whether ``attempt``, which failed, deserves a try on another node although its class speaks against the study.

    So it is while no other node has failed like this, and on a node that never ran a trial where others do.
    """
    if not attempt.nodes:
        return False
    here = set(attempt.nodes)
    others = [
        a for a in _recent(sweep.attempts.values(), now) if (a.trial, a.number) != (attempt.trial, attempt.number)
    ]
    elsewhere = [a for a in others if a.nodes and not here & set(a.nodes)]
    if not any(a.failure in ANY for a in elsewhere):
        return True
    lived = _seconds(attempt, now)
    worked_here = any(here & set(a.nodes) and _works(a, lived, now) for a in others)
    return not worked_here and any(_works(a, lived, now) for a in elsewhere)


def _recent(attempts: Iterable[Attempt], now: float) -> list[Attempt]:
    """Those that run, and those that ended in the last day of what was not fixed since; by their end."""
    known = (a for a in attempts if a.started_at and a.fixed_at is None)
    recent = [a for a in known if a.ended_at is None or now - a.ended_at < LEFT_OUT_SECONDS]
    return sorted(recent, key=lambda a: a.ended_at or now)


def _failed_in_a_row(recent: Sequence[Attempt]) -> dict[str, dict[int, Attempt]]:
    """Node -> the attempts, by trial, that failed on it since one there did not."""
    failed: dict[str, dict[int, Attempt]] = {}
    for attempt in (a for a in recent if a.ended_at is not None):
        own_end = attempt.state not in (JobState.CANCELLED, JobState.LOST, JobState.PREEMPTED)
        if attempt.failure in ANY and (own_end or attempt.stop is StopKind.SILENT):
            for node in attempt.nodes:
                failed.setdefault(node, {})[attempt.trial] = attempt
        elif not attempt.failure and attempt.stop is not StopKind.USER:
            for node in attempt.nodes:
                failed.pop(node, None)
    return failed


def _sits_on(node: str, failed: Mapping[int, Attempt], recent: Collection[Attempt], now: float) -> bool:
    """Whether what failed on ``node`` runs elsewhere: other trials without any such failure, or one of these trials."""
    lived = max(_seconds(a, now) for a in failed.values())
    elsewhere = [a for a in recent if a.nodes and node not in a.nodes]
    working = [a for a in elsewhere if _works(a, lived, now)]
    alone = not any(a.failure in ANY for a in elsewhere)
    return bool(working) and (alone or any(a.trial in failed for a in working))


def _works(attempt: Attempt, lived: float, now: float) -> bool:
    """Whether an attempt ended well, or has run for twice as long as those ``lived`` that failed."""
    if attempt.ended_at is None:
        return _seconds(attempt, now) > 2 * lived
    return not attempt.failure and attempt.stop is not StopKind.USER


def _seconds(attempt: Attempt, now: float) -> float:
    end = now if attempt.ended_at is None else attempt.ended_at
    return max(0.0, end - attempt.started_at) if attempt.started_at is not None else 0.0
