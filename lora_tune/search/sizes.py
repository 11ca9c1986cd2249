"""Avoid sizes that ran out of memory, learned from a script's first out-of-memory trial.

A user's script has no memory model. But a larger batch, rank or sequence needs no less memory, whatever the other
parameters, so one failure excludes all sizes at least as large; unless a trial with sizes as large ran, in which case
the failure was random. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_LARGER_NEEDS_MORE = re.compile(
    r"(?:(?:train|eval|device|gpu|micro|mini|per)_?)*(?:batch|bs|mbs|minibs)(?:_?size)?"
    r"|(?:lora_?)?(?:r|rank)"
    r"|(?:max_?)?(?:seq|sequence|context|ctx|block|prompt)(?:_?(?:len|length|size))?|max_length|cutoff_len"
    r"|(?:n_?|num_?)?(?:layers?|heads)|(?:hidden|embed(?:ding)?|model|d)_?(?:size|dim|model)|n_?embd|width|depth"
)
"""Names for which a larger value needs no less GPU memory. Not the global batch size, which may use accumulation."""


def is_size(name: str, value: object) -> bool:
    """Whether a parameter of this name and value is a size on the GPU."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and _LARGER_NEEDS_MORE.fullmatch(name.lower()) is not None


def smaller(
    proposed: Mapping[str, Any],
    choices: Mapping[str, Sequence[Any]],
    died: Sequence[Mapping[str, Any]],
    lived: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Sizes to change in a proposal so that it needs less than failed trials; {} if it already does.

    proposed: tuned values. choices: possible values of each size. died, lived: tuned values of trials that ran out of
    memory, and of those that trained. The size largest relative to its smallest choice is reduced first.
    """
    sizes = {name: value for name, value in proposed.items() if is_size(name, value) and len(choices.get(name, ())) > 1}
    deaths = [{n: d[n] for n in sizes} for d in died if sizes and all(n in d for n in sizes)]
    deaths = [d for d in deaths if not any(_as_large(other, d) for other in lived)]
    point = dict(sizes)
    while doomed := next((d for d in deaths if _as_large(point, d)), None):
        lower = {n: [c for c in choices[n] if c < doomed[n]] for n in sizes}
        able = [n for n in sizes if lower[n]]
        if not able:
            return {}
        name = max(able, key=lambda n: point[n] / max(min(choices[n]), 1e-12))
        point[name] = max(lower[name])
    return {name: value for name, value in point.items() if value != sizes[name]}


def _as_large(values: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether every size is at least that of ``other``, so that no less memory is needed."""
    return all(name in values and values[name] >= size for name, size in other.items())
