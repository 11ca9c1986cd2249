"""Slurm's commands as questions: bounded in time, and without what would change their answers."""

from __future__ import annotations

import os
import subprocess

from lora_tune.base.errors import LauncherError

ANSWER_SECONDS = 30.0
"""How long a Slurm command may take; with the controller away the client itself gives up after about 9 s."""


def ask(*command: str) -> str:
    """The standard output of a Slurm command. Raises LauncherError when it is missing, refuses or does not answer."""
    try:
        done = subprocess.run(
            command, env=clean_environment(), capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS
        )
    except FileNotFoundError as error:
        raise LauncherError(f"{command[0]} is not on PATH; run this where Slurm's commands are") from error
    except subprocess.TimeoutExpired as error:
        raise LauncherError(f"{command[0]} did not answer in {ANSWER_SECONDS:g} s; the jobs go on") from error
    if done.returncode:
        raise LauncherError(f"{command[0]} failed: {_last_line(done.stderr) or f'exit {done.returncode}'}")
    return done.stdout


def clean_environment() -> dict[str, str]:
    """This process's environment without what would change a command's answer; times as epoch seconds."""
    meddling = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
    kept = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith(meddling)}
    return {**kept, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}


def _last_line(text: str) -> str:
    """What a command said last, without the hint at its own help."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line and not line.startswith('Try "')), "")
