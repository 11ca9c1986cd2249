"""torchrun + HF Trainer + PEFT: preprocessing once, time to an eval loss, a lost rendezvous tried again."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster
from tests.conftest import REPOSITORY
from tests.recipes_e2e.rig import HOPELESS, Rig

pytestmark = pytest.mark.slurm

GOOD = (
    'LR = 4e-4, WARMUP_STEPS = 0, MAX_STEPS = 200, SCHEDULER = "cosine", LORA_RANK = 16, LORA_DROPOUT = 0.0, '
    'TRAINABLE = "q_proj,k_proj,v_proj,o_proj", layout = "tp1 pp1 cp1 minibs4 mbs4"'
)


def test_preprocess_once_then_sweep_to_an_eval_loss(slurm: Cluster, tmp_path: Path) -> None:
    rig = Rig(
        tmp_path,
        slurm,
        "torchrun_peft",
        site={"system": "TEST", "gpus_per_node": 8, "container": "standin.sqsh", "data": str(tmp_path / "data")},
        environment={"FAIL_MODE": "rendezvous!@SEED=1001", "STANDIN_STEP_SECONDS": "0.06"},
        points=[
            GOOD,
            GOOD.replace("4e-4", "2e-4"),
            GOOD.replace("4e-4", "1e-6").replace("MAX_STEPS = 200", "MAX_STEPS = 500"),
        ],
        LR='{ type = "float", low = 1e-6, high = 2e-3, log = true }',
        cwd=tmp_path / "recipe",
        target=2.75,
        trials=3,
        parallel=3,
    )
    assert rig.sweep_once().returncode == 0, rig.said
    lost, other, poor = rig.trials()

    passes = (tmp_path / "data" / "preprocessed.log").read_text().splitlines()
    assert len(passes) == 1, "once a sweep, not once a trial"
    record = json.loads(rig.paths.prepared.read_text())
    assert (record["state"], record["job_id"]) == ("done", passes[0].split()[2])
    assert min(a.intended_at for a in rig.attempts()) >= float(passes[0].split()[0]), "before any trial"

    assert (lost.verdict, other.verdict) == (Verdict.REACHED, Verdict.REACHED), rig.said
    assert poor.verdict in HOPELESS, rig.said
    first = rig.sweep().attempts_of(lost.number)[0]
    assert (first.failure, "RendezvousTimeoutError" in first.line) == ("infrastructure", True)
    assert "another job may hold their port" in first.remedy

    for attempt in rig.attempts():
        assert len(attempt.nodes) == 2, "as shipped"
        log = rig.log(attempt.trial, attempt.number)
        assert f"rendezvous at {attempt.nodes[0]}:29500, 2 nodes" in log, "on the head node"
    evals = rig.sweep().last_evals(other.number)
    assert other.samples == next(e.samples for e in evals if e.loss <= 2.75)
    regular = [e.samples for e in evals[:-1]]  # the last step evaluates too
    assert regular == pytest.approx([1024 * (i + 1) for i in range(len(regular))]), "at any batch"
    assert "to start at" in rig.accepted_by_sbatch()
    accepted_by_train_py(rig)

    # The same command again: nothing is prepared, nothing runs.
    assert rig.sweep_once().returncode == 0, rig.said
    assert len((tmp_path / "data" / "preprocessed.log").read_text().splitlines()) == 1
    assert len(rig.attempts()) == 4


def accepted_by_train_py(rig: Rig) -> None:
    """The exported arguments pass the training's own parser."""
    arguments = rig.usage().split("train.sub ")[1]
    check = 'import runpy; print(runpy.run_path("train.py")["arguments"]().learning_rate)'
    line = f"cd {rig.recipe} && {sys.executable} -c {shlex.quote(check)} {arguments}"
    shown = rig.by_hand(line, STANDIN_ROOT=str(REPOSITORY))
    assert float(shown.split()[-1]) in (4e-4, 2e-4)
