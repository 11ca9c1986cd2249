"""The words of a command that no shell runs: which of them is the script, and what only a shell would understand."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_INTERPRETERS = ("python", "python3", "bash", "sh")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_OPERATORS = ("|", "||", "&&", ";", "&", ">", ">>", "<", "2>&1", "2>")


def script_of(program: str, arguments: Sequence[str]) -> str:
    """The script that an interpreter is given to run; "" for another program, for ``-c TEXT`` and for ``-m MODULE``."""
    if Path(program).stem not in _INTERPRETERS:
        return ""
    script = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    inline = any(re.fullmatch(r"-\w*[cm]", argument) for argument in arguments[:script])
    return "" if inline or script == len(arguments) else arguments[script]


def _in_a_shell(argv: Sequence[str]) -> bool:
    return any(Path(word).name in _SHELLS for word in argv)


def shell_variable(argv: Sequence[str], names: Collection[str]) -> str:
    """The first of the parameters ``names`` that stands as ``$NAME``, which no shell fills in; "" for none.

    A word of several words is a text for what the command starts: another shell, a batch system, a language.
    """
    if _in_a_shell(argv):
        return ""
    single = [word for word in argv if len(word.split()) == 1]
    return next((name for word in single for name in _VARIABLE.findall(word) if name in names), "")


def shell_words(argv: Sequence[str]) -> list[str]:
    """A doubt about the first word that only a shell would understand, where there is none."""
    words = [] if _in_a_shell(argv) else [word for word in argv if word in _OPERATORS]
    remedy = 'no shell runs this command, so that it goes to your script; write argv = ["bash", "-c", "..."]'
    return [f"workload.argv: {word!r}: {remedy}" for word in words[:1]]


def one_word(program: str, folder: Path) -> str:
    """What is wrong with a whole command line written as one word; "" where it is a program's name."""
    words = program.split()
    if len(words) < 2 or (folder / program).exists():
        return ""
    return f"workload.argv: {program!r} is one word; write {json.dumps(words)}"
