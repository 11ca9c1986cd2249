"""Any command: somebody's script, its prints read by patterns, through submitit and srun."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster
from tests.conftest import REPOSITORY
from tests.recipes_e2e.rig import HOPELESS, Rig

pytestmark = pytest.mark.slurm


def test_a_script_that_nobody_wrote_for_us(slurm: Cluster, tmp_path: Path) -> None:
    points = [
        f"LR = {lr}, MAX_STEPS = {steps}, GBS = {batch}"
        for lr, steps, batch in ((4e-4, 150, 8), (1e-5, 250, 8), (4e-4, 150, 32))
    ]
    rig = Rig(
        tmp_path,
        slurm,
        "command",
        standin="any_command",
        site={"system": "TEST", "gpus_per_node": 8},
        environment={"STANDIN_STEP_SECONDS": "0.04"},
        points=points,
        cwd=tmp_path / "recipe",
        target=2.75,
        trials=3,
        parallel=3,
    )
    rig.file.write_text(rig.file.read_text().replace('argv = ["python"', f'argv = ["{sys.executable}"'))
    assert rig.sweep_once().returncode == 0, rig.said
    good, poor, refused = rig.trials()

    printed = [line for line in rig.log(good.number).splitlines() if "val_loss" in line]
    losses = [float(line.split("val_loss ")[1]) for line in printed]
    assert good.verdict is Verdict.REACHED, rig.said
    assert good.samples == 8 * 10 * (1 + next(i for i, loss in enumerate(losses) if loss <= 2.75))
    attempt = rig.sweep().attempts_of(good.number)[-1]  # on a busy machine it is measured again
    life = attempt.ended_at - attempt.started_at
    assert good.samples / 8 * 0.04 - 1.5 <= good.seconds <= life + 1.5, "by arrival, a second or so"

    assert poor.verdict in HOPELESS, rig.said

    assert refused.verdict is Verdict.FAILED
    (attempt,) = rig.sweep().attempts_of(refused.number)
    assert attempt.failure == "configuration"
    assert "train.py: error: argument --batch: invalid choice: 32" in attempt.line
    assert "refuses its command line" in attempt.remedy

    check = 'import runpy; print(runpy.run_path("train.py")["arguments"]().lr)'
    line = rig.usage().replace(f"{sys.executable} train.py", f"{sys.executable} -c {shlex.quote(check)}")
    assert float(rig.by_hand(line, STANDIN_ROOT=str(REPOSITORY)).split()[-1]) == 4e-4
