"""The studies of machines that are submitted: they load, are closed, and start from a published point."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tune.config.study import closed_violations, load_study
from lora_tune.workloads import load
from tests.conftest import REPOSITORY

STUDIES = sorted((REPOSITORY / "studies" / "mlperf").glob("*.toml"))


@pytest.mark.parametrize("file", STUDIES, ids=lambda p: p.stem)
def test_it_loads_keeps_the_rules_and_begins_where_somebody_ended(file: Path) -> None:
    study = load_study(file)
    load(study, file)
    assert study.division == "closed"
    assert study.benchmark is not None
    assert study.benchmark.metrics[0].target == study.objective.target
    assert [v.sentence for v in closed_violations(study)] == []
    assert study.search.enqueue
    space = study.search_space
    for point in study.search.enqueue:
        values = space.resolve({**space.corner(), **point})
        assert study.benchmark.reference(int(values["GBS"])) is not None
