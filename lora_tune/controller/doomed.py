"""Proposals that are certain to fail, so that no job is started. Pure functions of (workload, records, proposal)."""

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
"""Consecutive doomed proposals before a sweep stops asking."""

ENOUGH = 2
"""Refusals of the same choices before these are avoided, because a numeric value may have caused one."""

_REFUSED = re.compile(r"val_check_interval\W{1,4}(\d+)\W.{1,80}must be less than or equal.{1,80}?\((\d+)\)")


class _Refused(NamedTuple):
    """A trial that a trainer refused. stated: its interval as the trainer counts it; most: the largest allowed one."""

    trial: int
    first: float
    samples: float
    stated: float
    most: float


def refused_before(study: Study, sweep: StudyRecords, tuned: Mapping[str, Value]) -> str:
    """The refusal of an earlier trial with the same choices, if the program refused all such trials; else "".

    Choices are layouts and categorical values: Megatron refuses incompatible degrees, whatever the learning rate.
    """
    names = [n for n, p in study.space.items() if isinstance(p, CategoricalParameter | LayoutParameter)]
    alike = [t for t in sweep.trials.values() if t.verdict and all(t.tuned.get(n) == tuned.get(n) for n in names)]
    refused = [t for t in alike if t.verdict is Verdict.INFEASIBLE and is_refusal(t.sentence)]
    if not names or len(refused) < ENOUGH or len(refused) < len(alike):
        return ""
    return f"trial {refused[-1].number}, which has the same {', '.join(names)}, was refused: {refused[-1].sentence}"


def why_doomed(workload: Workload, sweep: StudyRecords, proposal: Proposal) -> str:
    """Why a proposal's run must end without an eval; "" if it need not.

    By its own numbers, and by a trainer's refusal of a training of the same length (PyTorch Lightning rejects an
    interval beyond the training's batches).
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
