"""Regular expressions from study files, refused where a log line could make them hang."""

from __future__ import annotations

import re
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]  # the only way to know how patterns nest
from typing import Any

from lora_tune.logs.line_reader import FACTS

_PROGRESS = frozenset(("samples", "step", "epoch"))

MAX_REPEATS = 100
"""A repetition that may go on for longer counts as unbounded."""


@lru_cache(maxsize=64)
def compile_safely(name: str, pattern: str, *, progress_apart: bool = False) -> re.Pattern[str]:
    """The compiled pattern; ValueError where it is malformed, lacks groups, or repeats a repetition.

    progress_apart: another pattern says how far the run is.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        remedy = "; Python writes a named group (?P<name>...)" if "unknown extension ?<" in str(error) else ""
        raise ValueError(
            f"log setting {name!r} is not a valid regular expression ({error}){remedy}; got {pattern!r}"
        ) from error
    if _repeats_repetition(_parser.parse(pattern)):
        raise ValueError(
            f"log setting {name!r} repeats a repetition or an alternative, which can hang on a long line; "
            f"write the inner one possessively (x++) or without repetition; got {pattern!r}"
        )
    groups = set(compiled.groupindex)
    measures = name in ("eval", "train")
    if measures and not ("loss" in groups and (progress_apart or groups & _PROGRESS)):
        raise ValueError(
            f"log setting {name!r} needs the named groups loss and samples, step or epoch; where these stand on lines "
            f"of their own, add a pattern 'progress' with one of them; got {pattern!r}"
        )
    if name == "progress" and not groups & _PROGRESS:
        raise ValueError(f"log setting 'progress' needs the named group samples, step or epoch; got {pattern!r}")
    unknown = sorted(groups - {"loss", *FACTS})
    if unknown:
        raise ValueError(
            f"log setting {name!r} has the unknown group {unknown[0]!r}; known are loss, {', '.join(FACTS)}"
        )
    return compiled


def _repeats_repetition(parsed: Any, inside: bool = False) -> bool:
    """Whether an unbounded repetition holds another, or an alternative: what takes exponential time to fail."""
    for operation, argument in parsed:
        kind = str(operation)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, held = argument
            if (inside and most != least) or _repeats_repetition(held, inside or most > MAX_REPEATS):
                return True
        elif kind == "BRANCH" and (inside or any(_repeats_repetition(branch) for branch in argument[1])):
            return True
        elif kind in _HOLDS:
            position, starts_anew = _HOLDS[kind]
            held = argument if position is None else argument[position]
            if _repeats_repetition(held, inside and not starts_anew):
                return True
    return False


# Where a parsed operation holds another pattern, and whether that one never gives back what it matched.
_HOLDS: dict[str, tuple[int | None, bool]] = {
    "SUBPATTERN": (3, False),
    "ASSERT": (1, True),
    "ASSERT_NOT": (1, True),
    "ATOMIC_GROUP": (None, True),
    "POSSESSIVE_REPEAT": (2, True),
}
