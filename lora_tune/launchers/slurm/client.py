"""Slurm's commands as questions: bounded in time, and without what would change their answers."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from lora_tune.base.errors import LauncherError
from lora_tune.base.host import send_signal

ANSWER_SECONDS = 30.0
"""How long a Slurm command may take; with the controller away the client itself gives up after about 9 s."""


def ask(*command: str) -> str:
    """The standard output of a Slurm command. Raises LauncherError when it is missing, refuses or does not answer."""
    done = run_bounded(command, ANSWER_SECONDS, clean_environment(), name=command[0])
    if done.returncode:
        raise LauncherError(f"{command[0]} failed: {_last_line(done.stderr) or f'exit {done.returncode}'}")
    return done.stdout


def run_bounded(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None, *, name: str
) -> subprocess.CompletedProcess[str]:
    """A command's answer. Raises LauncherError when it is missing, or takes longer: it is ended with its children.

    A site may put wrappers in the place of Slurm's commands, and those have children. So is a command that another
    thread waits for when this program ends. name: for the message.
    """
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise LauncherError(f"{name} is not on PATH; run this where Slurm's commands are") from error
    with process:
        _running.add(process)
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise LauncherError(f"{name} did not answer in {seconds:g} s; the jobs go on") from error
        finally:
            _running.discard(process)
            _end(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


_running: set[subprocess.Popen[str]] = set()


def _end(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        # A session of its own, and not reaped yet: the number is still its.
        send_signal(process.pid, signal.SIGKILL, group=True)


@atexit.register
def _end_all() -> None:
    for process in tuple(_running):
        _end(process)


def clean_environment() -> dict[str, str]:
    """This process's environment without what would change a command's answer; times as epoch seconds."""
    meddling = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
    kept = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith(meddling)}
    return {**kept, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}


def _last_line(text: str) -> str:
    """What a command said last, without the hint at its own help."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line and not line.startswith('Try "')), "")
