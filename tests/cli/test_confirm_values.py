"""``confirm`` where trials are compared by a metric's value: either direction, and what the pages then say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lora_tune.cli import commands
from tests.search.objectives.test_objectives import HEAD

BEST_ACCURACY = 'metric = "val_acc"\ndirection = "maximize"'
LAST_LOSS = 'metric = "eval_loss"\nscore = "final_value"'


def toy_study(objective: str, *options: str) -> str:
    """The toy's study with more of its options."""
    rate = '"--lr={LR}"'
    return HEAD.replace(rate, ", ".join([rate, *map(json.dumps, options)])) + f"[objective]\n{objective}\n"


def confirmed(folder: Path, objective: str, noise: float, seeds: int = 4) -> tuple[list[str], Result]:
    """A sweep of the toy and its race of two; returns the options that name it, and what confirm said."""
    file = folder / "toy.toml"
    file.write_text(toy_study(objective, f"--noise={noise}"))
    options = ["--study", str(file), "--output", str(folder / "out")]
    swept = CliRunner().invoke(commands.sweep, [*options, "--parallel", "3", "--quiet"])
    assert swept.exit_code == 0, swept.output
    more = ["--top", "2", "--seeds", str(seeds), "--parallel", "4"]
    return options, CliRunner().invoke(commands.confirm, [*options, *more])


def test_the_higher_accuracy_wins_and_every_page_says_its_mean(tmp_path: Path) -> None:
    options, said = confirmed(tmp_path, BEST_ACCURACY, 0.002)
    assert said.exit_code == 0, said.output
    assert re.search(r"trial 1 is better than trial 2 by 0\.\d+ with 95% confidence, after \d runs", said.output)
    assert "MLPerf" not in said.output
    assert "score  " not in said.output
    told = json.loads((tmp_path / "out" / "confirm" / "confirmation.json").read_text())
    (first, second) = told["places"]
    assert (first["trial"], second["trial"], told["scored"]) == (1, 2, None)
    assert first["low"] < first["mean"] < first["high"]
    assert first["mean"] == pytest.approx(0.8835, abs=0.01)
    standing = CliRunner().invoke(commands.status, options).output
    assert f"chosen: mean {first['mean']:.5g}" in " ".join(standing.split())
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Confirmed with more seeds" in page
    assert f"{first['mean']:.5g}</td>" in page
    assert "Measured no value</th>" in page
    assert CliRunner().invoke(commands.report, options).exit_code == 0
    exported = CliRunner().invoke(commands.export, options)
    written = "".join(path.read_text() for path in (tmp_path / "out" / "best").glob("*.sh"))
    assert exported.exit_code == 0
    assert f"mean {first['mean']:.5g}, 90% interval" in written


def test_a_script_that_ignores_its_seed_is_told_so(tmp_path: Path) -> None:
    _, said = confirmed(tmp_path, LAST_LOSS, 0.0, seeds=2)
    assert said.exit_code == 0, said.output
    assert "trial 2 is better than trial 1" in said.output or "trial 1 is better than trial 2" in said.output
    assert re.search(r"each run measured 0\.\d+: does the script use its seed, the variable SEED\?", said.output)


def test_one_run_of_each_says_nothing_of_how_values_differ(tmp_path: Path) -> None:
    file = tmp_path / "toy.toml"
    file.write_text(toy_study(LAST_LOSS))
    where = ["--study", str(file), "--output", str(tmp_path / "out")]
    assert CliRunner().invoke(commands.sweep, [*where, "--trials", "1", "--quiet"]).exit_code == 0
    said = CliRunner().invoke(commands.confirm, [*where, "--seeds", "1"])
    assert said.exit_code == 2
    assert "give 2 or more" in said.output
