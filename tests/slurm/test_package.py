"""From an empty folder to a tree that MLPerf's checkers accept, on real Slurm: one command after the sweep, killed on
the way."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_tune.mlperf.package import described_by_logs, template
from lora_tune.review.stopping import replicates
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StudyRecords
from tests.slurm.house import House
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

ANNOUNCED = {"submission_org": "stand-in", "submission_division": "closed", "submission_status": "onprem"}
SPACE = """[space]
LR = { type = "float", low = 3e-4, high = 6e-4, log = true }
[objective]
benchmark = "llama2_70b_lora"
ruleset = "5.1"
[search]"""


def described(file: Path) -> None:
    """A system description that somebody has filled in."""
    known = template(described_by_logs(ANNOUNCED))
    file.write_text(json.dumps({field: value or "1" for field, value in known.items()}))


def closed_study(home: House) -> None:
    """The closed division's schedule and target: of the study's text what says otherwise goes."""
    base = 'base = "config_DGXH100_1x8x4xtp4pp1cp1.sh"\n'
    text = home.study.read_text().replace("first_eval = 256\neval_every = 128\n", base)
    before, after = text.split("[space]")[0], text.split("[search]")[1]
    home.study.write_text(before + SPACE + after)


def race_of(home: House) -> StudyRecords | None:
    store = Store(sqlite_url(home.paths.database), read_only=True)
    try:
        return store.load(f"{home.name}.confirm")
    finally:
        store.close()


def _reached(moment: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    return moment() or process.poll() is not None


@pytest.mark.timeout(600)
def test_one_command_after_the_sweep_makes_a_tree_that_the_checkers_accept_though_it_is_killed_five_times(
    house: Callable[..., House], tmp_path: Path
) -> None:
    home = house(trials=2, environment={"STANDIN_ROUND": "v5.1", "NCCL_TEST": "0"})
    closed_study(home)
    assert home.finish(180) == 0, home.said
    system, out = tmp_path / "TEST.json", tmp_path / "submission"
    command = [sys.executable, "-m", "lora_tune.package", "--study", str(home.study), "--output", str(home.paths.root)]
    command += ["--system", str(system), "--out", str(out)]
    environment = {**os.environ, **home.cluster.environment, "LORA_TUNE_IMPLEMENTATION": ""}

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
        )

    asked = started()
    printed, _ = asked.communicate(timeout=120)
    assert (asked.returncode, "was missing, and is begun" in printed) == (2, True), printed
    assert race_of(home) is None, "nothing is run before the machine is described"
    described(system)

    def logged(words: str) -> int:
        logs = (home.paths.root / "confirm").rglob("job.log")
        return sum(log.read_text(errors="replace").count(words) for log in logs)

    moments: list[Callable[[], bool]] = [
        lambda: (race := race_of(home)) is not None and bool(race.attempts),
        lambda: logged('"run_start"') > 0,
        lambda: logged('"run_stop"') > 1,
        lambda: any((home.paths.root / "confirm").glob("*/result_9.txt")),
        out.exists,
    ]
    for number, moment in enumerate(moments):
        process = started()
        wait_for(functools.partial(_reached, moment, process), 240, f"moment {number}")
        assert process.poll() is None, (number, process.communicate()[0])
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = started()
    printed, _ = last.communicate(timeout=300)
    assert last.returncode == 0, printed
    assert "package_checker  accepts it" in printed
    assert "repo_checker     accepts it" in printed
    top = out / "stand-in"
    assert len(list((top / "results/TEST/llama2_70b_lora").glob("result_*.txt"))) == 10
    code = top / "benchmarks/llama2_70b_lora/implementations/implementation"
    assert list(code.glob(f"config_*_{home.name}-*.sh")), "the exported config"
    assert (code / "run.sub").is_file()
    race = race_of(home)
    assert race is not None
    (runs,) = replicates(race).values()
    assert len({run.seed for run in runs}) == len(runs) == 10, "no run was made twice"
    names = Counter(home.cluster.run("squeue", "-h", "-t", "all", "-o", "%j").split())
    jobs = {name: count for name, count in names.items() if name.startswith(f"{home.name}.confirm-")}
    assert set(jobs.values()) == {1}, jobs
