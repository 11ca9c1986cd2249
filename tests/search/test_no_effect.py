"""Trials with different values whose evals are the same to the last digit: a parameter has no effect; that is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.config.study import Study
from lora_tune.explain import main as explain
from lora_tune.logs.run import Eval
from lora_tune.review.summary import overview
from lora_tune.search.no_effect import no_effect
from lora_tune.search.recommendation import recommend
from lora_tune.status import main as status
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict
from lora_tune.sweep import main as sweep
from tests.builders import BEGAN, study_of

TEXT = """
[workload]
kind = "command"
argv = ["train", "{LR}", "{WORKERS}"]
[space]
LR = { type = "float", low = 1e-4, high = 1e-1, log = true }
WORKERS = { type = "int", low = 1, high = 64 }
[objective]
OBJECTIVE
[budget]
trials = 20
"""
LOSSES = (2.1234, 1.5321, 1.2468)
Run = tuple[dict[str, float | int], Sequence[float]]


def study(objective: str = 'metric = "loss"') -> Study:
    return study_of(TEXT.replace("OBJECTIVE", objective))


def records(runs: Sequence[Run], seconds: Callable[[int], float] = lambda n: 10.0) -> StudyRecords:
    """Finished trials: their values and evals at steps 10, 20, ...; seconds: of one eval interval of each trial."""
    trials, attempts, evals = {}, {}, {}
    for n, (tuned, losses) in enumerate(runs):
        length = seconds(n) * len(losses)
        trials[n] = Trial(
            number=n, seed=n, tuned=tuned, parameters=tuned, state=TrialState.FINISHED, verdict=Verdict.REACHED,
            seconds=length, samples=10.0 * len(losses), finished_at=BEGAN + length,
            metrics=TrialMetrics(objective=min(losses)),
        )  # fmt: skip
        attempts[n, 0] = Attempt(trial=n, number=0, job_name=f"t{n}", folder=f"trials/{n}", state="ended")
        evals[n, 0] = tuple(Eval(10.0 * (i + 1), loss, seconds(n) * (i + 1)) for i, loss in enumerate(losses))
    sweep = StudyRecords(name="built", digest="x", study_toml=TEXT, began_at=BEGAN)
    return replace(sweep, trials=trials, attempts=attempts, evals=evals)


def of_rates(count: int, losses: Sequence[float] = LOSSES) -> list[Run]:
    return [({"LR": 10.0**-n, "WORKERS": 2}, losses) for n in range(1, count + 1)]


def test_three_configurations_with_the_same_evals_recommend_nothing_and_say_so_once() -> None:
    same = records(of_rates(3))
    idle = no_effect(study(), same)
    assert idle is not None
    assert (idle.names, idle.trials) == (("LR",), (0, 1, 2))
    assert recommend(study(), same) is None
    seen = overview(study(), same, BEGAN + 100)
    assert seen.warning.startswith("LR has no effect: trials 0, 1, 2 differ in it and their evals are the same to the")


@pytest.mark.parametrize(
    "runs",
    [
        of_rates(2),
        [*of_rates(3), ({"LR": 0.5, "WORKERS": 2}, (2.1234, 1.5321, 1.2469))],
        [({"LR": 0.1, "WORKERS": 2}, LOSSES)] * 3,
        of_rates(3, losses=(0.9667,)),
    ],
    ids=["two", "one of them differs in the last digit", "the same values again", "one coarse number"],
)
def test_less_is_no_reason_to_withhold_a_recommendation(runs: list[Run]) -> None:
    assert recommend(study(), records(runs)) is not None


def test_a_run_that_was_stopped_early_agrees_as_far_as_it_went() -> None:
    idle = no_effect(study(), records([*of_rates(3), ({"LR": 0.5, "WORKERS": 2}, LOSSES[:1])]))
    assert idle is not None
    assert (idle.trials, idle.every) == ((0, 1, 2), True)


def differ_later(*ends: Sequence[float]) -> list[Run]:
    """Runs of one warm-up: the first evals are the same, and what follows is not."""
    return [({"LR": 10.0**-n, "WORKERS": 2}, (2.1234, 1.5321, *end)) for n, end in enumerate(ends, start=1)]


@pytest.mark.parametrize(
    "runs",
    [
        differ_later((), (), (1.2, 1.1), (1.3, 1.2)),
        differ_later((), (), (), (1.2, 1.1, 1.0, 0.9)),
        differ_later((), (), (), (1.2, 1.1, 1.0, 0.9), (1.3, 1.2, 1.1, 1.0)),
    ],
    ids=["short runs begin as two others do", "stopped before they could differ", "several"],
)
def test_runs_whose_first_evals_are_the_same_are_not_called_alike(runs: list[Run]) -> None:
    """A parameter of a schedule shows late: runs that were stopped before say nothing of it."""
    assert no_effect(study(), records(runs)) is None


def test_runs_of_half_the_length_or_more_count_beside_longer_ones() -> None:
    idle = no_effect(study(), records(differ_later((1.2, 1.1), (1.2, 1.1), (1.2, 1.1, 1.0, 0.9))))
    assert idle is not None
    assert idle.trials == (0, 1, 2)


def test_a_parameter_among_others_that_changes_nothing_is_named_and_the_others_are_recommended() -> None:
    workers: list[Run] = [({"LR": 0.01, "WORKERS": n}, LOSSES) for n in (1, 2, 4)]
    other: Run = ({"LR": 0.02, "WORKERS": 1}, (2.0, 1.4, 1.1))
    mixed = records([*workers, other])
    idle = no_effect(study(), mixed)
    assert idle is not None
    assert (idle.names, idle.every) == (("WORKERS",), False)
    assert recommend(study(), mixed) is not None


def test_the_time_to_a_target_may_differ_by_a_parameter_of_speed_alone() -> None:
    timed = study("target = 1.3")
    workers: list[Run] = [({"LR": 0.01, "WORKERS": n}, LOSSES) for n in (1, 2, 4, 8)]
    faster = records(workers, seconds=lambda n: 40.0 / 2**n)
    assert recommend(timed, faster) is not None
    assert recommend(timed, records(workers)) is None
    assert recommend(timed, records(of_rates(4), seconds=lambda n: 40.0 / 2**n)) is None, "no learning rate is faster"


SCRIPT = """
import os
rate = os.environ["LR"]   # read, and never used
for step in range(1, 6):
    print(f"step {step} val_loss {1 / step + 0.35:.4f}", flush=True)
"""
FILE = """
[workload]
kind = "command"
argv = ["python3", "train.py"]
[workload.log]
kind = "regex"
eval = 'step (?P<step>\\d+) val_loss (?P<loss>[\\d.]+)'
[space]
LR = { type = "float", low = 1e-5, high = 1e-2, log = true }
[objective]
metric = "loss"
[budget]
trials = 4
"""


UNSEEDED = """
import random
for step in range(1, 6):
    print(f"step {step} val_loss {1 / step + random.random():.4f}", flush=True)
"""


def test_of_two_trials_of_a_script_that_reads_nothing_none_is_recommended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So few may run, to try a machine; their evals differ by chance."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(UNSEEDED)
    (tmp_path / "mine.toml").write_text(FILE.replace("trials = 4", "trials = 2"))
    swept = CliRunner().invoke(sweep, ["--study", "mine.toml"])
    assert "its trials differ by chance alone; nothing is recommended" in swept.output
    assert "\ntake " not in swept.output
    assert not (tmp_path / "sweeps" / "mine" / "best").exists()


@pytest.mark.long
def test_a_script_that_ignores_what_it_reads_ends_without_a_recommendation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "mine.toml").write_text(FILE)
    swept = CliRunner().invoke(sweep, ["--study", "mine.toml"])
    assert swept.exit_code == 4, swept.output
    assert "LR has no effect" in swept.output
    assert swept.output.partition("\nall ")[0].count("has no effect") == 1, "not again with each further trial"
    assert "\ntake " not in swept.output
    shown = " ".join(CliRunner().invoke(status, ["--study", "mine.toml"]).output.split())
    assert "trouble LR has no effect" in shown
    assert "recommended" not in shown.replace("nothing is recommended", "")
    assert "LR has no effect" in " ".join(CliRunner().invoke(explain, ["--study", "mine.toml"]).output.split())
    report = (tmp_path / "sweeps" / "mine" / "report.html").read_text()
    assert "LR has no effect" in report
    assert not (tmp_path / "sweeps" / "mine" / "best").exists()
