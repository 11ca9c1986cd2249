"""What MLPerf's closed division fixes of Llama 3.1 405B pre-training, and when it evaluates.

Source of the formulas: ``closed_llama31_405b.yaml`` of mlperf_logging's compliance checker (training 5.0 and 5.1),
which fails a log whose rate, warm-up, clip, weight decay or sequence length differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from lora_tune.curves.timing import Schedule
from lora_tune.mlperf.division import Violation

BENCHMARK = "llama31_405b"
TARGET = 5.6
"""Log perplexity that ends a run."""

EVAL_SEQUENCES = 18_432
"""Sequences between evals."""

FIXED: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "weight decay": (0.1, ("WEIGHT_DECAY", "OPT_ADAMW_WEIGHT_DECAY")),
    "gradient clip": (1.0, ("GRADIENT_CLIP_VAL", "OPT_GRADIENT_CLIP_NORM", "MAX_GRAD_NORM")),
    "sequence length": (8192, ("ENCODER_SEQ_LENGTH", "MAX_SEQLEN", "SEQ_LENGTH", "SEQ_LEN")),
}
"""Meaning -> value and the names under which trials read it."""


def learning_rate(gbs: int) -> float:
    """The base learning rate at a global batch size: 8e-5 at 1,152 sequences, linear in the batch."""
    return 8e-5 * gbs / 1152


def warmup_steps(gbs: int) -> int:
    """Optimizer steps of linear warm-up: 8,000 at 1,152 sequences, equal in sequences at every batch."""
    return math.ceil(8000 * 1152 / gbs)


def eval_schedule(gbs: int) -> Schedule:
    """Every 18,432 sequences, in whole steps; none is skipped."""
    every = math.ceil(EVAL_SEQUENCES / gbs) * gbs
    return Schedule(first_samples=every, interval_samples=every)


def check_closed(*, tuned: Collection[str], points: Iterable[Mapping[str, object]]) -> list[Violation]:
    """What a space breaks; empty when nothing.

    tuned: names of parameters that vary. points: resolved values, with ``GBS``, one for each layout.
    """
    fixed = {name: value for value, names in FIXED.values() for name in names}
    found = {
        name: Violation(name, f"{name} is tuned, but the closed division fixes it; {_remedy(name)}")
        for name in tuned
        if name in fixed or name in ("LR", "WARMUP_STEPS")
    }
    for values in points:
        gbs = values.get("GBS")
        wanted = dict(fixed)
        if isinstance(gbs, int):
            wanted |= {"LR": learning_rate(gbs), "WARMUP_STEPS": warmup_steps(gbs)}
        for name in values.keys() & wanted.keys() - found.keys():
            if not _equal(values[name], wanted[name]):
                at = f" at GBS {gbs}" if name in ("LR", "WARMUP_STEPS") else ""
                came = f"{name} = {values[name]}{at}, but it must be {wanted[name]:g}"
                found[name] = Violation(name, f"{came} in the closed division; {_remedy(name)}")
    return list(found.values())


def _remedy(name: str) -> str:
    formulas = {"LR": "8e-5 * GBS / 1152", "WARMUP_STEPS": "ceil(8000 * 1152 / GBS)"}
    if name in formulas:
        return f'write {name} = {{ type = "derived", formula = "{formulas[name]}" }}, or use the open division'
    return "remove the line, or use the open division"


def _equal(value: object, wanted: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, wanted, rel_tol=1e-9)
