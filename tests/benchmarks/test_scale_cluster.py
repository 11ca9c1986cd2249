"""The cluster of ``benchmarks.scale`` writes what it says that it writes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import scale_cluster
from benchmarks.scale import LIVE_STUDY
from lora_tune.config.study import parse_study
from lora_tune.controller import pruning
from lora_tune.logs.mllog import MllogReader
from lora_tune.store.records import StudyRecords, Trial


def job(folder: Path, batch: int) -> scale_cluster.Job:
    """A job of a trial with this global batch size, as the launcher writes it down."""
    (folder / "command.json").write_text(json.dumps({"environment": {"GBS": str(batch)}}))
    arguments = ["--job-name=scale-0000-0", "--comment=scale", f"--output={folder / 'job.log'}"]
    return scale_cluster.Job("1", arguments, "n0001", random.Random(7), first=False)


@pytest.mark.parametrize("batch", [8, 16])
def test_a_job_announces_the_batch_of_its_trial(batch: int, tmp_path: Path) -> None:
    """A trial whose log announces another one fails, and after three of them no more are started."""
    reader = MllogReader()
    reader.feed("".join(text for _, text, _, _ in job(tmp_path, batch).lines).encode())
    assert reader.run().hyperparameters["global_batch_size"] == batch


def test_the_driver_stops_a_job_at_the_eval_that_the_cluster_calls_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_cluster, "DIVERGED", 0.5)
    study = parse_study(LIVE_STUDY.replace("PARALLEL", "1"), Path("scale.toml"))
    trial = Trial(number=0, seed=0, tuned={}, parameters={"GBS": 8, "MAX_STEPS": 1600})
    sweep = StudyRecords(name="scale", digest="", study_toml="", began_at=0.0, trials={0: trial})
    reader, verdicts = MllogReader(), []
    for _, text, samples, diverged in job(tmp_path, 8).lines:
        reader.feed(text.encode())
        judgement = pruning.judge_curve(study, sweep, trial, reader.run())
        if samples:
            verdicts.append((diverged, isinstance(judgement, pruning.Stop)))
        if diverged:
            break
    assert verdicts[-1] == (True, True)
    assert all(said == stopped for said, stopped in verdicts)
