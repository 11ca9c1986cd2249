"""A whole sweep in packs: the shipped task, a real driver, a real pack."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_tune.base.paths import AttemptPaths, SweepPaths
from lora_tune.config.study import load_study
from lora_tune.controller.evidence import is_audit
from lora_tune.launchers.job_records import read_records
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StopKind, Verdict
from tests.waiting import wait_for

STUDY = """
[workload]
kind = "peft"
save_adapter = true
[site]
slots = 3
[space]
LR = { type = "float", low = 1e-3, high = 1e-2, log = true }
MAX_STEPS = 4
VAL_CHECK_INTERVAL = 8
SEQ = 32
EVAL_SAMPLES = 2
[objective]
target = 9.0
[search]
sampler = "random"
[budget]
trials = 3
parallel = 3
"""


def test_trials_of_a_sweep_and_seeds_of_its_leaders_share_jobs_and_each_is_told_for_itself(tmp_path: Path) -> None:
    study, paths = tmp_path / "packs.toml", SweepPaths(tmp_path / "sweep")
    study.write_text(STUDY)
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(study), "--output", str(paths.root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = Store(sqlite_url(paths.database), read_only=True).load("packs")
    assert sweep is not None
    assert [trial.verdict for trial in sweep.trials.values()] == [Verdict.REACHED] * 3
    attempts = list(sweep.attempts.values())
    assert len({attempt.job_id for attempt in attempts}) == 1
    assert len(list(paths.packs.iterdir())) == 1
    for trial, attempt in zip(sweep.trials.values(), attempts, strict=True):
        assert trial.metrics.objective == trial.metrics.stop_seconds
        assert trial.metrics.packed_seconds > 0
        assert "alone (" in trial.sentence
        assert 0 < attempt.node_share <= 1
        assert (paths.attempt(trial.number, 0).folder / "adapter" / "adapter_model.safetensors").exists()
    (pack,) = paths.packs.iterdir()
    job = read_records(AttemptPaths(pack), "")
    assert job.ended is not None, "a sweep that is over lets its pack go"
    held = job.ended.seconds
    assert held is not None
    assert sweep.node_hours(job.ended.at) * 3600 == pytest.approx(held, abs=0.1)
    assert sum(a.overhead_seconds for a in attempts) > 0.2 * held, "the model is loaded and measured"
    assert sum(t.metrics.node_hours for t in sweep.trials.values()) * 3600 < held
    confirm = [sys.executable, "-m", "lora_tune.confirm", "--study", str(study), "--output", str(paths.root)]
    done = subprocess.run(
        [*confirm, "--top", "2", "--seeds", "2", "--parallel", "4"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    race = Store(sqlite_url(paths.database), read_only=True).load("packs.confirm")
    assert race is not None
    assert [trial.verdict for trial in race.trials.values()] == [Verdict.REACHED] * 4
    runs = [attempt for attempt in race.attempts.values() if not attempt.failure]
    assert len({attempt.job_id for attempt in runs}) < len(runs), "several seeds share a job"
    # The packs of a race are its own: so what both studies cost is what the jobs of both held.
    assert list(paths.packs.iterdir()) == [pack]
    packs = [
        read_records(AttemptPaths(folder), "").ended for folder in SweepPaths(paths.root / "confirm").packs.iterdir()
    ]
    assert race.node_hours(time.time()) * 3600 == pytest.approx(
        sum(end.seconds or 0.0 for end in packs if end), abs=0.1
    )


def test_a_trial_whose_pack_has_too_few_gpus_fails_once_and_says_so(tmp_path: Path) -> None:
    study, paths = tmp_path / "packs.toml", SweepPaths(tmp_path / "sweep")
    few = 'slots = 1\npacks = 2\nenvironment = { CUDA_VISIBLE_DEVICES = "3" }'
    study.write_text(STUDY.replace("slots = 3", few).replace("trials = 3\nparallel = 3", "trials = 1\nparallel = 1"))
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(study), "--output", str(paths.root)]
    subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    sweep = Store(sqlite_url(paths.database), read_only=True).load("packs")
    assert sweep is not None
    ((attempt,), (trial,)) = sweep.attempts.values(), sweep.trials.values()
    assert (attempt.failure, trial.verdict) == ("configuration", Verdict.FAILED)
    assert "site.packs = 2: the job has 1 GPUs (CUDA_VISIBLE_DEVICES=3); allowed are" in trial.sentence


def test_a_person_stops_one_trial_of_a_pack_and_a_limit_of_its_own_share_ends_the_other(tmp_path: Path) -> None:
    study, paths = tmp_path / "packs.toml", SweepPaths(tmp_path / "sweep")
    endless = STUDY.replace("MAX_STEPS = 4", "MAX_STEPS = 1000000").replace("target = 9.0", "target = 0.1")
    endless = endless.replace("trials = 3\nparallel = 3", "trials = 2\nparallel = 2")
    study.write_text(f"{endless}\n[pruning]\nrule = 'none'\ncap = false\n")
    common = ["--study", str(study), "--output", str(paths.root)]
    driver = subprocess.Popen([sys.executable, "-m", "lora_tune.sweep", *common], stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: paths.attempt(0, 0).started.exists(), seconds=120)
        for asked in (["--stop", "0"], ["--trial-minutes", "0.05"]):
            steer = [sys.executable, "-m", "lora_tune.steer", *common, *asked]
            subprocess.run(steer, check=True, timeout=120, capture_output=True)
        said, _ = driver.communicate(timeout=240)
    finally:
        driver.kill()
    sweep = Store(sqlite_url(paths.database), read_only=True).load("packs")
    assert sweep is not None, said
    stopped, limited = sweep.trials.values()
    assert (stopped.verdict, limited.verdict) == (Verdict.CANCELLED, Verdict.CENSORED), said
    assert "ran into the limit of 0.05 min" in limited.sentence
    assert len({attempt.job_id for attempt in sweep.attempts.values()}) == 1, "the pack trained on"
    (own,) = sweep.attempts_of(1)
    assert own.node_hours(time.time()) * 3600 > 3.0, "its share counts, not what others had"


AUDITS = """
[workload]
kind = "peft"
[site]
slots = 4
[space]
LR = { type = "float", low = 1e-7, high = 1e-2, log = true }
MAX_STEPS = 300
VAL_CHECK_INTERVAL = 16
SEQ = 32
EVAL_SAMPLES = 4
[objective]
target = 1.75
[search]
enqueue = [
  { LR = 3e-3 }, { LR = 4e-3 }, { LR = 3.5e-3 }, { LR = 3.2e-3 },
  { LR = 1e-7 }, { LR = 2e-7 }, { LR = 3e-7 }, { LR = 4e-7 },
]
[pruning]
references = 3
false_prune_rate = 0.3
audit = 0.5
cap = false
[budget]
trials = 8
parallel = 4
"""
"""Four good trials, with three of which the others are compared, and four whose loss stays where it is."""


def test_an_audit_goes_on_to_its_end_in_its_slot_and_other_condemned_trials_are_stopped(tmp_path: Path) -> None:
    study, paths = tmp_path / "packed.toml", SweepPaths(tmp_path / "sweep")
    study.write_text(AUDITS)
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(study), "--output", str(paths.root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = Store(sqlite_url(paths.database), read_only=True).load("packed")
    assert sweep is not None
    assert [sweep.trials[number].verdict for number in range(4)] == [Verdict.REACHED] * 4
    condemned = [sweep.trials[number] for number in range(4, 8)]
    audits = [trial for trial in condemned if is_audit(load_study(study), trial)]
    assert [trial.number for trial in audits] == [5, 6], "drawn by the study's name and the trial's seed"
    for trial in condemned:
        (attempt,) = sweep.attempts_of(trial.number)
        end = read_records(paths.attempt(trial.number, 0), "").ended
        assert end is not None
        if trial in audits:
            assert (trial.verdict, attempt.stop, end.exit_code) == (Verdict.CENSORED, StopKind.NONE, 0)
            assert trial.metrics.last_samples == 4 * 300
            assert trial.metrics.audited is not None
            assert "stalled: " in trial.metrics.audited
            assert 0 < (trial.metrics.audited_samples or 0.0) < 4 * 300
        else:
            assert (trial.verdict, attempt.stop, end.exit_code) == (Verdict.PRUNED, StopKind.PRUNED, 143)
            assert (trial.metrics.last_samples or 0.0) < 4 * 300
            assert trial.metrics.audited is None
    assert len({attempt.job_id for attempt in sweep.attempts.values()}) == 1
