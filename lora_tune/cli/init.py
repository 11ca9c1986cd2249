"""``python -m lora_tune.init``: write a study file for the user's own script, from its output and its help text."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import click

from lora_tune.base.errors import InputError
from lora_tune.base.files import MetricFiles, format_of
from lora_tune.base.host import gpus_of_command, gpus_of_machine, send_signal, visible_in
from lora_tune.base.paths import display_path
from lora_tune.base.text import counted
from lora_tune.cli.options import called
from lora_tune.config.study import parse_study
from lora_tune.logs.guess import LogGuess, guess
from lora_tune.logs.lines import TELL_APART
from lora_tune.logs.log_files import LogFile, log_files
from lora_tune.workloads import load as load_workload
from lora_tune.workloads import parser_hook
from lora_tune.workloads.command import script_of
from lora_tune.workloads.config_file import is_config, scalars
from lora_tune.workloads.proposed_space import (
    SEED,
    Option,
    ProposedParameter,
    from_command,
    from_help,
    from_parser,
    merged_options,
    place_of,
    propose,
    without_value,
)
from lora_tune.workloads.reach import defaults_of, script_text
from lora_tune.workloads.script_constants import constants

# The text of the study file, with a comment that explains each guess. Pure functions.


RELAY = ("python", "-m", "lora_tune.logs.relay")
UNREAD = "EDIT: not known without a log; run the script once and give init its output (--log FILE)"
NOTHING = "EDIT: nothing in {source} looks like an eval; write the names of yours"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """What is known about a script.

    command: its current command line; empty if only a log is known. options: its options. log: the guessed log format;
    None without a log, or if the log contains nothing like a loss. source: the log's name, for comments. writes_files:
    whether the script writes its metrics to files instead of printing them. config: the config file that the command
    names; "" for none. gpus: GPUs of this machine that trials may use.
    """

    command: tuple[str, ...]
    options: Sequence[Option] = field(default=())
    log: LogGuess | None = None
    source: str = ""
    writes_files: bool = False
    config: str = ""
    gpus: int = 0


def study_text(facts: ScriptFacts) -> str:
    """A valid study file; what cannot be guessed is marked EDIT."""
    proposals = propose(facts.options, _steps(facts.log))
    argv, keys, variables = _argv_text(facts, proposals)
    parts = [
        f"# Written by lora-tune init{' from ' + facts.source if facts.source else ''}; every guess says why\n",
        f'[workload]\nkind = "command"\n{_argv(facts, argv)}\n{_environment(variables)}'
        f"{_config(facts, keys)}{_log(facts, proposals)}",
        _space(proposals, facts.options),
        _objective(facts.log),
        _search(proposals),
        _site(facts),
        f"[budget]\ntrials = 20\nparallel = {max(1, facts.gpus // _gpus_of_trial(facts)):<11}# trials at one time\n"
        "trial_minutes = 60    # a trial that takes longer is ended\n",
    ]
    return "\n".join(part for part in parts if part)


def _text(value: str) -> str:
    """A TOML string; literal where it contains backslashes, so that regex patterns stay readable."""
    plain = "'" not in value and value.isprintable()
    return f"'{value}'" if plain and "\\" in value else json.dumps(value, ensure_ascii=False)


def _gpus_of_trial(facts: ScriptFacts) -> int:
    return max(1, min(facts.gpus, gpus_of_command(facts.command)))


def _site(facts: ScriptFacts) -> str:
    """``[site]`` if this machine has GPUs; each trial gets its own."""
    if not facts.gpus:
        return ""
    each = f"gpus_per_node = {_gpus_of_trial(facts)}"
    return f"[site]\n{each}     # of a trial; this machine has {counted(facts.gpus, 'GPUs')} for trials\n"


def _steps(log: LogGuess | None) -> int | None:
    """Optimizer steps of the logged run; None if the log does not count steps."""
    return int(log.run.evals[-1].samples) if log is not None and log.unit == "step" else None


def _argv_text(
    facts: ScriptFacts, proposals: Sequence[ProposedParameter]
) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """The command with placeholders for the parameters, the seed and the trial's folder.

    Also returns placeholders by config-file key and by environment variable.
    A seed that is unset stays unset: setting one may turn on slower, deterministic training.
    """
    argv = list(facts.command) or ["python", "train.py"]
    filled = [(p.option, "{" + p.place + "}") for p in proposals]
    names = [(o, o.names[0]) for o in facts.options]
    filled += [(o, "{SEED}") for o, name in names if SEED.fullmatch(name) and o.number is not None][:1]
    filled += _places(facts.options)
    keys = {option.flag: place for option, place in filled if option.in_file}
    variables = {option.flag: place for option, place in filled if option.in_environment}
    if keys:
        argv = [
            f"{token.removesuffix(facts.config)}{{config}}" if token.endswith(facts.config) else token for token in argv
        ]
    for option, place in filled:
        if option.in_file or option.in_environment:
            continue
        if option.at is None:
            argv += [f"{option.flag}={place}"] if option.joined else [option.flag, place]
        elif option.joined:
            argv[option.at] = f"{option.flag}={place}"
        else:
            argv[option.at + 1] = place
    return argv, keys, variables


def _environment(variables: Mapping[str, str]) -> str:
    """``environment``: the variables that differ between trials."""
    values = ", ".join(f"{name} = {_text(place)}" for name, place in variables.items())
    return f"environment = {{ {values} }}   # variables that the script reads\n" if values else ""


def _config(facts: ScriptFacts, keys: Mapping[str, str]) -> str:
    """``[workload.config]``: the values of the script's config file that differ between trials."""
    if not keys:
        return ""
    values = ", ".join(f"{_text(key)} = {_text(place)}" for key, place in keys.items())
    return (
        "\n[workload.config]   # {config} is the trial's own copy of this file; the rest stays as it is there\n"
        f"file = {_text(facts.config)}\nvalues = {{ {values} }}\n"
    )


def _places(options: Sequence[Option]) -> list[tuple[Option, str]]:
    """Paths below the trial's folder for each path option that has a value, else for the first path option.

    Options with the same path keep a common one; a file name keeps its suffix.
    """
    able = [(o, place) for o in options if (place := place_of(o))]
    named = [(o, place) for o, place in able if o.at is not None or o.value not in ("", "None")] or able[:1]
    extra: dict[str, str] = {}
    for option, place in named:
        free = place not in extra.values()
        extra.setdefault(option.value, place if free else f"{option.names[0]}{PurePath(place).suffix}")
    return [(option, f"{{folder}}/{extra[option.value]}") for option, _ in named]


def _argv(facts: ScriptFacts, argv: list[str]) -> str:
    lines = []
    if not facts.command:
        lines.append("# EDIT: the command that runs your script, a {NAME} where a parameter's value belongs")
    if facts.writes_files:
        folders = sorted({w for token in argv if (w := token.rpartition("=")[2]).startswith("{folder}/")})
        if not folders:
            lines.append("# EDIT: no option for an output folder was found; {folder} is the trial's own folder")
        lines.append("# the relay prints the metrics that the script writes into files of this folder")
        one = len(folders) == 1 and not PurePath(folders[0]).suffix
        argv = [*RELAY, folders[0] if one else "{folder}", "--", *argv]
    rows, row = [], ""
    for token in map(_text, argv):
        if row and len(row) + len(token) > 100:
            rows.append(row)
            row = ""
        row += f"{token}, "
    rows.append(row.rstrip(", "))
    return "\n".join((*lines, "argv = [" + "\n        ".join(r.rstrip() for r in rows) + "]"))


def _log(facts: ScriptFacts, proposals: Sequence[ProposedParameter]) -> str:
    """``[workload.log]``, with the log line it was guessed from."""
    log = facts.log
    if log is None:
        return (
            f"\n[workload.log]\n# {NOTHING.format(source=facts.source) if facts.source else UNREAD}\n"
            'kind = "named"\nloss = "val loss"\nstep = "step"\n'
        )
    comment = _shown(log)
    settings: dict[str, Any] = dict(log.settings)
    batch = next((p.place for p in proposals if p.place == "BATCH_SIZE"), None)
    if log.unit == "step" and batch:
        settings["global_batch_size"] = batch
    lines = [f"\n[workload.log]\n# {comment}"]
    if log.example:
        lines.append(f"# made from: {log.example[:160]}")
    if log.last_batch:
        lines.append("# an eval prints its batches alone: the last one counts")
    if log.names_batch:
        lines.append("# it is found by its number, which is another where evals have more or fewer of them")
    if not log.is_eval:
        lines.append("# EDIT: this looks like a training loss; an eval's would be the better judge, if one is printed")
    if log.by_trend:
        better = "it rises there, so that more is better" if log.rising else "it falls there, so that less is better"
        lines.append(f"# EDIT: {log.metric} says no measure; {better} by [objective] direction")
    if log.other_sets:
        lines.append(f"# EDIT: not read: {', '.join(log.other_sets)}; name that one instead where it is what counts")
        if log.settings["kind"] == "hf_trainer":
            lines.append(
                "# metric below is the set that is read; for the mean of all let the script log it, as eval_loss"
            )
    notes = {
        "from_zero": "the first epoch is called 0",
        "repeated": "the progress bar shows the last eval again until there is a new one",
        "decimal_comma": "numbers as 0,925, read as 0.925",
        "below": "the line that says how far the run is stands below an eval's",
        "batches": "of an eval's batches",
        "global_batch_size": "samples a step: steps of different sizes compare by samples",
    }
    for name, value in settings.items():
        text = str(value).lower() if isinstance(value, bool) else _text(str(value))
        lines.append(f"{name} = {text}" + (f"   # {notes[name]}" if name in notes else ""))
    if log.unit == "epoch":
        lines.append("# samples_per_epoch = 10000   # samples in the training set, so that progress counts in samples")
    return "\n".join(lines) + "\n"


def _shown(log: LogGuess) -> str:
    evals = log.run.evals
    first, last = evals[0], evals[-1]
    begin, end = (counted(point.samples, f"{log.unit.removesuffix('s')}s") for point in (first, last))
    more = log.run.other_values
    others = f"; EDIT: {counted(more, 'other values')} for the same progress passed over, {TELL_APART}" if more else ""
    return f"{counted(len(evals), 'evals')} read in it: {first.loss:g} at {begin}, {last.loss:g} at {end}{others}"


def _space(proposals: Sequence[ProposedParameter], options: Sequence[Option]) -> str:
    unknown = "".join(
        f"# {place} of {o.flag}: not searched, as nothing states what it is today; "
        f"{'export' if o.in_environment else 'give the command'} today's value\n"
        for place, o in without_value(options, proposals)
    )
    if not proposals:
        return (
            "[space]\n# EDIT: no option was recognised as a learning rate, batch size, rank or warm-up;\n"
            f"{unknown}# every parameter also reaches the script as an environment variable of its name\n"
            'LR = { type = "float", low = 1e-5, high = 1e-2, log = true }\n'
        )
    lines = [f"{p.place} = {p.toml}" + (f"   # {p.option.flag}: {p.why}" if p.why else "") for p in proposals]
    return "[space]\n" + "\n".join(lines) + "\n" + unknown


def _objective(log: LogGuess | None) -> str:
    """``[objective]``: the best eval counts; a target is proposed in a comment."""
    if log is None:
        return '[objective]\nmetric = "val loss"   # the lowest eval counts; with target = VALUE the time to it\n'
    losses = [point.loss for point in log.run.evals if point.loss == point.loss]
    best = (max if log.rising else min)(losses, default=1.0)
    direction = 'direction = "maximize"\n' if log.rising else ""
    end = "highest" if log.rising else "lowest"
    unit = log.unit if log.unit.endswith("s") else f"{log.unit}s"
    why = f"the {end} eval of a trial counts, whenever it comes; progress is counted in {unit}"
    best_comment = "the best in that log: with this line the time to it counts"
    target = f"# target = {reachable(best, rising=log.rising)!r}   # {best_comment}"
    return f"[objective]\nmetric = {_text(log.metric)}   # {why}\n{direction}{target}\n"


def reachable(best: float, *, rising: bool) -> float:
    """``best`` rounded to three significant digits, to the side that is easier to reach."""
    if not best or not math.isfinite(best):
        return 1.0 if not math.isfinite(best) else best
    digits = 2 - math.floor(math.log10(abs(best)))
    rounded = (math.floor if rising else math.ceil)(round(best * 10.0**digits, 6)) / 10.0**digits
    return float(f"{rounded:.6g}")


def _search(proposals: Sequence[ProposedParameter]) -> str:
    """``[search]`` with the current values as first trial, if they are known."""
    today = [f"{p.place} = {p.today}" for p in proposals if p.toml.startswith("{")]
    return f"[search]\nenqueue = [{{ {', '.join(today)} }}]   # trial 0 is what runs today\n" if today else ""


HELP_SECONDS = 60.0
HOOK = Path(parser_hook.__file__).parent
"""Prepended to PYTHONPATH: at start-up Python imports a hook from it that dumps the script's argument parser."""
HELP_BYTES = 1 << 20
LOG_BYTES = 1 << 26
"""Bytes read from each log to guess its format."""


def run(logs: tuple[Path, ...], output: Path, no_help: bool, command: tuple[str, ...]) -> None:
    """Run ``init``; options: cli/commands.py."""
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
    load_workload(parse_study(text, output), output)  # checks that the text is a valid study
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    click.echo(text)
    _print_result(output, logs, facts)


def _print_result(output: Path, logs: tuple[Path, ...], facts: ScriptFacts) -> None:
    """Print the next steps."""
    edits = sum("EDIT" in line for line in output.read_text(encoding="utf-8").splitlines())
    file = shlex.quote(str(display_path(output)))
    todo = f"; {edits} line{'s' if edits > 1 else ''} marked EDIT" if edits else ""
    click.echo(f"# written: {display_path(output)}{todo}", err=True)
    if logs and not facts.writes_files:
        click.echo(f"# its log:  {called('logs')} --study {file} {shlex.join(map(str, logs))}", err=True)
    sweep = f"{called('sweep')} --study {file}"
    click.echo(f"# look:     {sweep} --dry-run\n# then:     {sweep}", err=True)


def missing_script(command: Sequence[str]) -> str:
    """The script that the command names, if it does not exist; else ""."""
    script = script_of(command[0], command[1:])
    return script if Path(script).suffix in (".py", ".sh") and not Path(script).expanduser().is_file() else ""


def read_logs(paths: tuple[Path, ...]) -> tuple[LogGuess | None, str, bool]:
    """(guess, name, whether the metrics come from files) of the logs. Raises InputError for a missing path."""
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
    """At most the first ``LOG_BYTES`` of a log."""
    held = bytearray()
    for piece in log.pieces():
        held += piece
        if len(held) >= LOG_BYTES:
            break
    return bytes(held[:LOG_BYTES])


def script_options(command: tuple[str, ...], *, ask: bool) -> tuple[list[Option], str]:
    """The script's options with their current values, and the config file that it reads ("" for none).

    ask: whether the command may be run to dump its parser or print its help text. Config keys and environment variables
    are used only for meanings that no option has. A program that reads a file instead of options runs without --help.
    """
    typed, script = from_command(command), script_text(command, Path())
    listed, parsed = (from_help(""), False)
    if ask and (script.command_line or _reads_a_file(command)):
        text, records = ask_parser((*command, *([] if _reads_a_file(command) else ["--help"])))
        known = from_parser(records)
        listed, parsed = (from_help(text), False) if known is None else (known, True)
        if not listed and not script_of(command[0], command[1:]) and _is_compiled(command[0]):
            listed = from_help(ask_parser(command[:1])[0])
    if not listed:
        listed, parsed = script_constants(command), False
    config = next((token for token in map(_named_file, command) if is_config(token) and Path(token).is_file()), "")
    defaults = defaults_of(script).items()
    variables = (Option(flag=name, value=os.environ.get(name, value), in_environment=True) for name, value in defaults)
    typed_names = {option.flag for option in typed}  # env NAME=VALUE python train.py, and yacs' SOLVER.BASE_LR 0.02
    others = [option for option in (*(_keys(config) if config else ()), *variables) if option.flag not in typed_names]
    return [*merged_options(typed, listed, parsed=parsed), *others], config


def _named_file(token: str) -> str:
    return token.rpartition("=")[2] if token.startswith("-") else token


def _keys(config: str) -> list[Option]:
    """The values of a config file as options; empty if it cannot be read."""
    try:
        values = scalars(Path(config).read_text(encoding="utf-8"), config)
    except (OSError, ValueError) as error:
        click.echo(f"# {config}: not read as a config file: {error}", err=True)
        return []
    return [Option(flag=key, value=scalar.value, in_file=True) for key, scalar in values.items()]


def script_constants(command: Sequence[str]) -> list[Option]:
    """Constants set in the command's Python files, which ``--name=value`` arguments override."""
    files = [Path(token) for token in command if token.endswith(".py") and Path(token).is_file()]
    try:
        texts = [file.read_text(encoding="utf-8") for file in files]
    except (OSError, UnicodeDecodeError):
        return []
    return constants(texts[0], texts[1:]) if texts else []


def _reads_a_file(command: Sequence[str]) -> bool:
    """Whether the last word is a config file, and no option or its value."""
    return is_config(command[-1]) and not any(token.startswith("-") for token in command[-2:])


def _is_compiled(program: str) -> bool:
    """Whether a program is an ELF executable; such programs may list their options when run without any."""
    with Path(shutil.which(program) or os.devnull).open("rb") as file:
        return file.read(4) == b"\x7fELF"


def ask_parser(command: tuple[str, ...]) -> tuple[str, str]:
    """What the command prints (at most 1 MB) and the parser records it dumps, within 60 s.

    Nothing is trained: a hook ends a Python program when it parses its command line or creates an optimizer, and GPUs
    are hidden. At the timeout the process group is killed. Raises InputError if the command cannot be run.
    """
    program = sys.executable if command[0] in ("python", "python3") else command[0]
    argv = [program, *command[1:]]
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
            click.echo(f"# {shlex.join(command)} did not end within {HELP_SECONDS:.0f} s", err=True)
        finally:
            if child.poll() is None:
                send_signal(child.pid, signal.SIGKILL, group=True)
                child.wait()
        printed.seek(0)
        written = records.read_text(encoding="utf-8") if records.exists() else ""
        return printed.read(HELP_BYTES).decode("utf-8", "replace"), written


def _is_value(command: Sequence[str]) -> bool:
    """Whether the last argument is the value of an option."""
    return len(command) > 1 and (command[-1].startswith("-") or command[-2].startswith("-"))


_SEES_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
