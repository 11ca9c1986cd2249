"""Any training script as a workload: a command line, its environment, and its log's format."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lora_tune.base.errors import SetupError, StudyError
from lora_tune.base.host import gpus_of_command, gpus_of_machine, visible_in
from lora_tune.base.paths import AttemptPaths
from lora_tune.base.registry import LOG_READERS, on_this_machine
from lora_tune.config.layout import config_file_name, layout_of
from lora_tune.config.secrets import Variables
from lora_tune.config.study import Study
from lora_tune.logs.lines import SCALES, make_reader
from lora_tune.logs.run import LogReader
from lora_tune.workloads.base import Export, Job, Proposal, Resources, Value, Workload, places, reader_of, some_proposal
from lora_tune.workloads.config_file import changed, needs, render, value_text
from lora_tune.workloads.reach import PLACE, Reach, idle_sentence, reaches, script_text, unsure_sentence

# The words of a command that runs without a shell: which one is the script, and which would need a shell.


_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_INTERPRETERS = ("python", "python3", "bash", "sh")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_OPERATORS = ("|", "||", "&&", ";", "&", ">", ">>", "<", "2>&1", "2>")


def script_of(program: str, arguments: Sequence[str]) -> str:
    """The script that an interpreter runs; "" for another program, for ``-c TEXT`` and for ``-m MODULE``."""
    if Path(program).stem not in _INTERPRETERS:
        return ""
    script = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    inline = any(re.fullmatch(r"-\w*[cm]", argument) for argument in arguments[:script])
    return "" if inline or script == len(arguments) else arguments[script]


def _in_a_shell(argv: Sequence[str]) -> bool:
    return any(Path(token).name in _SHELLS for token in argv)


def shell_variable(argv: Sequence[str], names: Collection[str]) -> str:
    """The first of the parameters ``names`` that occurs as ``$NAME``, which no shell expands; "" for none.

    A word that contains blanks is skipped: it may be code for another shell, a batch system or a language.
    """
    if _in_a_shell(argv):
        return ""
    single = [token for token in argv if len(token.split()) == 1]
    return next((name for token in single for name in _VARIABLE.findall(token) if name in names), "")


def shell_tokens(argv: Sequence[str]) -> list[str]:
    """A warning about the first word that only a shell would understand, if the command has no shell."""
    tokens = [] if _in_a_shell(argv) else [token for token in argv if token in _OPERATORS]
    remedy = 'no shell runs this command, so that it goes to your script; write argv = ["bash", "-c", "..."]'
    return [f"workload.argv: {token!r}: {remedy}" for token in tokens[:1]]


def single_token(program: str, folder: Path) -> str:
    """What is wrong with a whole command line in one word; "" if it is a program's name."""
    tokens = program.split()
    if len(tokens) < 2 or (folder / program).exists():
        return ""
    return f"workload.argv: {program!r} is one word; write {json.dumps(tokens)}"


_FEW = 4
"""Up to so many trials a study may run although nothing of its space reaches its script."""

_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")


class PrepareSettings(Variables):
    """Keys of ``[workload.prepare]``: a pass that runs once, before the first trial of a sweep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    argv: tuple[str, ...] = Field(min_length=1, description="the command; {NAME} becomes a fixed parameter's value")
    environment: dict[str, str] = Field(
        default_factory=dict, description="further variables, secrets as in [site]; {NAME} as in argv"
    )
    script: bool = Field(False, description="argv is an sbatch script with its arguments, submitted unchanged")
    nodes: int = Field(1, ge=1, description="nodes that it runs on")
    minutes: float = Field(60, gt=0, description="its time limit")


class ConfigSettings(BaseModel):
    """Keys of ``[workload.config]``: a config file of the script's, of which each trial gets a changed copy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Path = Field(
        description="YAML, JSON, TOML or gin; a relative path is one from workload.cwd, or from where you started"
    )
    values: dict[str, str] = Field(
        default_factory=dict, description='what changes: "dotted.key" = "{NAME}"; the rest stays as it is in the file'
    )


class CommandSettings(Variables):
    """Keys of ``[workload]`` for ``kind = "command"``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    argv: tuple[str, ...] = Field(
        min_length=1,
        description="the command, one string a word; {NAME} becomes a parameter's value, {folder} the attempt's folder",
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="further variables, secrets as in [site]; {NAME} as in argv"
    )
    cwd: Path | None = Field(
        None, description="working folder; ~ is the home folder [the attempt's own under Slurm, else where you started]"
    )
    script: bool = Field(False, description="argv is an sbatch script with its arguments, submitted unchanged")
    log: dict[str, Any] = Field(
        default_factory=lambda: {"kind": "mllog"},
        description="how the output is read: kind = mllog, hf_trainer, jsonl, named or regex, and that kind's settings",
    )
    prepare: PrepareSettings | None = Field(None, description="what runs once, before the first trial")
    config: ConfigSettings | None = Field(
        None, description="a config file that the script reads: {config} in argv is the trial's changed copy of it"
    )


class CommandWorkload(Workload):
    """Runs ``argv`` with every parameter as an environment variable."""

    Settings = CommandSettings
    needs_goal = True

    def __init__(self, study: Study, settings: CommandSettings) -> None:
        self._study = study
        self._settings = settings
        space = study.search_space
        reserved = _RESERVED_NAMES if study.objective.target is None else (*_RESERVED_NAMES, "TARGET")
        known = {*space.resolve(space.corner()), *space.conditions.of, *reserved}
        if settings.config is not None:
            self._check_tokens("workload.config", settings.config.values.values(), known)
            known.add("config")
        self._check_places("workload", settings, known)
        if not settings.script and (variable := shell_variable(settings.argv, known)):
            problem = f'no shell fills ${variable} in; write {{{variable}}}, or argv = ["bash", "-c", "..."]'
            raise StudyError(f"study {study.name}", "workload.argv", problem)
        if settings.prepare is not None:
            self._check_places("workload.prepare", settings.prepare, {*space.fixed, "folder"})
        self.reader()

    def _check_places(self, key: str, settings: CommandSettings | PrepareSettings, known: set[str]) -> None:
        self._check_tokens(key, (*settings.argv, *settings.environment.values()), known)

    def _check_tokens(self, key: str, texts: Iterable[str], known: set[str]) -> None:
        for text in texts:
            for name in PLACE.findall(text):
                if name not in known:
                    allowed = ", ".join(sorted(known))
                    raise StudyError(f"study {self._study.name}", key, f"{{{name}}} is unknown; known are {allowed}")

    def job(self, proposal: Proposal, folder: Path) -> Job:
        """The command with its placeholders filled, and the parameters as environment variables."""
        values = self._values(proposal, folder)
        return Job(
            name=self._study.job_name(proposal.number, proposal.attempt),
            folder=folder,
            files=self._config_copy(values),
            argv=self._argv(values),
            # Buffered lines of a Python program would arrive late, and get the time of their arrival.
            environment={"PYTHONUNBUFFERED": "1", **self._environment(values, self._settings.environment)},
            secrets={**self._study.site.secrets, **self._settings.secrets},
            cwd=self._cwd,
            log=AttemptPaths(folder).log,
            resources=Resources(
                nodes=int(values["NODES"]),
                gpus_per_node=self._study.site.gpus_per_node,
                minutes=self._study.budget.trial_minutes,
            ),
            script=self._settings.script,
        )

    def _config_copy(self, values: Mapping[str, Value]) -> dict[str, str]:
        """The trial's copy of the script's config file by name; empty if the study names none."""
        config = self._settings.config
        if config is None:
            return {}
        required = config.values.items()
        filled = {key: fill(text, values) for key, text in required if not self._of_another_trial(text, values)}
        try:
            return {f"config/{config.file.name}": changed(self._config_text, filled, config.file.name)}
        except ValueError as error:
            raise SetupError(f"study {self._study.name}: workload.config: {config.file}: {error}") from error

    @functools.cached_property
    def _config_text(self) -> str:
        """The config file as at the first trial, so that a sweep uses one version."""
        assert self._settings.config is not None
        file = (self._cwd or Path()) / self._settings.config.file.expanduser()
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise SetupError(f"study {self._study.name}: workload.config.file = {str(file)!r}: {why}") from error

    def _argv(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        """The command with its placeholders filled. On this machine ``python`` is the sweep's interpreter."""
        program, *arguments = self._tokens(values)
        if program in ("python", "python3") and on_this_machine(self._study.site.launcher):
            program = self._study.site.python or sys.executable
        return (program, *arguments)

    def _tokens(self, values: Mapping[str, Value]) -> list[str]:
        """The command, filled. A word with a parameter that this trial does not have is left out.

        So is the option before it: ``--momentum {MOMENTUM}`` without momentum.
        """
        argv: list[str] = []
        for token in self._settings.argv:
            if self._of_another_trial(token, values):
                if PLACE.fullmatch(token) and argv and _OPTION.fullmatch(argv[-1]):
                    argv.pop()
            else:
                argv.append(fill(token, values))
        return argv

    def _of_another_trial(self, text: str, values: Mapping[str, Value]) -> bool:
        """Whether a text contains a conditional parameter that this trial does not have."""
        return any(n not in values and n in self._study.search_space.conditions.of for n in PLACE.findall(text))

    def check(self) -> Sequence[str]:
        """Check the command's working folder and script, if trials run on this machine.

        Elsewhere they may be in a container or on another file system, so that there is only a warning.
        """
        if self._settings.config is not None and on_this_machine(self._study.site.launcher):
            self._config_copy(self._values(some_proposal(self._study), Path()))
        missing = self._missing()
        if missing and on_this_machine(self._study.site.launcher):
            raise SetupError(f"study {self._study.name}: {missing}")
        warnings = [f"{missing} (on this machine; trials run elsewhere)"] if missing else []
        tokens = shell_tokens(self._settings.argv)
        return [*warnings, *tokens, *self._unread_parameters(), *self._about_gpus()]

    def _unread_parameters(self) -> list[str]:
        """Warnings about parameters that the script does not read. Raises StudyError if many trials would be equal.

        A study of a few trials tests a machine more than a space: it runs, and nothing is recommended.
        """
        names, sentence, unsure = self._unread
        if self.all_unread and not 0 < (self._study.budget.trials or 0) <= _FEW:
            raise StudyError(f"study {self._study.name}", "space", sentence)
        return [*([f"space: {sentence}"] if names else ()), *([unsure_sentence(unsure)] if unsure else ())]

    @property
    def all_unread(self) -> str:
        """The message that no tuned parameter reaches the script, so trials differ only by noise; "" if one may."""
        names, sentence, _ = self._unread
        return sentence if len(names) == len(self._study.search_space.corner()) else ""

    @functools.cached_property
    def _unread(self) -> tuple[list[str], str, list[str]]:
        """Parameters that the script does not read, what to do about them, and parameters for which it is unknown."""
        settings = self._settings
        script = script_text(settings.argv, self._cwd or Path())
        variables, files = settings.environment, list[str]()
        if settings.config is not None and any("{config}" in t for t in (*settings.argv, *variables.values())):
            files += settings.config.values.values()
        each = reaches(self._study.search_space, settings.argv, variables, script, files)
        idle, unsure = ([n for n, r in each.items() if r is which] for which in (Reach.NO, Reach.UNKNOWN))
        return idle, idle_sentence(idle, settings.argv, variables, script) if idle else "", unsure

    def _about_gpus(self) -> list[str]:
        """Warnings about the use of this machine's GPUs, if trials run here and it is probably not intended."""
        site, budget = self._study.site, self._study.budget
        gpus = on_this_machine(site.launcher) and len(gpus_of_machine(visible_in({**os.environ, **site.environment})))
        stated = "gpus_per_node" in site.model_fields_set
        needed = site.gpus_per_node if stated else gpus_of_command(self._settings.argv)
        if not gpus or site.launcher != "local":
            return []
        if not needed:
            return [f"site.gpus_per_node = 0: trials see none of this machine's {gpus} GPUs; 1 gives each trial one"]
        side_by_side = gpus // needed
        if not stated and budget.parallel > side_by_side > 0:
            reserved = f"budget.parallel = {side_by_side} and site.gpus_per_node = {needed} give each its own"
            return [f"{budget.parallel} trials at a time share {gpus} GPUs of this machine; {reserved}"]
        if side_by_side > budget.parallel:
            return [f"{gpus - budget.parallel * needed} of {gpus} GPUs of this machine stay idle; "
                    f"budget.parallel = {side_by_side} uses all"]  # fmt: skip
        return []

    def _missing(self) -> str:
        """A missing file of the command, with the key to correct; "" if all exist, or it is unknown."""
        folder = self._cwd or Path()
        if not folder.is_dir():
            return f"workload.cwd = {str(folder)!r}: there is no such folder; correct it, or make it"
        place = "" if self._cwd is None else f" in {folder}"
        program, *arguments = self._settings.argv
        inner = script_of(program, arguments)
        if self._settings.script:
            program, inner = "", program
        if inner.endswith(_SCRIPTS) and not PLACE.search(inner) and not (folder / Path(inner).expanduser()).is_file():
            where = place or f" in {Path.cwd()}"
            return f"workload.argv: there is no file {inner!r}{where}; correct it, or set workload.cwd"
        if not self._settings.script and (tokens := single_token(program, folder)):
            return tokens
        unchecked = PLACE.search(program) or not program or program in ("python", "python3")
        if not unchecked and shutil.which(program if "/" not in program else str(folder.absolute() / program)) is None:
            return f"workload.argv: there is no program {program!r}{place}; correct it, or install it"
        return ""

    def preparation(self, folder: Path) -> Job | None:
        """The job of ``[workload.prepare]``: the same environment, without what varies between trials."""
        prepare = self._settings.prepare
        if prepare is None:
            return None
        values: dict[str, Value] = {**self._study.search_space.fixed, "folder": str(folder)}
        return Job(
            name=f"{self._study.name}-{folder.name.replace('attempt', 'prepare')}",
            folder=folder,
            argv=tuple(fill(token, values) for token in prepare.argv),
            environment=self._environment(values, prepare.environment),
            secrets={**self._study.site.secrets, **prepare.secrets},
            cwd=self._cwd,
            log=AttemptPaths(folder).log,
            resources=Resources(nodes=prepare.nodes, minutes=prepare.minutes),
            script=prepare.script,
        )

    @property
    def _cwd(self) -> Path | None:
        return self._settings.cwd.expanduser() if self._settings.cwd else None

    def reader(self, proposal: Proposal | None = None) -> LogReader:
        """The reader that ``log`` names; a setting that is a parameter's name takes the trial's value."""
        space = self._study.search_space
        values = proposal.parameters if proposal else space.resolve(space.corner())
        settings = {key: values.get(v, v) if key in SCALES else v for key, v in self._settings.log.items()}
        kind = settings.pop("kind", "mllog")
        try:
            LOG_READERS.known(kind)
            named = getattr(LOG_READERS.load(kind), "metric", "")
            metric = self._study.objective.metric
            if named and metric and (other := settings.setdefault(named, metric)) != metric:
                raise ValueError(
                    f"{named} = {other!r} is not objective.metric = {metric!r}; remove {named}, or correct it"
                )
            return reader_of(self._study, make_reader(kind, **settings))
        except (TypeError, ValueError, KeyError) as error:
            raise StudyError(f"study {self._study.name}", "workload.log", str(error)) from error

    def export(self, proposal: Proposal, provenance: tuple[str, ...]) -> Export:
        """The environment as a config file, and the command line under it (scripts: ``sbatch``)."""
        site = self._study.site
        values = self._values(proposal, Path())
        nodes, gpus = int(values["NODES"]), max(1, site.gpus_per_node)
        name = config_file_name(site.system, nodes, gpus, layout_of(proposal.parameters))
        if site.system == _NO_SYSTEM and nodes == 1 and _DEGREES.isdisjoint(proposal.parameters):
            name = f"config_{self._study.name}.sh"  # a user's own script has no layout
        command = self._tokens(values)
        if self._settings.script:
            command = ["sbatch", "-N", str(nodes), *site.sbatch_arguments(nodes), *command]
        place = f"cd {shlex.quote(str(self._cwd))} && " if self._cwd else ""
        if commit := proposal.parameters.get("COMMIT"):
            place += f"git switch --detach {shlex.quote(str(commit))} && "
        usage = f"source {name} && {place}{shlex.join(command)}"
        exports = {**site.step_variables(), **self._environment(values, self._settings.environment)}
        needed = [needs(name) for name in (*site.secrets, *self._settings.secrets)]
        text = render(exports, comments=(*provenance, f"Run: {usage}"), before=needed)
        return Export(files={name: text, **self._config_copy(values)}, usage=usage)

    def _values(self, proposal: Proposal, folder: Path) -> dict[str, Value]:
        space = self._study.search_space
        reserved: dict[str, Value] = {
            "SEED": proposal.seed,
            "folder": str(folder),
            "NODES": space.node_count(proposal.parameters),
            "GPUS": space.gpu_count(proposal.parameters),
        }
        if self._settings.config is not None:
            reserved["config"] = str(folder / "config" / self._settings.config.file.name)
        target = self._study.objective.target
        return {**reserved, **({} if target is None else {"TARGET": target}), **proposal.parameters}

    def _environment(self, values: Mapping[str, Value], further: Mapping[str, str]) -> dict[str, str]:
        site = self._study.site
        named = {name: value_text(value) for name, value in values.items() if name not in ("folder", "config")}
        filled = {k: fill(v, values) for k, v in further.items() if not self._of_another_trial(v, values)}
        return {**places(site), **site.environment, **named, **filled}


_SCRIPTS = (".py", ".sh")

_NO_SYSTEM = "LOCAL"
"""The default of a site's system."""

_DEGREES = frozenset(("TP", "PP", "CP", "EP", "MINIBS", "MBS"))

_RESERVED_NAMES = ("SEED", "folder", "NODES", "GPUS")


def fill(text: str, values: Mapping[str, Value]) -> str:
    """``{NAME}`` replaced by the value's text; other braces stay. The result is one word, never parsed by a shell."""
    return PLACE.sub(lambda m: value_text(values[m[1]]) if m[1] in values else m[0], text)
