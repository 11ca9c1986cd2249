"""No job is started for a proposal that must fail, and one refusal of a trainer speaks of its neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_tune.controller.doomed import why_doomed
from lora_tune.controller.jobs import proposal as proposal_of
from lora_tune.controller.proposals import FILL_SECONDS
from lora_tune.store.records import Attempt, StudyRecords, Trial
from lora_tune.workloads.base import Proposal
from tests.controller.test_driver import House
from tests.fakes import FakeClock, FakeCluster, Script, command_study, curve_script

LINE = "ValueError: `val_check_interval` ({}) must be less than or equal to the number of the training batches ({})."


class Evaluating:
    """A workload whose trials evaluate first after ``first`` samples of ``samples``."""

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def first_eval(self, proposal: Proposal) -> tuple[float, float] | None:
        values = proposal.parameters
        return (float(values["FIRST"]), float(values["SAMPLES"])) if "FIRST" in values else None


def trial(number: int, first: int, samples: int) -> Trial:
    return Trial(number=number, seed=1, tuned={}, parameters={"FIRST": first, "SAMPLES": samples})


def refused(first: int, samples: int, line: str) -> StudyRecords:
    """A sweep whose trial 3 died with this line."""
    attempt = Attempt(trial=3, number=0, job_name="j", folder="f", failure="configuration", line=line)
    return StudyRecords(
        name="x",
        digest="",
        study_toml="",
        began_at=0.0,
        trials={3: trial(3, first, samples)},
        attempts={(3, 0): attempt},
    )


def why(sweep: StudyRecords, first: int, samples: int) -> str:
    return why_doomed(Evaluating(), sweep, proposal_of(trial(9, first, samples), 0))  # type: ignore[arg-type]


NOTHING = StudyRecords(name="x", digest="", study_toml="", began_at=0.0)


def test_an_eval_behind_the_end_of_training_is_told_from_the_numbers_alone() -> None:
    assert why(NOTHING, 1152, 800) == "its first eval would come after 1152 samples, and its training ends after 800"
    assert why(NOTHING, 800, 800) == ""


@pytest.mark.parametrize(
    ("line", "first"),
    [(LINE.format(1152, 1000), 1152), (LINE.format(144, 125), 1152), (LINE.format(1152.0, 1000), 1152)],
    ids=["in samples", "in steps of eight", "as a float"],
)
def test_what_a_trainer_refused_once_speaks_of_later_evals_of_as_long_a_training(line: str, first: int) -> None:
    sweep = refused(first, 6400, line)
    for doomed in (1152, 1150, 1008):
        assert "trial 3, which trains as long, was refused for 1152" in why(sweep, doomed, 6400), doomed
    assert why(sweep, 1000, 6400) == ""
    assert why(sweep, 1152, 8000) == "", "a longer training may have as many batches"


def test_where_nobody_states_the_evals_nothing_is_judged() -> None:
    plain = proposal_of(Trial(number=1, seed=1, tuned={}, parameters={"LR": 1e-3}), 0)
    assert why_doomed(Evaluating(), refused(1152, 6400, LINE.format(1152, 1000)), plain) == ""  # type: ignore[arg-type]


class ByRate(Evaluating):
    """Half of the learning rates have their first eval behind the end."""

    def first_eval(self, proposal: Proposal) -> tuple[float, float]:
        return (2.0, 1.0) if float(proposal.parameters["LR"]) < 1e-3 else (1.0, 2.0)


def swept(
    tmp_path: Path, workload: type[Evaluating], clock: FakeClock | None = None, **budget: Any
) -> tuple[StudyRecords, str]:
    def script(environment: Any, start: float) -> Script:
        return curve_script(environment, start)

    home = House(
        tmp_path, FakeCluster(clock or FakeClock(), script), command_study(**{"trials": 6, "parallel": 2, **budget})
    )
    plain = home.driver()._dependencies
    driver = home.driver(workload=workload(plain.workload))
    outcome = driver.run()
    return home.sweep(), outcome.reason


def test_a_sweep_runs_only_what_can_run_and_spends_no_trial_on_the_rest(tmp_path: Path) -> None:
    sweep, reason = swept(tmp_path, ByRate)
    assert reason == "all 6 trials are proposed"
    assert len(sweep.trials) == 6
    assert all(float(t.parameters["LR"]) >= 1e-3 for t in sweep.trials.values())


class Never(Evaluating):
    def first_eval(self, proposal: Proposal) -> tuple[float, float]:
        return 1152.0, 800.0


def test_a_space_without_any_run_that_can_end_well_ends_the_sweep_with_the_reason(tmp_path: Path) -> None:
    sweep, reason = swept(tmp_path, Never)
    assert "proposals would all fail: its first eval would come after 1152 samples" in reason
    assert not sweep.trials


class SlowNever(Never):
    """As slow to ask as a search whose model takes longer than a tick has."""

    clock = FakeClock()

    def first_eval(self, proposal: Proposal) -> tuple[float, float]:
        self.clock.sleep(2 * FILL_SECONDS)
        return super().first_eval(proposal)


def test_the_sweep_ends_also_where_a_tick_has_time_for_one_such_proposal_only(tmp_path: Path) -> None:
    SlowNever.clock = FakeClock()
    _, reason = swept(tmp_path, SlowNever, clock=SlowNever.clock)
    assert "proposals would all fail" in reason
