"""What more nodes bring, against the published runs of PEFT + FSDP on 8 to 512 H100."""

from __future__ import annotations

import pytest

from lora_tune.records import Sweep, Trial, Verdict
from lora_tune.scaling import scaling, table
from lora_tune.study import Study, load_study
from tests.conftest import REPOSITORY

PUBLISHED = {1: 1.247, 2: 3.664, 4: 9.432, 8: 21.905, 16: 47.342, 32: 95.339, 64: 154.931}


@pytest.fixture
def study() -> Study:
    return load_study(REPOSITORY / "studies" / "peft_fsdp.toml")


def sweep_of(study: Study, speeds: list[tuple[int, float, Verdict]]) -> Sweep:
    trials = {
        n: Trial(
            number=n,
            seed=n,
            tuned={},
            parameters={"NODES": nodes},
            verdict=verdict,
            facts={"samples_per_second": speed},
        )
        for n, (nodes, speed, verdict) in enumerate(speeds)
    }
    return Sweep(name=study.name, digest="", study_toml="", began_at=0.0, trials=trials)


def test_the_published_scaling_and_the_page_that_shows_it(study: Study) -> None:
    rows = scaling(study, sweep_of(study, [(n, s, Verdict.REACHED) for n, s in PUBLISHED.items()]))
    assert [row.gpus for row in rows] == [8, 16, 32, 64, 128, 256, 512]
    assert rows[0].efficiency == 1
    assert rows[-1].efficiency == pytest.approx(154.931 / 512 / (1.247 / 8))
    page = (REPOSITORY / "docs" / "peft_fsdp.md").read_text()
    for row in rows:
        assert f"| {row.nodes} | {row.gpus} | {row.samples_per_second} | {row.efficiency:.0%} |" in page


def test_the_best_of_each_node_count_measured_before_estimated(study: Study) -> None:
    rows = scaling(
        study, sweep_of(study, [(1, 2.0, Verdict.REACHED), (1, 3.0, Verdict.CAPPED), (2, 3.0, Verdict.CAPPED)])
    )
    assert [(r.nodes, r.samples_per_second, r.trial, r.stopped) for r in rows] == [
        (1, 2.0, 0, False),
        (2, 3.0, 2, True),
    ]
    assert "75%   2, stopped early" in table(rows)


def test_no_table_where_the_node_count_is_fixed() -> None:
    study = load_study(REPOSITORY / "studies" / "torchrun_peft.toml")
    assert scaling(study, sweep_of(study, [(1, 1.0, Verdict.REACHED)])) == []
    assert table([]) == ""
