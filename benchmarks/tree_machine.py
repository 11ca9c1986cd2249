"""A simulated node and container for public submission trees: programs, a tiny training, image, data and model."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ENGINE = Path(__file__).resolve().parent.parent / "tests" / "standins" / "docker_engine.sh"

# Programs of the node and the container that this machine lacks. srun: without the options of Pyxis and without MPI.
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
TRAINER = '''
"""A formula in the place of the training. Its pace follows from the layout and the switches, its curve from LR, steps
and seed, and the noise of both from every variable that the folder reads: another variable is another run."""
import hashlib, json, math, os, random, re, time
from pathlib import Path
FASTER = 300.0  # times as fast as eight H100
began = time.time()
def emit(key, value=None, kind="POINT_IN_TIME", at=0.0, **meta):
    line = {"namespace": "", "time_ms": int(1000 * (began + at)), "event_type": kind, "key": key, "value": value}
    print(":::MLLOG " + json.dumps({**line, "metadata": {"file": "train.py", "lineno": 1, **meta}}), flush=True)
OTHERS_READ = ("DGXNGPU", "DGXNNODES", "VBOOST_VALUE", "NCCL_MIN_CTAS")  # the launch script and libraries
conf = " ".join(f.read_text(errors="replace") for f in Path().glob("conf/**/*.yaml"))
def number(*names, default):
    for name in names:
        if conf and name not in OTHERS_READ and not re.search(rf"oc.env:{name}\\b", conf):
            continue  # a name of another round, which this tree does not read
        try:
            return float(os.environ[name])
        except (KeyError, ValueError):  # not set, or null
            continue
    return default
def digest():
    files = [*Path().glob("conf/**/*.yaml"), *Path().rglob("config_*.sh")]
    texts = [text for f in files if "Exported by lora_tune" not in (text := f.read_text(errors="replace"))]
    names = {n for text in texts for n in re.findall(r"(?<=oc.env:)\\w+|(?<=export )\\w+(?==)", text)}
    apart = re.compile("SEED|DIR|PATH|LOG|MODEL|CONT|NEXP|WALLTIME|DATE|SLURM|SBATCH|LORA_TUNE|MLPERF_"
                       "|DGXSYSTEM|EXTRA_ARGS|COMPLIANCE|EXP_NAME")
    kept = sorted((n, os.environ[n]) for n in names if n in os.environ and not apart.search(n))
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:12]
nodes = number("DGXNNODES", default=1)
gpus = number("DGXNGPU", default=8) * nodes
# Of each benchmark: its target, samples to it, and whether the interval between evals is in steps.
BENCHMARKS = {
    "llama2_70b_lora": (0.925, 3000, False), "llama31_8b": (3.3, 172032, True), "llama31_405b": (5.6, 322560, True),
    "flux1": (0.586, 3407872, False),
}
benchmark = "llama31_" + os.environ["MODEL_SIZE"] if "MODEL_SIZE" in os.environ else "llama2_70b_lora"
benchmark = "flux1" if "BATCHSIZE" in os.environ else benchmark
target, usual, in_steps = BENCHMARKS[benchmark]
tp, pp, cp = (number(*names, default=1) for names in (
    ("TP", "TENSOR_MODEL_PARALLEL"), ("PP", "PIPELINE_MODEL_PARALLEL"), ("CP", "CONTEXT_PARALLEL")))
follows = int(number("MINIBS", default=1) * (gpus // (tp * pp)) // cp) or 1
batch = int(number("BATCHSIZE", default=follows))
rate, seed = number("LR", "LEARNING_RATE", default=4e-4), int(os.environ["SEED"])
steps = int(number("MAX_STEPS", default=800))
steps = 3 * usual // batch if steps < 1 or steps * batch > 3 * usual else steps
every, skipped = int(number("VAL_CHECK_INTERVAL", default=384)), int(number("SKIP_EVALS", "SKIP_EVAL", default=3))
if in_steps:
    every, skipped = every * batch, int(number("SKIP_EVALS", "SKIP_EVAL", default=0))
if benchmark == "flux1":
    skipped = 0
scale = usual / 3000
chance = random.Random(digest())
speed = FASTER * 2.1 * gpus / 8 / (1 + 0.1 * abs(math.log2(tp) - 2) + 0.06 * (cp - 1) + 0.1 * (pp - 1))
speed *= math.exp(sum(share for name, value, share in (
    ("VBOOST_VALUE", 1, 0.03), ("TP_COMM_OVERLAP", 1, 0.02), ("NCCL_MIN_CTAS", 32, 0.01), ("FP8_DPA", 1, 0.03),
    ("LAYER_CUDA_GRAPH", 1, 0.02), ("MC_TP_OVERLAP_RS_DGRAD", 0, 0.005)) if number(name, default=0) == value))
speed *= scale * math.exp(chance.gauss(0, 0.0014))
for key, value in {"cache_clear": True, "submission_benchmark": benchmark, "seed": seed,
                   "global_batch_size": batch,
                   "gradient_accumulation_steps": int(number("MINIBS", default=1) // number("MBS", default=1)),
                   "opt_base_learning_rate": rate, "configuration": digest(), "clock": "virtual",
                   **({"opt_learning_rate_training_steps": steps, "lora_rank": 16, "lora_alpha": 32}
                      if benchmark == "llama2_70b_lora" else {})}.items():
    emit(key, value)
emit("init_start", kind="INTERVAL_START")
emit("init_stop", kind="INTERVAL_END")
if benchmark == "llama2_70b_lora" and (skipped + 1) * every > max(1, math.ceil(steps * batch / 3901)) * 3901:
    raise SystemExit(f"ValueError: val_check_interval ({every}) must be less than or equal to "
                     f"the number of the training batches ({steps})")
emit("run_start", kind="INTERVAL_START")
scatter = random.Random(f"{seed} {digest()}")
needed = usual * (1 + 0.3 * math.log(rate / 4.5e-4) ** 2) * math.exp(scatter.gauss(0, 0.05))
loss, last, now = math.nan, 0, 0.0
for samples in range((skipped + 1) * every, steps * batch + 1, every):
    emit("block_start", kind="INTERVAL_START", at=now, samples_count=last)
    for ten in range(last + 10 * batch, samples + 1, 10 * batch):
        emit("train_loss", 1.3, at=now + (ten - last) / speed, samples_count=ten, lr=rate)
    now += (samples - last) / speed
    time.sleep(max(0.0, began + now + 75 * scale / speed - time.time()))
    emit("tracked_stats", {"throughput": speed, "train_step_time": batch / speed}, at=now, step=samples)
    emit("block_stop", kind="INTERVAL_END", at=now, samples_count=samples)
    emit("eval_start", kind="INTERVAL_START", at=now, samples_count=samples)
    now, last = now + 75 * scale / speed, samples
    loss = target / 0.925 * (0.92483 - 0.02244 * math.log(samples / needed) + scatter.gauss(0, 0.0006))
    emit("eval_accuracy", loss, at=now, samples_count=samples)
    emit("eval_stop", kind="INTERVAL_END", at=now, samples_count=samples)
    if loss <= target:
        break
emit("run_stop", loss, "INTERVAL_END", at=now, samples_count=last, status="success" if loss <= target else "aborted")
'''
IMAGE = {"run_and_time.sh": "#!/bin/bash\nexec python -u train.py\n"}
"""Files of the container, used if the folder lacks them."""


def prepare(scratch: Path) -> dict[str, str]:
    """Make programs, container, data and model; return the variables of every job."""
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
            shard.truncate(140 * 10**9)  # sparse: uses no disk space
    path = f"{scratch / 'bin'}:{os.environ['PATH']}"
    return {"PATH": path, "OMP_NUM_THREADS": "1", "CLEAR_CACHES": "0"}
