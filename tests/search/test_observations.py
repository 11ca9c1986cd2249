"""What was read of a finished trial stays read; nothing that is proposed depends on that."""

from __future__ import annotations

import math
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

from lora_tune.logs.run import Eval
from lora_tune.search import observations
from lora_tune.search.grey_box.objective import Goal, closed_schedule
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.observations import Observation, readings

SPACE = {
    "LR": FloatDistribution(1e-4, 1e-3, log=True),
    "MAX_STEPS": IntDistribution(300, 1200),
    "layout": CategoricalDistribution(("tp4 pp1 cp1 minibs4 mbs1", "tp8 pp1 cp1 minibs8 mbs1")),
}


class Forgetful(GreyBoxSampler):
    """Reads every trial anew for every proposal."""

    def observations(self, study: optuna.Study, names: frozenset[str], skip: int = -1) -> list[Observation]:
        self._readers.clear()
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


def test_trials_of_another_study_are_not_taken_for_those_of_the_same_number() -> None:
    """As where what has ended is replayed without what runs still: everything behind it has another number there."""
    sampler, studies = GreyBoxSampler(SPACE), (optuna.create_study(), optuna.create_study())
    for rate, study in zip((2e-4, 8e-4), studies, strict=True):
        tuned = {"LR": rate, "MAX_STEPS": 800, "layout": "tp4 pp1 cp1 minibs4 mbs1"}
        study.add_trial(optuna.trial.create_trial(params=tuned, distributions=SPACE, value=1500.0))
    read = [sampler.observations(study, frozenset(SPACE))[0].values["LR"] for study in studies]
    assert read == [2e-4, 8e-4]


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


def run(*, samples: float, verdict: str, evals: int, slope: float = -0.08, **facts: float) -> Observation:
    """A run with evals 40 samples apart whose loss falls by ``slope`` per ln(samples) from 1.9 on."""
    at = [40.0 * (n + 1) for n in range(evals)]
    curve = tuple(Eval(s, 1.9 + slope * math.log(s / 40), math.nan) for s in at)
    reached = samples if verdict == "reached" else math.nan
    return Observation(
        number=0, values={}, evals=curve, reached=reached, bound=math.nan if verdict == "reached" else samples,
        samples_per_second=0.5, seconds_per_eval=20.0, attributes={"verdict": verdict, **facts},
    )  # fmt: skip


def test_a_run_capped_before_the_shape_of_curves_is_known_teaches_what_its_capper_knew() -> None:
    """At 0.5 samples/s and 20 s for each 40 samples, 1,000 s of the fastest run are 400 samples of the capped one."""
    good = run(samples=480, verdict="reached", evals=12, stop_seconds=1000.0)
    capped = run(samples=120, verdict="capped", evals=3, slope=-0.01)
    reading = readings([good, capped], 1.7, [800.0, 800.0])[1]
    assert reading.below
    assert math.exp(reading.ln_samples) == pytest.approx(400)


@pytest.mark.parametrize("verdict", ["censored", "pruned"])
def test_a_run_that_ended_unreached_is_never_read_as_crossing_before_its_end(verdict: str) -> None:
    family = [run(samples=480, verdict="reached", evals=12) for _ in range(4)]
    late = run(samples=560, verdict=verdict, evals=14)
    late = replace(late, evals=tuple(e._replace(loss=max(e.loss, 1.71)) for e in late.evals))
    found = readings([*family, late], 1.7, [800.0] * 4 + [560.0])[4]
    assert math.exp(found.ln_samples) >= 560


def test_a_run_that_should_long_have_crossed_is_a_bound_for_its_curve_has_another_shape() -> None:
    """Its last evals no longer fall: schedules end soon after the crossing, and some runs of them never arrive."""
    family = [run(samples=480, verdict="reached", evals=12) for _ in range(4)]
    flat = run(samples=520, verdict="censored", evals=13)
    flat = replace(flat, evals=tuple(e._replace(loss=max(e.loss, 1.72)) for e in flat.evals))
    found = readings([*family, flat], 1.7, [800.0] * 4 + [520.0])[4]
    assert found.below
    assert math.exp(found.ln_samples) == pytest.approx(530, abs=10)
