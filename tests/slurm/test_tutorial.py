"""docs/tutorial.md as its reader walks it: every command as printed, one after the other, on the test cluster."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tune.base.paths import SweepPaths
from lora_tune.review.stopping import replicates
from lora_tune.store.records import Verdict
from tests.cluster import Cluster
from tests.conftest import REPOSITORY
from tests.recorded import recorded

pytestmark = pytest.mark.slurm

STANDIN = REPOSITORY / "tests" / "standin"
INSTALLS = ("python3 -m venv", "pip install")
"""Lines of the first section, after which everything is as here."""
SERVES = ("--watch", "lora_tune.dashboard")
"""What goes on until Ctrl-C."""
MACHINE = {"/data/": "$HOME/data/", "/var/tmp/$USER": "$HOME/local/$USER"}
"""Absolute places of the page, and where this machine has them."""
SECONDS = 400


def printed() -> list[str]:
    """The commands of the page, in order."""
    page = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.S) for line in block.splitlines()]
    return [line for line in lines if not line.startswith(INSTALLS)]


def home_of_the_reader(folder: Path) -> Path:
    """Implementation, container, data and model where the page has them."""
    home = folder / "home"
    tree = home / "training_results_v4.1/Supermicro/benchmarks/llama2_70b_lora/implementations/nemo"
    shutil.copytree(STANDIN, tree)
    (tree / "configs").mkdir()  # where v4.1 has them
    for config in tree.glob("config_*.sh"):
        config.rename(tree / "configs" / config.name)
    (home / "images").mkdir()
    (home / "images" / "llama2_70b_lora.sqsh").write_bytes(b"hsqs" + bytes(100))
    for name in ("gov_report", "model/context", "model/weights"):
        (home / "data" / name).mkdir(parents=True)
    for name in ("train.npy", "validation.npy"):
        (home / "data" / "gov_report" / name).write_bytes(b"\x93NUMPY" + bytes(100))
    (home / "data" / "model" / "context" / "model.yaml").write_text("x")
    with (home / "data" / "model" / "weights" / "shard").open("wb") as shard:
        shard.truncate(140 * 10**9)  # sparse: takes no room
    return home


def with_pyxis(folder: Path) -> Path:
    """A folder with an srun that says that it knows containers; the stand-in's run.sub names none."""
    (folder / "bin").mkdir()
    srun = folder / "bin" / "srun"
    srun.write_text(
        f'#!/bin/bash\n[ "$1" != --help ] || exec echo --container-image\nexec {shutil.which("srun")} "$@"\n'
    )
    srun.chmod(0o755)
    return srun.parent


def studies_of_the_reader(folder: Path) -> None:
    """The studies with what the page says to name in them, a small budget, and the stand-in's interpreter."""
    shutil.copytree(REPOSITORY / "studies", folder / "studies")
    study, profile = folder / "studies" / "h100.toml", folder / "studies" / "sites" / "my-h100.toml"
    shutil.copy(folder / "studies" / "sites" / "dgx-h100.toml", profile)
    site = profile.read_text().replace('mpi = "pmix"', 'mpi = "none"\ngres = "gpu:8"')
    profile.write_text(f'{site}environment = {{ STANDIN_PYTHON = "{sys.executable}" }}\n')
    text = study.read_text().replace("sites/dgx-h100.toml", "sites/my-h100.toml").replace("# base = ", "base = ")
    text = text.replace("node_hours = 24\n", "trials = 4\n").replace("stop_below", "# stop_below")
    study.write_text(text.replace("probes = true", "probes = false"))


def shown(line: str, folder: Path, environment: dict[str, str]) -> str:
    """What a line prints, ended by Ctrl-C where it goes on."""
    goes_on = any(word in line for word in SERVES)
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line}" if goes_on else line], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    first = ""
    if goes_on:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
    text = first + process.communicate(timeout=SECONDS)[0]
    assert process.returncode in ((0, 130) if goes_on else (0,)), f"{line}\n{text}"
    assert "Traceback" not in text, f"{line}\n{text}"
    return text


def test_every_command_of_the_tutorial_as_printed(slurm: Cluster, tmp_path: Path) -> None:
    home = home_of_the_reader(tmp_path)
    studies_of_the_reader(tmp_path)
    path = f"{with_pyxis(tmp_path)}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **slurm.environment, "HOME": str(home), "USER": "reader", "PATH": path}
    environment |= {"OMP_NUM_THREADS": "1", "STANDIN_SECONDS": "0.5"}
    outputs: dict[str, str] = {}
    for line in printed():
        for place, there in MACHINE.items():
            line = line.replace(place, there)
        if re.search(r"(?:^|&& )export ", line):
            read = subprocess.run(["bash", "-c", f"{line} && env -0"], env=environment, capture_output=True, text=True)
            assert read.returncode == 0, read.stderr
            environment = dict(pair.split("=", 1) for pair in read.stdout.split("\0") if pair)
            continue
        outputs[line] = shown(line, tmp_path, environment)
    assert len(outputs) == 13, list(outputs)
    assert "PROBLEM" not in outputs["python -m lora_tune.doctor --study h100"]
    sweep = recorded(home / "local" / "reader" / "h100.db", "h100")
    assert sum(t.verdict is Verdict.REACHED for t in sweep.trials.values()) >= 2
    race = recorded(home / "local" / "reader" / "h100.db", "h100.confirm")
    assert sum(len(runs) for runs in replicates(race).values()) >= 9, "three of each at least"
    paths = SweepPaths(tmp_path / "sweeps" / "h100")
    assert (paths.root / "report.html").is_file()
    assert list(paths.best.glob("config_*.sh"))
