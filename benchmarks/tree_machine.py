"""What a node and its container hold, for trees of other people's: programs, a tiny training, image, data and model."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ENGINE = Path(__file__).resolve().parent.parent / "tests" / "standins" / "docker_engine.sh"

# What a node and the container have, and this machine has not. srun: without the options of Pyxis and without MPI.
PROGRAMS = {
    "srun": 'if [ "$1" = --help ]; then echo --container-image; exit; fi\n'
    'for word; do case $word in --container-* | --no-container-* | --mpi=pm*) ;; *) kept+=("$word") ;; esac; done\n'
    'exec {srun} --mpi=none "${{kept[@]}}"',
    "python": 'case " $* " in *train.py" "*) [ "${{RANK:-$SLURM_PROCID}}" = 0 ] || exit 0\n'
    "exec {python} -u {trainer} ;; esac",
    "slurm2pytorch": "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS\n"
    'export LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE; exec "$@"',
    "bindpcie": 'while [[ $1 == -* ]]; do word=$1; shift; [ "$word" != -- ] || break; done; exec "$@"',
    "torchrun": "exec {python} -u {trainer}",
    "sudo": '[ "$1" != docker ] || exec "$@"',
    **dict.fromkeys(("enroot", "nvidia-smi", "ibv_devinfo", "all_reduce_perf_mpi", "mlperf-sysjson.sh"), ":"),
}
TRAINER = """
import json, math, os, random, time
def emit(key, value=None, kind="POINT_IN_TIME", **meta):
    line = {"namespace": "", "time_ms": int(time.time() * 1000), "event_type": kind, "key": key, "value": value}
    print(":::MLLOG " + json.dumps({**line, "metadata": {"file": "train.py", "lineno": 1, **meta}}), flush=True)
def number(*names, default):
    return next((float(os.environ[n]) for n in names if os.environ.get(n)), default)
gpus = number("DGXNGPU", default=8) * number("DGXNNODES", default=1)
ranks = number("TP", default=1) * number("PP", default=1) * number("CP", default=1)
batch = int(number("MINIBS", default=1) * gpus / ranks)
rate, steps, seed = number("LR", default=4e-4), int(number("MAX_STEPS", default=800)), int(os.environ["SEED"])
every, skipped = int(number("VAL_CHECK_INTERVAL", default=384)), int(number("SKIP_EVALS", "SKIP_EVAL", default=3))
emit("init_start", kind="INTERVAL_START")
for key, value in {"submission_benchmark": "llama2_70b_lora", "seed": seed, "global_batch_size": batch,
                   "opt_base_learning_rate": rate, "opt_learning_rate_training_steps": steps}.items():
    emit(key, value)
emit("init_stop", kind="INTERVAL_END")
emit("run_start", kind="INTERVAL_START")
needed = 3000 * (1 + 0.3 * math.log(rate / 4.5e-4) ** 2) * math.exp(random.Random(seed).gauss(0, 0.05))
loss = math.nan
for samples in range((skipped + 1) * every, steps * batch + 1, every):
    time.sleep(0.2)
    loss = 0.92483 - 0.02244 * math.log(samples / needed)
    emit("eval_accuracy", loss, samples_count=samples)
    if loss <= 0.925:
        break
emit("run_stop", loss, "INTERVAL_END", status="success" if loss <= 0.925 else "aborted")
"""
IMAGE = {"run_and_time.sh": "#!/bin/bash\nexec python -u train.py\n"}
"""Files that the container holds where the folder has none."""


def prepare(scratch: Path) -> dict[str, str]:
    """Programs, container, data and model; returns the variables of every job."""
    values = {"srun": shutil.which("srun"), "python": sys.executable, "trainer": str(scratch / "trainer.py")}
    (scratch / "trainer.py").write_text(TRAINER)
    (scratch / "bin").mkdir()
    for name, text in PROGRAMS.items():
        program = scratch / "bin" / name
        program.write_text("#!/bin/bash\n" + text.format(**values) + "\n")
        program.chmod(0o755)
    shutil.copy(scratch / "bin" / "python", scratch / "bin" / "python3")
    shutil.copy(ENGINE, scratch / "bin" / "docker")
    (scratch / "image.sqsh").write_bytes(b"hsqs" + bytes(100))
    for name in ("data/data", "data/model", "model/context", "model/weights"):
        (scratch / name).mkdir(parents=True)
    for folder in ("data", "data/data"):
        for name in ("train.npy", "validation.npy"):
            (scratch / folder / name).write_bytes(b"\x93NUMPY" + bytes(100))
    (scratch / "model" / "context" / "model.yaml").write_text("x")
    (scratch / "data" / "model" / "config.json").write_text("{}")
    for weights in ("model/weights/shard", "data/model/model.safetensors"):
        with (scratch / weights).open("wb") as shard:
            shard.truncate(140 * 10**9)  # sparse: takes no room
    path = f"{scratch / 'bin'}:{os.environ['PATH']}"
    return {"PATH": path, "OMP_NUM_THREADS": "1", "CLEAR_CACHES": "0"}
