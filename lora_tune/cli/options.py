"""What all commands share: their options, and errors as one line with an exit code."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from lora_tune import store as stores
from lora_tune.base.errors import EXIT_INPUT, EXIT_INTERRUPTED, EXIT_SETUP, InputError, LoraTuneError
from lora_tune.base.kinds import fault
from lora_tune.base.paths import SweepPaths
from lora_tune.base.terminal import print_anything
from lora_tune.cli.again import as_typed, called
from lora_tune.config.kept_study import with_secrets_of
from lora_tune.config.study import Study, find_study, known_studies, load_study, parse_study, study_place
from lora_tune.store.records import StudyRecords

Command = TypeVar("Command", bound=Callable[..., Any])


def _study_files() -> list[str]:
    """The study files of this folder."""
    return sorted(str(path) for path in Path().glob("*.toml") if path.name != "pyproject.toml")


def _complete_study(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For a shell's completion: studies by name, and study files of this folder."""
    return [name for name in (*known_studies(), *_study_files()) if name.startswith(incomplete)]


_STUDY_WORD = f"{__name__}.study"
"""Where a command's context keeps the study that was given without an option."""


def _keep_word(context: click.Context, parameter: click.Parameter, word: str | None) -> None:
    context.meta[_STUDY_WORD] = word


def _chosen_study(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """The study, by its option or as the first word; what to type where there is neither."""
    word = context.meta.get(_STUDY_WORD)
    if context.resilient_parsing or (name is None) != (word is None):
        return name or word
    if name is not None:
        raise click.UsageError(f"the study is given twice: {name} by --study, and {word}; give one of them")
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
    is_eager=True,  # before the option, which knows what to say of both
    expose_value=False,
    callback=_keep_word,
    shell_complete=_complete_study,
)


def study_option(command: Command) -> Command:
    """Take the study as ``--study NAME`` or as the first word; where words are logs: ``named_study_option`` alone."""
    return named_study_option(_study_argument(command))


output_option = click.option("--output", type=click.Path(path_type=Path), help="sweep folder [sweeps/STUDY]")
STORAGE_VARIABLE = "LORA_TUNE_STORAGE"


def _storage(context: click.Context, parameter: click.Parameter, url: str | None) -> str | None:
    """The URL; without its password where every user of the machine could read that, and hidden from trials."""
    os.environ.pop(STORAGE_VARIABLE, None)  # what is started from here on has no business with the database
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
signing_key_option = click.option(
    "--signing-key",
    envvar="LORA_TUNE_SIGNING_KEY",
    type=click.Path(path_type=Path),
    help="file with the key that signs studies for a service; a service with it drives signed ones only",
)
metrics_option = click.option("--metrics", metavar="[HOST:]PORT", help="serve Prometheus metrics, on 127.0.0.1")


def guarded(command: Command) -> Command:
    """Print a LoraTuneError as one line on standard error and exit with its code; print any text in any locale.

    An error in the code of a kind that is not ours is the user's input, told by its file and line.
    """

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        print_anything()
        try:
            return command(*arguments, **options)
        except LoraTuneError as error:
            click.echo(f"lora_tune: {as_typed(' '.join(str(error).split()))}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:  # where a command does nothing better about it itself
            click.echo("interrupted", err=True)
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # Whoever read our output has seen enough (``| head``). Nothing may be flushed into the pipe at exit.
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


def sweep_paths(name: str, output: Path | None = None) -> SweepPaths:
    """The sweep's folder: ``--output``, or ``sweeps/NAME`` below the present folder."""
    return SweepPaths((output or Path("sweeps") / name).resolve())


def load_sweep(name: str, paths: SweepPaths, storage: str | None, known: StudyRecords | None = None) -> StudyRecords:
    """The records of a sweep that exists, for commands that only read. Raises InputError where there is none.

    known: the same sweep as loaded before, see :meth:`Store.load`.
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
    """The sweep's database for those who only look."""
    return stores.Store(storage or stores.sqlite_url(paths.database), read_only=True)


def recorded_study(sweep: StudyRecords, file: Path) -> Study:
    """The study as the sweep knows it; ``file`` names it in errors and tells where site profiles lie.

    Works where the study file itself is not, such as on another machine that knows the database's URL.
    """
    from lora_tune.controller.base_watch import with_base  # 0.1 s that --help need not wait

    study = with_secrets_of(parse_study(sweep.study_toml, file), file)
    named = study if study.name == sweep.name else study.model_copy(update={"name": sweep.name})
    return with_base(named, sweep)


@dataclass(frozen=True, slots=True)
class Review:
    """A sweep and its study, loaded to be looked at."""

    study: Study
    sweep: StudyRecords
    paths: SweepPaths
    file: Path


def load_review(study_name: str, output: Path | None, storage: str | None) -> Review:
    """What a reviewing command needs, from the database alone; the study file may be elsewhere or gone.

    Raises InputError where there is no such sweep, StoreError where the database does not answer.
    """
    file = study_place(study_name)
    name = load_study(file).name if file.is_file() else file.stem
    paths = sweep_paths(name, output)
    if storage is None and not paths.database.exists() and not file.is_file():
        find_study(study_name)  # says which studies there are
    sweep = load_sweep(name, paths, storage)
    return Review(recorded_study(sweep, file), sweep, paths, file)


def storage_name(paths: SweepPaths, storage: str | None) -> str:
    """Where the records lie, for people; without a password."""
    return stores.safe_url(storage) if storage else str(paths.database)
