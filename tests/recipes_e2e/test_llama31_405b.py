"""Llama 3.1 405B: its own names, layouts with virtual stages, the rate that follows from the batch, its mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster
from tests.recipes_e2e.mlperf_rig import mlperf_rig
from tests.recipes_e2e.rig import HOPELESS

pytestmark = pytest.mark.slurm


def test_pretraining_under_its_own_names(slurm: Cluster, tmp_path: Path) -> None:
    """Two nodes of four GPUs stand for the 128."""
    points = [
        'MAX_STEPS = 800, layout = "tp4 pp2 cp1 minibs896 mbs1 vp4"',
        'MAX_STEPS = 250, layout = "tp2 pp2 cp2 minibs896 mbs1"',
        'MAX_STEPS = 800, layout = "tp2 pp2 cp2 minibs1152 mbs1 vp2"',
    ]
    for name in ("data", "checkpoints", "tokenizer"):
        (tmp_path / name).mkdir()
    rig = mlperf_rig(
        tmp_path,
        slurm,
        "llama31_405b",
        target=2.47,
        environment={
            "FAIL_MODE": "mount@SEED=1003", "STANDIN_STEP_SECONDS": "0.025", "STANDIN_LR_SCALE": "100",
            "TOKENIZER": str(tmp_path / "tokenizer"),
        },
        site={"system": "GB200", "nodes": 2, "gpus_per_node": 4, "gres": "gpu:4", "mpi": "none", "container": "c.sqsh",
              "data": str(tmp_path / "data"), "model": str(tmp_path / "checkpoints")},
        points=points,
        MAX_STEPS='{ type = "int", low = 250, high = 800, step = 50 }',
        layout='{ type = "layout", tp = [2, 4], pp = [2], vp = [1, 2, 4], cp = [1, 2], gbs = [896, 1152] }',
        trials=3,
        parallel=2,
    )  # fmt: skip
    assert rig.sweep_once().returncode == 0, rig.said
    good, poor, unmounted = rig.trials()
    assert good.verdict is Verdict.REACHED, rig.said
    assert poor.verdict in HOPELESS, rig.said
    evals = rig.sweep().last_evals(good.number)
    assert [e.samples for e in evals] == [18_816 * (i + 1) for i in range(len(evals))], "18,432 in whole steps of 896"
    assert good.parameters["LR"] == pytest.approx(8e-5 * 896 / 1152)

    assert unmounted.verdict is Verdict.FAILED
    attempt = rig.sweep().attempts_of(unmounted.number)[-1]
    assert (attempt.failure, "mount check failed" in attempt.line) == ("configuration", True)
    assert "data or model are not where run.sub looks" in attempt.remedy

    (config,) = (rig.paths.trials / "0000" / "attempt-0").glob("config_GB200_2x4x896xtp4pp2cp1_cg-dplast.sh")
    exports = dict(
        line.removeprefix("export ").split("=", 1) for line in config.read_text().splitlines() if "export" in line
    )
    wanted = {
        "TENSOR_MODEL_PARALLEL": "4",
        "PIPELINE_MODEL_PARALLEL": "2",
        "INTERLEAVED_PIPELINE": "4",
        "MINIBS": "896",
    }
    assert wanted.items() <= exports.items()
    assert not {"TP", "PP", "CP", "VP", "GBS"} & exports.keys()
    assert "using 32 processors on nodes" in rig.accepted_by_sbatch()
