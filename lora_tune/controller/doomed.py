"""Which proposals must fail, so that no job is started for them. Pure functions of (workload, records, proposal)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from lora_tune.controller.jobs import proposal as proposal_of
from lora_tune.store.records import StudyRecords
from lora_tune.workloads.base import KnowsEvals, Proposal, Workload

MOST = 200
"""Proposals in a row that must fail before a sweep asks for no more."""

_REFUSED = re.compile(r"val_check_interval\W{1,4}(\d+)\W.{1,80}must be less than or equal.{1,80}?\((\d+)\)")


class _Refused(NamedTuple):
    """A trial that a trainer refused. stated: its interval as the trainer counts it; most: the largest it takes."""

    trial: int
    first: float
    samples: float
    stated: float
    most: float


def why_doomed(workload: Workload, sweep: StudyRecords, proposal: Proposal) -> str:
    """Why a proposal's run must end without an eval; "" where it need not.

    By its own numbers, and by what the trainer has said of a training of the same length (PyTorch Lightning: an
    interval beyond the training's batches is refused).
    """
    if not isinstance(workload, KnowsEvals) or (known := workload.first_eval(proposal)) is None:
        return ""
    first, samples = known
    if first > samples:
        return f"its first eval would come after {first:g} samples, and its training ends after {samples:g}"
    for refused in _refused(workload, sweep):
        if refused.samples == samples and refused.stated * first / refused.first > refused.most:
            return (
                f"its first eval would come after {first:g} samples, and trial {refused.trial}, which trains as long, "
                f"was refused for {refused.first:g}"
            )
    return ""


def _refused(workload: KnowsEvals, sweep: StudyRecords) -> Iterator[_Refused]:
    for attempt in sweep.attempts.values():
        if attempt.failure and (match := _REFUSED.search(attempt.line)):
            known = workload.first_eval(proposal_of(sweep.trials[attempt.trial], attempt.number))
            if known is not None and known[0] > 0:
                yield _Refused(attempt.trial, *known, float(match[1]), float(match[2]))
