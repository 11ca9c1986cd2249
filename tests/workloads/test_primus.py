"""A llama2_70b_lora folder on Primus, as v6.0's for MI355X: the shipped study and what a trial is given there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lora_tune.base.errors import InputError
from lora_tune.config.study import Study, load_study, parse_study
from lora_tune.workloads import load
from lora_tune.workloads.base import Proposal, some_proposal
from lora_tune.workloads.docker import DockerWorkload
from tests.conftest import REPOSITORY

STANDINS = REPOSITORY / "tests" / "standins"
SHIPPED = REPOSITORY / "studies" / "mlperf" / "mi355x_lora_primus.toml"


@pytest.fixture(autouse=True)
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = shutil.copytree(STANDINS / "primus", tmp_path / "tree")
    for name in ("run_with_docker.sh", "runtime_tunables.sh"):
        shutil.copy(STANDINS / "docker" / name, folder)
    monkeypatch.setenv("LORA_TUNE_IMPLEMENTATION", str(folder))
    monkeypatch.setenv("CONT", "standin/primus:1")
    return folder


def workload(study: Study) -> DockerWorkload:
    found = load(study, "t.toml")
    assert isinstance(found, DockerWorkload)
    return found


def proposal(study: Study, **changes: object) -> Proposal:
    point = {**study.search_space.corner(), **study.search.enqueue[0], **changes}
    return Proposal(number=3, attempt=0, seed=11, parameters=study.search_space.resolve(point))


def test_the_shipped_study_sets_what_this_folder_reads() -> None:
    study = load_study(SHIPPED)
    exports = workload(study).exports(proposal(study, LR=5e-4, WARMUP_STEPS=10, HEALING_ITER=350))
    told = {name: value for name, value in exports.items() if not name.startswith("DGX")}
    assert told == {
        "LR": 5e-4,
        "PRIMUS_LR_WARMUP_ITERS": 10,
        "HEALING_ITER": 350,
        "PRIMUS_GLOBAL_BATCH_SIZE": 8,
        "PRIMUS_TRAIN_ITERS": 550,
        "PRIMUS_EVAL_INTERVAL": 48,
    }


def test_its_first_trial_is_the_published_configuration() -> None:
    study = load_study(SHIPPED)
    start = workload(study).start()
    assert start is not None
    assert (start.name, start.parameters["LR"]) == ("config_MI355X_1x8x1.sh", 6e-4)


@pytest.mark.parametrize(("batch", "steps"), [(8, 48), (16, 24), (18, 22)])
def test_evals_are_counted_in_steps_by_primus(batch: int, steps: int) -> None:
    """384 samples, whatever the batch; 384 of them in Primus' variable would be the first eval after 3,072 samples."""
    text = SHIPPED.read_text().replace("GBS = 8", f"GBS = {batch}")
    study = parse_study(text, SHIPPED)
    assert workload(study).exports(some_proposal(study))["PRIMUS_EVAL_INTERVAL"] == steps


def test_both_precisions_may_be_on_in_its_config_but_no_trial_may_add_one(tree: Path) -> None:
    study = load_study(SHIPPED)
    config = tree / "config_MI355X_1x8x1.sh"
    assert {"export FP8=True", "export FP4=True"} <= {*config.read_text().splitlines()}
    workload(study).exports(proposal(study))
    config.write_text(config.read_text().replace("export FP4=True", "export FP4=False"))
    study = parse_study(SHIPPED.read_text().replace("GBS = 8", 'GBS = 8\nFP4 = "True"'), SHIPPED)
    with pytest.raises(InputError, match="FP8 and FP4 are both on"):
        workload(study).exports(proposal(study))


def test_degrees_that_the_folder_fixes_are_refused() -> None:
    text = SHIPPED.read_text().replace("GBS = 8", 'layout = { type = "layout", tp = [1, 2], gbs = [8] }')
    study = parse_study(text, SHIPPED)
    with pytest.raises(InputError, match=r"no file in .* reads (TP|MINIBS), so setting it has no effect"):
        workload(study).exports(proposal(study, layout="tp2 pp1 cp1 minibs2 mbs1"))
