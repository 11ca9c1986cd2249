"""Commands as a user pastes them: the same study, output folder and database as the command that prints them."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import click
from click.core import ParameterSource

from lora_tune import store as stores
from lora_tune.base.paths import near

_OPTIONS = (("study_name", "--study"), ("output", "--output"), ("storage", "--storage"))
_OF_A_STUDY = ("logs",)
"""Commands that look at a study and at no sweep."""

_HINT = re.compile(r"python -m lora_tune\.(\w+) --study (\S+?)(?=[;,.)]?(?:\s|$))")


_NAMED = re.compile(r"(?<![/\w.-])lora-tune (init|sweep|status|export|recipes)\b(?! --study)")
"""A command without a study, as messages name it."""


def python(near: Callable[[Path], str] = near) -> str:
    """How to call this interpreter: ``python`` where that is it, else its path, as in a venv that is not active.

    near: how a path is written.
    """
    executable = shutil.which("python")
    same = executable is not None and Path(executable).absolute() == Path(sys.executable).absolute()
    return "python" if same else shlex.quote(near(Path(sys.executable)))


def called(command: str) -> str:
    """How a command of ours is called, as the one that runs now was: ``lora-tune status`` or ``python -m ...``."""
    program = Path(sys.argv[0])
    if program.name != "lora-tune":
        return f"{python()} -m lora_tune.{command}"
    at_hand = shutil.which(program.name)
    same = at_hand is not None and Path(at_hand).absolute() == program.absolute()
    return f"{program.name if same else shlex.quote(near(program))} {command}"


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
    options = {} if context is None else context.params
    argv: list[str] = []
    for name, option in _OPTIONS if command not in _OF_A_STUDY else _OPTIONS[:1]:
        value = options.get(name) or (study if name == "study_name" else None)
        if value is not None and not (name == "storage" and stores.has_password(str(value))):
            argv += [option, str(value)]
    return " ".join([called(command), *map(shlex.quote, (*argv, *more))])


def typed(*names: str) -> list[str]:
    """The options of these names that were given to the command that runs now, as they are typed."""
    context = click.get_current_context(silent=True)
    arguments: list[str] = []
    for option in [] if context is None else context.command.params:
        name = option.name or ""
        if context is not None and name in names and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            arguments += [option.opts[-1], str(context.params[name])]
    return arguments


def from_anywhere(command: str, *more: str, study: str, folder: Path, storage: str | None = None) -> str:
    """The line that runs ``command`` on a sweep whatever the present folder is, for pages that are read later.

    The records know the study, so its name is enough for every command that reviews or steers.

    Parameters
    ----------
    command : str
        Such as "export".
    *more : str
        Further words.
    study : str
        The study's name.
    folder : Path
        The sweep's folder.
    storage : str, optional
        The database's URL; where none is given, that of the command that runs now.
    """
    context = click.get_current_context(silent=True)
    url = storage or ({} if context is None else context.params).get("storage")
    place = ["--storage", str(url)] if url and not stores.has_password(str(url)) else []
    argv = [f"lora_tune.{command}", "--study", study, "--output", str(folder.absolute()), *place, *more]
    return f"{python(near=str)} -m {shlex.join(argv)}"


def as_typed(text: str) -> str:
    """A message with the commands in it as :func:`again` gives them: whoever wrote it knew the study's name alone."""
    text = _HINT.sub(lambda hint: again(hint[1], hint[2]), text)
    return _NAMED.sub(lambda named: called(named[1]), text)
