"""GB200: trials of several nodes, a batch of 9, evals that do not divide 384, node-hours of whole allocations."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster, Shape
from tests.recipes_e2e.mlperf_rig import mlperf_rig
from tests.recipes_e2e.rig import HOPELESS

pytestmark = pytest.mark.slurm


def rack_site(nodes: int, folder: Path) -> dict[str, object]:
    """``nodes`` of a GB200 rack as the site of a study; container, data and model stand for themselves."""
    return {
        "system": "GB200",
        "nodes": nodes,
        "gpus_per_node": 4,
        "gres": "gpu:4",
        "mpi": "none",
        "container": "c.sqsh",
        "data": str(folder),
        "model": str(folder),
    }


def test_trials_of_three_nodes_with_a_batch_of_nine(slurm: Cluster, tmp_path: Path) -> None:
    """Three nodes stand for the eighteen: 12 GPUs, TP1 CP4, three ranks of three samples."""
    points = [
        f'LR = {lr}, MAX_STEPS = {steps}, layout = "tp1 pp1 cp4 minibs3 mbs1", MCORE_CUDA_GRAPH = {graph}, '
        "FP8_DPA = 1, FP8_ACT = 0"
        for lr, steps, graph in ((5e-4, 600, 1), (1e-5, 900, 0), (5e-4, 600, 0))
    ]
    rig = mlperf_rig(
        tmp_path,
        slurm,
        "gb200",
        target=2.6,
        environment={"FAIL_MODE": "userbuffers@SEED=1003", "STANDIN_STEP_SECONDS": "0.008"},
        site=rack_site(3, tmp_path),
        points=points,
        LR='{ type = "float", low = 1e-5, high = 8e-4, log = true }',
        layout='{ type = "layout", tp = [1, 2], cp = [2, 4], gbs = [9, 12] }',
        trials=3,
    )
    assert rig.sweep_once().returncode == 0, rig.said
    good, poor, overlap = rig.trials()
    assert good.verdict is Verdict.REACHED, rig.said
    assert poor.verdict in HOPELESS, rig.said
    evals = rig.sweep().last_evals(good.number)
    assert [e.samples for e in evals] == [1548 + 387 * i for i in range(len(evals))]

    assert overlap.verdict is Verdict.INFEASIBLE
    first = rig.sweep().attempts_of(overlap.number)[0]
    assert "operation not supported" in first.line
    assert "UB_SKIPMC=1" in first.remedy

    for attempt in rig.attempts():
        assert (attempt.node_count, len(attempt.nodes)) == (3, 3)
        assert attempt.node_hours(0) == pytest.approx(3 * ((attempt.ended_at or 0) - (attempt.started_at or 0)) / 3600)
    config = (rig.paths.trials / "0000" / "attempt-0" / "config_GB200_3x4x3xtp1pp1cp4.sh").read_text()
    assert "export MCORE_CUDA_GRAPH=1\n" in config
    assert "export VAL_CHECK_INTERVAL=387\n" in config
    assert "using 48 processors on nodes" in rig.accepted_by_sbatch()


def test_the_shipped_trial_takes_the_whole_rack(
    slurm: Cluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nothing is scaled down but the model: 18 nodes, 72 tasks, TP1 CP8, a batch of 9."""
    with Cluster(tmp_path_factory.mktemp("rack") / "c", Shape(nodes=18, gpus=4)) as rack:
        rig = mlperf_rig(
            tmp_path,
            rack,
            "gb200",
            target=2.6,
            environment={"STANDIN_STEP_SECONDS": "0.002"},
            site=rack_site(18, tmp_path),
            trials=1,
        )
        assert rig.sweep_once().returncode == 0, rig.said
        (attempt,) = rig.attempts()
        assert sorted(attempt.nodes) == sorted(rack.nodes)
        assert attempt.node_hours(0) == 18 * ((attempt.ended_at or 0) - (attempt.started_at or 0)) / 3600
        assert rig.sweep().last_evals(0)[0].samples == 1548
        (config,) = rig.paths.best.glob("config_GB200_18x4x1xtp1pp1cp8*.sh")
        assert config.name != "config_GB200_18x4x1xtp1pp1cp8.sh", "the folder has a config of that name: it is kept"
        assert "using 288 processors on nodes" in rig.accepted_by_sbatch()
