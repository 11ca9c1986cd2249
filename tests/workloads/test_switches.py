"""Switches on an implementation's folder: the base's own values are levels, what nothing reads is left alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lora_tune.config.holding import with_extended_space
from lora_tune.config.parameters import CategoricalParameter
from lora_tune.config.study import Study
from lora_tune.search.recorded import fitting
from lora_tune.search.session import Session
from lora_tune.store.records import Trial
from lora_tune.workloads import load
from lora_tune.workloads.base import Proposal, Start
from lora_tune.workloads.base_config import parameters_at
from lora_tune.workloads.mlperf import MlperfWorkload, check

STANDIN = Path(__file__).resolve().parents[1] / "standin"
CONFIG = "config_DGXH100_1x8x4xtp4pp1cp1.sh"


def switch(*choices: Any, role: str = "switch") -> dict[str, Any]:
    return {"type": "categorical", "choices": choices, "role": role}


SPACE: dict[str, Any] = {
    "LR": {"type": "float", "low": 1e-4, "high": 1e-3, "log": True},
    "MAX_STEPS": {"type": "int", "low": 600, "high": 1000, "step": 50},
    "layout": {"type": "layout", "tp": [4, 8], "sp": [0, 1], "gbs": [8]},
    "NCCL_MIN_CTAS": switch(32, 16),
    "NCCL_NVLS_ENABLE": switch(1, 0),
    "NVTE_FP8_DPA_BWD": switch(1, 0, role="precision"),
    "NOBODY_READS_THIS": switch(0, 1),
}


@pytest.fixture
def workload(tmp_path: Path) -> MlperfWorkload:
    """Of a folder whose config states one switch as the study has it, one otherwise, and one not at all."""
    folder = Path(shutil.copytree(STANDIN, tmp_path / "tree"))
    with (folder / CONFIG).open("a") as file:
        file.write("export NCCL_NVLS_ENABLE=0\nexport NCCL_MIN_CTAS=24\n")
    study = Study.model_validate(
        {
            "name": "h100",
            "workload": {"kind": "mlperf", "implementation": str(folder), "base": CONFIG},
            "site": {
                "launcher": "slurm",
                "system": "DGXH100",
                "gpus_per_node": 8,
                "container": "c",
                "data": "/d",
                "model": "/m",
            },
            "space": SPACE,
            "objective": {"curves": "llama2_70b_lora", "target": 0.925},
            "search": {"probes": True},
            "budget": {"node_hours": 8, "trial_minutes": 50},
        }
    )
    found = load(study, "h100.toml")
    assert isinstance(found, MlperfWorkload)
    return found


def start_of(workload: MlperfWorkload) -> Start:
    found = workload.start()
    assert found is not None
    return found


def held(workload: MlperfWorkload) -> Study:
    return with_extended_space(workload.study, start_of(workload).tuned, workload.unread_switches())


def choices(study: Study, name: str) -> tuple[Any, ...]:
    parameter = study.search_space.parameters[name]
    assert isinstance(parameter, CategoricalParameter)
    return parameter.choices


def test_the_base_is_a_point_whatever_its_switches_are(workload: MlperfWorkload) -> None:
    tuned = start_of(workload).tuned
    assert tuned is not None
    assert {n: tuned[n] for n in SPACE if n not in ("LR", "MAX_STEPS", "layout")} == {
        "NCCL_MIN_CTAS": 24, "NCCL_NVLS_ENABLE": 0, "NVTE_FP8_DPA_BWD": 1, "NOBODY_READS_THIS": 0,
    }  # fmt: skip
    assert choices(held(workload), "NCCL_MIN_CTAS") == (24, 32, 16)
    assert choices(held(workload), "NCCL_NVLS_ENABLE") == (0, 1)
    assert held(workload).digest == workload.study.digest


def test_what_no_file_reads_is_named_and_not_swept(workload: MlperfWorkload) -> None:
    assert workload.unread_switches() == ("NOBODY_READS_THIS",)
    assert choices(held(workload), "NOBODY_READS_THIS") == (0,)
    assert any("reads NOBODY_READS_THIS: these are not swept" in sentence for sentence in check(workload))


def test_a_probe_changes_switches_and_exports_no_other(workload: MlperfWorkload, tmp_path: Path) -> None:
    study, start = held(workload), start_of(workload)
    session = Session(study, start=start)
    base, *probes = [session.ask() for _ in range(5)]
    assert not isinstance(base, str)
    assert base.base == CONFIG
    again = []
    for asked in probes:
        assert not isinstance(asked, str)
        assert asked.probe
        parameters = parameters_at(start, study.search_space, asked.tuned)
        proposal = Proposal(number=asked.number, attempt=0, seed=1, parameters=parameters, probe=True)
        exports = workload.exports(proposal)
        assert "NOBODY_READS_THIS" not in exports
        assert start.tuned is not None
        changed = {n for n in workload.study.search_space.switches() if asked.tuned[n] != start.tuned[n]}
        assert changed == {n for n in exports if n in SPACE and n not in ("LR", "MAX_STEPS")}
        again.append(not changed)
    assert again.count(True) == 1  # the base's own setting, for the scatter of probes


def test_records_of_a_narrowed_space_fit_the_study_as_its_file_has_it(workload: MlperfWorkload) -> None:
    asked = Session(held(workload)).ask()
    assert not isinstance(asked, str)
    tuned = {**asked.tuned, "NCCL_MIN_CTAS": 32}
    trial = Trial(number=0, seed=1, tuned=tuned, parameters=workload.study.search_space.resolve(tuned))
    assert fitting(workload.study)(trial)
