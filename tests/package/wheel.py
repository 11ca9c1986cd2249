"""The wheel as a user gets it, built from a copy of this checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY


def build_wheel(folder: Path) -> Path:
    """Build the wheel below ``folder`` from what the checkout holds now and return its path.

    The source is copied: an older ``build/`` beside it would leak files that are gone since.
    """
    source = copied(folder)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("lora_tune-*.whl")
    return wheel


def copied(folder: Path) -> Path:
    """What the checkout holds of the distribution, in ``folder/source``."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for package in ("lora_tune", "lora_tune_recipes", "lora_tune_simulation"):
        shutil.copytree(REPOSITORY / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    return source
