"""What a sweep needs made before its first trial: once, recorded, taken up again, and said when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_tune.base.errors import SetupError, StudyError
from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import parse_study
from lora_tune.controller.runtime import Preparation, prepare
from lora_tune.launchers.local import LocalLauncher
from lora_tune.workloads import load
from lora_tune.workloads.base import Job, Proposal
from tests.waiting import wait_for

STUDY = """
[workload]
kind = "command"
argv = ["true", "{LR}"]
[workload.prepare]
argv = ["bash", "-c", "COMMAND"]
environment = { LENGTH = "{MAX_LENGTH}" }
[site]
data = "/shared/data"
[space]
LR = { type = "float", low = 1e-4, high = 1e-2 }
MAX_LENGTH = 512
[budget]
trials = 1
"""


class House:
    """A sweep folder, a command that prepares, and a local launcher."""

    def __init__(self, folder: Path, command: str) -> None:
        self.paths = SweepPaths(folder)
        self.said: list[str] = []
        self.study = parse_study(STUDY.replace('"COMMAND"', json.dumps(command)), Path("made.toml"))
        self.workload = load(self.study, "made.toml")

    def how(self) -> Preparation:
        preparation = self.workload.preparation  # type: ignore[attr-defined]
        return Preparation(
            make=preparation,
            launcher=LocalLauncher(),
            now=time.time,
            tick=lambda: time.sleep(0.05),
            echo=self.said.append,
        )

    def prepare(self) -> None:
        self.paths.root.mkdir(exist_ok=True)
        prepare(self.paths, self.how())

    @property
    def record(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.paths.prepared.read_text())
        return found


def test_it_runs_once_with_the_environment_of_the_trials(tmp_path: Path) -> None:
    made = tmp_path / "made"
    house = House(tmp_path / "sweep", f'echo "$LENGTH $MAX_LENGTH $DATADIR ${{LR-unset}}" >> {made}')
    house.prepare()
    house.prepare()
    assert made.read_text().splitlines() == ["512 512 /shared/data unset"]
    assert (house.record["state"], house.record["attempt"]) == ("done", 0)
    assert float(str(house.record["node_hours"])) >= 0
    assert [json.loads(x)["event"] for x in house.paths.driver_log.read_text().splitlines()] == ["prepared"]


def test_another_command_is_prepared_anew(tmp_path: Path) -> None:
    made = tmp_path / "made"
    House(tmp_path / "sweep", f"echo one >> {made}").prepare()
    House(tmp_path / "sweep", f"echo two >> {made}").prepare()
    assert made.read_text().split() == ["one", "two"]


def test_a_killed_driver_s_preparation_goes_on_and_is_taken_up(tmp_path: Path) -> None:
    made, go = tmp_path / "made", tmp_path / "go"
    command = f"echo begun >> {made}; until [ -e {go} ]; do sleep 0.05; done; echo ended >> {made}"
    program = (
        "import sys; from pathlib import Path; from tests.controller.test_preparation import House; "
        "House(Path(sys.argv[1]), sys.argv[2]).prepare()"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "sweep"), command],
        cwd=Path(__file__).parents[2],
        env=os.environ.copy(),
    )
    wait_for(made.exists, 30, "the preparation begins")
    driver.kill()
    driver.wait()
    go.touch()
    house = House(tmp_path / "sweep", command)
    house.prepare()
    assert made.read_text().split() == ["begun", "ended"], "it was neither lost nor started twice"
    assert house.record["state"] == "done"


def test_a_failed_one_starts_no_trial_and_says_why(tmp_path: Path) -> None:
    made = tmp_path / "made"
    house = House(tmp_path / "sweep", f"echo x >> {made}; echo 'preprocess.py: error: no such dataset' >&2; exit 2")
    with pytest.raises(SetupError, match=r"preparation failed, so no trial was started: preprocess\.py: error"):
        house.prepare()
    assert made.read_text().split() == ["x"], "a refused command line is not tried again"
    fixed = House(tmp_path / "sweep", f"echo x >> {made}")
    fixed.prepare()
    assert fixed.record["state"] == "done"


def test_what_the_machine_fails_is_tried_again(tmp_path: Path) -> None:
    once = tmp_path / "once"
    house = House(tmp_path / "sweep", f"if mkdir {once}; then echo 'Stale file handle'; exit 1; fi")
    house.prepare()
    assert house.record["attempt"] == 1
    assert any("again: " in line for line in house.said)


def test_it_cannot_depend_on_what_varies(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"workload\.prepare: \{LR\} is unknown; known are MAX_LENGTH, folder"):
        House(tmp_path, "echo {LR}")


def test_without_one_there_is_nothing_to_do(tmp_path: Path) -> None:
    text = STUDY[: STUDY.index("[workload.prepare]")] + STUDY[STUDY.index("[site]") :]
    workload = load(parse_study(text, Path("made.toml")), "made.toml")
    assert workload.preparation(tmp_path) is None  # type: ignore[attr-defined]
    job: Job = workload.job(Proposal(number=0, attempt=0, seed=1, parameters={"LR": 0.1}), tmp_path)
    assert job.argv == ("true", "0.1")
