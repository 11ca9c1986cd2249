"""How a job becomes an sbatch line; nothing here needs Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_tune.config.tables import Site
from lora_tune.launchers.slurm.client import handed_on
from lora_tune.launchers.slurm.submission import preview, submission_command
from lora_tune.workloads.base import Job, Resources

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def job(**fields: object) -> Job:
    values: dict[str, object] = {
        "name": "h100-0007-0",
        "folder": Path("/sweeps/h 100/trials/0007/attempt-0"),
        "argv": ("run.sub",),
        "environment": {"TP": "4", "DATADIR": "/data/a b"},
        "cwd": Path("/opt/llama2_70b_lora"),
        "log": Path("/sweeps/h 100/trials/0007/attempt-0/job.log"),
        "resources": Resources(nodes=1, gpus_per_node=8, minutes=59.5),
        "script": True,
        "exclude_nodes": ("dgx-03", "dgx-07"),
    }
    return Job(**{**values, **fields})  # type: ignore[arg-type]


FULL = Site(
    launcher="slurm",
    gpus_per_node=8,
    partition="batch",
    account="team",
    reservation="mlperf",
    qos="high",
    nodelist="dgx-[01-16]",
    exclude="dgx-01",
    gres="gpu:8",
    mpi="pmi2",
    cpu_bind="none",
    sbatch_args=("--constraint=h100", "--network=sharp"),
)


@pytest.fixture(autouse=True)
def _small_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in handed_on(os.environ):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/u", "USER": "u", "PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "17")


def test_the_whole_command_for_a_script_with_every_setting_of_a_site() -> None:
    assert "\n".join(submission_command(job(), FULL)) + "\n" == (GOLDEN / "sbatch_script.txt").read_text()


def test_the_whole_command_for_a_recipe_of_our_own() -> None:
    recipe = job(script=False, argv=("python", "-m", "x"), cwd=None, exclude_nodes=())
    command = submission_command(recipe, Site(launcher="slurm", gpus_per_node=8))
    assert "\n".join(command) + "\n" == (GOLDEN / "sbatch_recipe.txt").read_text()


def test_the_preview_leaves_out_what_is_shown_beside_it() -> None:
    assert preview(job(), FULL)[:4] == ["SLURM_GRES=gpu:8", "SLURM_MPI_TYPE=pmi2", "SLURM_CPU_BIND=none", "sbatch"]


def test_a_part_of_a_node_is_not_taken_whole() -> None:
    command = submission_command(job(resources=Resources(gpus_per_node=2, minutes=5), script=False), FULL)
    assert "--exclusive" not in command
    assert "--gres=gpu:8" in command  # the site's word counts


def test_percent_signs_in_the_log_are_not_expanded() -> None:
    assert "--output=/x/100%%/job.log" in submission_command(job(log=Path("/x/100%/job.log")), FULL)


def test_no_limit_is_not_submitits_five_minutes() -> None:
    command = submission_command(job(resources=Resources(gpus_per_node=8)), FULL)
    assert not [option for option in command if option.startswith("--time")]


@pytest.mark.parametrize("harmful", ["--signal", "--wckey", "--error"])
def test_what_submitit_adds_by_itself_and_would_harm_is_left_out(harmful: str) -> None:
    assert not [option for option in submission_command(job(), FULL) if option.startswith(harmful)]
