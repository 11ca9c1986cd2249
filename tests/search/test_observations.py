"""What was read of a finished trial stays read; nothing that is proposed depends on that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import InMemoryStorage, RDBStorage
from optuna.storages._base import BaseStorage
from optuna.trial import TrialState

from lora_tune.search import observations
from lora_tune.search.goal import Goal, closed_schedule
from lora_tune.search.observations import Observation, readings
from lora_tune.search.sampler import GreyBoxSampler

SPACE = {
    "LR": FloatDistribution(1e-4, 1e-3, log=True),
    "MAX_STEPS": IntDistribution(300, 1200),
    "layout": CategoricalDistribution(("tp4 pp1 cp1 minibs4 mbs1", "tp8 pp1 cp1 minibs8 mbs1")),
}


class Forgetful(GreyBoxSampler):
    """Reads every trial anew for every proposal."""

    def observations(self, study: optuna.Study, names: frozenset[str], skip: int = -1) -> list[Observation]:
        self._finished.clear()
        observations._curve_sd.cache_clear()
        return super().observations(study, names, skip)


def proposals(kind: type[GreyBoxSampler], storage: Callable[[], BaseStorage]) -> list[Any]:
    """Eight proposals by two samplers in turn, whose trials end in every way and elsewhere; the first was enqueued."""
    optuna.create_study(storage=storage(), study_name="s")
    here, there = (
        optuna.load_study(
            study_name="s", storage=storage(), sampler=kind(SPACE, goal=Goal(schedule=closed_schedule), gpus=8, seed=3)
        )
        for _ in range(2)
    )
    here.enqueue_trial({"LR": 4e-4})
    found = []
    for number in range(8):
        asking, ending = (here, there) if number % 2 else (there, here)
        trial = asking.ask(SPACE)  # type: ignore[arg-type]
        found.append((trial.params, trial.user_attrs))
        if number != 4:  # one goes on running, and reports while others are asked for
            end(ending, trial.number, number)
    return found


def end(study: optuna.Study, number: int, turn: int) -> None:
    frozen = study.get_trials(deepcopy=False)[number]
    trial = optuna.Trial(study, frozen._trial_id)
    if turn == 5:
        study.tell(number, state=TrialState.FAIL)
        return
    trial.set_user_attr("samples_per_second", 2.0 + 0.01 * turn)
    trial.set_user_attr("seconds_per_eval", 30.0)
    for k in range(5):
        trial.report(0.94 - 0.005 * k + 0.0003 * turn, 1536 + 384 * k)
    if turn % 3 == 2:
        trial.set_user_attr("last_samples", 3072.0)
        study.tell(number, state=TrialState.PRUNED)
    else:
        trial.set_user_attr("stop_samples", 3072.0)
        study.tell(number, 1500.0 + turn)


@pytest.mark.parametrize("place", ["memory", "database"])
def test_proposals_are_the_same_with_all_trials_read_anew(place: str, tmp_path: Path) -> None:
    def places(name: str) -> Callable[[], BaseStorage]:
        one = InMemoryStorage()
        return (lambda: one) if place == "memory" else (lambda: RDBStorage(f"sqlite:///{tmp_path / name}.db"))

    assert proposals(GreyBoxSampler, places("kept")) == proposals(Forgetful, places("anew"))


def test_a_reading_is_that_of_the_family_asked_for() -> None:
    """Runs that reach the target change the shape that all curves are read with."""
    sampler = GreyBoxSampler(SPACE)
    study = optuna.create_study()
    for turn in (0, 1, 3, 4, 6, 7, 9, 8, 2):
        trial = study.ask(SPACE)  # type: ignore[arg-type]
        for k in range(5):
            trial.report(0.94 - 0.005 * k + 0.0003 * turn * (k + 1), 1536 + 384 * k)
        study.tell(trial, 1500.0)
        kept = sampler.observations(study, frozenset(SPACE))
        anew = [replace(o) for o in kept]
        totals = [4000.0] * len(kept)
        assert readings(kept, 0.925, totals) == readings(kept, 0.925, totals) == readings(anew, 0.925, totals)
    assert all(o._read for o in kept if o.reached > 0), "they were read once"
