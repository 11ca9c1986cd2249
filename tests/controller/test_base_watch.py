"""The machine's own config may be edited or removed while a sweep goes on: that is noticed, and what it was is kept."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lora_tune.base.errors import InputError, SetupError
from lora_tune.controller.changed_study import departed, edited, refuse_departed
from lora_tune.controller.submissions import UNKNOWN_SECONDS
from lora_tune.explain import main as explain
from lora_tune.export import main as export
from lora_tune.report import main as report
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.sweep import main as sweep
from lora_tune.workloads.base import Start
from tests.controller.test_driver import House, house
from tests.fakes import FakeClock, FakeCluster
from tests.recorded import recorded
from tests.workloads.test_base_config import CONFIG, STANDIN, made, start_of
from tests.workloads.test_docker import STANDINS, engine, study_text

BASE = "config_MI300X_1x8x1.sh"


@pytest.fixture
def run_sub_tree(tmp_path: Path) -> Path:
    """A copy of the stand-in whose config also sets a switch of its machine."""
    folder = Path(shutil.copytree(STANDIN, tmp_path / "tree"))
    with (folder / CONFIG).open("a") as file:
        file.write("export VBOOST_VALUE=1\n")
    return folder


def measured(values: Mapping[str, str]) -> StudyRecords:
    """A sweep of which trial 0 measured the config with these values."""
    trial = Trial(number=0, seed=1, tuned={}, parameters={}, metrics=TrialMetrics(base=CONFIG), base_values=values)
    return StudyRecords(name="x", digest="", study_toml="", began_at=0.0, trials={0: trial})


class TestWhatIsKept:
    def test_all_that_the_config_sets_without_secrets_and_without_what_is_another_each_time(
        self, run_sub_tree: Path
    ) -> None:
        with (run_sub_tree / CONFIG).open("a") as file:
            file.write("export LOGS=/raid/$(date +%y%m%d) STAMP=$(date +%s) MINE=/tmp/$$ HF_TOKEN=hf_secret123\n")
        kept = start_of(made(run_sub_tree)).values
        assert (kept["VBOOST_VALUE"], kept["LR"], kept["HF_TOKEN"]) == ("1", "0.0004", "***")
        assert {"LOGS", "STAMP", "MINE"}.isdisjoint(kept)

    def test_the_same_files_read_again_are_no_change(self, run_sub_tree: Path) -> None:
        with (run_sub_tree / CONFIG).open("a") as file:
            file.write("export STAMP=$(date +%s%N)$RANDOM\n")
        workload = made(run_sub_tree)
        assert departed(measured(start_of(workload).values), made(run_sub_tree)) == ""
        assert edited(workload) == ""


class TestAChange:
    def test_is_told_with_what_it_was_and_is(self, run_sub_tree: Path) -> None:
        workload = made(run_sub_tree)
        sweep_of_then = measured(start_of(workload).values)
        common = run_sub_tree / "config_common.sh"  # what the config sources counts as well
        common.write_text(common.read_text() + "export FP8=False\n")
        with (run_sub_tree / CONFIG).open("a") as file:
            file.write("export VBOOST_VALUE=2 MORE=1\n")
        for words in (edited(workload), departed(sweep_of_then, made(run_sub_tree))):
            assert words.startswith(f"{CONFIG} is not what this sweep began with: ")
            assert "VBOOST_VALUE: 1 -> 2" in words
            assert "+ MORE = 1" in words
        with pytest.raises(InputError, match="put it back, use another --output, or resume with --accept-changes"):
            refuse_departed(sweep_of_then, made(run_sub_tree))

    def test_a_config_that_is_gone_is_one(self, run_sub_tree: Path) -> None:
        workload = made(run_sub_tree)
        start_of(workload)
        (run_sub_tree / CONFIG).unlink()
        assert f"holds no {CONFIG}" in edited(workload)

    def test_records_of_an_earlier_release_know_nothing_of_it(self, run_sub_tree: Path) -> None:
        assert departed(measured({}), made(run_sub_tree)) == ""


class Edited:
    """A workload whose config somebody edits: ``values`` is what it sets now."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.values = inner, {"VBOOST_VALUE": "1"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self) -> Start:
        return Start(name=CONFIG, parameters={"LR": 1e-3, "STEPS": 100}, values={"VBOOST_VALUE": "1"})

    def start_values(self) -> Mapping[str, str]:
        return self.values


class TestWhileTheDriverRuns:
    def home(self, tmp_path: Path) -> tuple[House, Edited, Any]:
        home = house(tmp_path, FakeCluster(FakeClock()), trials=4, parallel=1)
        driver = home.driver()
        workload = Edited(driver._dependencies.workload)
        driver._submissions._dependencies = replace(driver._dependencies, workload=workload)
        return home, workload, driver

    def test_nothing_is_started_until_it_is_put_back(self, tmp_path: Path) -> None:
        home, workload, driver = self.home(tmp_path)
        driver.tick()
        begun = len(home.cluster.starts)
        workload.values = {"VBOOST_VALUE": "2"}
        for _ in range(100):
            driver.tick()
            home.clock.sleep(1.0)
        assert len(home.cluster.starts) == begun
        workload.values = {"VBOOST_VALUE": "1"}
        driver.run()
        assert len(home.cluster.starts) == 4
        assert "VBOOST_VALUE: 1 -> 2; nothing is started until it is put back" in home.paths.driver_log.read_text()

    def test_one_that_stays_ends_the_sweep_once_nothing_runs_and_it_goes_on_later(self, tmp_path: Path) -> None:
        home, workload, driver = self.home(tmp_path)
        driver.tick()
        workload.values = {"VBOOST_VALUE": "2"}
        began = home.clock.now()
        with pytest.raises(SetupError, match="VBOOST_VALUE: 1 -> 2; put it back"):
            driver.run()
        assert home.clock.now() - began >= UNKNOWN_SECONDS
        home.driver().run()
        assert len(home.sweep().trials) == len(home.cluster.starts) == 4


class TestAfterwards:
    """A sweep of a container tree on this machine, whose base config is then edited, and then removed."""

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(STANDINS / "docker", tmp_path / "tree"))

    @pytest.fixture
    def finished(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The folder of a sweep of two trials."""
        image = engine(tree, monkeypatch)
        (tree.parent / "docker.toml").write_text(study_text(tree, STANDIN_IMAGE=str(image)))
        done = self.told(tree, sweep, "--quiet")
        assert done.exit_code == 0, done.output
        return tree.parent / "sweep"

    def told(self, tree: Path, command: Any, *options: str) -> Result:
        words = ["--study", str(tree.parent / "docker.toml"), "--output", str(tree.parent / "sweep"), *options]
        return CliRunner().invoke(command, words)

    def test_what_it_was_is_on_record_and_every_view_goes_on_without_it(self, tree: Path, finished: Path) -> None:
        base = recorded(finished / "sweep.db", "docker").trials[0]
        assert base.base_values["NVTE_USE_HIPBLASLT"] == "1"
        own = tree / BASE
        exporting = ["--trial", "1", "--diff", str(own)]
        before = self.told(tree, export, *exporting).output
        assert "  LR: 0.0004 -> " in before
        as_in_study = self.told(tree, export, "--trial", "1", "--diff", BASE).output
        assert changes(as_in_study) == changes(before), "a name as workload.base has it, from anywhere"

        own.write_text(own.read_text() + "export NVTE_USE_HIPBLASLT=0\n")
        again = self.told(tree, sweep, "--quiet", "--trials", "3")
        assert again.exit_code == 2
        assert "NVTE_USE_HIPBLASLT: 1 -> 0; put it back" in again.stderr
        edited_since = self.told(tree, export, *exporting)
        assert changes(edited_since.stdout) == changes(before)
        assert "warning: config_MI300X_1x8x1.sh is not what this sweep began with" in edited_since.stderr
        checked = self.told(tree, export, "--check")
        assert checked.exit_code == 2
        assert "NVTE_USE_HIPBLASLT: 1 -> 0" in checked.stderr
        assert self.told(tree, sweep, "--quiet", "--trials", "3", "--accept-changes").exit_code == 0

        own.unlink()
        gone = self.told(tree, export, *exporting)
        assert gone.exit_code == 0, gone.output
        assert changes(gone.stdout) == changes(before)
        assert "trial 1 against config_MI300X_1x8x1.sh (trial 0)" in gone.stdout
        assert "holds no config_MI300X_1x8x1.sh" in gone.stderr
        for command in (report, explain):
            seen = self.told(tree, command)
            assert seen.exit_code == 0, seen.output


def changes(said: str) -> list[str]:
    """What an export's ``--diff`` printed, without what each change is worth, which every further trial teaches."""
    return [line.split("   saves ")[0] for line in said[said.index("\nagainst ") :].splitlines()[2:]]
