"""When an MLPerf implementation evaluates: the rules' schedule in the variables that it reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lora_tune.mlperf.gate import INTERVAL_IN_STEPS
from lora_tune.workloads.base import Proposal, Value
from lora_tune.workloads.record import ALIASES, names_of

if TYPE_CHECKING:
    from lora_tune.workloads.mlperf import MlperfWorkload


def counts_steps(workload: MlperfWorkload) -> bool:
    """Whether an implementation's interval between evals is in optimizer steps, not in samples.

    What its own config or default states tells where that is the rules' interval at its own batch in one of the two.
    Else Primus hands it to Megatron as iterations, in every benchmark, and others count as their benchmark's do.
    """
    benchmark, own = workload.benchmark, workload.beneath
    stated, batch = own.number("VAL_CHECK_INTERVAL"), own.gbs
    rule = None if batch is None or batch == 1 else benchmark.eval_schedule(batch)
    if rule is not None and batch is not None and stated is not None:
        if stated == rule.interval_samples:
            return False
        if stated == math.ceil(rule.interval_samples / batch):
            return True
    name = workload.implementation.spelling(names_of("VAL_CHECK_INTERVAL"))
    return benchmark.name in INTERVAL_IN_STEPS or name == "PRIMUS_EVAL_INTERVAL"


def eval_exports(workload: MlperfWorkload, proposal: Proposal) -> dict[str, Value]:
    """The eval schedule in the implementation's terms: the rules' for this GBS unless the study says otherwise.

    Nothing where the rules count epochs, or where steps are counted and the first evals skipped: there the
    implementations keep the rules by themselves. Nothing either where nobody states the batch that they follow from.
    Where the study sets the interval, the evals that are left out at the start are the study's or the config's, too.
    """
    settings, benchmark, implementation = workload.settings, workload.benchmark, workload.implementation
    gbs = workload.gbs(proposal)
    rule = None if gbs is None else benchmark.eval_schedule(gbs)
    tuned = proposal.parameters.get("VAL_CHECK_INTERVAL")
    in_steps = counts_steps(workload)
    scheduled = bool(tuned or settings.first_eval or settings.eval_every)
    if gbs is None or rule is None or benchmark.progress == "epoch_num":
        return {}
    skips = rule.first_samples > rule.interval_samples
    if (
        in_steps
        and benchmark.name in INTERVAL_IN_STEPS
        and not scheduled
        and (skips or not implementation.knows("VAL_CHECK_INTERVAL"))
    ):
        return {}
    unit = gbs if in_steps else 1
    every = int(tuned) if tuned else math.ceil((settings.eval_every or rule.interval_samples) / unit)
    first = settings.first_eval or int(rule.first_samples)
    derived: dict[str, Value] = {
        "VAL_CHECK_INTERVAL": every,
        "SKIP_EVALS": max(0, round(first / (every * unit)) - 1),
    }
    if not implementation.mentions("SKIP_EVALS", "SKIP_EVAL") or (tuned and not settings.first_eval):
        del derived["SKIP_EVALS"]
    return {
        name: value for name, value in derived.items() if proposal.parameters.keys().isdisjoint((name, *ALIASES[name]))
    }


def first_eval(workload: MlperfWorkload, proposal: Proposal) -> tuple[float, float] | None:
    """Samples before a trial's first eval, and samples of its whole training; None where nobody states one of them."""
    record = workload.written(proposal)
    batch, every, steps = record.gbs, record.number("VAL_CHECK_INTERVAL"), record.number("MAX_STEPS")
    if batch is None or every is None or steps is None or workload.benchmark.progress == "epoch_num":
        return None
    unit = batch if counts_steps(workload) else 1
    return ((record.number("SKIP_EVALS") or 0) + 1) * every * unit, steps * batch
