"""The stall test inside an ordinary Optuna study."""

from __future__ import annotations

import math
from collections.abc import Sequence

import optuna
import pytest

from lora_tune.mlperf import published_curves
from lora_tune.search.pruner import SENTENCE, StallPruner

TARGET = 0.925
SAMPLES = range(1536, 8193, 384)


def loss(samples: float, offset: float = 0.0) -> float:
    """The median curve of GBS 8 runs, moved up."""
    return 0.9248 - 0.0221 * math.log(samples / 3000) + offset


def run(study: optuna.Study, losses: Sequence[float]) -> optuna.trial.FrozenTrial:
    """One trial that reports ``losses`` on the usual schedule until it is pruned, reaches the target, or ends."""
    trial = study.ask()
    for samples, value in zip(SAMPLES, losses, strict=False):
        trial.report(value, samples)
        if value <= TARGET:
            return study.tell(trial, samples)
        if trial.should_prune():
            return study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return study.tell(trial, SAMPLES[-1])


@pytest.fixture
def study() -> optuna.Study:
    """A study with six finished good trials and the stall pruner."""
    study = optuna.create_study(pruner=StallPruner(TARGET))
    for offset in (-0.001, -0.0005, 0.0, 0.0004, 0.0008, 0.0012):
        wiggle = [0.0003 * (-1) ** i for i in range(len(SAMPLES))]
        run(study, [loss(s, offset + w) for s, w in zip(SAMPLES, wiggle, strict=True)])
    return study


def test_a_flat_trial_is_pruned_with_a_sentence(study: optuna.Study) -> None:
    trial = run(study, [0.945] * len(SAMPLES))
    assert trial.state == optuna.trial.TrialState.PRUNED
    assert "above the median curve" in trial.user_attrs[SENTENCE]
    assert max(trial.intermediate_values) < 4000


def test_a_good_trial_with_a_spike_is_left_alone(study: optuna.Study) -> None:
    losses = [loss(s) for s in SAMPLES]
    losses[2] += 0.05
    trial = run(study, losses)
    assert trial.state == optuna.trial.TrialState.COMPLETE
    assert SENTENCE not in trial.user_attrs


def test_trials_with_another_eval_schedule_are_compared_at_equal_samples(study: optuna.Study) -> None:
    trial = study.ask()
    for samples in (1600, 2000, 2500, 2900):
        trial.report(loss(samples), samples)
        assert not trial.should_prune()
    slow = study.ask()
    slow.report(loss(1600, 0.02), 1600)
    assert not slow.should_prune(), "one eval is no evidence"
    slow.report(loss(2000, 0.02), 2000)
    assert slow.should_prune()


def test_nan_twice_is_pruned_in_the_first_trial_of_a_study() -> None:
    study = optuna.create_study(pruner=StallPruner(TARGET, no_verdict_before=1e9))
    trial = run(study, [0.95, math.nan, math.nan, math.nan])
    assert trial.user_attrs[SENTENCE].startswith("diverged")


def test_nothing_is_said_before_the_declared_point() -> None:
    pruner = StallPruner(TARGET, reference=published_curves.published(8), no_verdict_before=4000)
    trial = run(optuna.create_study(pruner=pruner), [0.945] * len(SAMPLES))
    assert min(s for s in trial.intermediate_values if s >= 4000) < max(trial.intermediate_values) < 5000


def test_a_healing_run_is_judged_by_no_other_curve_and_not_before_it_has_healed() -> None:
    losses = [0.955] * 4 + [0.947, 0.939, 0.931, 0.9255, 0.9253, 0.9249]
    reference = published_curves.published(8)
    blind = StallPruner(TARGET, reference=reference)
    told = StallPruner(TARGET, reference=reference, healing_step=2800, max_steps=8192)
    assert run(optuna.create_study(pruner=blind), losses).state == optuna.trial.TrialState.PRUNED
    assert run(optuna.create_study(pruner=told), losses).state == optuna.trial.TrialState.COMPLETE


def test_a_study_that_maximises_is_refused() -> None:
    study = optuna.create_study(pruner=StallPruner(TARGET), direction="maximize")
    trial = study.ask()
    trial.report(0.9, 1)
    with pytest.raises(ValueError, match="maximises"):
        trial.should_prune()


def test_a_false_prune_rate_is_a_share() -> None:
    with pytest.raises(ValueError, match="between 0 and 1, not 1"):
        StallPruner(TARGET, false_prune_rate=1)


def test_the_pruner_works_on_a_database(tmp_path: object) -> None:
    study = optuna.create_study(pruner=StallPruner(TARGET), storage=f"sqlite:///{tmp_path}/study.db")
    trial = run(study, [math.nan, math.nan])
    assert study.trials[trial.number].user_attrs[SENTENCE].startswith("diverged")
