"""Finds the variables that a launch script needs from outside, without which it ends at once.

A script under ``set -u`` ends at the first unset variable; ``${NAME:?message}`` ends any script. Both are found by
reading the script before a job is submitted: its own lines outside ``if`` and ``case`` (which may never run), without
single quotes and comments (which bash does not expand), and the files in its folder that it sources.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lora_tune.base.errors import SetupError
from lora_tune.base.host import send_signal
from lora_tune.base.sbatch_options import SbatchOption, sbatch_options
from lora_tune.workloads.base import Job
from lora_tune.workloads.walltime import minutes_of

_SET = re.compile(r"(?:^|[;&]\s*)set\s+([^;&|]+)|^#!\S*bash\s+(-\S+)$")
_NOUNSET = re.compile(r"(?:^|\s)([-+])(?:[A-Za-z]*u[A-Za-z]*|[A-Za-z]*o\s+nounset)(?=\s|$)")
_SOURCES = re.compile(r"^\s*(?:source|\.)\s+[\"']?(?:\S*/)?([\w.-]+\.sh)\b", re.MULTILINE)
_EXPANSION = re.compile(r"(?<!\\)\$(?:([A-Za-z_]\w*)|\{[#!]?([A-Za-z_]\w*)(\[[^]]*\])?(:?[-=+?])?)")
_ASSIGNED = re.compile(
    r"(?:^|[\s;(&|])(?:(?:export|readonly|local|declare|typeset)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)\+?=(?!=)"
    r"|\$\{([A-Za-z_]\w*):?="
    r"|\bfor\s+([A-Za-z_]\w*)\s+in\b"
)
_FILLED = re.compile(r"\b(?:read|mapfile|readarray|getopts|let|printf\s+-v)\s([^;|&<>()]*)")
"""Builtins that assign to variables named in their arguments."""
_NAME = re.compile(r"(?<![\w$-])[A-Za-z_]\w*")
_VERBATIM = re.compile(r"(<<-?\s*(['\"])(\w+)\2[^\n]*\n).*?^\s*\3\s*$", re.MULTILINE | re.DOTALL)
_STARTED = re.compile(r"(?<!bash )(?<!sh )(?<!source )(?<![\w/.])\./([\w.-]+\.sh)\b")
_FIXED_PATHS = re.compile(r"^\s*export\s+(CONT|DATADIR|MODEL|LOGDIR)=(?!.*\$\{\1)", re.MULTILINE)
_SAVED_ENVIRONMENT = re.compile(
    r"(?<![\w./-])(?:export -p|declare -x|printenv|env)[ \t]*(?:\|[^\n>]*)?>>?[ \t]*([^\s;&|]+)"
)
_NODELIST = re.compile(r"^#SBATCH\s+(?:-w\s*|--nodelist[= ]\s*)(\S+)", re.MULTILINE)
_CUT = re.compile(
    r"(?:\b(?:cd|pushd|source|dirname|realpath|readlink)|(?:^|\s)\.)[ \t]+(?:-\w+[ \t]+)*"
    r"\$(?:\(|0\b|\{?(BASH_SOURCE|PWD|SLURM_SUBMIT_DIR|\w*(?:DIR|HERE|ROOT|PATH))\b)"
)
"""Unquoted uses of a path, which bash splits at blanks."""
_OPENS = re.compile(r"^(?:if|case)\b")
_CLOSES = re.compile(r"(?:^|[;\s])(?:fi|esac)\b")

_AT_COMMAND = r"(?:^|[;&|]|\b(?:then|do|else)\b)[ \t]*"
_FUNCTIONS = {
    "module": (
        re.compile(rf"{_AT_COMMAND}(?:module|ml)[ \t]+\w", re.MULTILINE),
        re.compile(r"(?:source|\.)[ \t]+\S*(?:/init/(?:ba)?sh|modules\.sh|lmod\.sh|z00_lmod|/etc/profile|bashrc)"),
        "source /etc/profile.d/modules.sh",
    ),
    **{
        name: (
            re.compile(rf"{_AT_COMMAND}{name}[ \t]+(?:de)?activate\b", re.MULTILINE),
            re.compile(
                r"(?:source|\.)[ \t]+\S*(?:(?:conda|mamba)\.sh|bashrc|/activate)|shell(?:\.bash)?[ \t]+hook|\bhook\b"
            ),
            f'eval "$({name} shell{hook})"',
        )
        for name, hook in (("conda", ".bash hook"), ("mamba", " hook --shell bash"), ("micromamba", " hook -s bash"))
    },
}
"""Function of interactive shells -> pattern of its call, pattern of its definition, and the remedy."""
_LOGIN = re.compile(r"\A#!\S*bash[ \t]+(?:-\w*[li]\w*|--login)")
"""First line of a script for a login or interactive shell, which reads the profile."""

_PROVIDED = frozenset({
    "HOME", "USER", "LOGNAME", "PATH", "PWD", "OLDPWD", "SHELL", "HOSTNAME", "RANDOM", "SECONDS", "UID", "EUID", "PPID",
    "LINENO", "IFS", "OPTARG", "OPTIND", "FUNCNAME", "EPOCHSECONDS", "PIPESTATUS", "REPLY",
})  # fmt: skip
_PROVIDED_PREFIXES = ("SLURM", "BASH")


@dataclass(frozen=True, slots=True)
class Needed:
    """A variable that a script needs. line: its first expansion in the script."""

    name: str
    line: str


def needed_variables(script: Path) -> tuple[Needed, ...]:
    """The environment variables that ``script`` needs, in its order. The shell's and Slurm's own are left out."""
    text = _with_sourced(script)
    assigned, strict = _assigned(_code(text)), _turned(text.partition("\n")[0].rstrip(), now=False)
    needed: dict[str, Needed] = {}
    for line in _unconditional(_code(text)):
        strict = _turned(line, now=strict)
        for match in _EXPANSION.finditer(line):
            name, operator = match[1] or match[2], match[4] or ""
            provided = name in _PROVIDED or name.startswith(_PROVIDED_PREFIXES)
            demanded = operator.endswith("?")
            if not provided and name not in assigned and (demanded or (strict and not operator)):
                needed.setdefault(name, Needed(name, line.strip()))
    return tuple(needed.values())


def _assigned(code: str) -> set[str]:
    """The variables that the script assigns anywhere."""
    assigned = {name for line in code.splitlines() for m in _ASSIGNED.finditer(line) for name in m.groups()}
    return assigned | {name for names in _FILLED.findall(code) for name in _NAME.findall(names)}


def _turned(line: str, *, now: bool) -> bool:
    """Whether ``set -u`` is on after this line; now: whether it is before."""
    for match in _SET.finditer(line):
        for sign in _NOUNSET.findall(match[1] or match[2]):
            now = sign == "-"
    return now


def script_warnings(script: Path, known: Collection[str]) -> list[str]:
    """Why a job of ``script`` would end at once, or ignore its trial, a sentence each. known: variables of its jobs.

    Includes files in its folder that it runs as programs and that are not executable.
    """
    warnings = [*_lacking(script, script.name, known).values()]
    for config in sourced_configs(script):
        warnings.append(
            f"{script.name} sources {config} itself: what that sets, no trial can; remove the line from a copy of it"
        )
    code = code_of(script)
    for name in dict.fromkeys(_FIXED_PATHS.findall(code)):
        warnings.append(
            f"{script.name} sets {name} itself, so the study's does not count; remove the line from a copy of it"
        )
    for file in dict.fromkeys(_SAVED_ENVIRONMENT.findall(code)):
        warnings.append(
            f"{script.name} saves every variable of its job to {file}, tokens and passwords among them; "
            "keep secrets out of [site.environment] and of the shell that starts the sweep"
        )
    for name in dict.fromkeys(_STARTED.findall(code)):
        if (script.parent / name).is_file() and not os.access(script.parent / name, os.X_OK):
            warnings.append(
                f"{script.name} starts ./{name}, which may not be executed; chmod +x {script.parent / name}"
            )
    return warnings


def function_warnings(job: Job, functions: Collection[str]) -> list[str]:
    """A sentence for each undefined shell function that a job's scripts call. functions: those that jobs have."""
    warnings = []
    for script, text in _scripts(job):
        code = _code(text)
        for name, (call, produced, source) in _FUNCTIONS.items():
            defined = re.search(rf"\b{name}\s*\(\)", code) or produced.search(text) or _LOGIN.search(text)
            if name not in functions and call.search(code) and not defined:
                warnings.append(
                    f"{script} calls `{name}`, a function of your interactive shell that a job does not have; "
                    f"write `{source}` before it"
                )
    return warnings


def environment_warnings(job: Job, known: Collection[str], shell: Collection[str]) -> list[str]:
    """A sentence for each variable that a job's scripts need and nothing sets.

    known: variables of its jobs. shell: variables of the shell that starts the sweep.
    """
    warnings: dict[str, str] = {}
    for script, _ in _scripts(job):
        file = (job.cwd or job.folder) / script
        warnings |= _lacking(file, script, known, shell) if file.is_file() else {}
    return list(warnings.values())


def _lacking(script: Path, called: str, known: Collection[str], shell: Collection[str] = ()) -> dict[str, str]:
    """A sentence for each variable that a script needs and its jobs lack. called: the script's name in messages."""
    return {
        needed.name: f"{called} needs {needed.name}, which "
        f"{'this shell has and a job does not' if needed.name in shell else 'nothing sets'}, and ends at "
        f"`{needed.line[:120]}`; set {needed.name} in [site.environment]"
        for needed in needed_variables(script)
        if needed.name not in known
    }


def _scripts(job: Job) -> list[tuple[str, str]]:
    """The scripts in a job's command, with their texts."""
    named = [token for token in job.argv if token.endswith((".sh", ".sub", ".sbatch", ".slurm", ".bash"))]
    named = [*named, *(job.argv[:1] if job.script and job.argv[0] not in named else ())]
    return [(token, text) for token in named if (text := script_text(job, token))]


def path_warnings(job: Job) -> list[str]:
    """A sentence for each path of a job that contains blanks and that its script uses unquoted."""
    place = job.cwd or job.folder
    warnings: dict[str, str] = {}
    for script in (token for token in job.argv if token.endswith((".sh", ".sub"))):
        for line in _code(script_text(job, script)).splitlines():
            for match in _CUT.finditer(line):
                path = job.environment.get(match[1] or "", str(place))
                if re.search(r"\s", path):
                    cut = f"{script} uses it without quotes, where bash cuts it: `{' '.join(line.split())[:120]}`"
                    warnings.setdefault(path, f"{path} has a space in it, and {cut}; use a path without spaces")
    return list(warnings.values())


def script_text(job: Job, script: str) -> str:
    """The text of a script in the job's command; "" if it cannot be read here."""
    return job.files.get(script) or _text((job.cwd or job.folder) / script)


def _text(file: Path) -> str:
    """The text of ``file``; "" if it is not a readable file, such as a command with a similar ending."""
    try:
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError:
        return ""


def requested_nodes(script: Path) -> str:
    """The nodes that ``script`` requests from ``sbatch`` by name, as written; "" for none."""
    match = _NODELIST.search(script.read_text(encoding="utf-8", errors="replace"))
    return match[1] if match else ""


def sourced_configs(script: Path) -> tuple[str, ...]:
    """Config files that ``script`` itself sources, which override a trial's values."""
    code = code_of(script)
    return tuple(dict.fromkeys(n for n in _SOURCES.findall(code) if re.match(r"config_.*\dx\d", n)))


def _with_sourced(script: Path) -> str:
    """The script, followed by the files of its folder that it sources by name."""
    text = script.read_text(encoding="utf-8", errors="replace")
    beside = [script.parent / name for name in dict.fromkeys(_SOURCES.findall(_code(text)))]
    return "\n".join([text, *(p.read_text(encoding="utf-8", errors="replace") for p in beside if p.is_file())])


def code_of(script: Path) -> str:
    """The script without comments and quoted parts, which bash does not execute."""
    return _code(script.read_text(encoding="utf-8", errors="replace"))


def _code(text: str) -> str:
    """``text`` without comments, single-quoted parts and quoted here-documents, continued lines joined."""
    kept: list[str] = []
    quote, before = "", "\n"
    for character in _VERBATIM.sub(r"\1", text).replace("\\\n", "  "):
        if quote == "'":
            quote = "" if character == "'" else quote
            kept.append(character if character == "\n" else " ")
        elif quote == "#":
            quote = "" if character == "\n" else quote
            kept.append(character if character == "\n" else "")
        elif before == "\\":
            kept.append(character)
            before = "" if character == "\\" else character
            continue
        elif character == "'" and not quote:
            quote = "'"
            kept.append(" ")
        elif character == "#" and not quote and before in " \t\n;":
            quote = "#"
        else:
            quote = ("" if quote else '"') if character == '"' else quote
            kept.append(character)
        before = character
    return "".join(kept)


def _unconditional(code: str) -> Iterator[str]:
    """The lines that always run: those outside ``if`` and ``case``, and the conditions themselves."""
    depth = 0
    for line in code.splitlines():
        statement = line.strip()
        if depth == 0:
            yield re.split(r"; then|\bin\b", statement)[0] if _OPENS.match(statement) else statement
        depth = max(0, depth + bool(_OPENS.match(statement)) - len(_CLOSES.findall(statement)))


# Sources a user's bash files in a clean shell with resource limits, and returns what they export and print.
#
# Configs are programs: they may source themselves, loop, or end the shell. Any such failure ends within seconds, as a
# one-sentence error.


SECONDS = 20.0
"""Time limit of sourcing."""

_LIMITS = "ulimit -t 10 -v 2097152 -s 4096 -f 8192 -c 0"  # CPU seconds; KiB of memory, stack and files; no core dumps
_ANOTHER_DAY = 'date() { command date --date=@86400 "$@"; }; '
_GO_ON = 'set() { builtin set "$@"; builtin set +e; }; '
_CLEAN = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "LC_ALL": "C"}
_MARK = "LORA_TUNE_SANDBOX"
_SHELL_VARIABLES = frozenset({"PATH", "HOME", "PWD", "OLDPWD", "SHLVL", "_", "LC_ALL", _MARK})
_TOO_LARGE = 126
"""Exit code of bash if the kernel refuses its ``exec``."""


@dataclass(frozen=True, slots=True)
class Sourced:
    """The result of sourcing files.

    values: exported variables. printed: lines of standard output and error. path: their PATH, which usually extends
    that of the clean shell (``on_path``); "" if unchanged.
    """

    values: dict[str, str]
    printed: tuple[str, ...]
    path: str = ""


def source_files(
    files: Sequence[Path], *, strict: bool = False, another_day: bool = False, kept: Mapping[str, str] | None = None
) -> Sourced:
    """Source ``files`` in order, each by its own path, in the last one's folder.

    strict: end at the first failing command (``set -e``); by default continue, as a user's own shell does.
    another_day: fake the date, which reveals what depends on it.
    kept: variables with fixed values, whatever the files set, which reveals what they compute from them.
    Raises SetupError with bash's message if they fail or exceed the limits.
    """
    last = files[-1]
    first = ("set -e; " if strict else "") + (_ANOTHER_DAY if another_day else "")
    if kept:  # each assignment to one fails, which must not end the shell
        first += _GO_ON + "readonly " + " ".join(f"{n}={shlex.quote(v)}" for n, v in kept.items()) + "; "
    program = f'{_LIMITS}; {first}for f in "$@"; do source "$f"; done >&2; exec /usr/bin/env -0'
    # A nested shell, so that a config that kills its parent process hits only that.
    between = ["/bin/bash", "--noprofile", "--norc", "-c", '"$@"; exit', "bash"]
    named = [as_typed(file, last.parent) for file in files]
    command = [*between, "/bin/bash", "--noprofile", "--norc", "-c", program, "bash", *named]
    mark = f"{_MARK}={uuid.uuid4().hex}"
    # Output goes to files, whose size is limited, so that endless output takes neither memory nor disk.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        shell = subprocess.Popen(
            command,
            cwd=last.parent,
            env={**_CLEAN, _MARK: mark.partition("=")[2]},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = shell.wait(SECONDS)
        except subprocess.TimeoutExpired as error:
            raise SetupError(f"{last} cannot be sourced: it does not end within {SECONDS:g} s") from error
        finally:
            _end(shell)
            _end_marked(mark)
        out.seek(0)
        err.seek(0)
        values, errors = _variables(out.read()), tuple(err.read().decode(errors="replace").splitlines())
    if code or not values:
        raise SetupError(f"{last} cannot be sourced: {_why(code, errors)}")
    path = "" if values.get("PATH") == _CLEAN["PATH"] else values.get("PATH", "")
    return Sourced({name: value for name, value in values.items() if name not in _SHELL_VARIABLES}, errors, path)


def on_path(path: str, current: str) -> str:
    """The PATH that files set in a shell with PATH ``current``, from the PATH that they set in a clean one."""
    before, clean, behind = path.partition(_CLEAN["PATH"])
    return f"{before}{current}{behind}" if clean else path


def as_typed(file: Path, folder: Path) -> str:
    """The file's path as a user types it in ``folder``.

    Configs derive paths from their own name, often unquoted, and the folder's full path may contain blanks.
    """
    return f"./{file.relative_to(folder)}" if file.is_relative_to(folder) else str(file)


def _end(shell: subprocess.Popen[bytes]) -> None:
    """Kill the shell and its process group."""
    send_signal(shell.pid, signal.SIGKILL, group=True)
    shell.wait()


def _end_marked(mark: str) -> None:
    """Kill processes that left the shell's process group and have ``mark`` in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                send_signal(int(process.name), signal.SIGKILL)
        except OSError:  # another user's process, or it has ended
            continue


def _variables(output: bytes) -> dict[str, str]:
    pairs = (item.partition("=") for item in output.decode(errors="replace").split("\0") if item)
    return {name: value for name, _, value in pairs}


def _why(code: int, errors: Sequence[str]) -> str:
    ended_by = -code if code < 0 else code - 128  # the nested shell reports 128 plus the signal
    if ended_by == signal.SIGSEGV:
        return "bash ran out of stack; does it source itself?"
    if ended_by > 0:
        return f"bash was ended by signal {ended_by}"
    if code == _TOO_LARGE:
        return "what it exports is too large for the environment of a process"
    lines = [line for line in errors if line.strip()]
    return "it ends the shell" if code == 0 else lines[-1] if lines else f"exit {code}"


# Checks ``#SBATCH`` lines of a batch script, and a site's options, for conflicts with a trial's job.
#
# A script is submitted unchanged, so its header applies unless the command line sets the same option.


_MAGIC = "#SBATCH"

_ONE_JOB = "a trial is one job, with one log"
_PROBLEMS = {
    "array": f"makes an array of jobs of each trial; {_ONE_JOB}",
    "clusters": "sends trials to a cluster where nobody looks for them",
    "hetjob": f"makes several jobs of each trial; {_ONE_JOB}",
    "error": "keeps what a trial says of its failure out of its log",
    "output": "sends a trial's log where nobody reads it",
    "hold": "holds every trial in the queue until somebody releases it",
    "requeue": "lets Slurm run a trial a second time into one log",
    "parsable": "keeps from sbatch's answer what tells the job's id",
    "quiet": "keeps from sbatch's answer what tells the job's id",
    "test-only": "submits nothing",
    "wait": "keeps sbatch, and with it the sweep, until the job has ended; nothing would be watched meanwhile",
}
"""Option -> its effect on any trial."""
_VARIABLES = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_CLUSTERS": "clusters",
    "SLURM_CLUSTERS": "clusters",
    "SBATCH_ERROR": "error",
    "SBATCH_EXPORT": "export",
    "SBATCH_WAIT": "wait",
}
"""Environment variables that sbatch reads, which override a header."""
_IGNORE_PBS = "ignore-pbs"
_OVERRULED = frozenset({"error", "output", "quiet", "requeue"})
"""Options that a header may have: our command line overrides them, and sbatch reads --quiet only there."""


_OTHERS = {
    "#PBS": ({"J": "array", "e": "error", "h": "hold", "q": "partition", "t": "array", "v": "export"}, "hIVz"),
    "#BSUB": ({"e": "error", "q": "partition"}, "x"),
}
"""Headers of other schedulers that sbatch honours: options that change a trial's job, and those without a value."""


def job_header(job: Job) -> list[SbatchOption]:
    """The options in the header of a job's batch script; none for a command in our own batch file."""
    return header_options(script_text(job, job.argv[0])) if job.script else []


def header_options(script: str) -> list[SbatchOption]:
    """The options in the text of a batch script; sbatch reads ``#SBATCH`` lines up to the first command.

    It also honours PBS and LSF options (``#PBS -J 0-2``) anywhere, unless ``--ignore-pbs`` is set.
    """
    tokens: list[str] = []
    for line in script.splitlines():
        if line.startswith(_MAGIC):
            tokens += _tokens(line.removeprefix(_MAGIC))
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    options = sbatch_options(tokens)
    ignored = any(option.name == _IGNORE_PBS for option in options)
    others = (
        []
        if ignored
        else [
            replace(option, text=f"{magic} {option.text}")
            for magic, known in _OTHERS.items()
            for line in script.splitlines()
            if line.startswith(magic)
            for option in sbatch_options(_tokens(line.removeprefix(magic)), *known)
        ]
    )
    return [option for option in options if option.name != _IGNORE_PBS] + others


def environment_options(variables: Mapping[str, str]) -> list[SbatchOption]:
    """The options that ``sbatch`` reads from a job's variables."""
    return [SbatchOption(name, variables[v], f"{v}={variables[v]}") for v, name in _VARIABLES.items() if v in variables]


def _tokens(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # an unclosed quote
        return text.split()


def refusals(
    header: Sequence[SbatchOption],
    site: Sequence[SbatchOption],
    *,
    script: str,
    needed: Collection[str],
    nodes: int,
    minutes: float = 0.0,
    environment: Sequence[SbatchOption] = (),
) -> list[str]:
    """Why no trial could run as its study requires, a sentence each.

    header, site: the options of the batch script and of ``site.sbatch_args``; the last one of a name counts. script:
    the script's name, "" for a command in our own batch file. needed: the variables that a trial's job must receive.
    nodes: of one job. minutes: time limit of a job, 0: none. environment: the options in the variables of its jobs.
    """
    without_pbs = any(option.name == _IGNORE_PBS for option in site)
    read = [option for option in header if not (without_pbs and option.text.startswith("#"))]
    effective = {o.name: (o, f"{script}: {o.text if o.text.startswith('#') else f'{_MAGIC} {o.text}'}") for o in read}
    effective |= {option.name: (option, f"[site.environment] {option.text}") for option in environment}
    effective |= {option.name: (option, f"site.sbatch_args: {option.text}") for option in site}
    sentences = []
    for name, (option, place) in effective.items():
        of_header = place.startswith(f"{script}: #")
        why = "" if of_header and name in _OVERRULED else _PROBLEMS.get(name, "")
        if name == "clusters" and place.startswith("site.sbatch_args"):
            why = _not_one_cluster(option.value)
        elif name == "export":
            why = _kept_away(option.value, needed)
        elif name in ("time", "time-min") and not (of_header and name == "time"):
            why = _shorter(option.value, minutes)
        elif name.startswith("ntasks") and not script:
            why = _several_tasks(name, option.value, nodes)
        if why:
            remedy = f"take it out of {f'a copy of {script}' if of_header else place.split()[0].rstrip(':')}"
            one = "" if _not_one_cluster(option.value) else f"--clusters={option.value}"
            instead = {"export": "--export=ALL", "clusters": one}.get(name, "")
            instead = "--ignore-pbs" if option.text.startswith("#") else instead
            other = f', or write sbatch_args = ["{instead}"] in [site]' if of_header and instead else ""
            sentences.append(f"{place} {why}; {remedy}{other}")
    return sentences


def _kept_away(value: str, needed: Collection[str]) -> str:
    """The effect of ``--export=VALUE`` on the variables ``needed``; "" if all arrive unchanged."""
    items = [item.partition("=") for item in value.split(",")]
    named = {name for name, equals, _ in items if not equals}
    everything = "ALL" in {name.upper() for name in named}
    fixed = sorted({name for name, equals, _ in items if equals} & set(needed))
    if fixed:
        return f"sets {', '.join(fixed)} for every trial, whatever is proposed; trials set it themselves"
    absent = [] if everything else sorted(set(needed) - named)
    shown = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
    return f"keeps {shown} from the job, so that trials would train with the script's own values" if absent else ""


def _not_one_cluster(value: str) -> str:
    """What is wrong with the site's cluster option; "" if it names one cluster, which is then used for every query."""
    one = re.fullmatch(r"[\w.-]+", value) is not None and value.lower() != "all"
    return "" if one else "leaves the choice of a cluster to sbatch, and a sweep asks one; name one"


def _shorter(limit: str, minutes: float) -> str:
    """How a job's time limit cuts a trial of so many minutes; "" if it does not."""
    allowed = minutes_of(limit)
    if allowed is None or allowed >= minutes:
        return ""
    return f"lets Slurm end a trial after {allowed:g} minutes, and budget.trial_minutes gives it {minutes:g}"


def _several_tasks(name: str, value: str, nodes: int) -> str:
    """The effect of so many tasks on a command that our batch file starts once per node; "" if there are no more."""
    allowed = nodes if name == "ntasks" else 1
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) <= allowed:
        return ""
    return f"starts the trial's command {value} times, and {allowed} is allowed; a command starts its ranks itself"
