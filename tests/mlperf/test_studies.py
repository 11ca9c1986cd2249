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


@pytest.mark.parametrize(("study", "nodes"), [("llama31_405b", 64), ("llama31_405b", 32), ("h200", 2), ("h100", 2)])
def test_a_shipped_study_starts_from_its_published_point_on_another_number_of_nodes(
    study: str, nodes: int, tmp_path: Path
) -> None:
    """The batch of that point stays, and MINIBS follows: it was refused on any machine but the one it was run on."""
    text = (REPOSITORY / "studies" / f"{study}.toml").read_text(encoding="utf-8")
    place = str(REPOSITORY / "studies" / "sites")
    text = text.replace('profile = "sites', f'nodes = {nodes}\nprofile = "{place}')
    (tmp_path / "s.toml").write_text(text, encoding="utf-8")
    usual, moved = load_study(REPOSITORY / "studies" / f"{study}.toml"), load_study(tmp_path / "s.toml")
    batches = [
        [s.search_space.resolve({**s.search_space.corner(), **p})["GBS"] for p in s.search.enqueue]
        for s in (usual, moved)
    ]
    assert batches[0] == batches[1]
