"""The documentation runs: every command of the pages is executed, and what a page links to is there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lora_tune.config.study import load_study, parse_study
from lora_tune.store.records import Verdict
from tests.builders import stored, sweep_of
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = [
    DOCS / name for name in ("tutorial.md", "review.md", "study-file.md", "mlperf.md", "clusters.md", "service.md")
]
STUDY_PAGES = [*PAGES, DOCS / "own-scripts.md", DOCS / "trainers.md"]
STANDIN = REPOSITORY / "tests" / "standin"

SERVERS = ("lora_tune.dashboard",)
"""Commands that go on until Ctrl-C."""

ELSEWHERE = {
    "python -m lora_tune.sweep --study h100": "tests/slurm/test_tutorial.py walks this page on a Slurm cluster",
    "python -m lora_tune.confirm --study h100": "so does this",
}
"""Commands that other tests run, since they need more than a folder."""

MAY_FAIL = {"lora_tune.doctor": 3}
"""On a machine without Slurm the doctor finds problems, which is its work."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith("python -m lora_tune.")))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as after the two sweeps that the pages speak of."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(REPOSITORY / "studies", folder / "studies")
    implementation = Path(shutil.copytree(STANDIN, folder / "implementation"))
    (implementation / "configs").mkdir()  # where v4.1 has them
    for config in implementation.glob("config_*.sh"):
        config.rename(implementation / "configs" / config.name)
    (folder / "config_of_today.sh").write_text("export LR=0.0004\nexport MAX_STEPS=800\n")
    for name in ("tiny", "h100"):
        file = folder / "studies" / f"{name}.toml"
        study = load_study(file)
        text = file.read_text(encoding="utf-8")
        sweeps = (sweep_of(study, trials=30, text=text, seed=seed) for seed in range(50))
        sweep = next(s for s in sweeps if s.trials[2].verdict is Verdict.REACHED)  # the pages export trial 2
        stored(folder / "sweeps" / name, sweep, study)
    return folder


def environment(place: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    data = {"CONT": "image.sqsh", "DATADIR": str(place), "MODEL": str(place)}
    return {**os.environ, "PATH": path, "LORA_TUNE_IMPLEMENTATION": str(place / "implementation"), **data}


@pytest.mark.parametrize("line", commands())
def test_a_documented_command_runs(line: str, place: Path) -> None:
    if line in ELSEWHERE:
        assert (REPOSITORY / "tests" / "slurm").is_dir(), ELSEWHERE[line]
        return
    if any(name in line for name in SERVERS):
        _starts_and_ends(line, place)
        return
    done = subprocess.run(
        ["bash", "-c", line], cwd=place, env=environment(place), capture_output=True, text=True, timeout=120
    )
    allowed = {0, *(code for name, code in MAY_FAIL.items() if name in line)}
    assert done.returncode in allowed, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout


def _starts_and_ends(line: str, place: Path) -> None:
    line = line if "--port" not in line else re.sub(r"--port \d+", "--port 0", line)
    line = f"exec {line}" if "--port" in line else f"exec {line} --port 0"
    server = subprocess.Popen(
        ["bash", "-c", line], cwd=place, env=environment(place), stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert "http://127.0.0.1:" in server.stdout.readline()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0


def test_every_study_on_the_pages_loads() -> None:
    found = 0
    for page in STUDY_PAGES:
        for block in blocks(page, "toml"):
            table = tomllib.loads(block)
            if "space" in table:
                parse_study(block, REPOSITORY / "studies" / "documented.toml")
                found += 1
    assert found


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_no_page_holds_both_sides_of_a_merge() -> None:
    pages = [*DOCS.rglob("*.md"), *REPOSITORY.glob("*.md")]
    assert [page for page in pages if re.search(r"(?m)^(?:<{7} |>{7} )", page.read_text(encoding="utf-8"))] == []
