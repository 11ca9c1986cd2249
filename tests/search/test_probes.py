"""Short runs that measure a layout: where they are on by themselves, and that the laboratory searches as studies do."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from benchmarks.laboratory.ours import Default
from benchmarks.laboratory.problems import h100_wide
from lora_tune.config.study import load_study, parse_study
from lora_tune.search.samplers import make_sampler
from lora_tune.workloads.implementation import PROBE_STEPS, probe_values
from tests.builders import STUDY
from tests.conftest import REPOSITORY

STUDIES = REPOSITORY / "studies"
HOURS = ("trials = 40\n", "")
SURFACE = ('kind = "command"\nargv = ["bash", "train.sh"]', 'kind = "surface"\nsurface = "h100"')
RECIPE = ('kind = "command"\nargv = ["bash", "train.sh"]', 'kind = "nemo"')
OFF = ("[budget]", "[search]\nprobes = false\n[budget]")
ON = ("[budget]", "[search]\nprobes = true\n[budget]")


@pytest.mark.parametrize(
    ("changes", "on"),
    [
        ((SURFACE, HOURS), True),
        ((RECIPE, HOURS), True),
        ((HOURS,), False),  # nobody knows whether a script ends by itself
        ((SURFACE,), False),  # a number of trials: each short run would take one
        ((SURFACE, HOURS, OFF), False),
        ((ON,), True),
    ],
)
def test_they_are_on_where_trials_end_them_and_node_hours_are_the_budget(
    changes: tuple[tuple[str, str], ...], on: bool
) -> None:
    text = STUDY
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    assert parse_study(text, Path("built.toml")).probes is on


@pytest.mark.parametrize("name", ["simulated_h100", "h100", "h200"])
def test_shipped_studies_of_the_laboratorys_problem_probe_as_the_laboratory_does(name: str) -> None:
    study = load_study(STUDIES / f"{name}.toml")
    made = optuna.create_study(sampler=make_sampler(study))
    asked = [made.ask(study.search_space.distributions()) for _ in range(4)]
    measured = Default(h100_wide(1), seed=1)
    assert "probe" in {trial.user_attrs.get("kind") for trial in asked}
    assert "probe" in {measured.ask().kind for _ in range(5)}  # the first is the start


def test_a_probe_warms_up_for_no_longer_than_a_block() -> None:
    assert probe_values(8, 40)["WARMUP_STEPS"] == PROBE_STEPS
    assert probe_values(8, 4)["WARMUP_STEPS"] == 4
    assert "WARMUP_STEPS" not in probe_values(8)
    assert probe_values(8, 40)["MAX_STEPS"] == 2 * PROBE_STEPS
