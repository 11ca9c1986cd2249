"""Our own recipes as workloads: what is looked for before the first trial, and what their exports are accepted by."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from lora_tune.base.errors import SetupError, StudyError
from lora_tune.config.study import Study, load_study
from lora_tune.sweep import main
from lora_tune.workloads import load
from lora_tune.workloads.base import Proposal, Workload
from lora_tune_recipes import settings as peft
from lora_tune_recipes.bridge import settings as bridge
from lora_tune_recipes.nemo import settings as nemo
from tests.conftest import REPOSITORY


def workload(**site: Any) -> Workload:
    study = Study.model_validate(
        {
            "name": "nemo",
            "workload": {"kind": "nemo"},
            "site": {"launcher": "slurm", "gpus_per_node": 1, **site},
            "space": {"LR": 4e-4, "layout": {"type": "layout", "tp": [1], "minibs": [4]}},
            "budget": {"trials": 1},
        }
    )
    return load(study, "nemo.toml")


def test_paths_that_only_the_nodes_may_see_are_doubts(tmp_path: Path) -> None:
    site = {"data": tmp_path, "model": "/nowhere/model", "container": "registry/image:1"}
    doubts = workload(**site, container_mounts=[f"{tmp_path}:/data", "/nowhere/cache:/cache"]).check()
    assert [doubt.split(" is not")[0] for doubt in doubts] == [
        "site.model=/nowhere/model",
        "site.container_mounts.1=/nowhere/cache",
    ]


def test_where_trials_run_here_what_is_missing_is_missing() -> None:
    with pytest.raises(SetupError, match=r"site\.model=/nowhere/model is not there"):
        workload(launcher="local", model="/nowhere/model").check()


@pytest.mark.parametrize(
    "name",
    [
        "bridge_h200x1",
        "bridge_h200x4",
        "bridge_small_h200x2",
        "nemo_h100x1",
        "nemo_h200x2",
        "nemo_h200x4",
        "nemo_small_h200x2",
        "nemo_small_h200x4",
        "h200x8",
        "peft_h100x1",
        "tiny",
    ],
)
def test_the_recipe_accepts_every_layout_as_exported(name: str, tmp_path: Path) -> None:
    """Sourced in a clean bash and read by the recipe itself; the base that the GPU studies adapt has a named shape."""
    study = load_study(REPOSITORY / "studies" / f"{name}.toml")
    space = study.search_space
    workload = load(study, f"{name}.toml")
    kind = study.workload.kind
    named = {} if kind == "peft" else {"MODEL": "", "LLAMA": "small"}
    tuned = space.corner()
    for layout in space.layouts("layout").layouts if "layout" in tuned else [None]:
        values = space.resolve({**tuned, "layout": str(layout)} if layout else tuned)
        made = workload.export(Proposal(number=0, attempt=0, seed=1, parameters=values), ("a test",))
        ((file, text),) = made.files.items()
        (tmp_path / file).write_text(text)
        show = ["bash", "-euc", f"source ./{file} && env -0"]
        shown = subprocess.run(
            show, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True
        ).stdout
        environment = dict(line.split("=", 1) for line in shown.decode().split("\0") if line)
        if kind in ("nemo", "bridge"):
            world = study.site.gpus_per_node
            accepted = {"nemo": nemo.read, "bridge": bridge.read}[kind](
                environment if study.site.model is None else {**environment, **named}, world
            )
            assert accepted.layout.batch == values["GBS"]
        else:
            assert peft.read({**environment, "MODEL": ""}).minibs == values["MINIBS"]


def test_the_dry_run_of_a_study_of_two_gpus_shows_what_each_trial_is(tmp_path: Path) -> None:
    """Files that the recipe takes on two ranks, the command of the job's step, and one node's two GPUs."""
    study = REPOSITORY / "studies" / "bridge_small_h200x2.toml"
    done = CliRunner().invoke(main, ["--study", str(study), "--output", str(tmp_path / "sweep"), "--dry-run"])
    assert done.exit_code == 0, done.output
    trials = done.output.split("\n# trial ")[1:]
    assert len(trials) == 2
    for shown in trials:
        exports = dict(re.findall(r"^export (\w+)=(.*)$", shown, re.MULTILINE))
        accepted = bridge.read({**exports, "MODEL": "", "LLAMA": "small"}, 2)
        assert (accepted.lr, accepted.layout.tp) == (float(exports["LR"]), int(exports["TP"]))
        runs = "torch.distributed.run --standalone --nproc-per-node=2 -m lora_tune_recipes.bridge_lora"
        assert re.search(rf"^# FILE runs: bash .*{runs}$", shown, re.MULTILINE)
        assert re.search(r"sbatch .*--gres=gpu:2 .*--nodes=1 .*--time=2 FILE$", shown, re.MULTILINE)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("site", "layout"), [({"nodes": 2}, {}), ({}, {"nodes": [1, 2]})], ids=["the site's nodes", "a layout's nodes"]
)
def test_a_recipe_that_starts_on_one_node_refuses_trials_of_two(site: dict[str, Any], layout: dict[str, Any]) -> None:
    study = Study.model_validate(
        {
            "name": "peft",
            "workload": {"kind": "peft"},
            "site": {"gpus_per_node": 1, **site},
            "space": {"LR": 4e-4, "layout": {"type": "layout", "tp": [1], "minibs": [4], **layout}},
            "budget": {"trials": 1},
        }
    )
    with pytest.raises(
        StudyError, match=r"site\.nodes: trials of 2 nodes, and this recipe starts its processes on one"
    ):
        load(study, "peft.toml")


@pytest.mark.parametrize("kind", ["nemo", "bridge", "peft"])
@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_trials_that_cannot_share_a_job_are_refused_slots(kind: str, gpus: int) -> None:
    study = Study.model_validate(
        {
            "name": kind,
            "workload": {"kind": kind},
            "site": {"gpus_per_node": gpus, "slots": 4},
            "space": {"LR": 4e-4},
            "objective": {"target": 1.0},
            "budget": {"trials": 1},
        }
    )
    if kind == "peft" and gpus <= 1:
        assert load(study, "study.toml")
    else:
        with pytest.raises(StudyError, match=r"site\.slots: allowed is workload\.kind \"peft\" on at most one GPU"):
            load(study, "study.toml")


def test_packs_in_one_job_want_slots() -> None:
    assert load(peft_study({"LR": 4e-4}, slots=4, packs=2), "study.toml")
    with pytest.raises(ValidationError, match=r"2 packs a job, and no slots in them; add site\.slots"):
        peft_study({"LR": 4e-4}, packs=2)


def peft_study(space: dict[str, Any], **site: Any) -> Study:
    whole = {"name": "peft", "workload": {"kind": "peft"}, "objective": {"target": 1.0}, "budget": {"trials": 1}}
    return Study.model_validate({**whole, "space": space, "site": site})


CHOICE = {"type": "categorical"}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"FSDP": 1}, "space.FSDP: 1: a trial in a pack has one process; allowed with site.slots is 0"),
        ({"TP": {"type": "int", "low": 1, "high": 2}}, "space.TP: 1, 2: a trial in a pack has one process"),
        ({"ATTN": {**CHOICE, "choices": ["sdpa", "eager"]}}, "space.ATTN: sdpa, eager: the trials of a pack share it"),
    ],
)
def test_what_no_pack_can_train_is_refused_with_the_study(space: dict[str, Any], message: str) -> None:
    assert load(peft_study(space), "study.toml"), "trials with jobs of their own may"
    with pytest.raises(StudyError) as refused:
        load(peft_study(space, slots=4), "study.toml")
    assert message in str(refused.value)


def test_what_a_pack_can_train_is_not_refused() -> None:
    dora = {"DORA": {**CHOICE, "choices": [0, 1]}, "LORA_TARGETS": "embed_tokens,q_proj"}
    space = {
        **dora,
        "MODULES_TO_SAVE": "lm_head",
        "FSDP": False,
        "TP": 1,
        "ATTN": "eager",
        "LR": {"type": "float", "low": 1e-4, "high": 1e-2},
    }
    assert load(peft_study(space, slots="auto"), "study.toml")


def test_a_library_that_is_not_here_is_refused_before_a_trial_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    four_bits = {"LOAD_IN_4BIT": {**CHOICE, "choices": ["", "nf4"]}}
    with pytest.raises(SetupError, match=r"LOAD_IN_4BIT='nf4': bitsandbytes is not installed here; pip install"):
        load(peft_study(four_bits), "study.toml").check()
    assert load(peft_study(four_bits, launcher="slurm"), "study.toml").check() == [], "nodes may have it"
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: object())
    assert load(peft_study(four_bits), "study.toml").check() == []
    with pytest.raises(SetupError, match=r"ATTN='flash_attention_2': a trial has no GPU"):
        load(peft_study({"ATTN": "flash_attention_2"}), "study.toml").check()


def test_a_trial_that_shares_a_job_reads_what_its_own_would(tmp_path: Path) -> None:
    study = Study.model_validate(
        {
            "name": "peft",
            "workload": {"kind": "peft", "save_adapter": True},
            "site": {"slots": "auto"},
            "space": {"LR": 4e-4, "MAX_STEPS": 7},
            "objective": {"target": 1.0},
            "budget": {"trials": 1},
        }
    )
    parameters = study.search_space.resolve({})
    job = load(study, "study.toml").job(Proposal(number=0, attempt=0, seed=5, parameters=parameters), tmp_path)
    assert job.slot is not None
    (config,) = job.files.values()
    exported = subprocess.run(["bash", "-c", f"{config}\nenv -0"], capture_output=True, check=True, env={}).stdout
    shell = dict(line.split("=", 1) for line in exported.decode().split("\0") if line)
    assert {name: shell[name] for name in job.slot.knobs} == dict(job.slot.knobs)
    assert job.slot.knobs["SAVE_ADAPTER"] == str(tmp_path / "adapter")
