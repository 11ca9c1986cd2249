"""The stopping rule inside an ordinary Optuna study."""

from __future__ import annotations

import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from lora_tune.curves.published import CONTINUE
from lora_tune.logs.follower import EACH, LATER
from lora_tune.search import pruner
from lora_tune.search.pruner import SENTENCE, StallPruner

TARGET = 0.925
SAMPLES = range(1536, 8193, 384)


def loss(samples: float, offset: float = 0.0) -> float:
    """The median curve of GBS 8 runs, moved up."""
    return 0.9248 - 0.0221 * math.log(samples / 3000) + offset


def run(study: optuna.Study, losses: Sequence[float], sign: float = 1.0) -> optuna.trial.FrozenTrial:
    """One trial that reports ``sign * losses`` on the usual schedule until it is pruned, there, or at its end."""
    trial = study.ask()
    for samples, value in zip(SAMPLES, losses, strict=False):
        trial.report(sign * value, samples)
        if value <= TARGET:
            return study.tell(trial, samples)
        if trial.should_prune():
            return study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return study.tell(trial, SAMPLES[-1])


def study_with_references(pruner: StallPruner, direction: str = "minimize", count: int = 10) -> optuna.Study:
    """A study with finished good trials."""
    sign = -1.0 if direction == "maximize" else 1.0
    study = optuna.create_study(pruner=pruner, direction=direction)
    for i in range(count):
        wiggle = [0.0003 * (-1) ** k for k in range(len(SAMPLES))]
        run(study, [loss(s, 0.0002 * i + w) for s, w in zip(SAMPLES, wiggle, strict=True)], sign)
    return study


@pytest.fixture
def study() -> optuna.Study:
    """A study with ten finished good trials and the stall pruner."""
    return study_with_references(StallPruner(TARGET, max_steps=8192))


def test_a_flat_trial_is_pruned_with_a_sentence_that_states_the_rate(study: optuna.Study) -> None:
    trial = run(study, [0.945] * len(SAMPLES))
    assert trial.state == optuna.trial.TrialState.PRUNED
    assert "further above the best 3 of 4 finished runs at " in trial.user_attrs[SENTENCE]
    assert " steps than any of them" in trial.user_attrs[SENTENCE], "Optuna counts steps"
    assert "among the best 4, at most 25.0% look like this" in trial.user_attrs[SENTENCE]
    assert max(trial.intermediate_values) < 4000


def test_a_good_trial_with_a_spike_is_left_alone(study: optuna.Study) -> None:
    losses = [loss(s) for s in SAMPLES]
    losses[2] += 0.05
    trial = run(study, losses)
    assert trial.state == optuna.trial.TrialState.COMPLETE
    assert SENTENCE not in trial.user_attrs


def test_trials_with_another_eval_schedule_are_compared_at_equal_steps(study: optuna.Study) -> None:
    trial = study.ask()
    for samples in range(96, 8193, 96):
        trial.report(0.945, samples)
        if trial.should_prune():
            break
    assert 1536 <= samples < 4000


def test_rising_metrics_are_compared_the_other_way_round() -> None:
    study = study_with_references(StallPruner(-TARGET, max_steps=8192), direction="maximize")
    pruned = run(study, [0.945] * len(SAMPLES), -1.0)
    assert pruned.state == optuna.trial.TrialState.PRUNED
    sentence = pruned.user_attrs[SENTENCE]
    assert ("further below" in sentence, "above" in sentence) == (True, False)
    assert re.search(r"at most [\d.]+% look like this", sentence), "the rate stands in each verdict"
    assert run(study, [loss(s) for s in SAMPLES], -1.0).state == optuna.trial.TrialState.COMPLETE


def test_nothing_is_said_before_the_declared_point() -> None:
    study = study_with_references(StallPruner(TARGET, max_steps=8192, no_verdict_before=3500))
    trial = run(study, [0.945] * len(SAMPLES))
    assert 3500 <= max(trial.intermediate_values) < 8000


def test_a_trial_of_its_own_length_and_kind_says_so(study: optuna.Study) -> None:
    trial = study.ask()
    trial.set_user_attr("stall_length", 80_000)
    trial.set_user_attr("stall_kind", "longer schedule")
    for samples in SAMPLES:
        trial.report(0.945, samples)
        assert not trial.should_prune(), "no trial of its kind has finished, and all others are of one kind"


@pytest.mark.parametrize("losses", [[0.96, 0.95, 0.94, *[40.0] * 8], [0.95, math.nan, math.nan, math.nan]])
def test_a_first_trial_that_diverges_is_pruned_whatever_the_rule(losses: Sequence[float], tmp_path: Path) -> None:
    """In a database, too."""
    pruner = StallPruner(TARGET, no_verdict_before=1e9)
    study = optuna.create_study(pruner=pruner, storage=f"sqlite:///{tmp_path}/study.db")
    trial = run(study, losses)
    assert study.trials[trial.number].user_attrs[SENTENCE].startswith("diverged")


def test_a_study_of_several_objectives_is_refused() -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    study.ask()
    with pytest.raises(ValueError, match="this study has 2"):
        StallPruner(TARGET).prune(study, study.get_trials()[study.ask().number - 1])


def test_one_pruner_in_two_studies_learns_from_each_alone() -> None:
    pruner = StallPruner(TARGET, max_steps=8192)
    study_with_references(pruner)
    other = optuna.create_study(pruner=pruner)
    for _ in range(10):
        run(other, [2.0, 1.9])
    assert run(other, [0.945] * len(SAMPLES)).state == optuna.trial.TrialState.COMPLETE


def accuracy_study(storage: str | None) -> optuna.Study:
    """Accuracy by epoch, from epoch 0 on, as a user would write it: noise, a NaN, steps told twice, a trial that fails.

    Every second trial is good.
    """

    def objective(trial: optuna.Trial) -> float:
        random = np.random.default_rng(trial.number)
        accuracy = 0.0
        for epoch in range(12):
            best = 0.7 if trial.number % 2 else 0.97
            accuracy = best * (1 - math.exp(-(epoch + 1) / 3)) + random.normal(0, 0.01)
            if trial.number == 1 and epoch == 3:
                raise RuntimeError("out of memory")
            trial.report(math.nan if epoch == 2 else accuracy, epoch)
            trial.report(0.0, epoch)  # Optuna keeps the first report of a step
            if trial.should_prune():
                raise optuna.TrialPruned
        return accuracy

    pruner = StallPruner(0.88, max_steps=12)
    study = optuna.create_study(direction="maximize", pruner=pruner, storage=storage)
    study.optimize(objective, n_trials=40, catch=(RuntimeError,), n_jobs=1 if storage else 2)
    return study


@pytest.mark.filterwarnings("ignore:The reported value is ignored")
@pytest.mark.parametrize("stored", [False, True])
def test_a_users_accuracy_study_loses_its_bad_half_and_no_good_trial(stored: bool, tmp_path: Path) -> None:
    study = accuracy_study(f"sqlite:///{tmp_path}/study.db" if stored else None)
    good, bad = ([t.state.name for t in study.trials[24:] if t.number % 2 == odd] for odd in (0, 1))
    assert bad.count("PRUNED") == len(bad)
    assert good.count("PRUNED") <= 2, "3 references support 25%"


class Model:
    """Reaches 0.95 with a learning rate near 3e-4, and less the further away it is."""

    def __init__(self, lr: float) -> None:
        self.best = 0.95 - 0.2 * max(0.0, abs(math.log10(lr / 3e-4)) - 0.8)
        self._luck = np.random.default_rng(round(lr * 1e9))

    def train_until(self, step: int) -> float:
        return float(self.best * (1 - math.exp(-step / 2000)) + self._luck.normal(0, 0.004))


def test_the_example_of_the_readme_prunes_bad_trials_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    example = next(block for block in text.split("```python")[1:] if "StallPruner" in block).split("```")[0]
    sampler = optuna.samplers.RandomSampler(seed=0)
    monkeypatch.setattr(optuna, "create_study", functools.partial(optuna.create_study, sampler=sampler))
    study = run_example(example)
    pruned = [t for t in study.trials if t.state == optuna.trial.TrialState.PRUNED]
    assert all("finished runs" in t.user_attrs[SENTENCE] for t in pruned)
    good = [t for t in study.trials if Model(t.params["lr"]).best > 0.945]
    assert sum(t in pruned for t in good) <= len(good) / 4, "3 references support 25%"
    assert len(pruned) >= 5


def run_example(code: str) -> optuna.Study:
    names: dict[str, Any] = {"Model": Model}
    exec(code, names)
    study: optuna.Study = names["study"]
    return study


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"false_prune_rate": 1}, "between 0 and 1, not 1"),
        ({"references": 2}, "3 or more, not 2"),
        ({"references": 3.5}, "3 or more, not 3.5"),
        ({"max_steps": 0}, "above 0, or None where it is not known, not 0"),
        ({"max_steps": math.inf}, "above 0, or None where it is not known, not inf"),
        ({"no_verdict_before": math.nan}, "0 or more, not nan"),
        ({"target": math.nan}, "a finite number, not nan"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StallPruner(**{"target": TARGET, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, -5, math.nan, math.inf, "1000"])
def test_a_length_that_no_trial_can_have_is_refused_by_name(length: object) -> None:
    study = optuna.create_study(pruner=StallPruner(TARGET))
    trial = study.ask()
    trial.set_user_attr("stall_length", length)
    trial.report(1.0, 100)
    with pytest.raises(ValueError, match=f"'stall_length' of trial 0 is a step above 0.*not {length!r}"):
        trial.should_prune()


@pytest.mark.parametrize("count", [int, float, np.int64, np.float32])
def test_counts_and_lengths_are_numbers_of_any_type(count: Callable[[int], float]) -> None:
    """``len(loader) * epochs`` of NumPy's numbers is one of NumPy's."""
    study = optuna.create_study(pruner=StallPruner(TARGET, references=count(3), max_steps=count(4000)))  # type: ignore[arg-type]
    for _ in range(4):
        run(study, [1.0, 0.9])
    assert study.trials[-1].state is optuna.trial.TrialState.COMPLETE


def reports(trial: optuna.Trial, values: Sequence[float], first: int = 1) -> int | None:
    """Report the values one by one; the step after which the trial should be pruned."""
    for step, value in enumerate(values, first):
        trial.report(value, step)
        if trial.should_prune():
            return step
    return None


def test_a_trial_that_reports_every_step_is_judged_at_each_of_a_thousand_and_then_less_often(monkeypatch) -> None:
    judged = []
    monkeypatch.setattr(pruner, "verdict", lambda evals, *_, **__: judged.append(len(evals)) or CONTINUE)
    assert reports(optuna.create_study(pruner=StallPruner(TARGET)).ask(), [1.0] * 4000) is None
    assert judged[:EACH] == [*range(1, EACH + 1)]
    assert len(judged) < EACH + 1000 / LATER * math.log(4) + 2
    assert all(later <= sooner + 4 * LATER for sooner, later in itertools.pairwise(judged))


def test_a_trial_of_thousands_of_reports_that_diverges_is_pruned_and_stays_so_when_asked_again() -> None:
    trial = optuna.create_study(pruner=StallPruner(TARGET)).ask()
    assert reports(trial, [1.0] * 2000) is None
    at = reports(trial, [math.nan] * 2000, first=2001)
    assert at is not None
    assert at <= 2000 / 0.9 + 3 * LATER, "two thousand evals are nine tenths of it, and it is judged at each seventh"
    assert trial.should_prune()


def test_the_rate_that_the_references_support_is_said_when_the_pruner_is_made() -> None:
    with pytest.warns(UserWarning, match=r"3 references support a false-prune rate of 25\.0%, not 5%; references=19 "):
        StallPruner(TARGET, false_prune_rate=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StallPruner(TARGET, false_prune_rate=0.05, references=19)


@pytest.mark.parametrize(
    ("direction", "target", "max_steps", "values", "message"),
    [
        ("maximize", 92.0, 10, (0.1, 0.5, 0.6), r"target=92, but trials report shares such as 0\.5; write 0\.92"),
        ("minimize", 0.9, 10, (0.1, 0.5, 0.6), "a trial's first value, 0.1, lies below it; is the study's direction"),
        ("maximize", 0.1, 10, (0.5, 0.6), "a trial's first value, 0.5, lies above it"),
        ("minimize", 0.1, 1, (3.0, 2.0), "max_steps=1, but a trial reports at step 2; state both in the same unit"),
    ],
)
def test_a_target_or_a_length_in_another_unit_is_doubted_once(
    direction: str, target: float, max_steps: float, values: Sequence[float], message: str
) -> None:
    study = optuna.create_study(pruner=StallPruner(target, max_steps=max_steps), direction=direction)
    trial = study.ask()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, value in enumerate(values, start=1):
            trial.report(value, step)
            trial.should_prune()
    (said,) = [str(w.message) for w in caught if "StallPruner" in str(w.message)]
    assert re.search(message, said)
