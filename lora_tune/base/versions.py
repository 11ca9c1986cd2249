"""Releases of installed packages, and commits of source trees."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path


def installed(name: str) -> str:
    """The release of the distribution ``name``; "" where this environment does not have it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def commit_of(folder: Path) -> str:
    """The commit of the git tree that a folder lies in, with "+changes" where files of it differ; "" where there is
    none, or no git."""
    answers = []
    for question in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *question], capture_output=True, text=True, timeout=5, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        answers.append(done.stdout.strip())
    return answers[0] + ("+changes" if answers[1] else "")
