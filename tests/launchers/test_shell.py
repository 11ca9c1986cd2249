"""What a Slurm job takes from the shell in which its sweep was started, and what its script then lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.paths import AttemptPaths
from lora_tune.base.text import names_secret
from lora_tune.launchers.base import JobState
from lora_tune.launchers.slurm.client import handed_on, inherited_variables, withheld_secrets
from lora_tune.launchers.slurm.launcher import SlurmLauncher
from lora_tune.sweep import main as sweep
from lora_tune.workloads.base import Job, Resources
from lora_tune.workloads.script_needs import environment_warnings, function_warnings
from tests.cluster import Cluster
from tests.contracts.launcher import poll_until, ticket_of
from tests.launchers.test_slurm import script_job, site

SOFTWARE = {
    "HF_HOME": "/data/hf",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "CUDA_HOME": "/usr/local/cuda",
    "CONDA_PREFIX": "/opt/conda",
    "BASH_FUNC_module%%": "() {  echo loaded $2\n}",
}
OTHERS = {
    "LR": "1", "NCCL_DEBUG": "INFO", "WANDB_RUN_ID": "x", "WANDB_NAME": "n", "SLURM_JOB_ID": "1", "SBATCH_WAIT": "1",
    "BASH_FUNC_train%%": "() { true; }", "MASTER_PORT": "1", "HF_TOKEN": "secret", "WANDB_API_KEY": "secret",
}  # fmt: skip


def test_where_software_and_caches_are_is_handed_on_and_nothing_that_makes_a_trial_another_one() -> None:
    assert handed_on({**SOFTWARE, **OTHERS}) == SOFTWARE
    assert withheld_secrets({**SOFTWARE, **OTHERS}) == ["HF_TOKEN", "WANDB_API_KEY"]
    words = inherited_variables({**SOFTWARE, **OTHERS})
    assert "HF_HOME" in words
    assert "the function module" in words
    assert "secret" not in words


@given(st.dictionaries(st.from_regex(r"(HF_|WANDB_|CONDA_|LMOD_)?[A-Z_%()]{1,12}", fullmatch=True), st.text()))
def test_no_secret_is_ever_handed_on(environment: dict[str, str]) -> None:
    assert not [name for name in handed_on(environment) if names_secret(name)]


@pytest.mark.slurm
@pytest.mark.long
def test_functions_and_variables_of_the_shell_arrive_in_a_job(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SOFTWARE, **OTHERS}.items():
        monkeypatch.setenv(name, value)
    job = script_job(tmp_path / "a", "module load cuda; echo $HF_HOME $HF_HUB_OFFLINE $WANDB_MODE $CUDA_HOME .$LR.")
    launcher = SlurmLauncher(site())
    poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
    log = job.log.read_text()
    assert "loaded cuda" in log
    assert "/data/hf 1 offline /usr/local/cuda .." in log


def job_with(folder: Path, text: str) -> Job:
    (folder / "train.sh").write_text(text)
    return Job(
        name="j", folder=folder / "a", argv=("bash", "train.sh"), cwd=folder, log=AttemptPaths(folder / "a").log,
        environment={"LR": "1"}, resources=Resources(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("#!/bin/bash\nmodule load cuda/12\n", "module"),
        ("#!/bin/bash\nset -e; ml python\n", "module"),
        ("#!/bin/bash\nconda activate train\npython x.py\n", "conda"),
        ("#!/bin/bash\nif true; then mamba activate train; fi\n", "mamba"),
        ("#!/bin/bash\nmicromamba activate train\n", "micromamba"),
        ("#!/bin/bash -l\nmodule load cuda\n", ""),
        ("#!/bin/bash --login\nconda activate x\n", ""),
        ("#!/bin/bash\nsource /etc/profile.d/modules.sh\nmodule load cuda\n", ""),
        ("#!/bin/bash\n. /usr/share/lmod/lmod/init/bash\nmodule load cuda\n", ""),
        ("#!/bin/bash\nsource ~/miniconda3/etc/profile.d/conda.sh\nconda activate x\n", ""),
        ('#!/bin/bash\neval "$(conda shell.bash hook)"\nconda activate x\n', ""),
        ("#!/bin/bash\nmodule() { true; }\nmodule load cuda\n", ""),
        ("#!/bin/bash\n# module load cuda\necho 'conda activate x'\npython -m module load\n", ""),
        ("#!/bin/bash\nconda run -n x python train.py\n", ""),
    ],
)
def test_a_function_of_interactive_shells_that_a_script_calls_is_named(tmp_path: Path, text: str, named: str) -> None:
    doubts = function_warnings(job_with(tmp_path, text), ())
    assert [f"calls `{named}`, a function of your interactive shell" in doubt for doubt in doubts] == [True] * bool(
        named
    )
    assert function_warnings(job_with(tmp_path, text), [named]) == [], "where it is handed on there is no doubt"


def test_a_variable_that_a_script_demands_and_only_the_shell_has_is_named(tmp_path: Path) -> None:
    job = job_with(tmp_path, '#!/bin/bash\nset -u\necho "$DATA $LR ${HF_HOME} ${OPTIONAL:-}"\n: ${NOWHERE:?}\n')
    known = {"LR", "HF_HOME"}
    first, second = environment_warnings(job, known, {"DATA", "HF_HOME"})
    assert "needs DATA, which this shell has and a job does not" in first
    assert "set DATA in [site.environment]" in first
    assert "needs NOWHERE, which nothing sets" in second


def test_dry_run_shows_what_jobs_take_from_this_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SOFTWARE, **OTHERS}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.sh").write_text("#!/bin/bash\nset -u\nconda activate x\necho $LR $MY_DATA\n")
    (tmp_path / "s.toml").write_text(STUDY.format(folder=tmp_path))
    monkeypatch.setenv("MY_DATA", "/data")
    shown = CliRunner().invoke(
        sweep, ["--study", str(tmp_path / "s.toml"), "--output", str(tmp_path / "o"), "--dry-run"]
    )
    (line,) = (line for line in shown.output.splitlines() if line.startswith("# jobs take from this shell"))
    assert all(name in line for name in ("CONDA_PREFIX", "CUDA_HOME", "HF_HOME", "the function module"))
    assert "LR" not in line.split(", ")
    assert "calls `conda`, a function of your interactive shell" in shown.output
    assert "needs MY_DATA, which this shell has and a job does not" in shown.output
    assert 'write HF_TOKEN = { env = "HF_TOKEN" } in [site.environment]' in shown.output


STUDY = """
[workload]
kind = "command"
argv = ["bash", "train.sh"]
cwd = "{folder}"
log = {{ kind = "jsonl" }}
[site]
launcher = "slurm"
gpus_per_node = 1
[space]
LR = {{ type = "float", low = 1e-3, high = 1e-2, log = true }}
[objective]
target = 0.6
[budget]
trials = 2
parallel = 2
trial_minutes = 5
"""
