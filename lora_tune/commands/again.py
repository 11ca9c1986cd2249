"""Commands as a user pastes them: the same study, output folder and database as the command that prints them."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import click

from lora_tune.base.paths import near
from lora_tune.store import has_password

_OPTIONS = (("study_name", "--study"), ("output", "--output"), ("storage", "--storage"))
_HINT = re.compile(r"python -m lora_tune\.(\w+) --study (\S+?)(?=[;,.)]?(?:\s|$))")


def python() -> str:
    """How to call this interpreter: ``python`` where that is it, else its path, as in a venv that is not active."""
    executable = shutil.which("python")
    same = executable is not None and Path(executable).absolute() == Path(sys.executable).absolute()
    return "python" if same else shlex.quote(near(Path(sys.executable)))


def again(command: str, study: str, *more: str) -> str:
    """The line that runs ``command`` on the sweep of the command that runs now.

    A database URL with a password is left out: it came by a variable, which is still set where this is pasted.

    Parameters
    ----------
    command : str
        Such as "status".
    study : str
        The study's name, where the command that runs was given none.
    *more : str
        Further words.
    """
    context = click.get_current_context(silent=True)
    given = {} if context is None else context.params
    argv = [f"lora_tune.{command}"]
    for name, option in _OPTIONS:
        value = given.get(name) or (study if name == "study_name" else None)
        if value is not None and not (name == "storage" and has_password(str(value))):
            argv += [option, str(value)]
    return f"{python()} -m {shlex.join([*argv, *more])}"


def as_typed(text: str) -> str:
    """A message with the commands in it as :func:`again` gives them: whoever wrote it knew the study's name alone."""
    return _HINT.sub(lambda hint: again(hint[1], hint[2]), text)
