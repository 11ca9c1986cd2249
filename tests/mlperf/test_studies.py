"""The studies of machines that are submitted: they load, are closed, and start from a published point."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tune.config.campaign import allotments, load_campaign
from lora_tune.config.checks import closed_violations
from lora_tune.config.study import load_study
from lora_tune.workloads import load
from tests.conftest import REPOSITORY

CAMPAIGNS = sorted((REPOSITORY / "studies" / "campaigns").glob("*.toml"))
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


@pytest.mark.parametrize("file", CAMPAIGNS, ids=lambda p: p.stem)
def test_a_campaign_leaves_each_of_its_sweeps_time_for_several_trials(file: Path) -> None:
    campaign = load_campaign(file)
    nothing = [0.0] * len(campaign.members)
    for member, hours in zip(campaign.members, allotments(campaign, nothing, [False] * len(nothing)), strict=True):
        study = member.study
        assert study.division == "closed"
        assert hours >= 4 * study.site.nodes * study.budget.trial_minutes / 60
