"""What runs out of memory, learned from the first trial of a script that did: sizes at least as large are left.

A script of one's own has no model of its memory. But a batch, a rank or a sequence that is larger needs no less,
whatever the other parameters are, so one death speaks of all of them at once; a survivor with sizes as large says that
it was bad luck. Pure functions.
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
"""Names of which a larger value needs no less memory on a GPU. Not a batch over all GPUs: accumulation makes that."""


def is_size(name: str, value: object) -> bool:
    """Whether a parameter of this name and value says how large something on the GPU is."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and _LARGER_NEEDS_MORE.fullmatch(name.lower()) is not None


def smaller(
    proposed: Mapping[str, Any],
    choices: Mapping[str, Sequence[Any]],
    died: Sequence[Mapping[str, Any]],
    lived: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The sizes that a proposal should have instead, so that it needs less than what died; {} where it does already.

    proposed: tuned values. choices: the values that each size may have. died, lived: tuned values of trials that ran
    out of memory, and of others that trained. The size that is largest beside its smallest choice gives way first.
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
    """Whether every size of ``other`` is reached: no less memory is needed."""
    return all(name in values and values[name] >= size for name, size in other.items())
