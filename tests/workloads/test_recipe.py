"""Our own recipes as workloads: what is looked for before the first trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_tune.errors import SurroundingsError
from lora_tune.study import Study
from lora_tune.workloads import load
from lora_tune.workloads.base import Checks


def workload(**site: Any) -> Checks:
    study = Study.model_validate(
        {
            "name": "nemo",
            "workload": {"kind": "nemo"},
            "site": {"launcher": "slurm", "gpus_per_node": 1, **site},
            "space": {"LR": 4e-4, "layout": {"type": "layout", "tp": [1], "minibs": [4]}},
            "budget": {"trials": 1},
        }
    )
    found = load(study, "nemo.toml")
    assert isinstance(found, Checks)
    return found


def test_paths_that_only_the_nodes_may_see_are_doubts(tmp_path: Path) -> None:
    site = {"data": tmp_path, "model": "/nowhere/model", "container": "registry/image:1"}
    doubts = workload(**site, container_mounts=[f"{tmp_path}:/data", "/nowhere/cache:/cache"]).check()
    assert [doubt.split(" is not")[0] for doubt in doubts] == [
        "site.model=/nowhere/model",
        "site.container_mounts.1=/nowhere/cache",
    ]


def test_where_trials_run_here_what_is_missing_is_missing() -> None:
    with pytest.raises(SurroundingsError, match=r"site\.model=/nowhere/model is not there"):
        workload(launcher="local", model="/nowhere/model").check()
