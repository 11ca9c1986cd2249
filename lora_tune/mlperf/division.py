"""The closed division of MLPerf llama2_70b_lora: what a study may tune, and when a run evaluates."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lora_tune.curves.timing import Schedule
from lora_tune.mlperf.score import largest_rcp

TARGET = 0.925
"""Eval loss that ends a run."""

EVAL_SAMPLES = 384
"""Samples between evals where the batch size divides it."""

SCHEDULE_RULE = (
    "evaluate every CEIL(384 / GBS) steps, skipping the first FLOOR(0.125 * GBS + 2) evaluations "
    "(MLPerf reference llama2_70b_lora, Evaluation frequency)"
)
FIXED_RULE = "fixed to the reference in the closed division (MLPerf Training rules, hyperparameters of llama2_70b_lora)"

FIXED: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "LoRA rank": (16, ("LORA_RANK", "LORA_DIM", "LORA_R", "ADAPTER_DIM")),
    "LoRA alpha": (32, ("LORA_ALPHA",)),
    "LoRA dropout": (0.1, ("LORA_DROPOUT", "ADAPTER_DROPOUT")),
    "weight decay": (1e-4, ("WEIGHT_DECAY", "OPT_ADAMW_WEIGHT_DECAY")),
    "gradient clip": (0.3, ("GRADIENT_CLIP_VAL", "GRADIENT_CLIP_NORM", "OPT_GRADIENT_CLIP_NORM", "MAX_GRAD_NORM")),
    "sequence length": (8192, ("MAX_SEQLEN", "SEQ_LENGTH", "SEQ_LEN", "MAX_SEQ_LENGTH")),
}
"""Meaning -> value and the names (any case) under which trials read it."""

INTERVAL_NAMES = ("VAL_CHECK_INTERVAL", "EVAL_INTERVAL", "EVAL_EVERY", "EVAL_STEPS")
SKIP_NAMES = ("SKIP_EVALS", "SKIP_EVAL")


@dataclass(frozen=True, slots=True)
class Violation:
    """One breach of the closed division. fatal: the study is refused; otherwise it is a warning.

    sentence: what came, what is allowed and what to do, with the rule's text.
    """

    name: str
    sentence: str
    fatal: bool = True


def skipped_evals(gbs: int) -> int:
    """``SKIP_EVALS``: evals left out at the start, ``floor(0.125 * GBS + 2)``."""
    return math.floor(0.125 * gbs + 2)


def eval_schedule(gbs: int) -> Schedule:
    """The closed division's eval schedule in samples: every ``ceil(384/GBS)*GBS``, after :func:`skipped_evals`."""
    if gbs < 1:
        raise ValueError(f"a global batch size is at least 1, not {gbs}")
    interval = math.ceil(EVAL_SAMPLES / gbs) * gbs
    return Schedule(first_samples=(skipped_evals(gbs) + 1) * interval, interval_samples=interval)


def check_closed(
    *, tuned: Iterable[str], values: Mapping[str, object] | None = None, batch_sizes: Collection[int] = ()
) -> list[Violation]:
    """What a space breaks of the closed division; empty when nothing.

    tuned: names of parameters that vary. values: names and values of those that do not (fixed or derived).
    batch_sizes: every global batch size that the space can produce. Names are compared without case.
    """
    found = [v for name in tuned if (v := _check_tuned(name)) is not None]
    for name, value in (values or {}).items():
        found.extend(_check_value(name, value, batch_sizes))
    largest = largest_rcp()
    if above := sorted(g for g in set(batch_sizes) if g > largest):
        listed = ", ".join(map(str, above))
        found.append(
            Violation(
                "GBS",
                f"GBS {listed} is above {largest}, the largest batch size with a reference convergence point: such a "
                f"submission fails the RCP check until a reference is submitted for it; keep GBS <= {largest}",
                fatal=False,
            )
        )
    return found


def _check_tuned(name: str) -> Violation | None:
    upper = name.upper()
    for meaning, (value, names) in FIXED.items():
        if upper in names:
            return Violation(
                name, f"{name} is tuned, but {meaning} is {value:g}, {FIXED_RULE}; fix it, or use the open division"
            )
    if upper in INTERVAL_NAMES + SKIP_NAMES:
        return Violation(
            name, f"{name} is tuned, but the eval schedule follows from GBS: {SCHEDULE_RULE}; remove it, or use open"
        )
    return None


def _check_value(name: str, value: object, batch_sizes: Collection[int]) -> list[Violation]:
    upper = name.upper()
    for meaning, (allowed, names) in FIXED.items():
        if upper in names and not _equal(value, allowed):
            return [Violation(name, f"{name} = {value}, but {meaning} is {allowed:g}, {FIXED_RULE}; remove the line")]
    for gbs in sorted(set(batch_sizes)):
        interval = eval_schedule(gbs).interval_samples
        if upper == "VAL_CHECK_INTERVAL" and not (_equal(value, interval) or _equal(value, EVAL_SAMPLES)):
            need = f"{interval:g} samples at GBS {gbs}"
        elif upper in SKIP_NAMES and not _equal(value, skipped_evals(gbs)):
            need = f"{skipped_evals(gbs)} at GBS {gbs}"
        else:
            continue
        return [Violation(name, f"{name} = {value}, but it must be {need}: {SCHEDULE_RULE}; remove the line")]
    return []


def _equal(value: object, allowed: float) -> bool:
    try:
        return math.isclose(float(value), allowed, rel_tol=1e-9)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError):
        return False
