"""What more nodes bring, against the published runs of PEFT + FSDP on 8 to 512 H100."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from lora_tune.cli.report import report_html
from lora_tune.cli.status import picture
from lora_tune.config.study import Study, load_study
from lora_tune.review.importance import scaling, table
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, Verdict
from tests.conftest import REPOSITORY

PUBLISHED = {1: 1.247, 2: 3.664, 4: 9.432, 8: 21.905, 16: 47.342, 32: 95.339, 64: 154.931}


@pytest.fixture
def study() -> Study:
    return load_study(REPOSITORY / "studies" / "peft_fsdp.toml")


def sweep_of(study: Study, speeds: list[tuple[int, float, Verdict]]) -> StudyRecords:
    trials = {
        n: Trial(
            number=n,
            seed=n,
            tuned={"layout": f"tp1 pp1 cp1 minibs4 mbs4 nodes{nodes}"},
            parameters={"NODES": nodes},
            verdict=verdict,
            metrics=TrialMetrics(samples_per_second=speed, objective=speed),
        )
        for n, (nodes, speed, verdict) in enumerate(speeds)
    }
    return StudyRecords(name=study.name, digest="", study_toml="", began_at=0.0, trials=trials)


def test_the_published_scaling_and_the_page_that_shows_it(study: Study) -> None:
    rows = scaling(study, sweep_of(study, [(n, s, Verdict.REACHED) for n, s in PUBLISHED.items()]))
    assert [row.gpus for row in rows] == [8, 16, 32, 64, 128, 256, 512]
    assert rows[0].efficiency == 1
    assert rows[-1].efficiency == pytest.approx(154.931 / 512 / (1.247 / 8))
    page = (REPOSITORY / "docs" / "trainers.md").read_text()
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
    assert "75%   2, stopped early" in table(study, rows)


def test_no_table_where_the_node_count_is_fixed() -> None:
    study = load_study(REPOSITORY / "studies" / "torchrun_peft.toml")
    assert scaling(study, sweep_of(study, [(1, 1.0, Verdict.REACHED)])) == []
    assert table(study, []) == ""


def test_report_and_status_show_it(study: Study) -> None:
    sweep = sweep_of(study, [(1, 1.247, Verdict.REACHED), (2, 3.664, Verdict.REACHED), (4, 9.0, Verdict.CAPPED)])
    page = report_html(study, sweep, 0.0)
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", _section(page), re.S)]
    assert cells[1:] == [
        ["1", "8", "1.247", "100%", "0", ""],
        ["2", "16", "3.664", "147%", "1", ""],
        ["4", "32", "9", "180%", "2", "stopped early: an estimate"],
    ]
    with (console := Console(width=120)).capture() as shown:
        console.print(picture(study, sweep, ("", 0.0), 0.0, every=False))
    assert table(study, scaling(study, sweep)) in shown.get().replace(" \n", "\n")

    fixed = load_study(REPOSITORY / "studies" / "torchrun_peft.toml")
    assert 'id="scaling"' not in report_html(fixed, sweep_of(fixed, [(1, 1.0, Verdict.REACHED)]), 0.0)


def _section(page: str) -> str:
    return page.split('id="scaling"')[1].split("</section>")[0]
