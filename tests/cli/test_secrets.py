"""Tokens and passwords of a study, and those that its trials print, through a real sweep and what shows it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.__main__ import main as lora_tune
from lora_tune.base.paths import SweepPaths
from lora_tune.cli import commands

TOKEN, KEY, PASSWORD = "hf_abcdefghijklmnopqrstuvwxyz012345", "0123456789abcdef0123", "hunter2isnotenough"
SECRETS = (TOKEN, KEY, PASSWORD)
SCRIPT = f"""set -x
WANDB_API_KEY=$WANDB_API_KEY
echo RuntimeError: cannot fetch https://me:{PASSWORD}@host with $HF_TOKEN
exit 1
"""
STUDY = f"""
description = "trials that print what they should not"
[workload]
kind = "command"
argv = ["bash", "-c", {json.dumps(SCRIPT)}]
environment = {{ WANDB_API_KEY = "{KEY}" }}
[site]
system = "TEST"
environment = {{ HF_TOKEN = "{TOKEN}" }}
[space]
LR = {{ type = "float", low = 1e-4, high = 1e-2, log = true }}
[objective]
target = 0.5
[search]
sampler = "random"
[budget]
trials = 1
attempts = 1
"""
NEEDED = {"study.toml", "command.json", "job.log"}
"""What a trial is started from, and its own output: the user's, and read by nobody else but through redaction."""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    study = tmp_path / "talkative.toml"
    study.write_text(STUDY)
    return ["--study", str(study), "--output", str(tmp_path / "sweep")]


def hidden(shown: str) -> bool:
    return not any(secret in shown for secret in SECRETS)


def test_a_dry_run_can_be_shown_to_others(options: list[str]) -> None:
    shown = CliRunner().invoke(commands.sweep, [*options, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "HF_TOKEN=*** " in shown.output
    assert "WANDB_API_KEY=*** " in shown.output
    assert hidden(shown.output)


def test_nothing_that_is_stored_or_shown_of_a_sweep_holds_a_secret(options: list[str], tmp_path: Path) -> None:
    said = CliRunner().invoke(commands.sweep, options)
    assert said.exit_code == 4, said.output
    paths = SweepPaths(tmp_path / "sweep")
    log = paths.attempt(0, 0).log.read_text()
    assert all(secret in log for secret in SECRETS), "the trial did print them"
    shown = said.output
    for name, further in (("status", ["--all"]), ("status", ["--json"]), ("report", []), ("explain", ["--trial", "0"])):
        done = CliRunner().invoke(lora_tune, [name, *options, *further])
        assert done.exit_code in (0, 4), done.output
        shown += done.output
    assert "RuntimeError: cannot fetch" in shown
    assert hidden(shown)
    files = [file for file in paths.root.rglob("*") if file.is_file() and file.name not in NEEDED]
    telling = {file.name for file in files if not hidden(file.read_bytes().decode(errors="replace"))}
    assert {name.removesuffix("-wal") for name in telling} == {"sweep.db"}, (
        "which holds the study as its user wrote it, to go on with it"
    )
    with sqlite3.connect(paths.database) as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        rows = {name: repr(database.execute(f'select * from "{name}"').fetchall()) for name in tables}
    assert [name for name, content in rows.items() if not hidden(content)] == ["lora_tune_sweep"]
