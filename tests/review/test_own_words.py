"""A sweep of somebody's own script speaks that script's words: no layout, no node-hours, no batch that nobody named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.text import duration
from lora_tune.cli.options import called
from lora_tune.confirm import main as confirm
from lora_tune.explain import main as explain
from lora_tune.report import main as report
from lora_tune.review.summary import interval_text
from lora_tune.status import main as status
from lora_tune.sweep import main as sweep
from lora_tune.verdict import main as verdict

SCRIPT = """
import sys
rate = float(sys.argv[2])
for epoch in range(1, 6):
    print(f"epoch {epoch} val_loss {1 / epoch + abs(rate - 0.003):.5f}", flush=True)
"""
STUDY = """
[workload]
kind = "command"
argv = ["python3", "train.py", "--lr", "{LR}"]
[workload.log]
kind = "regex"
eval = 'epoch (?P<epoch>\\d+) val_loss (?P<loss>[\\d.]+)'
[space]
LR = { type = "float", low = 1e-4, high = 1e-2, log = true }
[objective]
OBJECTIVE
[budget]
trials = 4
MORE
"""
FOREIGN = re.compile(r"(?i)node-hour|\bGBS\b|tp1pp1cp1|1x1x1|layout(?!\")")


def swept(folder: Path, objective: str, more: str = "") -> tuple[str, str, str]:
    """What the sweep and the status print, and the text of the report."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "mine.toml").write_text(STUDY.replace("OBJECTIVE", objective).replace("MORE", more))
    done = CliRunner().invoke(sweep, ["--study", "mine.toml"])
    assert done.exit_code in (0, 4), done.output
    report = (folder / "sweeps" / "mine" / "report.html").read_text()
    shown = re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", " ", report)
    return done.output, CliRunner().invoke(status, ["--study", "mine.toml"]).output, shown


@pytest.mark.long
@pytest.mark.parametrize("objective", ['metric = "loss"', "target = 0.3"])
def test_nothing_that_is_shown_speaks_of_layouts_or_node_hours(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed, stands, report = swept(tmp_path, objective)
    for text in (printed, stands, report):
        assert FOREIGN.findall(text) == []
    assert "machine time" in stands
    assert (tmp_path / "sweeps" / "mine" / "best" / "config_mine.sh").is_file()


@pytest.mark.long
@pytest.mark.parametrize("objective", ['metric = "loss"', "target = 0.3"])
def test_further_seeds_and_their_verdict_speak_of_machine_time(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    swept(tmp_path, objective)
    again = CliRunner().invoke(confirm, ["--study", "mine.toml", "--top", "2", "--seeds", "2"])
    texts = [
        again.output,
        *(CliRunner().invoke(c, ["--study", "mine.toml"]).output for c in (explain, report, verdict)),
    ]
    texts.append(CliRunner().invoke(sweep, ["--study", "mine.toml", "--output", "other", "--dry-run"]).output)
    for text in texts:
        assert FOREIGN.findall(text) == [], text
    assert "of machine time" in again.output


@pytest.mark.long
def test_a_budget_of_node_hours_is_shown_as_it_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, stands, report = swept(tmp_path, 'metric = "loss"', "node_hours = 2")
    assert "node-hours" in stands
    assert "Node-hours" in report


def test_an_interval_has_as_many_digits_as_tell_its_ends_apart() -> None:
    assert interval_text(0.512, 0.538, duration) == "0.512 s to 0.538 s"
    assert interval_text(61.0, 64.5, duration) == "61.0 s to 64.5 s"
    assert interval_text(0.5, 0.5, duration) == "0.5 s to 0.5 s"


@given(st.floats(1e-3, 1e4), st.floats(1e-3, 1e4))
def test_ends_that_differ_look_different(low: float, high: float) -> None:
    one, other = interval_text(low, high, duration).split(" to ")
    assert (one != other) or low == high


def test_commands_are_printed_as_the_one_that_runs_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/lora-tune", "sweep"])
    assert called("status") == "/opt/venv/bin/lora-tune status"
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setattr(sys, "argv", [str(Path(sys.executable).parent / "lora-tune"), "sweep"])
    assert called("status") == "lora-tune status"
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert called("status").endswith("-m lora_tune.status")
