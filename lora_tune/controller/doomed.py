"""Which proposals must fail, so that no job is started for them. Pure functions of (workload, records, proposal)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lora_tune.config.parameters import CategoricalParameter, LayoutParameter, Value
from lora_tune.config.study import Study
from lora_tune.controller.jobs import proposal as proposal_of
from lora_tune.logs.failures import is_refusal
from lora_tune.store.records import StudyRecords, Verdict
from lora_tune.workloads.base import Proposal, Workload

MOST = 200
"""Proposals in a row that must fail before a sweep asks for no more."""

ENOUGH = 2
"""Refusals of the same choices before they are left alone: a number may have been to blame for one."""

_REFUSED = re.compile(r"val_check_interval\W{1,4}(\d+)\W.{1,80}must be less than or equal.{1,80}?\((\d+)\)")


class _Refused(NamedTuple):
    """A trial that a trainer refused. stated: its interval as the trainer counts it; most: the largest it takes."""

    trial: int
    first: float
    samples: float
    stated: float
    most: float


def refused_before(study: Study, sweep: StudyRecords, tuned: Mapping[str, Value]) -> str:
    """Which trial of the same choices the program has refused, as it has each other one; "" where there is none.

    Choices are layouts and categorical values: Megatron refuses degrees that do not go together, whatever the rate.
    """
    names = [n for n, p in study.space.items() if isinstance(p, CategoricalParameter | LayoutParameter)]
    alike = [t for t in sweep.trials.values() if t.verdict and all(t.tuned.get(n) == tuned.get(n) for n in names)]
    refused = [t for t in alike if t.verdict is Verdict.INFEASIBLE and is_refusal(t.sentence)]
    if not names or len(refused) < ENOUGH or len(refused) < len(alike):
        return ""
    return f"trial {refused[-1].number}, which has the same {', '.join(names)}, was refused: {refused[-1].sentence}"


def why_doomed(workload: Workload, sweep: StudyRecords, proposal: Proposal) -> str:
    """Why a proposal's run must end without an eval; "" where it need not.

    By its own numbers, and by what the trainer has said of a training of the same length (PyTorch Lightning: an
    interval beyond the training's batches is refused).
    """
    if (known := workload.first_eval(proposal)) is None:
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


def _refused(workload: Workload, sweep: StudyRecords) -> Iterator[_Refused]:
    for attempt in sweep.attempts.values():
        if attempt.failure and (match := _REFUSED.search(attempt.line)):
            known = workload.first_eval(proposal_of(sweep.trials[attempt.trial], attempt.number))
            if known is not None and known[0] > 0:
                yield _Refused(attempt.trial, *known, float(match[1]), float(match[2]))
