"""``config_*.sh``: a trial's variables as bash exports, the form that MLPerf users source."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_tune.workloads.base import Value
from lora_tune.workloads.sandbox import as_typed

_INTO_ITS_OWN = 'CDPATH= pushd "$(dirname "${BASH_SOURCE[0]}")"'


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


def source_lines(files: Sequence[Path], *, beside: bool = False) -> list[str]:
    """Bash lines that source ``files`` in order from the last one's own folder, where its user stands.

    What a config names may count from there, or from its own name, often without quotes. beside: for a file that lies
    in that folder, wherever that is; else the lines work in any file.
    """
    if not files:
        return []
    folder = files[-1].parent
    into = _INTO_ITS_OWN if beside else f"pushd {shlex.quote(str(folder))}"
    typed = (as_typed(file, folder) for file in files)
    named = [os.path.relpath(name, folder) if beside and Path(name).is_absolute() else name for name in typed]
    return [f"{into} >/dev/null", *(f"source {shlex.quote(name)}" for name in named), "popd >/dev/null"]


def needs(name: str) -> str:
    """A bash line that refuses to go on where the secret ``name`` is not in the environment."""
    return f': "${{{name}:?is a secret of the study and stands in no file; export it first}}"'


def printable(text: str) -> str:
    """Text without control characters: what a terminal would act on becomes a space."""
    return "".join(character if character.isprintable() else " " for character in text)
