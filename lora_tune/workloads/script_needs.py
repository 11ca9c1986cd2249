"""Which variables a launch script needs from outside: those without which it ends at once.

A script under ``set -u`` ends at the first variable that nobody set; ``${NAME:?words}`` ends any script. Both are
found here by reading, before a job is submitted. Read are the script's own lines outside ``if`` and ``case`` (what is
within may never run), single quotes and comments (which bash does not expand), and the files beside it that it sources.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_tune.workloads.base import Job

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
"""Builtins that assign to variables that they are given by name."""
_NAME = re.compile(r"(?<![\w$-])[A-Za-z_]\w*")
_VERBATIM = re.compile(r"(<<-?\s*(['\"])(\w+)\2[^\n]*\n).*?^\s*\3\s*$", re.MULTILINE | re.DOTALL)
_STARTED = re.compile(r"(?<!bash )(?<!sh )(?<!source )(?<![\w/.])\./([\w.-]+\.sh)\b")
_OWN_PLACES = re.compile(r"^\s*export\s+(CONT|DATADIR|MODEL|LOGDIR)=(?!.*\$\{\1)", re.MULTILINE)
_SAVED_ENVIRONMENT = re.compile(
    r"(?<![\w./-])(?:export -p|declare -x|printenv|env)[ \t]*(?:\|[^\n>]*)?>>?[ \t]*([^\s;&|]+)"
)
_OWN_NODES = re.compile(r"^#SBATCH\s+(?:-w\s*|--nodelist[= ]\s*)(\S+)", re.MULTILINE)
_CUT = re.compile(
    r"(?:\b(?:cd|pushd|source|dirname|realpath|readlink)|(?:^|\s)\.)[ \t]+(?:-\w+[ \t]+)*"
    r"\$(?:\(|0\b|\{?(BASH_SOURCE|PWD|SLURM_SUBMIT_DIR|\w*(?:DIR|HERE|ROOT|PATH))\b)"
)
"""Where a path is used without quotes: bash cuts it at its blanks."""
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
"""Function of interactive shells -> how a script calls it, how it gets it for itself, and what to write."""
_LOGIN = re.compile(r"\A#!\S*bash[ \t]+(?:-\w*[li]\w*|--login)")
"""The first line of a script that bash runs as a login or interactive shell, which reads the profile."""

_GIVEN = frozenset({
    "HOME", "USER", "LOGNAME", "PATH", "PWD", "OLDPWD", "SHELL", "HOSTNAME", "RANDOM", "SECONDS", "UID", "EUID", "PPID",
    "LINENO", "IFS", "OPTARG", "OPTIND", "FUNCNAME", "EPOCHSECONDS", "PIPESTATUS", "REPLY",
})  # fmt: skip
_GIVEN_PREFIXES = ("SLURM", "BASH")


@dataclass(frozen=True, slots=True)
class Needed:
    """A variable that a script needs. line: as the script first expands it."""

    name: str
    line: str


def needed_variables(script: Path) -> tuple[Needed, ...]:
    """What ``script`` needs of its environment, each once, in its order. Shell's and Slurm's own are left out."""
    text = _with_sourced(script)
    assigned, strict = _assigned(_code(text)), _turned(text.partition("\n")[0].rstrip(), now=False)
    needed: dict[str, Needed] = {}
    for line in _unconditional(_code(text)):
        strict = _turned(line, now=strict)
        for match in _EXPANSION.finditer(line):
            name, operator = match[1] or match[2], match[4] or ""
            provided = name in _GIVEN or name.startswith(_GIVEN_PREFIXES)
            demanded = operator.endswith("?")
            if not provided and name not in assigned and (demanded or (strict and not operator)):
                needed.setdefault(name, Needed(name, line.strip()))
    return tuple(needed.values())


def _assigned(code: str) -> set[str]:
    """The variables to which the script itself gives a value, anywhere."""
    assigned = {name for line in code.splitlines() for m in _ASSIGNED.finditer(line) for name in m.groups()}
    return assigned | {name for names in _FILLED.findall(code) for name in _NAME.findall(names)}


def _turned(line: str, *, now: bool) -> bool:
    """Whether a variable that nobody set ends the script from this line on; now: whether it does before it."""
    for match in _SET.finditer(line):
        for sign in _NOUNSET.findall(match[1] or match[2]):
            now = sign == "-"
    return now


def script_doubts(script: Path, known: Collection[str]) -> list[str]:
    """Why a job of ``script`` would end at once, or ignore its trial, a sentence each. known: what its jobs are given.

    A file beside it that it starts as a program and that may not be executed counts as well.
    """
    doubts = [
        f"{script.name} needs {needed.name}, which nothing sets, and ends at `{needed.line[:120]}`; "
        f"set {needed.name} in [site.environment]"
        for needed in needed_variables(script)
        if needed.name not in known
    ]
    for config in sourced_configs(script):
        doubts.append(
            f"{script.name} sources {config} itself: what that sets, no trial can; remove the line from a copy of it"
        )
    code = code_of(script)
    for name in dict.fromkeys(_OWN_PLACES.findall(code)):
        doubts.append(
            f"{script.name} sets {name} itself, so the study's does not count; remove the line from a copy of it"
        )
    for file in dict.fromkeys(_SAVED_ENVIRONMENT.findall(code)):
        doubts.append(
            f"{script.name} saves every variable of its job to {file}, tokens and passwords among them; "
            "keep secrets out of [site.environment] and of the shell that starts the sweep"
        )
    for name in dict.fromkeys(_STARTED.findall(code)):
        if (script.parent / name).is_file() and not os.access(script.parent / name, os.X_OK):
            doubts.append(f"{script.name} starts ./{name}, which may not be executed; chmod +x {script.parent / name}")
    return doubts


def function_doubts(job: Job, functions: Collection[str]) -> list[str]:
    """Which shell functions a job's scripts call that no job has, a sentence each. functions: what jobs are given."""
    doubts = []
    for script, text in _scripts(job):
        code = _code(text)
        for name, (call, made, source) in _FUNCTIONS.items():
            defined = re.search(rf"\b{name}\s*\(\)", code) or made.search(text) or _LOGIN.search(text)
            if name not in functions and call.search(code) and not defined:
                doubts.append(
                    f"{script} calls `{name}`, a function of your interactive shell that a job does not have; "
                    f"write `{source}` before it"
                )
    return doubts


def environment_doubts(job: Job, known: Collection[str], shell: Collection[str]) -> list[str]:
    """Which variables a job's scripts need that nothing gives it, a sentence each.

    known: variables that its jobs have. shell: those of the shell that starts the sweep.
    """
    doubts = {}
    for script, _ in _scripts(job):
        file = (job.cwd or job.folder) / script
        for needed in needed_variables(file) if file.is_file() else ():
            if needed.name not in known:
                here = "this shell has and a job does not" if needed.name in shell else "nothing sets"
                doubts[needed.name] = (
                    f"{script} needs {needed.name}, which {here}, and ends at `{needed.line[:120]}`; "
                    f"set {needed.name} in [site.environment]"
                )
    return list(doubts.values())


def _scripts(job: Job) -> list[tuple[str, str]]:
    """The scripts that a job's command names, with their texts."""
    named = [word for word in job.argv if word.endswith((".sh", ".sub", ".sbatch", ".slurm", ".bash"))]
    named = [*named, *(job.argv[:1] if job.script and job.argv[0] not in named else ())]
    return [(word, text) for word in named if (text := script_text(job, word))]


def path_doubts(job: Job) -> list[str]:
    """Which paths of a job have blanks in them and are used without quotes by its script, a sentence each."""
    place = job.cwd or job.folder
    doubts: dict[str, str] = {}
    for script in (word for word in job.argv if word.endswith((".sh", ".sub"))):
        for line in _code(script_text(job, script)).splitlines():
            for match in _CUT.finditer(line):
                path = job.environment.get(match[1] or "", str(place))
                if re.search(r"\s", path):
                    cut = f"{script} uses it without quotes, where bash cuts it: `{' '.join(line.split())[:120]}`"
                    doubts.setdefault(path, f"{path} has a space in it, and {cut}; use a path without spaces")
    return list(doubts.values())


def script_text(job: Job, script: str) -> str:
    """The text of a script that the job's command names; "" where none can be read from here."""
    return job.files.get(script) or _text((job.cwd or job.folder) / script)


def _text(file: Path) -> str:
    """What stands in ``file``; nothing where it is none that can be read, such as a command that ends like a name."""
    try:
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError:
        return ""


def own_nodes(script: Path) -> str:
    """The nodes that ``script`` itself asks ``sbatch`` for by name, as it writes them; "" for none."""
    match = _OWN_NODES.search(script.read_text(encoding="utf-8", errors="replace"))
    return match[1] if match else ""


def sourced_configs(script: Path) -> tuple[str, ...]:
    """Config files that ``script`` sources itself: what they set, no trial can."""
    code = code_of(script)
    return tuple(dict.fromkeys(n for n in _SOURCES.findall(code) if re.match(r"config_.*\dx\d", n)))


def _with_sourced(script: Path) -> str:
    """The script, and behind it the files of its own folder that it sources by name."""
    text = script.read_text(encoding="utf-8", errors="replace")
    beside = [script.parent / name for name in dict.fromkeys(_SOURCES.findall(_code(text)))]
    return "\n".join([text, *(p.read_text(encoding="utf-8", errors="replace") for p in beside if p.is_file())])


def code_of(script: Path) -> str:
    """The script without comments and quoted parts, which bash does not run."""
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
    """The lines that run whatever is the case: those outside ``if`` and ``case``, and the conditions themselves."""
    depth = 0
    for line in code.splitlines():
        statement = line.strip()
        if depth == 0:
            yield re.split(r"; then|\bin\b", statement)[0] if _OPENS.match(statement) else statement
        depth = max(0, depth + bool(_OPENS.match(statement)) - len(_CLOSES.findall(statement)))
