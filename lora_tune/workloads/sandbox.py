"""Somebody's bash files, sourced in a clean shell with bounds: what they export, and what they say.

Configs are programs: they may source themselves, loop, or end the shell. Whatever they do ends within seconds, as one
sentence.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_tune.base.errors import SetupError
from lora_tune.base.host import send_signal

SECONDS = 20.0
"""How long sourcing may take."""

_LIMITS = "ulimit -t 10 -v 2097152 -s 4096 -f 8192 -c 0"  # CPU seconds; KiB of memory, stack and files; no core dumps
_ANOTHER_DAY = 'date() { command date --date=@86400 "$@"; }; '
_GO_ON = 'set() { builtin set "$@"; builtin set +e; }; '
_CLEAN = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", "LC_ALL": "C"}
_MARK = "LORA_TUNE_SANDBOX"
_SHELLS_OWN = frozenset({"PATH", "HOME", "PWD", "OLDPWD", "SHLVL", "_", "LC_ALL", _MARK})
_TOO_LARGE = 126
"""Exit code of a bash whose ``exec`` the kernel refuses."""


@dataclass(frozen=True, slots=True)
class Sourced:
    """What sourcing files left behind.

    values: exported variables. said: standard output and error, by line. path: their PATH, which extends that of the
    clean shell most often (``on_path``); "" where they leave it alone.
    """

    values: dict[str, str]
    said: tuple[str, ...]
    path: str = ""


def source_files(
    files: Sequence[Path], *, strict: bool = False, another_day: bool = False, kept: Mapping[str, str] | None = None
) -> Sourced:
    """Source ``files`` one after another, each where it lies, in the last one's folder.

    strict: the first command that fails ends it (``set -e``); a user's own shell goes on, and so does this without it.
    another_day: ``date`` answers as on another day, which shows what depends on it.
    kept: variables that have these values whatever the files set, which shows what they compute from them.
    Raises SetupError with bash's own words when nothing comes back within the bounds.
    """
    last = files[-1]
    first = ("set -e; " if strict else "") + (_ANOTHER_DAY if another_day else "")
    if kept:  # each assignment fails, which may not end the shell
        first += _GO_ON + "readonly " + " ".join(f"{n}={shlex.quote(v)}" for n, v in kept.items()) + "; "
    program = f'{_LIMITS}; {first}for f in "$@"; do source "$f"; done >&2; exec /usr/bin/env -0'
    # Between: what a config does to its parent process it does to a shell that is there for nothing else.
    between = ["/bin/bash", "--noprofile", "--norc", "-c", '"$@"; exit', "bash"]
    named = [as_typed(file, last.parent) for file in files]
    command = [*between, "/bin/bash", "--noprofile", "--norc", "-c", program, "bash", *named]
    mark = f"{_MARK}={uuid.uuid4().hex}"
    # Into files: their size has a limit, so that what prints without end takes neither memory nor disk.
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
    return Sourced({name: value for name, value in values.items() if name not in _SHELLS_OWN}, errors, path)


def on_path(path: str, current: str) -> str:
    """The PATH that files leave behind in a shell with PATH ``current``, by what they left in a clean one."""
    before, clean, behind = path.partition(_CLEAN["PATH"])
    return f"{before}{current}{behind}" if clean else path


def as_typed(file: Path, folder: Path) -> str:
    """The file as its user names it in ``folder``.

    Configs take what lies beside them from their own name, often without quotes: the folder's own name may have spaces.
    """
    return f"./{file.relative_to(folder)}" if file.is_relative_to(folder) else str(file)


def _end(shell: subprocess.Popen[bytes]) -> None:
    """End the shell and what it has started."""
    send_signal(shell.pid, signal.SIGKILL, group=True)
    shell.wait()


def _end_marked(mark: str) -> None:
    """End what has left the shell's process group and carries ``mark`` in its environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                send_signal(int(process.name), signal.SIGKILL)
        except OSError:  # somebody else's, or it has ended
            continue


def _variables(output: bytes) -> dict[str, str]:
    pairs = (item.partition("=") for item in output.decode(errors="replace").split("\0") if item)
    return {name: value for name, _, value in pairs}


def _why(code: int, errors: Sequence[str]) -> str:
    ended_by = -code if code < 0 else code - 128  # 128 and the signal, where the shell between reports it
    if ended_by == signal.SIGSEGV:
        return "bash ran out of stack; does it source itself?"
    if ended_by > 0:
        return f"bash was ended by signal {ended_by}"
    if code == _TOO_LARGE:
        return "what it exports is too large for the environment of a process"
    lines = [line for line in errors if line.strip()]
    return "it ends the shell" if code == 0 else lines[-1] if lines else f"exit {code}"
