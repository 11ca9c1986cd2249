"""Checks of the study for trials of the PEFT recipe that cannot run, before a job is submitted."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from lora_tune.base.errors import SetupError, StudyError
from lora_tune.config.parameters import CategoricalParameter, FixedParameter, IntParameter, Parameter, Value
from lora_tune.config.study import Study

NOT_IN_A_PACK = {
    "TP": ("a trial in a pack has one process", ("1", "")),
    "CP": ("a trial in a pack has one process", ("1", "")),
    "FSDP": ("a trial in a pack has one process", ("0", "False", "false", "")),
}
"""Variables that packs do not support: why, and the values that they do."""
ONE_IN_A_PACK = (
    "MODEL",
    "DTYPE",
    "LOAD_IN_4BIT",
    "ATTN",
    "RECOMPUTE_GRANULARITY",
    "TORCH_COMPILE",
    "CUDA_GRAPH",
)
"""Variables that the trials of a pack share."""
LIBRARIES = (
    ("LOAD_IN_4BIT", ("nf4", "fp4"), "bitsandbytes", "pip install 'lora-tune[qlora]'"),
    ("ATTN", ("flash_attention_2",), "flash_attn", "pip install flash-attn, or take sdpa"),
)
"""(variable, values, library that they need, remedy)."""


def refuse_in_packs(study: Study) -> None:
    """Raise StudyError for the first variable of the space that ``site.slots`` does not support."""
    for name, parameter in study.space.items():
        values = [str(value) for value in _values(parameter)]
        reason, allowed = NOT_IN_A_PACK.get(name, ("", tuple(values)))
        if not set(values) <= set(allowed):
            problem = f"{', '.join(values)}: {reason}; allowed with site.slots is {allowed[0] or 'nothing'}"
            raise StudyError(f"study {study.name}", f"space.{name}", problem)
        if name in ONE_IN_A_PACK and len(set(values)) > 1:
            problem = f"{', '.join(values)}: the trials of a pack share it; give it one value, or take site.slots out"
            raise StudyError(f"study {study.name}", f"space.{name}", problem)


def refuse_without_library(study: Study) -> None:
    """Raise SetupError for a value of the space that needs a missing library, or a GPU."""
    for name, wanting, library, remedy in LIBRARIES:
        values = [str(v) for v in _values(study.space.get(name)) if str(v) in wanting]
        if values and importlib.util.find_spec(library) is None:
            raise SetupError(f"{name}={values[0]!r}: {library} is not installed here; {remedy}")
    flash = "flash_attention_2" in map(str, _values(study.space.get("ATTN")))
    if flash and study.site.gpus_per_node == 0:
        raise SetupError(
            "ATTN='flash_attention_2': a trial has no GPU (site.gpus_per_node = 0); allowed are sdpa, eager"
        )


def _values(parameter: Parameter | None) -> Sequence[Value]:
    """The values of a parameter; the ends of an integer range; empty for other kinds."""
    match parameter:
        case FixedParameter():
            return (parameter.value,)
        case CategoricalParameter():
            return parameter.choices
        case IntParameter():
            return (parameter.low, parameter.high)
    return ()
