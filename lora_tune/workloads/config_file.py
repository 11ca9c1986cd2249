"""``config_*.sh``: a trial's variables as bash exports, the form that MLPerf users source."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from lora_tune.workloads.base import Value


def value_text(value: Value) -> str:
    """A value as the text that a trial reads: ``True`` and ``False`` as in the public configs, floats exactly."""
    return repr(value) if isinstance(value, float) else str(value)


def render(
    values: Mapping[str, Value], *, comments: Sequence[str] = (), before: Sequence[str] = (), after: Sequence[str] = ()
) -> str:
    """A bash file that exports ``values``, in order.

    comments: provenance, one line each (newlines within one are folded). before, after: bash lines around the
    exports, such as ``source config_common.sh``; the caller has quoted them. Sources cleanly under ``set -eu``.
    """
    lines = ["#!/usr/bin/env bash"]
    lines += ["# " + " ".join(printable(comment).split()) for comment in comments]
    lines += before
    lines += [f"export {name}={shlex.quote(value_text(value))}" for name, value in values.items()]
    lines += after
    return "\n".join(lines) + "\n"


def needs(name: str) -> str:
    """A bash line that refuses to go on where the secret ``name`` is not in the environment."""
    return f': "${{{name}:?is a secret of the study and stands in no file; export it first}}"'


def printable(text: str) -> str:
    """Text without control characters: what a terminal would act on becomes a space."""
    return "".join(character if character.isprintable() else " " for character in text)
