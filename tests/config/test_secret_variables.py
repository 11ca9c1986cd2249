"""Secrets of a study reach its trials, and stand in no file, no command line and no copy of the study."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import RefusedError, StudyError
from lora_tune.base.paths import AttemptPaths, SweepPaths
from lora_tune.base.text import names_secret
from lora_tune.cli import commands
from lora_tune.config.study import parse_study, secrets_written_in, text_to_keep, with_secrets_of
from lora_tune.launchers.base import JobState
from lora_tune.launchers.files import SOURCING, file_in_memory
from lora_tune.launchers.local import LocalLauncher
from lora_tune.workloads import load
from lora_tune.workloads.base import Proposal
from tests.contracts.launcher import poll_until, ticket_of

VALUE = "tr0ub4dor&3 'and' \"more\" $HOME"
SHOW = """import hashlib, os
print([hashlib.md5(os.environ[name].encode()).hexdigest() for name in ("SITE_TOKEN", "WANDB_API_KEY")])"""
NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]))
STUDY = """
[workload]
kind = "command"
argv = ["python", "-c", {show}]
environment = {{ WANDB_API_KEY = {own}, PLAIN = "shown" }}
[site]
system = "TEST"
environment = {{ SITE_TOKEN = {site} }}
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


def shown(*values: str) -> str:
    """What a trial prints that got these values: nobody can read them from it."""
    return f"{[hashlib.md5(value.encode()).hexdigest() for value in values]}\n"


def text_with(site: str, own: str) -> str:
    return STUDY.format(show=json.dumps(SHOW), site=site, own=own)


@pytest.fixture
def references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A study that names its secrets by reference: one in the driver's environment, one in a file."""
    monkeypatch.setenv("MY_TOKEN", VALUE)
    (tmp_path / "key").write_text("from a file\n")
    return text_with('{ env = "MY_TOKEN" }', f'{{ file = "{tmp_path / "key"}" }}')


def everything_below(folder: Path) -> str:
    return "".join(
        f.read_bytes().decode(errors="replace") for f in folder.rglob("*") if f.is_file() and f.suffix != ".log"
    )


def test_a_reference_reaches_the_trial_and_is_written_nowhere(references: str, tmp_path: Path) -> None:
    study = tmp_path / "referring.toml"
    study.write_text(references)
    done = CliRunner().invoke(commands.sweep, ["--study", str(study), "--output", str(tmp_path / "sweep")])
    assert "warning" not in done.output
    paths = SweepPaths(tmp_path / "sweep")
    assert paths.attempt(0, 0).log.read_text().endswith(shown(VALUE, "from a file"))
    kept = everything_below(paths.root)
    assert VALUE not in kept
    assert "from a file" not in kept
    assert "shown" in kept, "what is no secret is kept as ever"


def test_a_secret_in_the_study_is_warned_of_and_kept_nowhere_else(tmp_path: Path) -> None:
    study = tmp_path / "telling.toml"
    study.write_text(text_with('"hunter2hunter2"', '{ value = "open sesame", secret = true }'))
    done = CliRunner().invoke(commands.sweep, ["--study", str(study), "--output", str(tmp_path / "sweep")])
    assert "warning: site.environment.SITE_TOKEN: a secret stands in the study file" in done.output
    assert "workload.environment.WANDB_API_KEY" in done.output
    paths = SweepPaths(tmp_path / "sweep")
    assert paths.attempt(0, 0).log.read_text().endswith(shown("hunter2hunter2", "open sesame"))
    kept = everything_below(paths.root)
    assert "hunter2hunter2" not in kept
    assert "open sesame" not in kept


def test_a_kept_text_gets_its_values_back_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "whole.toml"
    file.write_text(text_with('"hunter2hunter2"', '"sesame-sesame"'))
    study = parse_study(file.read_text(), file)
    kept = text_to_keep(file.read_text(), study, file)
    assert "hunter2" not in kept
    again = parse_study(kept, file)
    assert again.digest == study.digest, "a sweep goes on with either"
    restored = with_secrets_of(again, file)
    assert restored.site.secrets["SITE_TOKEN"].read("SITE_TOKEN") == "hunter2hunter2"
    assert (restored.workload.model_extra or {})["secrets"]["WANDB_API_KEY"]
    assert secrets_written_in(study) == ["workload.environment.WANDB_API_KEY", "site.environment.SITE_TOKEN"]


def test_a_secret_that_cannot_be_hidden_is_refused(tmp_path: Path) -> None:
    text = text_with('"hunter2\\u0068unter2"', '{ env = "X" }')
    with pytest.raises(StudyError, match="is a secret, spelled so that it cannot be hidden"):
        text_to_keep(text, parse_study(text, tmp_path / "s.toml"), tmp_path / "s.toml")


def test_a_secret_whose_source_is_gone_is_said_with_the_remedy(
    references: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = parse_study(references, tmp_path / "s.toml")
    job = load(study, "s.toml").job(Proposal(number=0, attempt=0, seed=1, parameters={"LR": 1e-3}), tmp_path / "job")
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(RefusedError, match="MY_TOKEN is not set where the sweep is driven; export MY_TOKEN there"):
        LocalLauncher().submit(job)


def test_an_exported_configuration_asks_for_what_it_does_not_hold(references: str, tmp_path: Path) -> None:
    study = parse_study(references, tmp_path / "s.toml")
    export = load(study, "s.toml").export(Proposal(number=0, attempt=0, seed=1, parameters={"LR": 1e-3}), ())
    (text,) = export.files.values()
    assert "SITE_TOKEN:?is a secret of the study" in text
    assert VALUE not in text


def test_a_value_under_a_suspicious_name_may_be_declared_no_secret(tmp_path: Path) -> None:
    text = text_with('{ value = "public", secret = false }', '""')
    study = parse_study(text, tmp_path / "s.toml")
    assert study.site.environment == {"SITE_TOKEN": "public"}
    assert secrets_written_in(study) == []


@given(st.dictionaries(NAMES, TEXTS, min_size=1, max_size=4))
def test_any_text_arrives_through_the_file_in_memory(values: dict[str, str]) -> None:
    names = {f"T_{name}": value for name, value in values.items()}
    with file_in_memory(names) as file:
        shell = ["env", "-i", f"PATH={os.environ['PATH']}", *SOURCING, file, "env", "-0"]
        found = subprocess.run(shell, capture_output=True, check=True).stdout.split(b"\0")
    assert {f"{name}={value}".encode() for name, value in names.items()} <= set(found)


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "MY_TOKEN_2"])
def test_names_of_secrets(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize("name", ["MAX_TOKENS", "TOKENIZER", "EOS_TOKEN", "HF_TOKEN_FILE", "LR", "SECRETARY"])
def test_names_of_none(name: str) -> None:
    assert not names_secret(name)


def test_the_local_launcher_leaves_its_own_environment_as_it_was(references: str, tmp_path: Path) -> None:
    study = parse_study(references, tmp_path / "s.toml")
    folder = tmp_path / "job"
    folder.mkdir()
    job = load(study, "s.toml").job(Proposal(number=0, attempt=0, seed=1, parameters={"LR": 1e-3}), folder)
    before, launcher = dict(os.environ), LocalLauncher()
    ticket = ticket_of(job, launcher.submit(job))
    assert dict(os.environ) == before
    poll_until(launcher, ticket, JobState.ENDED)
    assert AttemptPaths(folder).log.read_text() == shown(VALUE, "from a file")
