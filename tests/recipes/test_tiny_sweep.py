"""The README's sweep in small: real LoRA trials on the CPU, from proposal to exported config and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tune.config.study import load_study
from lora_tune.logs.mllog import MllogReader
from lora_tune.review.summary import time_interval
from lora_tune.search.recommendation import recommend
from lora_tune.store.records import StudyRecords, TrialState, Verdict
from lora_tune_recipes.workloads import TINY_UNTRAINED
from tests.recorded import recorded
from tests.tiny import STUDY


@pytest.fixture(scope="module")
def sweep(tiny_sweep: Path) -> StudyRecords:
    return recorded(tiny_sweep / "sweep.db", "tiny")


def test_after_the_kill_every_trial_is_accounted_for_and_none_ran_twice(sweep: StudyRecords, tiny_sweep: Path) -> None:
    assert {t.state for t in sweep.trials.values()} == {TrialState.FINISHED}
    logs = sorted(tiny_sweep.glob("trials/*/attempt-*/job.log"))
    assert [log.parent.parent.name for log in logs] == [f"{n:04d}" for n in sweep.trials]
    assert {log.read_text().count('"run_start"') for log in logs} == {1}
    assert not any(t.verdict is Verdict.FAILED for t in sweep.trials.values())


def test_a_target_that_is_met_before_training_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "easy.toml"
    bad.write_text(STUDY.read_text().replace("target = ", "target = 9"))
    done = subprocess.run(
        [sys.executable, "-m", "lora_tune.sweep", "--study", str(bad)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "objective.target" in done.stderr
    assert "is met before training" in done.stderr
    assert not (tmp_path / "sweeps").exists()


def test_the_untrained_base_has_the_loss_that_is_written_down() -> None:
    variables = {**os.environ, "LR": "1e-12", "MAX_STEPS": "1", "TARGET": "0.1"}
    command = [sys.executable, "-m", "lora_tune_recipes.peft_lora"]
    reader = MllogReader()
    reader.feed(subprocess.run(command, env=variables, capture_output=True, timeout=120, check=True).stdout)
    assert reader.run().evals[-1].loss == pytest.approx(TINY_UNTRAINED, abs=1e-3)


def test_real_trials_reach_the_target_and_learn_on_the_way(sweep: StudyRecords) -> None:
    target = load_study(STUDY).objective.target
    reached = [t for t in sweep.trials.values() if t.verdict is Verdict.REACHED]
    assert reached
    for trial in reached:
        evals = sweep.last_evals(trial.number)
        assert len(evals) >= 3
        assert evals[0].loss > evals[-1].loss
        assert evals[-1].loss <= target < min(e.loss for e in evals[:-1])
        assert trial.seconds == evals[-1].seconds


def test_the_exported_config_by_hand_reproduces_the_trial(sweep: StudyRecords, tiny_sweep: Path) -> None:
    handed_over = recommend(load_study(STUDY), sweep)
    assert handed_over is not None
    assert handed_over.ran
    best = handed_over.trial
    (config,) = (tiny_sweep / "best").glob("config_*.sh")
    done = subprocess.run(
        ["bash", "-euc", f"source {config.name} && exec {sys.executable} -m lora_tune_recipes.peft_lora"],
        cwd=config.parent,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        timeout=300,
        check=True,
    )
    reader = MllogReader()
    reader.feed(done.stdout)
    run = reader.run()
    stop = run.reached(load_study(STUDY).objective.target)
    assert stop is not None
    assert stop.samples == best.samples
    assert run.evals[-1].loss == sweep.last_evals(best.number)[-1].loss
    low, high = time_interval(best)
    assert low <= (best.seconds or 0) <= high


def test_the_study_copy_and_the_report_lie_beside(tiny_sweep: Path) -> None:
    assert (tiny_sweep / "study.toml").read_text() == STUDY.read_text()
    assert (tiny_sweep / "report.html").stat().st_size > 1000
