"""The commands on the recipes' pages run, against the stand-ins' folders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.sweep import main
from tests.conftest import REPOSITORY

STANDINS = REPOSITORY / "tests" / "standins"
PAGES = {
    "p8000": "mlperf",
    "gb200": "mlperf",
    "llama31_405b": "mlperf",
    "peft_fsdp": "trainers",
    "torchrun_peft": "trainers",
}
"""The page that shows each recipe's dry run."""


@pytest.mark.parametrize("recipe", PAGES)
def test_the_dry_run_shows_legal_submissions(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs" / f"{PAGES[recipe]}.md").read_text(encoding="utf-8")
    assert f"python -m lora_tune.sweep --study {recipe} --dry-run\n" in page
    monkeypatch.setenv("LORA_TUNE_IMPLEMENTATION", str(STANDINS / recipe))
    for name in ("CONT", "DATADIR", "MODEL", "PREPROC_DATA", "LOAD_CHECKPOINTS_PATH", "TOKENIZER"):
        monkeypatch.setenv(name, str(tmp_path))
    study = REPOSITORY / "studies" / f"{recipe}.toml"
    done = CliRunner().invoke(main, ["--study", str(study), "--output", str(tmp_path / "sweep"), "--dry-run"])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if re.search(r"\bsbatch ", line)]
    prepared = recipe == "torchrun_peft"
    assert len(lines) == 2 + prepared, done.output
    if prepared:
        assert "# before the first trial, once\n" in done.output
        assert "--nodes=1" in lines[0]
        assert "preprocess.sub --max_length=4096" in lines[0]
    assert not (tmp_path / "sweep").exists(), "nothing is written"
