"""What Slurm's commands answer at strange sites, by commands of the test's own; nothing here needs Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lora_tune.base.errors import SetupError
from lora_tune.config.tables import Site
from lora_tune.launchers.slurm.launcher import COMMANDS, SlurmLauncher
from lora_tune.launchers.slurm.submission import submitted_id


def answers(folder: Path, monkeypatch: pytest.MonkeyPatch, programs: Mapping[str, str]) -> None:
    """Slurm's commands from here on: shell programs, by name; the others answer nothing."""
    for command in COMMANDS:
        (folder / command).write_text(f"#!/bin/sh\n{programs.get(command, '')}\n")
        (folder / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


HIDDEN = """case "$*" in
*--all*%P) printf '%s\\n' 'batch*' owner;;
*%P) echo 'batch*';;
esac"""


def test_a_hidden_partition_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, {"sinfo": HIDDEN})
    SlurmLauncher(Site(launcher="slurm", partition="owner"))
    with pytest.raises(SetupError, match="no partition nowhere; it has batch, owner"):
        SlurmLauncher(Site(launcher="slurm", partition="nowhere"))


@pytest.mark.parametrize(
    ("answer", "job_id"),
    [
        ("Submitted batch job 19\n", "19"),
        ("Welcome. Your last job 17 ended well\nSubmitted batch job 19\n", "19"),
        ("Submitted batch job 17 was yesterday's\nSubmitted batch job 19\n", "19"),
        ("Submitted batch job 19\nYour job 17 ended well\n", "19"),
        ("Submitted batch job 19 on cluster b\n", "19"),
        ("a filter submitted batch job 17\n", ""),
    ],
)
def test_the_id_of_a_job_stands_in_the_last_line_of_sbatch_itself(answer: str, job_id: str) -> None:
    assert submitted_id(answer) == job_id
