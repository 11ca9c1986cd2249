"""The shipped llama2_70b_lora studies in a folder of v6.0's form: what they set is read there."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tune.config.study import load_study
from lora_tune.workloads import load
from lora_tune.workloads.base import Proposal
from lora_tune.workloads.mlperf import MlperfWorkload
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "tests" / "standins" / "v60"
STUDIES = ("b300_lora_fp4", "b300_lora_fp8", "gb300_lora_fp4", "gb300_lora_fp8", "h200_lora_fp8")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_TUNE_IMPLEMENTATION", str(FOLDER))
    for name in ("CONT", "DATADIR", "MODEL"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.mark.parametrize("name", STUDIES)
def test_its_first_point_is_set_under_names_that_the_folder_reads(name: str, tmp_path: Path) -> None:
    file = REPOSITORY / "studies" / "mlperf" / f"{name}.toml"
    study = load_study(file)
    workload = load(study, str(file))
    assert isinstance(workload, MlperfWorkload)
    point = {**study.search_space.corner(), **study.search.enqueue[0]}
    proposal = Proposal(number=3, attempt=0, seed=11, parameters=study.search_space.resolve(point))
    exports = workload.exports(proposal)
    assert exports["LR"] == study.search.enqueue[0]["LR"]
    assert exports["VAL_CHECK_INTERVAL"] == 384
    assert all(workload.implementation.reads_name(knob) for knob in study.space if knob != "layout")
    job = workload.job(proposal, tmp_path / "attempt-0")
    sourced = job.files[workload.file_name(proposal)]
    assert ("source ./config_common_fp4.sh" in sourced) is name.endswith("fp4")
