"""``python -m lora_tune.init``: a study file for a script of one's own, from its output and its help text."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from lora_tune.base.errors import InputError
from lora_tune.base.files import MetricFiles, format_of
from lora_tune.base.host import gpus_of_machine, send_signal, visible_in
from lora_tune.base.paths import near
from lora_tune.cli.new_study import ScriptFacts, study_text
from lora_tune.cli.options import called, guarded
from lora_tune.config.study import parse_study
from lora_tune.logs.guess import LogGuess, guess
from lora_tune.logs.log_files import LogFile, log_files
from lora_tune.workloads import load as load_workload
from lora_tune.workloads import parser_hook
from lora_tune.workloads.command_words import script_of
from lora_tune.workloads.config_copy import is_config, scalars
from lora_tune.workloads.script_constants import constants
from lora_tune.workloads.script_options import Option, from_command, from_help, from_parser, together

HELP_SECONDS = 60.0
HOOK = Path(parser_hook.__file__).parent
"""First on the script's PYTHONPATH: what Python imports from it as it starts asks the script's own parser."""
HELP_BYTES = 1 << 20
LOG_BYTES = 1 << 26
"""Of each log: enough to know its form."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="what the script printed in an earlier run, or metric files that it wrote (events, .csv, .jsonl)",
)
@click.option(
    "--output", default="mine.toml", show_default=True, type=click.Path(path_type=Path), help="the study file"
)
@click.option("--no-help", is_flag=True, help="do not run the command with --help to learn its options")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@guarded
def main(logs: tuple[Path, ...], output: Path, no_help: bool, command: tuple[str, ...]) -> None:
    """Write a study for the COMMAND that runs your script today, such as: python train.py --lr 3e-4.

    The log's format and pattern are guessed from --log. The parameters are those of the script's own parser, asked
    in a run of `COMMAND --help` (at most 60 s). Every guess is commented in the file. Nothing is trained.
    Exit codes: 0 written; 2 your input; 3 the machine.
    """
    if not logs and not command:
        raise InputError("nothing to look at; give the command that runs your script, --log FILE, or both")
    if output.suffix != ".toml":
        raise InputError(f"--output {output}: a study file ends in .toml")
    if output.exists():
        raise InputError(f"{output} exists and is not replaced; name another file with --output")
    if command and (script := missing_script(command)):
        raise InputError(f"{script}: there is no such file here; give the command as you type it")
    log, source, writes_files = read_logs(logs)
    options, config = script_options(command, ask=not no_help) if command else ([], "")
    facts = ScriptFacts(command=command, options=options, log=log, source=source, writes_files=writes_files,
                  config=config, gpus=len(gpus_of_machine(visible_in(os.environ))))  # fmt: skip
    text = study_text(facts)
    load_workload(parse_study(text, output), output)  # what it writes loads
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    click.echo(text)
    _say(output, logs, facts)


def _say(output: Path, logs: tuple[Path, ...], facts: ScriptFacts) -> None:
    """What to do next."""
    edits = sum("EDIT" in line for line in output.read_text(encoding="utf-8").splitlines())
    file = shlex.quote(str(near(output)))
    todo = f"; {edits} line{'s' if edits > 1 else ''} marked EDIT" if edits else ""
    click.echo(f"# written: {near(output)}{todo}", err=True)
    if logs and not facts.writes_files:
        click.echo(f"# its log:  {called('logs')} --study {file} {shlex.join(map(str, logs))}", err=True)
    sweep = f"{called('sweep')} --study {file}"
    click.echo(f"# look:     {sweep} --dry-run\n# then:     {sweep}", err=True)


def missing_script(command: Sequence[str]) -> str:
    """The script that the command names, where it is not there; "" for others."""
    script = script_of(command[0], command[1:])
    return script if Path(script).suffix in (".py", ".sh") and not Path(script).expanduser().is_file() else ""


def read_logs(paths: tuple[Path, ...]) -> tuple[LogGuess | None, str, bool]:
    """How the logs read, their name, and whether they are files of metrics. Raises InputError for one not there."""
    if not paths:
        return None, "", False
    for path in paths:
        if not path.exists():
            raise InputError(f"--log {path}: there is no such file or folder")
    source = ", ".join(path.name for path in paths)
    rows = list(MetricFiles([p for p in paths if p.is_dir() or format_of(p) is not None]).rows())
    if rows:
        return guess("\n".join(json.dumps(row) for row in rows).encode()), source, True
    return guess(b"\n".join(beginning(log) for log in log_files(paths))), source, False


def beginning(log: LogFile) -> bytes:
    """A log's first ``LOG_BYTES``, of which no more than that is read."""
    held = bytearray()
    for piece in log.pieces():
        held += piece
        if len(held) >= LOG_BYTES:
            break
    return bytes(held[:LOG_BYTES])


def script_options(command: tuple[str, ...], *, ask: bool) -> tuple[list[Option], str]:
    """The options of the script that a command runs, with what each is today, and the config file that it reads.

    ask: whether the command may be run, so that its parser, or else its help text, says what it knows. A key of the
    config file counts where no option has its meaning.
    """
    typed = from_command(command)
    listed, parsed = (from_help(""), False)
    if ask:
        text, records = ask_parser(command)
        known = from_parser(records)
        listed, parsed = (from_help(text), False) if known is None else (known, True)
    if not listed:
        listed, parsed = script_constants(command), False
    config = next((word for word in map(_named_file, command) if is_config(word) and Path(word).is_file()), "")
    return [*together(typed, listed, parsed=parsed), *(_keys(config) if config else [])], config


def _named_file(word: str) -> str:
    return word.rpartition("=")[2] if word.startswith("-") else word


def _keys(config: str) -> list[Option]:
    """The values of a config file as options; none where it cannot be read."""
    try:
        values = scalars(Path(config).read_text(encoding="utf-8"), config)
    except (OSError, ValueError) as error:
        click.echo(f"# {config}: not read as a config file: {error}", err=True)
        return []
    return [Option(flag=key, value=scalar.value, in_file=True) for key, scalar in values.items()]


def script_constants(command: Sequence[str]) -> list[Option]:
    """The constants that the command's Python files set and its ``--name=value`` words overwrite."""
    files = [Path(word) for word in command if word.endswith(".py") and Path(word).is_file()]
    try:
        texts = [file.read_text(encoding="utf-8") for file in files]
    except (OSError, UnicodeDecodeError):
        return []
    return constants(texts[0], texts[1:]) if texts else []


def ask_parser(command: tuple[str, ...]) -> tuple[str, str]:
    """What the command prints for ``--help``, and what its own parser wrote down, within 60 s and 1 MB each.

    Nothing is trained: a Python program ends in the moment in which it parses its command line, or makes an optimizer.
    It sees no GPU. One that reads a file in place of options is asked without ``--help``. What does neither is ended
    with all that it started. Raises InputError for a command that cannot be run.
    """
    program = sys.executable if command[0] in ("python", "python3") else command[0]
    argv = [program, *command[1:], *([] if is_config(command[-1]) and not _is_value(command) else ["--help"])]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        records = Path(folder) / "parsers.jsonl"
        environment = {**os.environ, **_SEES_NO_GPU, "LORA_TUNE_PARSER_FILE": str(records)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
        try:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
                                     start_new_session=True, env=environment)  # fmt: skip
        except OSError as error:
            problem = f"{command[0]}: cannot be run ({error.strerror}); give the command as you type it"
            raise InputError(problem) from error
        try:
            child.wait(HELP_SECONDS)
        except subprocess.TimeoutExpired:
            click.echo(f"# {shlex.join(command)} --help did not end within {HELP_SECONDS:.0f} s", err=True)
        finally:
            if child.poll() is None:
                send_signal(child.pid, signal.SIGKILL, group=True)
                child.wait()
        printed.seek(0)
        written = records.read_text(encoding="utf-8") if records.exists() else ""
        return printed.read(HELP_BYTES).decode("utf-8", "replace"), written


def _is_value(command: Sequence[str]) -> bool:
    """Whether the last word is the value of an option before it."""
    return len(command) > 1 and (command[-1].startswith("-") or command[-2].startswith("-"))


_SEES_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
