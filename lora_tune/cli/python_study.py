"""A study from Python's own values: keyword arguments, and a function that is one trial. The file is written from them.

What is swept is a study file as any other, so that every command of the command line knows it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lora_tune.base.errors import InputError
from lora_tune.base.files import write_text
from lora_tune.review.config_check import toml_text

SECTIONS = ("workload", "space", "objective", "search", "pruning", "budget", "site", "description", "division")
_OWN = ("SEED", "folder")
"""What a function may take beside the parameters of the space."""


def write_study(file: Path, sections: Mapping[str, Any], function: Callable[..., Any] | None = None) -> Path:
    """Write a study file of these sections, and beside it the function that is one trial, if any; returns the file.

    file: ends in .toml. sections: as the file has them; in ``space`` a pair (low, high) is a range, on a log scale
    where it is positive and spans a decade, and a list is one of several values. Raises InputError for
    what cannot be swept.
    """
    if unknown := sorted(sections.keys() - {*SECTIONS}):
        raise InputError(f"{unknown[0]!r} is no section of a study; allowed are {', '.join(SECTIONS)}")
    table = {key: value for key, value in sections.items() if value is not None}
    space = table.get("space")
    if not isinstance(space, Mapping) or not space:
        raise InputError("space is missing: give what may vary, such as space={'LR': (1e-5, 1e-2)}")
    table["space"] = {name: _parameter(name, value) for name, value in space.items()}
    if function is not None:
        table["workload"] = _of_function(function, file.with_suffix(".pkl"), space, table)
        table.setdefault("objective", {"metric": "loss"})
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = toml_text(table)
    except AssertionError as error:
        raise InputError(
            f"{error.args[0]!r} is nothing that a study holds: numbers, texts, lists and mappings"
        ) from error
    write_text(file, "# Written by lora_tune.Sweep from Python's values.\n" + text)
    return file


def _parameter(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        if len(value) != 2 or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in value):
            raise InputError(f"space.{name} = {value!r}: a tuple is (low, high), two numbers; write a list of choices")
        low, high = value
        if isinstance(low, int) and isinstance(high, int):
            return {"type": "int", "low": low, "high": high}
        return {"type": "float", "low": float(low), "high": float(high), "log": low > 0 and high / low >= 10}
    if isinstance(value, list):
        return {"type": "categorical", "choices": value}
    return dict(value) if isinstance(value, Mapping) else value


def _of_function(
    function: Callable[..., Any], file: Path, space: Mapping[str, Any], table: Mapping[str, Any]
) -> dict[str, Any]:
    """``[workload]`` that runs a function, pickled into ``file``. Raises InputError for one that cannot be run."""
    if "workload" in table:
        raise InputError("a function is the workload; give one of the two")
    parameters = inspect.signature(function).parameters.values()
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if absent := [n for n, p in named.items() if p.default is p.empty and n not in (*space, *_OWN)]:
        raise InputError(f"{function.__name__}() needs {absent[0]}, which space does not hold; add it, or a default")
    if not everything and (unread := [n for n in space if n not in named]):
        raise InputError(f"{function.__name__}() does not take {unread[0]}, which space holds; add it to either")
    words = [n for n in (*space, *_OWN) if n in named or (everything and n in space)]
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]

        file.write_bytes(cloudpickle.dumps(function))
    except Exception as error:
        problem = (
            f"{function.__name__}() cannot be handed to another process: {error}; keep open files, locks and models"
        )
        raise InputError(f"{problem} out of it, and make them within") from error
    argv = [
        sys.executable,
        "-m",
        "lora_tune.logs.function_trial",
        str(file.resolve()),
        *(f"{n}={{{n}}}" for n in words),
    ]
    return {"kind": "command", "argv": argv, "log": {"kind": "jsonl"}}
