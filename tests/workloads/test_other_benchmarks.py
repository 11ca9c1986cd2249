"""Folders of other benchmarks than LoRA: their own names for rate and batch, and no layout of a large model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import Study
from lora_tune.workloads import load
from lora_tune.workloads.base import Proposal, Start, Value
from lora_tune.workloads.base_config import fitting_configs, parameters_at
from lora_tune.workloads.mlperf import MlperfWorkload, findings, other_scripts

CONFIG = "config_GB200_2x4x32.sh"
RATE = {"type": "float", "low": 1e-5, "high": 1e-3, "log": True}
READS = "python train.py --rate $LEARNING_RATE --batch $BATCHSIZE --steps $MAX_STEPS --every $VAL_CHECK_INTERVAL\n"
LAYOUT = "export TP=1 PP=1 CP=2 MBS=1 MINIBS=2\n"


def made(
    folder: Path, space: dict[str, Any], *, benchmark: str, reads: str = READS, config: str = "", data: Path = Path("d")
) -> tuple[MlperfWorkload, Start]:
    """A folder whose training reads what ``reads`` expands, and whose config exports a rate, a batch and ``config``."""
    folder.mkdir(parents=True)
    (folder / "run.sub").write_text(f"#!/bin/bash\n{reads}")
    exports = "export LEARNING_RATE=0.0002 BATCHSIZE=512 MAX_STEPS=900 VAL_CHECK_INTERVAL=262144 DGXNNODES=2 DGXNGPU=4"
    (folder / CONFIG).write_text(f"{exports}\n{config}")
    workload = {"kind": "mlperf", "implementation": str(folder), "base": CONFIG, "benchmark": benchmark}
    site = {"launcher": "slurm", "nodes": 2, "gpus_per_node": 4, "container": "c", "data": str(data), "model": "m"}
    study = Study.model_validate(
        {"name": "t", "workload": workload, "site": site, "space": space, "budget": {"trials": 3}}
    )
    found = load(study, "t.toml")
    assert isinstance(found, MlperfWorkload)
    start = found.start()
    assert start is not None
    return found, start


def trial(workload: MlperfWorkload, start: Start, **tuned: Value) -> Proposal:
    """A trial at a point of the space, as the driver makes it."""
    return Proposal(number=1, attempt=0, seed=7, parameters=parameters_at(start, workload.study.search_space, tuned))


def changes(workload: MlperfWorkload, proposal: Proposal) -> dict[str, Value]:
    """What the trial's config sets, but for its name."""
    return {name: value for name, value in workload.exports(proposal).items() if name != "DGXSYSTEM"}


def test_a_rate_that_is_tuned_under_the_trees_own_name_reaches_the_trial(tmp_path: Path) -> None:
    """It was set back to the base's: LR means the same, and the base's value was handed on under that name."""
    workload, start = made(tmp_path / "tree", {"LEARNING_RATE": RATE}, benchmark="flux1")
    proposal = trial(workload, start, LEARNING_RATE=5e-4)
    assert changes(workload, proposal) == {"LEARNING_RATE": 5e-4}
    assert "LR" not in proposal.parameters
    assert start.tuned == {"LEARNING_RATE": 2e-4}


@pytest.mark.parametrize("benchmark", ["bert", "rgat", "retinanet", "stable_diffusion"])
def test_degrees_and_batch_that_nobody_states_are_neither_set_nor_made_up(benchmark: str, tmp_path: Path) -> None:
    """BATCHSIZE counts a GPU's samples in these, so no GBS is known; a tree that computes its own kept 8 of it."""
    reads = READS + "export GLOBAL_BATCH_SIZE=$((BATCHSIZE * DGXNGPU)); echo $GLOBAL_BATCH_SIZE\n"
    workload, start = made(tmp_path / "tree", {"LEARNING_RATE": RATE}, benchmark=benchmark, reads=reads)
    proposal = trial(workload, start, LEARNING_RATE=5e-4)
    assert changes(workload, proposal) == {"LEARNING_RATE": 5e-4}
    assert {"GBS", "MINIBS", "TP"}.isdisjoint(start.parameters.keys() | proposal.parameters.keys())


@pytest.mark.parametrize("benchmark", ["flux1", "dlrm_dcnv2"])
def test_a_batch_that_is_stated_whole_is_the_trials(benchmark: str, tmp_path: Path) -> None:
    workload, start = made(tmp_path / "tree", {"LEARNING_RATE": RATE}, benchmark=benchmark)
    assert start.parameters["GBS"] == 512
    assert workload.gbs(trial(workload, start, LEARNING_RATE=5e-4)) == 512


def test_the_config_is_called_by_each_ranks_part_of_the_batch_as_the_vendors_are(tmp_path: Path) -> None:
    """``config_GB200_2x4x32.sh`` states BATCHSIZE alone: 32 is each rank's part. Trials' configs were called x1."""
    space = {"LEARNING_RATE": RATE, "BATCHSIZE": {"type": "categorical", "choices": [256, 512]}}
    workload, start = made(tmp_path / "tree", space, benchmark="flux1")
    names = [workload.file_name(trial(workload, start, LEARNING_RATE=5e-4, BATCHSIZE=b)) for b in (256, 512)]
    assert [name.split("xtp")[0].rpartition("x")[2] for name in names] == ["32", "64"]


def test_a_batch_that_is_tuned_under_its_own_name_is_no_longer_the_bases(tmp_path: Path) -> None:
    space = {"BATCHSIZE": {"type": "categorical", "choices": [512, 1024]}, "LEARNING_RATE": 2e-4}
    workload, start = made(tmp_path / "tree", space, benchmark="flux1")
    proposal = trial(workload, start, BATCHSIZE=1024)
    assert changes(workload, proposal) == {"BATCHSIZE": 1024}
    assert (proposal.parameters.get("GBS"), workload.gbs(proposal)) == (None, 1024)


@pytest.mark.parametrize(
    ("tuned", "batch"),
    [({"MINIBS": 4}, 16), ({"TP": 2}, 4), ({"TENSOR_MODEL_PARALLEL": 2}, 4), ({"SEED_OFFSET": 3}, 8)],
)
def test_a_batch_that_follows_from_what_is_tuned_follows_it(
    tuned: dict[str, Value], batch: int, tmp_path: Path
) -> None:
    """Base: MINIBS 2 on 8 GPUs with CP 2. Its GBS of 8 was recorded for every trial, and no log agreed with it."""
    name, value = next(iter(tuned.items()))
    space = {name: {"type": "categorical", "choices": [1, value]}}
    reads = f"{READS}echo $TP $CP $MINIBS ${name}\n"
    workload, start = made(tmp_path / "tree", space, benchmark="llama2_70b_lora", reads=reads, config=LAYOUT)
    assert start.parameters["GBS"] == 8
    proposal = trial(workload, start, **tuned)
    assert (proposal.parameters["GBS"], workload.gbs(proposal)) == (batch, batch)


def test_a_layout_is_compared_with_degrees_that_the_base_leaves_alone(tmp_path: Path) -> None:
    """A degree of one that nobody states is one: such a base is a point of a space of layouts."""
    space = {"layout": {"type": "layout", "tp": [1, 2], "minibs": [2]}}
    workload, start = made(
        tmp_path / "tree", space, benchmark="llama2_70b_lora", reads=READS + "echo $TP $MINIBS\n",
        config="export MINIBS=2\n",
    )  # fmt: skip
    assert start.tuned == {"layout": "tp1 pp1 cp1 minibs2 mbs1"}
    assert changes(workload, trial(workload, start, layout="tp2 pp1 cp1 minibs2 mbs1"))["TP"] == 2


class TestDoctor:
    """What is told of such a folder before anything runs."""

    @staticmethod
    def told(workload: MlperfWorkload, folder: Path) -> list[str]:
        return [finding.what for finding in findings(workload, SweepPaths(folder / "sweep")) if finding.fix]

    def test_a_mount_that_no_file_reads_is_not_missed(self, tmp_path: Path) -> None:
        """A tokenizer and a checkpoint were asked of detection and recommendation, with exit code 3."""
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "train").touch()
        workload, _ = made(
            tmp_path / "tree",
            {"LEARNING_RATE": RATE},
            benchmark="retinanet",
            reads=f"{READS}echo $DATADIR $TOKENIZER\n",
            data=tmp_path / "d",
        )
        told = self.told(workload, tmp_path)
        assert [what for what in told if what.endswith("is not set")] == ["TOKENIZER is not set"]

    def test_a_folder_among_anothers_implementations_is_told(self, tmp_path: Path) -> None:
        place = tmp_path / "bert" / "implementations" / "pytorch"
        workload, _ = made(place, {"LEARNING_RATE": RATE}, benchmark="flux1")
        words = "lies among the implementations of bert, and the target 0.586 is that of flux1"
        assert any(words in what for what in self.told(workload, tmp_path))
        named, _ = made(tmp_path / "2" / "bert" / "implementations" / "x", {"LEARNING_RATE": RATE}, benchmark="bert")
        assert not any("lies among" in what for what in self.told(named, tmp_path))


def test_a_changed_batch_script_and_a_config_of_another_spelling_of_the_system_are_named(tmp_path: Path) -> None:
    """A guide's folder: run.sub, its changed copy, and config_H100_optimal.sh for a site called DGXH100."""
    workload, _ = made(tmp_path / "tree", {"LEARNING_RATE": RATE}, benchmark="flux1")
    assert other_scripts(workload) == []
    (tmp_path / "tree" / "run_h100_universal.sub").write_text("srun ./run_and_time.sh\n")
    (tmp_path / "tree" / "download.sub").write_text("curl x\n")
    (sentence,) = other_scripts(workload)
    assert sentence.endswith(
        'holds run_h100_universal.sub; workload.script = "run_h100_universal.sub" runs that instead'
    )
    (tmp_path / "tree" / "config_H100_optimal.sh").write_text("export LR=1\n")
    assert fitting_configs(tmp_path / "tree", "DGXH100", 1, 8) == ["config_H100_optimal.sh"]
    assert fitting_configs(tmp_path / "tree", "H200", 1, 8) == []
