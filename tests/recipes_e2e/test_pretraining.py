"""llama31_8b, gpt_oss_20b and flux1 end to end: small real trainings behind each implementation's own names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lora_tune.base.paths import SweepPaths
from lora_tune.store.records import Verdict
from tests.cluster import Cluster
from tests.conftest import REPOSITORY
from tests.recorded import recorded

pytestmark = pytest.mark.slurm
STANDIN = REPOSITORY / "tests" / "standins" / "llama31_405b"


@dataclass(frozen=True)
class Implementation:
    """What an implementation calls its knobs. steps: VAL_CHECK_INTERVAL counts optimizer steps, not samples."""

    benchmark: str
    lr: str
    warmup: str
    tp: str
    mbs: str
    steps: bool
    axes: str = ""


IMPLEMENTATIONS = (
    Implementation("llama31_8b", "LR", "WARMUP_STEPS", "TENSOR_MODEL_PARALLEL", "MICRO_BATCH_SIZE", steps=True),
    Implementation(
        "gpt_oss_20b", "LR", "LR_WARMUP_STEPS", "TENSOR_MODEL_PARALLEL", "MICRO_BATCH_SIZE", steps=True,
        axes=", ep = [2], experts = 32",
    ),
    Implementation("flux1", "LEARNING_RATE", "WARMUP_STEPS", "TP", "MBS", steps=False),
)  # fmt: skip

STUDY = """
name = "{benchmark}"
[workload]
kind = "mlperf"
implementation = {folder}
benchmark = "{benchmark}"
eval_every = 160
[site]
launcher = "slurm"
system = "B200"
gpus_per_node = 4
gres = "gpu:4"
mpi = "none"
container = "c.sqsh"
data = {data}
model = {data}
kill_seconds = 5
[site.environment]
{environment}
[space]
LR = {{ type = "categorical", choices = [4e-4, 1e-6] }}
WARMUP_STEPS = 2
layout = {{ type = "layout", tp = [2], mbs = [1], gbs = [16]{axes} }}
[objective]
target = 2.75
[search]
enqueue = [{{ LR = 4e-4 }}, {{ LR = 1e-6 }}]
[pruning]
cap = false
[budget]
trials = 2
parallel = 2
trial_minutes = 5
"""


def conf(names: Implementation) -> str:
    """The variables that the implementation reads, as the stand-in's training takes them."""
    ep = "ep: ${oc.env:EXPERT_PARALLEL,1}\n" if names.axes else ""
    return (
        "nodes: ${oc.env:DGXNNODES,1}\ngpus: ${oc.env:DGXNGPU,4}\npp: ${oc.env:NONE,1}\ncp: ${oc.env:NONE,1}\n"
        "minibs: ${oc.env:MINIBS,1}\nmax_steps: ${oc.env:MAX_STEPS,300}\nseed: ${oc.env:SEED,1}\n"
        "target: ${oc.env:STANDIN_TARGET,2.75}\nlr_scale: ${oc.env:STANDIN_LR_SCALE,100}\n"
        f"every: ${{oc.env:VAL_CHECK_INTERVAL,10}}\nlr: ${{oc.env:{names.lr},1e-4}}\n"
        f"warmup_steps: ${{oc.env:{names.warmup},0}}\ntp: ${{oc.env:{names.tp},1}}\n"
        f"mbs: ${{oc.env:{names.mbs},1}}\n{ep}"
    )


@pytest.mark.parametrize("names", IMPLEMENTATIONS, ids=lambda i: i.benchmark)
def test_a_sweep_under_the_implementations_own_names(names: Implementation, slurm: Cluster, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(STANDIN, tmp_path / "recipe"))
    for file in (folder / "conf").glob("*.yaml"):
        file.write_text(conf(names))
    every = "int(os.environ['VAL_CHECK_INTERVAL'])" + (" * 16" if names.steps else "")
    training = (folder / "train.py").read_text()
    call = training[training.index("main(Path") :]
    (folder / "train.py").write_text(
        training.replace(call, f'main(Path(__file__).parent, "{names.benchmark}", shrink=2, every={every})\n')
    )
    (folder / "config_common.sh").write_text("export MODEL_SIZE=small\n")
    variables = {
        "STANDIN_PYTHON": sys.executable, "STANDIN_ROOT": str(REPOSITORY), "OMP_NUM_THREADS": "1",
        "STANDIN_TARGET": "2.75", "TOKENIZER": str(tmp_path), "PREPROC_DATA": str(tmp_path),
        "LOAD_CHECKPOINTS_PATH": str(tmp_path),
    }  # fmt: skip
    study = tmp_path / "study.toml"
    study.write_text(
        STUDY.format(
            benchmark=names.benchmark, folder=json.dumps(str(folder)), data=json.dumps(str(tmp_path)), axes=names.axes,
            environment="\n".join(f"{name} = {json.dumps(value)}" for name, value in variables.items()),
        )
    )  # fmt: skip
    output = tmp_path / "sweep"
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(study), "--output", str(output)]
    done = subprocess.run(command, env={**os.environ, **slurm.environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = recorded(SweepPaths(output).database, names.benchmark)
    good, poor = (sweep.trials[n] for n in (0, 1))
    assert good.verdict is Verdict.REACHED, done.stdout
    assert poor.verdict is not Verdict.REACHED
    evals = [e.samples for e in sweep.last_evals(0)]
    assert evals == [160 * (n + 1) for n in range(len(evals))]
    (config,) = (output / "trials" / "0000" / "attempt-0").glob("config_B200_1x4x*.sh")
    exports = dict(
        line.removeprefix("export ").split("=", 1) for line in config.read_text().splitlines() if "export" in line
    )
    wanted = {names.lr: "0.0004", names.warmup: "2", names.tp: "2", names.mbs: "1"}
    wanted["VAL_CHECK_INTERVAL"] = "10" if names.steps else "160"
    if names.axes:
        wanted["EXPERT_PARALLEL"] = "2"
        assert "ep2" in config.name
    assert wanted.items() <= exports.items()
