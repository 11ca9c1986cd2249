"""The variables of MLPerf implementations: which names mean the same, and which values go together. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from lora_tune.base.errors import InputError
from lora_tune.workloads.base import Value
from lora_tune.workloads.implementation import Implementation
from lora_tune.workloads.record import ALIASES, NEUTRAL, Record

PROBE_STEPS = 16
"""Optimizer steps of each of a probe's two blocks; the second is warm."""

PROBE_TRAINS = 2 * PROBE_STEPS
"""Optimizer steps that a probe's config is written with, whatever its trial proposes."""


def spelled(values: Mapping[str, Value], implementation: Implementation) -> dict[str, Value]:
    """``values`` under the names that the implementation reads.

    Raises InputError for a value that it reads under no name: such a knob has no effect.
    """
    exports: dict[str, Value] = {}
    for name, value in values.items():
        known = implementation.spelling((name, *ALIASES.get(name, ())))
        follows = name == "GBS" and not implementation.mentions("GBS", *ALIASES["GBS"])  # from MINIBS
        if known is not None and not follows:
            exports[known] = value
        elif name == "WARMUP_STEPS" and implementation.knows("WARMUP_RATIO"):
            exports["WARMUP_RATIO"] = warmup_ratio(int(value), int(values["MAX_STEPS"]))
        elif name == "MINIBS" and implementation.knows("GLOBAL_BATCH_SIZE"):
            continue  # the batch is given whole
        elif name != "GBS" and NEUTRAL.get(name) != value:
            near = difflib.get_close_matches(name, sorted(implementation.reads), n=3)
            hint = f"; it reads {', '.join(near)}" if near else ""
            raise InputError(
                f"space.{name}: no file in {implementation.folder} reads {name}, so setting it has no effect{hint}; "
                "remove it or name the variable that it reads"
            )
    return exports


def probe_values(gbs: int, warmup: Value | None = None, *, in_steps: bool = False) -> dict[str, Value]:
    """Two short blocks with an eval behind each, and an end of its own should nobody stop it.

    warmup: the trial's steps of it, of which no more than a block are kept: schedulers refuse one as long as training.
    in_steps: the implementation counts VAL_CHECK_INTERVAL in optimizer steps, not in samples.
    """
    kept: dict[str, Value] = {} if warmup is None else {"WARMUP_STEPS": min(int(warmup), PROBE_STEPS)}
    return kept | {
        "VAL_CHECK_INTERVAL": PROBE_STEPS if in_steps else PROBE_STEPS * gbs,
        "SKIP_EVALS": 0,
        "MAX_STEPS": PROBE_TRAINS,
    }


def refuse_illegal(record: Record, exports: Mapping[str, Value]) -> None:
    """Combinations that NVIDIA's code rejects or silently ignores (v4.0 to v5.1).

    record: of the trial. exports: what it sets itself. Both precisions may be on in a folder's own config: those of
    v6.0's Primus folders have it so.
    """

    def on(name: str) -> bool:
        return str(record.get(name, "")).lower() in ("1", "true")

    if on("FP8") and on("FP4") and exports.keys() & {"FP8", "FP4"}:
        raise InputError("FP8 and FP4 are both on; the implementation allows one of them")
    if str(record.get("CP_EVAL", "")) not in ("", "1"):
        raise InputError(f"CP_EVAL={record['CP_EVAL']}; only 1 or unset works")


def warmup_ratio(warmup: int, steps: int) -> float:
    """The shortest decimal that makes ``warmup`` of ``steps``, whether an implementation rounds or cuts the product."""
    for digits in range(1, 17):
        scale = 10**digits
        ratio: float = -(-warmup * scale // steps) / scale
        if int(ratio * steps) == round(ratio * steps) == warmup:
            return ratio
    return warmup / steps
