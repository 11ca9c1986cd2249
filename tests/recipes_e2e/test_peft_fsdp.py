"""HF PEFT + FSDP: throughput over node counts, no target, slow layouts stopped by their pace."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tune.review.importance import scaling
from lora_tune.store.records import Verdict
from tests.cluster import Cluster
from tests.recipes_e2e.rig import Rig

pytestmark = pytest.mark.slurm

LAYOUTS = (
    "minibs4 mbs4 nodes1",
    "minibs4 mbs4 nodes2",
    "minibs4 mbs1 nodes1",
    "minibs4 mbs1 nodes2",
    "minibs4 mbs4 nodes4",
    "minibs8 mbs8 nodes1",
)


def test_a_throughput_sweep_over_node_counts(slurm: Cluster, tmp_path: Path) -> None:
    rig = Rig(
        tmp_path,
        slurm,
        "peft_fsdp",
        site={"system": "TEST", "gpus_per_node": 8, "account": "tuning", "partition": "gpu"},
        points=[f'layout = "tp1 pp1 cp1 {layout}"' for layout in LAYOUTS],
        cwd=tmp_path / "recipe",
        trials=len(LAYOUTS),
    )
    assert rig.sweep_once().returncode == 0, rig.said
    one, two, slow, slower, four, large = rig.trials()

    assert [t.verdict for t in (one, two, four)] == [Verdict.REACHED] * 3, rig.said
    for trial in (one, two, four):
        printed = float(rig.log(trial.number).split("'train_samples_per_second': ")[1].split(",")[0])
        assert trial.metrics.objective == printed, "the objective is what the Trainer itself says of the run"
    assert [t.verdict for t in (slow, slower)] == [Verdict.CAPPED] * 2, rig.said
    assert "the best on 1 nodes is" in slow.sentence
    assert "the best on 2 nodes is" in slower.sentence

    assert large.verdict is Verdict.INFEASIBLE
    first, second = rig.sweep().attempts_of(large.number)
    assert "CUDA out of memory" in first.line
    assert "smaller MBS" in first.remedy
    assert set(first.nodes) <= set(second.exclude_nodes)

    for attempt in rig.attempts():
        asked = int(rig.sweep().trials[attempt.trial].parameters["NODES"])
        assert (attempt.node_count, len(attempt.nodes)) == (asked, asked)

    rows = scaling(rig.study, rig.sweep())
    assert [(r.nodes, r.gpus, r.trial) for r in rows] == [(1, 8, 0), (2, 16, 1), (4, 32, 4)]
    assert all(row.efficiency > 1 for row in rows[1:]), "as published: memory lets larger systems do better a GPU"
    assert f"{rows[2].efficiency:.0%}" in rig.said

    assert "-A tuning" in rig.usage()
    assert "-N 4 -p gpu" in rig.usage()
    assert "using 64 processors on nodes" in rig.accepted_by_sbatch(), "four nodes"


def test_time_to_an_eval_loss_instead_as_the_page_says(slurm: Cluster, tmp_path: Path) -> None:
    """``--eval_steps`` added to argv, ``score`` and ``target`` set: nothing else changes."""
    rig = Rig(
        tmp_path,
        slurm,
        "peft_fsdp",
        site={"system": "TEST", "gpus_per_node": 8},
        points=['layout = "tp1 pp1 cp1 minibs4 mbs4 nodes4"'],
        cwd=tmp_path / "recipe",
        score="time_to_target",
        LR=4e-4,
        MAX_STEPS=60,
        trials=1,
    )
    text = rig.file.read_text().replace('    "--seed={SEED}",\n', '    "--seed={SEED}",\n    "--eval_steps=5",\n')
    rig.file.write_text(text.replace('score = "time_to_target"\n', 'score = "time_to_target"\ntarget = 2.8\n'))
    assert rig.sweep_once().returncode == 0, rig.said
    (trial,) = rig.trials()
    printed = [float(rest.split(",")[0]) for rest in rig.log(0).split("'eval_loss': ")[1:]]
    assert trial.verdict is Verdict.REACHED, (printed, rig.said)
    assert trial.samples == pytest.approx(5 * 128 * (1 + next(i for i, x in enumerate(printed) if x <= 2.8)), rel=0.01)
    assert "s to the target" in rig.said
