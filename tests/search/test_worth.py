"""The end of a sweep by what the next node-hour is expected to gain: who may ask for it, and what the sampler says."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState, create_trial

from lora_tune.base.errors import StudyError
from lora_tune.config.study import load_study, parse_study
from lora_tune.search.capping import gain_below_threshold
from lora_tune.search.grey_box.sampler import GreyBoxSampler

STUDY = Path(__file__).resolve().parents[2] / "studies" / "simulated_h100.toml"
RATE = {"LR": optuna.distributions.FloatDistribution(1e-4, 1e-3, log=True)}


def test_only_the_sampler_that_knows_its_gain_can_end_a_sweep_by_it() -> None:
    text = STUDY.read_text(encoding="utf-8").replace("[budget]", "[budget]\nstop_below = 0.002")
    assert parse_study(text, STUDY).budget.stop_below == 0.002
    with pytest.raises(StudyError, match=r"budget\.stop_below.*needs search\.sampler"):
        parse_study(text.replace("grey_box", "tpe"), STUDY)


@pytest.mark.parametrize(("gain", "ends"), [(0.0019, True), (0.002, False), (0.5, False), (None, False)])
def test_the_sweep_ends_below_the_limit_only_and_says_both_figures(gain, ends) -> None:
    study = load_study(STUDY).with_options({"budget": {"stop_below": 0.002}})
    reason = gain_below_threshold(study, gain)
    assert bool(reason) == ends
    if ends:
        assert "0.19%" in reason
        assert "budget.stop_below = 0.2%" in reason
    assert gain_below_threshold(load_study(STUDY), gain) == ""


def add(study: optuna.Study, rate: float, samples: float) -> None:
    """A finished run at this learning rate that needed so many samples."""
    facts = {"stop_samples": samples, "samples_per_second": 2.0, "node_hours": samples / 7200, "verdict": "reached"}
    study.add_trial(
        create_trial(
            params={"LR": rate}, distributions=RATE, user_attrs=facts, state=TrialState.COMPLETE, value=samples / 2
        )
    )


def test_the_expected_gain_is_unknown_before_the_target_was_reached_and_falls_as_runs_agree() -> None:
    sampler = GreyBoxSampler(RATE, seed=0)
    study = optuna.create_study(sampler=sampler)
    assert sampler.expected_gain(study) is None
    add(study, 2e-4, 3000.0)
    add(study, 6e-4, 2800.0)
    first = sampler.expected_gain(study)
    assert first is not None
    assert first > 0
    assert sampler.expected_gain(study) == first  # nothing new: answered at once
    for k in range(20):
        add(study, 1e-4 * 10 ** (k / 20), 2700.0 + 40 * (k - 10) ** 2)
    last = sampler.expected_gain(study)
    assert last is not None
    assert last < first / 3
