"""Runs that go on from a checkpoint: what says so, and what is not believed of them then."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lora_tune import curves
from lora_tune.config.study import parse_study
from lora_tune.controller import conclusion
from lora_tune.controller.acceptance import why_untrue
from lora_tune.launchers.base import JobState, JobStatus
from lora_tune.logs.readers import HfTrainerReader
from lora_tune.logs.run import RunLog
from lora_tune.logs.run_builder import states_resume
from lora_tune.store.records import Attempt, Trial

STUDY = parse_study(
    """
[workload]
kind = "command"
argv = ["true"]
log = { kind = "hf_trainer", samples_per_epoch = 10000 }
[space]
MBS = { type = "categorical", choices = [1, 2] }
[objective]
score = "throughput"
[budget]
trials = 2
""",
    Path("x.toml"),
)


@pytest.mark.parametrize(
    "line",
    [
        "Continuing training from global step 200",
        "  Continuing training from checkpoint, will skip to saved global_step",
        "  Will skip the first 3 epochs then the first 120 batches in the first epoch.",
        "Checkpoint detected, resuming training at epoch 6",
        "Checkpoint detected, resuming training at out/checkpoint-500. To avoid this behavior, change --output_dir",
        "Resuming from checkpoint out/last.pt",
        "[rank0] INFO: resumed training from step 1200",
        "Restored all states from the checkpoint at /runs/a/last.ckpt",
    ],
)
def test_what_programs_say_when_they_go_on(line: str) -> None:
    assert states_resume(line)


@pytest.mark.parametrize(
    "line",
    [
        "Loading checkpoint shards: 100%|##########| 15/15 [00:07<00:00]",
        "resume_from_checkpoint=None",
        "Resuming from checkpoint: None",
        "Resuming training from step 0",
        "Continuing training from global step 0",
        "There were no checkpoints found in out. Training from scratch.",
        "  Will skip the first 0 epochs then the first 0 batches in the first epoch.",
        "presumed lost",
        "loaded the weights of /models/llama2",
    ],
)
def test_what_loads_a_base_model_or_begins_at_nothing_is_no_resume(line: str) -> None:
    assert not states_resume(line)


def trained(*, resumed: bool, stated: float = 600.0) -> RunLog:
    """40 steps of 10 samples in 4 s, the last of 240: what was resumed divides all its samples by this session."""
    clock = itertools.count()
    reader = HfTrainerReader(lambda: float(next(clock)), samples_per_epoch=10_000.0)
    lines = [
        "Continuing training from global step 200" if resumed else "***** Running training *****",
        *(f"{{'loss': 0.9, 'epoch': {0.2 * resumed + epoch / 100:g}}}" for epoch in (1, 2, 3, 4)),
        f"{{'eval_loss': 0.95, 'eval_runtime': 0.3, 'epoch': {0.2 * resumed + 0.04:g}}}",
        f"{{'train_runtime': 4.0, 'train_samples_per_second': {stated}, 'epoch': {0.2 * resumed + 0.04:g}}}",
    ]
    for line in lines:
        reader.feed(line.encode() + b"\n")
    return reader.run()


def test_a_resumed_run_has_the_speed_of_its_own_progress() -> None:
    run = trained(resumed=True)
    assert run.resumed == "Continuing training from global step 200"
    assert curves.measured_throughput(run) == pytest.approx(100.0)
    assert curves.measured_throughput(trained(resumed=False, stated=105.0)) == 105.0, "who began at zero is believed"


def test_it_is_measured_by_that_where_speed_is_what_counts() -> None:
    run, trial = trained(resumed=True), Trial(number=0, seed=1, tuned={"MBS": 1}, parameters={"MBS": 1})
    attempt = Attempt(trial=0, number=0, job_name="x-0000-0", folder="")
    ended = JobStatus(state=JobState.ENDED, exit_code=0, seconds=10.0)
    assert why_untrue(STUDY, trial, attempt, ended, run, written={}, stamped=False) is None
    assert conclusion.measured(STUDY, trial, [attempt], run, 0.0).objective == pytest.approx(100.0)
