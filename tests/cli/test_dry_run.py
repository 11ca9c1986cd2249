"""What ``sweep --dry-run`` shows of a study whose implementation is not on this machine yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lora_tune.sweep import main
from tests.conftest import REPOSITORY

CONFIG = "config_H100_optimal.sh"
SCRIPT = "run_h100_universal.sub"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without any implementation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LORA_TUNE_IMPLEMENTATION", raising=False)
    return tmp_path


def shown(study: str) -> Result:
    file = REPOSITORY / "studies" / f"{study}.toml"
    return CliRunner().invoke(main, ["--study", str(file), "--output", "sweep", "--dry-run"])


def test_the_study_can_be_judged_before_the_checkout() -> None:
    """It ended with the folder that is not there, and showed nothing."""
    lines = shown("h100").output
    for words in (
        "# space: LR within 0.00025 to 0.0008", "# start: no configuration of today, then 1 point of search.enqueue",
        "# budget: ", "node-hours", "# trial 0: LR=0.0004",
    ):  # fmt: skip
        assert words in lines, words
    assert shown("h100").exit_code == 3, "no trial would run, and it says so"


@pytest.mark.parametrize("study", ["h100", "llama31_405b"])
def test_the_folder_that_is_asked_for_is_called_as_the_study_s_own_benchmark(study: str) -> None:
    folder = {"h100": "llama2_70b_lora"}.get(study, study)
    assert f"/{folder} does not exist" in shown(study).output


def test_in_a_folder_with_configs_and_batch_scripts_of_its_own_these_are_named(elsewhere: Path) -> None:
    (elsewhere / CONFIG).write_text("export DGXNNODES=1\n")
    (elsewhere / SCRIPT).write_text("#!/bin/bash\nsrun ./run_and_time.sh\n")
    output = shown("h100").output
    assert f'workload.script = "{SCRIPT}" and workload.base = "{CONFIG}"' in output
