"""An arm may be a commit: each attempt runs a worktree of its own, and a diff of nothing is found to be nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lora_tune import Sweep
from lora_tune.base.errors import InputError
from lora_tune.cli.mcp import AgentTools
from lora_tune.store.records import TrialState, Verdict
from tests.cli.test_ask_tell import STUDY

SCRIPT = """
import os, sys
rate, seed = float(sys.argv[1]), int(os.environ["SEED"])
print(f"step 10 loss {LOSS + rate / 100 + 0.01 * (seed % 5):.3f}")
"""


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A repository whose code lies below its root: the baseline, one that changes no file, and a better one."""
    code = tmp_path / "repository" / "code"
    code.mkdir(parents=True)
    git(code.parent, "init", "-q")
    known = {}
    for name, loss in (("baseline", 1.0), ("nothing", 1.0), ("better", 0.5)):
        (code / "train.py").write_text(SCRIPT.replace("LOSS", str(loss)))
        git(code.parent, "add", "-A")
        git(code.parent, "commit", "-q", "--allow-empty", "-m", name)
        known[name] = git(code.parent, "rev-parse", "HEAD")
    (tmp_path / "mine.toml").write_text(study(code))
    monkeypatch.chdir(tmp_path)
    return known


def study(code: Path, launcher: str = "outside") -> str:
    text = STUDY.replace('"outside"', f'"{launcher}"').replace("[space]", '[search]\nsampler = "requests"\n[space]')
    text = text.replace('"--lr={LR}", "--seed={SEED}"', '"{LR}"')
    log = '[workload.log]\nkind = "regex"\neval = "step (?P<step>[0-9]+) loss (?P<loss>[0-9.]+)"\n'
    return text.replace("[site]", f'cwd = "{code}"\n{log}[site]')


def test_commits_are_told_apart_by_their_files(commits: dict[str, str]) -> None:
    """Another commit with the same files is a further run of the same arm, a changed one an arm of its own."""
    tools = AgentTools()
    for number in range(15):
        name = ("baseline", "nothing", "better")[number % 3]
        offer = tools.propose({"LR": 0.02}, commit=commits[name])
        assert offer["parameters"]["COMMIT"] == commits[name]
        place = Path(offer["cwd"])
        assert place.name == "code"
        assert place.is_relative_to(Path("sweeps").absolute())
        assert git(place, "rev-parse", "HEAD") == commits[name]
        loss = (0.5 if name == "better" else 1.0) + 0.01 * (number % 5)
        Sweep("mine.toml").tell(offer["token"], log=f"step 10 loss {loss}\n")
    ledger = tools.verdict()
    assert ledger["ledger"].startswith("2 configurations, 1 run again, 1 better")
    assert tools.verdict(2)["state"] == "better"
    assert tools.verdict(1)["state"] == "baseline"
    assert tools.propose(again=2)["parameters"]["COMMIT"] == commits["better"]


def test_what_is_no_commit_and_what_cannot_run_one_is_refused_with_what_to_do(
    commits: dict[str, str], tmp_path: Path
) -> None:
    tools = AgentTools()
    for name in ("nosuch", "--help", "HEAD:code"):
        with pytest.raises(InputError, match="has none of that name; git log lists them"):
            tools.propose({"LR": 0.02}, commit=name)
    with pytest.raises(InputError, match="no values are given; name one that is tuned"):
        tools.propose(commit="HEAD")
    other = (tmp_path / "mine.toml").read_text().replace('"requests"', '"random"')
    (tmp_path / "other.toml").write_text(other)
    with pytest.raises(InputError, match='commits need sampler = "requests"'):
        tools.propose({"LR": 0.02}, commit="HEAD", study="other")


@pytest.mark.long
def test_the_sweep_runs_a_commit_in_its_worktree_and_exports_it(commits: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(study(tmp_path / "repository" / "code", "local"))
    tools = AgentTools()
    for name in ("baseline", "better"):
        tools.propose({"LR": 0.02}, commit=commits[name][:10])
    while tools.status(wait=60)["state"] == "running":
        pass
    first, second = Sweep("mine.toml").trials
    assert (first.state, first.verdict) == (TrialState.FINISHED, Verdict.REACHED)
    assert 1.0 <= first.metrics.objective < 1.1
    assert 0.5 <= second.metrics.objective < 0.6
    assert second.parameters["COMMIT"] == commits["better"]
    tools.export()
    (config,) = (tmp_path / "sweeps" / "mine" / "best").glob("config_*.sh")
    assert f"git switch --detach {commits['better']}" in config.read_text()
