"""The example of own-scripts.md: its script and study, taken from the page, make a sweep; and they stay small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import block, section
from tests.recorded import recorded

EXAMPLE = section("own-scripts.md", "A whole example")


def test_script_and_study_are_under_sixty_lines_and_name_nothing_of_ours() -> None:
    script, study = block(EXAMPLE, "python"), block(EXAMPLE, "toml")
    assert len((script + study).splitlines()) < 60
    assert "lora_tune" not in script


@pytest.mark.long
def test_they_sweep_with_nothing_but_the_page(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block(EXAMPLE, "python"))
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "mine.toml").write_text(block(EXAMPLE, "toml"))
    python = f'"{sys.executable}"'
    study = (tmp_path / "studies" / "mine.toml").read_text().replace('"python"', python)
    (tmp_path / "studies" / "mine.toml").write_text(study)
    for line in (x for x in block(EXAMPLE, "bash").splitlines() if x.startswith("python -m ")):
        command = [sys.executable, *line.split()[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    sweep = recorded(tmp_path / "sweeps" / "mine" / "sweep.db", "mine")
    assert sweep.best() is not None, done.stdout
    for trial in sweep.trials.values():
        samples = [e.samples for e in sweep.last_evals(trial.number)]
        assert samples == [20 * int(trial.parameters["GBS"]) * (i + 1) for i in range(len(samples))]
    assert (tmp_path / "sweeps" / "mine" / "best").is_dir()
