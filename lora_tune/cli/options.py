"""Options, error handling and loading shared by all commands.

Every ``--help`` imports this module, so studies, records and the controller are imported where they are used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from lora_tune import store as stores
from lora_tune.base.errors import (
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_SETUP,
    InputError,
    LoraTuneError,
    StoreError,
    StudyError,
)
from lora_tune.base.paths import SweepPaths, display_path
from lora_tune.base.registry import fault
from lora_tune.base.text import escape_unprintable

if TYPE_CHECKING:
    from lora_tune.config.study import Study
    from lora_tune.controller.runtime import DrivePlan
    from lora_tune.store.port import Remark, Request
    from lora_tune.store.records import StudyRecords

# Command lines to paste, with the study, output folder and database of the current command.


_OPTIONS = (("study_name", "--study"), ("output", "--output"), ("storage", "--storage"))
_OF_A_STUDY = ("logs",)
"""Commands that take a study but no sweep."""

_HINT = re.compile(r"python -m lora_tune\.(\w+) --study (\S+?)(?=[;,.)]?(?:\s|$))")


_NAMED = re.compile(r"(?<![/\w.-])lora-tune (init|sweep|status|export|recipes)\b(?! --study)")
"""Matches a command without a study, as messages name it."""


def python(path_text: Callable[[Path], str] = display_path) -> str:
    """The command of this interpreter: ``python`` if PATH finds it by that name, else its path.

    path_text: formats the path.
    """
    executable = shutil.which("python")
    same = executable is not None and Path(executable).absolute() == Path(sys.executable).absolute()
    return "python" if same else shlex.quote(path_text(Path(sys.executable)))


def called(command: str) -> str:
    """``command`` in the style of the current invocation: ``lora-tune status`` or ``python -m lora_tune.status``."""
    program = Path(sys.argv[0])
    if program.name != "lora-tune":
        return f"{python()} -m lora_tune.{command}"
    at_hand = shutil.which(program.name)
    same = at_hand is not None and Path(at_hand).absolute() == program.absolute()
    return f"{program.name if same else shlex.quote(display_path(program))} {command}"


def command_line(command: str, study: str, *more: str) -> str:
    """The command line that runs ``command`` on the current command's sweep, with ``more`` arguments.

    study: the study's name, used if the current command has no --study. A database URL with a password is omitted: it
    came from an environment variable, which is still set.
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
    """The named options that were set on the command line, as arguments."""
    context = click.get_current_context(silent=True)
    arguments: list[str] = []
    for option in [] if context is None else context.command.params:
        name = option.name or ""
        if context is not None and name in names and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            arguments += [option.opts[-1], str(context.params[name])]
    return arguments


def absolute_command_line(command: str, *more: str, study: str, folder: Path, storage: str | None = None) -> str:
    """Like command_line(), but independent of the working directory, for pages that are read later.

    study: its name, which is enough, because the records contain the study. folder: the sweep's. storage: the database
    URL; default: that of the current command.
    """
    context = click.get_current_context(silent=True)
    url = storage or ({} if context is None else context.params).get("storage")
    place = ["--storage", str(url)] if url and not stores.has_password(str(url)) else []
    argv = [f"lora_tune.{command}", "--study", study, "--output", str(folder.absolute()), *place, *more]
    return f"{python(path_text=str)} -m {shlex.join(argv)}"


def as_typed(text: str) -> str:
    """A message with its commands completed by :func:`command_line`; their authors know only the study."""
    text = _HINT.sub(lambda hint: command_line(hint[1], hint[2]), text)
    return _NAMED.sub(lambda named: called(named[1]), text)


Command = TypeVar("Command", bound=Callable[..., Any])


def _study_files() -> list[str]:
    """The study files of the working directory."""
    return sorted(str(path) for path in Path().glob("*.toml") if path.name != "pyproject.toml")


def _complete_study(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion: shipped studies and study files of the working directory."""
    from lora_tune.config.study import known_studies

    return [name for name in (*known_studies(), *_study_files()) if name.startswith(incomplete)]


_STUDY_ARGUMENT = f"{__name__}.study"
"""Key in the click context of the study that is passed as an argument."""


def _keep_argument(context: click.Context, parameter: click.Parameter, study_argument: str | None) -> None:
    context.meta[_STUDY_ARGUMENT] = study_argument


def _chosen_study(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """The study from ``--study`` or the first argument. Raises UsageError for both or neither."""
    study_argument = context.meta.get(_STUDY_ARGUMENT)
    if context.resilient_parsing or (name is None) != (study_argument is None):
        return name or study_argument
    if name is not None:
        raise click.UsageError(f"the study is given twice: {name} by --study, and {study_argument}; give one of them")
    files = _study_files()
    logs = [p.make_metavar(context) for p in context.command.params if isinstance(p, click.Argument) and p.required]
    line = " ".join([context.command_path, "--study", files[0] if files else "NAME", *logs])
    more = f"here: {', '.join(files)}" if files else f"tiny is shipped; {called('init')} writes one for your script"
    raise click.UsageError(f"Missing option '--study': {line} ({more})")


named_study_option = click.option(
    "--study",
    "study_name",
    callback=_chosen_study,
    shell_complete=_complete_study,
    help="NAME of studies/NAME.toml, a shipped study, or a .toml file",
)
_study_argument = click.argument(
    "word",
    metavar="[STUDY]",
    required=False,
    is_eager=True,  # parsed before --study, whose callback reads both
    expose_value=False,
    callback=_keep_argument,
    shell_complete=_complete_study,
)


def study_option(command: Command) -> Command:
    """Take the study as ``--study NAME`` or first argument; not for commands whose arguments are logs."""
    return named_study_option(_study_argument(command))


output_option = click.option("--output", type=click.Path(path_type=Path), help="sweep folder [sweeps/STUDY]")
STORAGE_VARIABLE = "LORA_TUNE_STORAGE"


def _storage(context: click.Context, parameter: click.Parameter, url: str | None) -> str | None:
    """The URL; refused with a password on the command line, which others can read. Hides the variable from trials."""
    os.environ.pop(STORAGE_VARIABLE, None)  # not inherited by child processes
    source = context.get_parameter_source(parameter.name or "")
    if url and source is click.core.ParameterSource.COMMANDLINE and stores.has_password(url):
        raise click.UsageError(
            "--storage has a password in it, and every user of this machine can read command lines; put the URL into "
            f"the variable {STORAGE_VARIABLE}, or the password into ~/.pgpass"
        )
    return url


storage_option = click.option(
    "--storage",
    envvar=STORAGE_VARIABLE,
    callback=_storage,
    help=f"database URL, or the variable {STORAGE_VARIABLE} [SQLite in the sweep folder]",
)


def sweep_options(command: Command) -> Command:
    """Take a sweep: --study, --storage and --output."""
    return study_option(storage_option(output_option(command)))


metrics_option = click.option("--metrics", metavar="[HOST:]PORT", help="serve Prometheus metrics, on 127.0.0.1")


def replaced_option(
    name: str, instead: str, *, is_flag: bool = False, variable: str = ""
) -> Callable[[Command], Command]:
    """A hidden option of a former release; using it is an error that says what to do ``instead``.

    variable: environment variable that used to set the option; if still set, the command warns.
    """

    def refuse(_context: click.Context, _parameter: click.Parameter, value: object) -> None:
        if os.environ.get(variable):
            click.echo(f"warning: {variable} is set and has no effect any more: {instead}; unset it", err=True)
        if value:
            raise click.UsageError(f"{name} has left: {instead}")

    return click.option(name, is_flag=is_flag, hidden=True, expose_value=False, callback=refuse)


def guarded(command: Command) -> Command:
    """Print a LoraTuneError as one line on stderr and exit with its code; escape text that the locale cannot print.

    An exception raised in third-party plug-in code is an input error, reported with its file and line.
    """

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        escape_unprintable()
        try:
            return command(*arguments, **options)
        except LoraTuneError as error:
            click.echo(f"lora_tune: {as_typed(' '.join(str(error).split()))}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:  # unless the command handles it itself
            click.echo("interrupted", err=True)
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output has closed the pipe (``| head``). Nothing may be flushed into it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        except Exception as error:
            if outside := fault(error):
                click.echo(f"lora_tune: {' '.join(outside.split())}; fix it and rerun the same command", err=True)
                sys.exit(EXIT_INPUT)
            if not isinstance(error, OSError):
                raise
            where = f"{error.filename}: " if error.filename else ""
            click.echo(f"lora_tune: {where}{error.strerror or error}; check the disk and the permissions", err=True)
            sys.exit(EXIT_SETUP)

    return run  # type: ignore[return-value]  # same signature, by functools.wraps


def runs(module: str, function: str = "run") -> Callable[[Command], Command]:
    """Implement a command by ``function`` of lora_tune.cli.``module``, imported on use; adds guarded()."""

    def of(command: Command) -> Command:
        @functools.wraps(command)
        def run(**options: Any) -> None:
            getattr(importlib.import_module(f"lora_tune.cli.{module}"), function)(**options)

        return guarded(run)  # type: ignore[return-value]  # same signature, by functools.wraps

    return of


def sweep_paths(name: str, output: Path | None = None) -> SweepPaths:
    """The sweep's folder: ``--output``, or ``sweeps/NAME`` in the working directory."""
    return SweepPaths((output or Path("sweeps") / name).resolve())


def load_sweep(name: str, paths: SweepPaths, storage: str | None, known: StudyRecords | None = None) -> StudyRecords:
    """The records of an existing sweep, read only. Raises InputError if there is none.

    known: the same sweep from an earlier load, see :meth:`Store.load`.
    """
    missing = InputError(
        f"there is no sweep of {name} at {storage_name(paths, storage)}; start one with: "
        f"python -m lora_tune.sweep --study {name}"
    )
    if storage is None and not paths.database.exists():
        raise missing
    with contextlib.closing(watch_store(paths, storage)) as store:
        sweep = store.load(name, known)
    if sweep is None:
        raise missing
    if paths.priors.exists() or sweep.priors:
        from lora_tune.search import priors

        runs = priors.read(paths.priors)
        sweep = sweep if sweep.priors == runs else replace(sweep, priors=runs)
    return sweep


def watch_store(paths: SweepPaths, storage: str | None) -> stores.Store:
    """The sweep's database, opened read only."""
    return stores.Store(storage or stores.sqlite_url(paths.database), read_only=True)


def recorded_study(sweep: StudyRecords, file: Path) -> Study:
    """The study as recorded in the database; ``file`` names it in errors and locates site profiles.

    Works without the study file, for example on another machine that has the database URL.
    """
    from lora_tune.config.study import parse_study, with_secrets_of
    from lora_tune.controller.changed_study import with_base

    study = with_secrets_of(parse_study(sweep.study_toml, file), file)
    named = study if study.name == sweep.name else study.model_copy(update={"name": sweep.name})
    return with_base(named, sweep)


@dataclass(frozen=True, slots=True)
class Review:
    """A loaded sweep with its study."""

    study: Study
    sweep: StudyRecords
    paths: SweepPaths
    file: Path


def load_review(study_name: str, output: Path | None, storage: str | None) -> Review:
    """Load a sweep from the database alone; the study file may be missing.

    Raises InputError if there is no such sweep, StoreError if the database does not answer.
    """
    from lora_tune.config.study import find_study, load_study, study_place

    file = study_place(study_name)
    name = load_study(file).name if file.is_file() else file.stem
    paths = sweep_paths(name, output)
    if storage is None and not paths.database.exists() and not file.is_file():
        find_study(study_name)  # raises InputError with the known studies
    sweep = load_sweep(name, paths, storage)
    return Review(recorded_study(sweep, file), sweep, paths, file)


def storage_name(paths: SweepPaths, storage: str | None) -> str:
    """Where the records are, without a password, for messages."""
    return stores.safe_url(storage) if storage else str(paths.database)


# Requests and remarks of users, for the report.


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Users' requests to a sweep and their remarks on it and its trials."""

    requests: Sequence[Request] = ()
    remarks: Sequence[Remark] = ()


NO_FEEDBACK = Feedback()


def feedback_of(store: stores.Store, name: str) -> Feedback:
    """The sweep's requests and remarks. Raises StoreError."""
    written = sorted(stores.Remarks(store, name).latest().values(), key=lambda remark: remark.trial)
    return Feedback(requests=stores.Requests(store, name).all(), remarks=[r for r in written if r.text])


def feedback_if_known(store: stores.Store, name: str) -> Feedback:
    """feedback_of(), but empty if the database does not answer, which the driver reports itself."""
    try:
        return feedback_of(store, name)
    except StoreError:
        return NO_FEEDBACK


# The study file combined with overrides from the command line or Python.


_MARK = re.compile(r"^\s*#.*\bEDIT:\s*(?P<what>.*\S)")


def unresolved_mark(text: str) -> str:
    """How to resolve the first ``EDIT`` comment that ``init`` left in a study's text; "" if there is none."""
    for number, line in enumerate(text.splitlines(), start=1):
        if mark := _MARK.match(line):
            return f"line {number} still says EDIT: {mark['what']}; decide it, then delete the word EDIT"
    return ""


def refuse_marks(file: Path) -> None:
    """Raise StudyError if an ``EDIT`` mark of ``init`` is left."""
    if mark := unresolved_mark(file.read_text(encoding="utf-8")):
        raise StudyError(file, "", mark)


def plan_of(
    file: Path,
    from_file: Study,
    options: Mapping[str, Mapping[str, Any]],
    output: Path | None = None,
) -> DrivePlan:
    """The study of ``file`` with ``options`` overriding its sections, ready to be driven. Raises InputError."""
    from lora_tune.config.study import text_to_keep
    from lora_tune.controller.runtime import DrivePlan
    from lora_tune.workloads import load as load_workload

    study = from_file.with_options(options)
    return DrivePlan(
        file=file,
        text=text_to_keep(file.read_text(encoding="utf-8"), from_file, file),
        study=study,
        from_file=from_file,
        options=options,
        paths=sweep_paths(study.name, output),
        workload=load_workload(study, file),
    )


def study_overrides(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The study overrides of the command line, by section; unset options are omitted."""
    laid = {
        "budget": {
            "trials": options["trials"],
            "parallel": options["parallel"],
            "node_hours": options["budget_node_hours"],
        },
        "site": {"launcher": options["launcher"]},
        "search": {"seed": options["seed"]},
    }
    return {
        part: known for part, values in laid.items() if (known := {k: v for k, v in values.items() if v is not None})
    }


def name_values(texts: Sequence[str], option: str, what: str = "VALUE") -> dict[str, str]:
    """Parse ``NAME=VALUE`` texts of a repeated option. Raises InputError for any other form."""
    split = [text.partition("=") for text in texts]
    for (name, equals, _), text in zip(split, texts, strict=True):
        if not equals or not name:
            raise InputError(f"{option} {text}: write NAME={what}")
    return {name: value for name, _, value in split}
