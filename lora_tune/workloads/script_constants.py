"""Settings that are constants in a script, and that a command line can override by name.

The style of nanoGPT and llama2.c: ``learning_rate = 6e-4`` at the top level, and a ``configurator.py`` that executes
files and the ``--name=value`` words of the command on top. Pure functions of text.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from lora_tune.workloads.proposed_space import Option

_OVERWRITES = "configurator"


def constants(text: str, overriding: Sequence[str] = ()) -> list[Option]:
    """The script's constants as options ``--name=value``; empty if no configurator would override them.

    text: the script. overriding: texts of the Python files in its command, which override some of them.
    """
    values = dict(_assigned(text, until=_OVERWRITES))
    if not values:
        return []
    for other in overriding:
        values |= {name: value for name, value in _assigned(other) if name in values}
    return [Option(flag=f"--{name}", value=str(value)) for name, value in values.items()]


def _assigned(text: str, until: str = "") -> list[tuple[str, str | int | float]]:
    """Top-level assignments before a line that contains ``until``; empty if none does."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    literals: list[tuple[str, str | int | float]] = []
    for statement in tree.body:
        if until and not isinstance(statement, ast.Assign) and until in (ast.get_source_segment(text, statement) or ""):
            return literals
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        try:
            value = ast.literal_eval(statement.value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue  # a computed value
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            literals.append((statement.targets[0].id, value))
    return [] if until else literals
