"""Inventec P8000: env.sh, a named node, --gres and pmi2 for each step, a batch that is given whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster
from tests.recipes_e2e.mlperf_rig import mlperf_rig
from tests.recipes_e2e.rig import HOPELESS

pytestmark = pytest.mark.slurm


def test_inventecs_folder_is_swept_as_it_is(slurm: Cluster, tmp_path: Path) -> None:
    points = [
        f'LR = {lr}, MAX_STEPS = {600 if lr > 1e-5 else 900}, layout = "{layout} mbs1 sp1"'
        for lr, layout in (
            (4e-4, "tp8 pp1 cp1 minibs8"),
            (4e-4, "tp4 pp1 cp1 minibs4"),
            (1e-5, "tp4 pp1 cp2 minibs8"),
            (6e-4, "tp2 pp1 cp1 minibs2"),
        )
    ]
    nodes = ",".join(slurm.nodes[:3])
    rig = mlperf_rig(
        tmp_path,
        slurm,
        "p8000",
        target=2.58,
        environment={"FAIL_MODE": "numa@SEED=1005", "STANDIN_STEP_SECONDS": "0.008", "CONT_FILE": "lora.sqsh"},
        site={
            "system": "P8000",
            "gpus_per_node": 8,
            "gres": "gpu:8",
            "mpi": "pmi2",
            "cpu_bind": "none",
            "nodelist": nodes,
        },
        points=points,
        LR='{ type = "float", low = 1e-5, high = 8e-4, log = true }',
        trials=5,
        parallel=3,
    )
    assert rig.sweep_once().returncode == 0, rig.said
    base, good, other, poor, numa = rig.trials()
    assert [t.verdict for t in (base, good, other)] == [Verdict.REACHED] * 3, rig.said
    assert base.metrics.base == "config_P8000_1x8x1xtp8pp1cp1.sh", "what its author runs now is trial 0"
    assert poor.verdict in HOPELESS, rig.said

    assert numa.verdict is Verdict.FAILED
    attempt = rig.sweep().attempts_of(numa.number)[-1]
    assert attempt.failure == "configuration"
    assert "is invalid" in attempt.line or "CPU binding" in attempt.line
    assert "SLURM_CPU_BIND=none" in attempt.remedy

    for trial in (base, good, other):
        evals = rig.sweep().last_evals(trial.number)
        assert [e.samples for e in evals] == [1536 + 384 * i for i in range(len(evals))], "the closed division's evals"
        assert trial.samples == next(e.samples for e in evals if e.loss <= 2.58)
    (config,) = (rig.paths.trials / "0001" / "attempt-0").glob("config_*.sh")
    assert config.name == "config_P8000_1x8x8xtp8pp1cp1.sh"
    based = "source ./config_P8000_1x8x1xtp8pp1cp1.sh\npopd >/dev/null\nexport MAX_STEPS=600\n"
    assert based in config.read_text(), "the base, and changes"
    assert "MINIBS" not in config.read_text()
    assert {node for a in rig.attempts() for node in a.nodes} <= set(slurm.nodes[:3]), "named nodes only"

    usage = rig.usage()
    assert "source env.sh && source config_P8000_1x8x" in usage
    assert "SLURM_GRES=gpu:8 SLURM_MPI_TYPE=pmi2 SLURM_CPU_BIND=none " in usage
    assert " sbatch -N $DGXNNODES -t $WALLTIME -w " in usage
    assert f"on nodes {slurm.nodes[0]} " in rig.accepted_by_sbatch(), "one node of the list"
