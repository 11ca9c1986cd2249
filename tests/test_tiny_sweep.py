"""The README's sweep in small: real LoRA trials on the CPU, from proposal to exported config and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tune.export import time_interval
from lora_tune.mllog import MllogReader
from lora_tune.records import Sweep, Verdict
from lora_tune.store import Store, sqlite_url
from lora_tune.study import load_study
from tests.tiny import STUDY


@pytest.fixture(scope="module")
def sweep(tiny_sweep: Path) -> Sweep:
    store = Store(sqlite_url(tiny_sweep / "sweep.db"), read_only=True)
    found = store.load("tiny")
    assert found is not None
    return found


def test_real_trials_reach_the_target_and_learn_on_the_way(sweep: Sweep) -> None:
    target = load_study(STUDY).objective.target
    reached = [t for t in sweep.trials.values() if t.verdict is Verdict.REACHED]
    assert reached
    for trial in reached:
        evals = sweep.last_evals(trial.number)
        assert len(evals) >= 3
        assert evals[0].loss > evals[-1].loss
        assert evals[-1].loss <= target < min(e.loss for e in evals[:-1])
        assert trial.seconds == evals[-1].seconds


def test_the_exported_config_by_hand_reproduces_the_trial(sweep: Sweep, tiny_sweep: Path) -> None:
    best = sweep.best()
    assert best is not None
    (config,) = (tiny_sweep / "best").glob("config_*.sh")
    done = subprocess.run(
        ["bash", "-euc", f"source {config.name} && exec {sys.executable} -m lora_tune.recipes.peft_lora"],
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
