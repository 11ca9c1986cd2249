"""The stand-in's training: what rank 0 of a trial does and prints.

Reads the variables that ``conf/*.yaml`` names. FAIL_MODE is a list of ``mode`` or ``mode@VARIABLE=value`` (the mode
then applies only where the environment has that value), with these modes:

    ecc          the GPU's memory is faulty: the process dies before it initialises, exit 1
    nodata       the data set is missing on this node, exit 1
    oom          CUDA out of memory in the first block, exit 1
    hang         the log stops after the first eval; the process waits
    deaf         as hang, and SIGTERM is ignored
    nan          losses are NaN from the first eval on
    segv         the process dies of SIGSEGV in the first block
    truncated    the log ends in the middle of an eval line, exit 0
    fake_success run_stop claims success although no eval reached the target, exit 0
    exit3        the training fails with exit code 3 before its first eval
    nccl         a collective times out
    slow         after the first eval one train loss a second, for ever
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TRAIN_SAMPLES = 3901  # of the real data set; bounds val_check_interval
TARGET = 0.925
SPEED = 651.0
"""Samples a second of eight GPUs with TP=4: 300 times a DGX H100's, so that the time stamps of a short run are true."""


def conf() -> dict[str, str]:
    """The effective values: ``key: ${oc.env:NAME,default}`` with the environment laid over the defaults."""
    text = (Path(__file__).parent / "conf" / "megatron_gpt_peft_tuning_config.yaml").read_text()
    found = re.findall(r"\$\{oc\.env:(\w+),([^}]*)\}", text)
    return {name: os.environ.get(name) or default for name, default in found}


def emit(key: str, value: object = None, kind: str = "POINT_IN_TIME", at: float | None = None, **meta: object) -> None:
    """One MLLOG line; ``at`` is in seconds since the epoch."""
    stamp = time.time() if at is None else at
    meta = {"file": "custom_callbacks.py", "lineno": 1, **meta}
    line = {"namespace": "", "time_ms": int(stamp * 1000), "event_type": kind, "key": key, "value": value}
    print(f":::MLLOG {json.dumps({**line, 'metadata': meta})}", flush=True)


def failures() -> set[str]:
    """The failure modes that apply here."""
    found = set()
    for item in os.environ.get("FAIL_MODE", "").split():
        mode, _, condition = item.partition("@")
        name, _, wanted = condition.partition("=")
        if not condition or os.environ.get(name) == wanted:
            found.add(mode)
    return found


class Layout:
    """NVIDIA's arithmetic: DP and GBS from the degrees, floored as its configuration floors them."""

    def __init__(self, values: dict[str, str]) -> None:
        nodes, gpus = int(values["DGXNNODES"]), int(values["DGXNGPU"])
        self.tp, self.pp, self.cp = int(values["TP"]), int(values["PP"]), int(values["CP"])
        self.minibs = int(values["MINIBS"])
        self.gbs = (self.minibs * (nodes * gpus // (self.tp * self.pp))) // self.cp
        self.gpus = nodes * gpus
        if self.gpus % (self.tp * self.pp * self.cp):
            print(f"warning: {self.gpus} GPUs do not divide by TP*PP*CP; GBS becomes {self.gbs}", flush=True)

    def throughput(self) -> float:
        """Samples a second of one node or more: TP=4 is best on 80 GB, as in the public results."""
        penalty = {1: 1.6, 2: 1.12, 4: 1.0, 8: 1.25}.get(self.tp, 2.0) * (
            1 + 0.06 * (self.cp - 1) + 0.1 * (self.pp - 1)
        )
        return SPEED * self.gpus / 8 / penalty


def steps_of_evals(values: dict[str, str], gbs: int) -> list[int]:
    """Optimizer steps after which the training evaluates."""
    interval, skip, last = int(values["VAL_CHECK_INTERVAL"]), int(values["SKIP_EVALS"]), int(values["MAX_STEPS"])
    batches = TRAIN_SAMPLES * math.ceil(last * gbs / TRAIN_SAMPLES) // gbs
    first, between = (skip + 1) * interval // gbs, max(1, -(-interval // gbs))
    if first > batches:
        raise ValueError(
            f"val_check_interval ({first}) must be less than or equal to the number of the training batches "
            f"({batches})."
        )
    return list(range(max(1, first), last + 1, between))


def curve_losses(values: dict[str, str], layout: Layout, evals: list[int]) -> Iterator[float]:
    """Eval losses from a formula: the public median curve, slowed by a poor learning rate, with the seed's noise."""
    rng = random.Random(f"{values['SEED']} {values['LR']} {layout.gbs}")
    off = math.log(float(values["LR"]) / 4.5e-4)
    needed = 3000 * (layout.gbs / 8) ** 0.35 * (1 + 0.35 * off * off) * math.exp(rng.gauss(0, 0.05))
    for step in evals:
        yield 0.92483 - 0.02244 * math.log(step * layout.gbs / needed) + rng.gauss(0, 0.0006)


KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH", "SEED", "MAX_STEPS", "LORA_TUNE_WORKER")
"""Variables of the job that a real training takes over."""


def tiny_losses(values: dict[str, str], layout: Layout, evals: list[int]) -> Iterator[float]:
    """Eval losses of a real LoRA training of the tiny model, one tiny sequence for eight samples."""
    batch = max(1, layout.gbs // 8)
    environment = {
        **{k: os.environ[k] for k in KEPT if k in os.environ},
        "CUDA_VISIBLE_DEVICES": "",
        "MINIBS": str(batch),
        "LR": str(float(values["LR"]) * 20),  # the tiny model likes rates about twenty times higher
        "VAL_CHECK_INTERVAL": str(math.gcd(*evals) * batch),  # in its own samples
        "SEQ": "64",
        "EVAL_SAMPLES": "16",
        "TARGET": "0.001",  # this program decides when the target is reached
        "WARMUP_STEPS": str(int(float(values["WARMUP_RATIO"]) * int(values["MAX_STEPS"]))),
        "WARMUP": "0",
    }
    command = [sys.executable, "-m", "lora_tune_recipes.peft_lora"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        try:
            for line in training.stdout:
                match = re.search(r':::MLLOG (\{.*"eval_accuracy".*\})', line)
                if match:
                    event = json.loads(match[1])
                    if event["metadata"]["samples_count"] // batch in evals:
                        yield float(event["value"])
        finally:
            training.kill()


def target() -> float:
    """The eval loss that ends the run; the tiny task has another scale."""
    return float(os.environ.get("STANDIN_TARGET", TARGET))


def die_early(modes: set[str]) -> None:
    """The failures that happen in the first block of training."""
    if "oom" in modes:
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79.11 GiB in total")
        sys.exit(1)
    if "segv" in modes:
        sys.stdout.flush()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    if "exit3" in modes:
        print("Traceback (most recent call last):\n  ...\nValueError: the training went wrong")
        sys.exit(3)
    if "nccl" in modes:
        print("[rank0]: torch.distributed.DistBackendError: NCCL error: remote process exited or network error")
        sys.exit(1)


def stop_logging(modes: set[str], layout: Layout, samples: int) -> None:
    """The failures that begin after the first eval."""
    if "deaf" in modes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if modes & {"hang", "deaf"}:
        time.sleep(86400)
    if "truncated" in modes:
        print(
            ':::MLLOG {"namespace": "", "time_ms": 17952547, "event_type": "POINT_IN_TIME", "key": "eval_accu',
            flush=True,
        )
        sys.exit(0)
    while "slow" in modes:
        samples += 10 * layout.gbs
        emit("train_loss", 1.3, samples_count=samples, lr=1e-4)
        time.sleep(1)


def main() -> None:
    values, modes = conf(), failures()
    layout = Layout(values)
    mode = os.environ.get("STANDIN_TRAINING", "curve")
    if "ecc" in modes:
        sys.exit("RuntimeError: CUDA error: uncorrectable ECC error encountered")
    if "nodata" in modes:
        sys.exit("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.npy'")
    print(f"stand-in: training mode {mode}" + ("; this is a formula, not a training" if mode == "curve" else ""))
    emit("cache_clear", True)
    emit("init_start", kind="INTERVAL_START")
    emit("submission_benchmark", "llama2_70b_lora")
    for key, value in {
        "seed": int(values["SEED"]),
        "global_batch_size": layout.gbs,
        **({"clock": "virtual"} if os.environ.get("STANDIN_TRAINING", "curve") == "curve" else {}),
        "gradient_accumulation_steps": layout.minibs // int(values["MBS"]),
        "opt_learning_rate_training_steps": int(values["MAX_STEPS"]),
        "opt_base_learning_rate": float(values["LR"]),
        "lora_rank": 16,
        "lora_alpha": 32,
    }.items():
        emit(key, value)
    evals = steps_of_evals(values, layout.gbs)
    if not evals:
        print("stand-in: MAX_STEPS ends before the first eval")
    emit("init_stop", kind="INTERVAL_END")
    run(values, modes, layout, evals, mode)


def run(values: dict[str, str], modes: set[str], layout: Layout, evals: list[int], mode: str) -> None:
    """From run_start to run_stop. In curve mode by the formula's own, true times: STANDIN_SECONDS or more."""
    begun, speed = time.time(), layout.throughput()
    pace = float(os.environ.get("STANDIN_SECONDS", "2")) / max(1, len(evals))
    losses = tiny_losses(values, layout, evals) if mode == "tiny" else curve_losses(values, layout, evals)
    clock = (lambda simulated: begun + simulated) if mode == "curve" else (lambda simulated: time.time())
    emit("run_start", kind="INTERVAL_START", at=begun)
    simulated, last, reached, loss = 0.0, 0, False, math.nan
    for index, (step, value) in enumerate(zip(evals, losses, strict=False)):
        samples, before = step * layout.gbs, last * layout.gbs
        emit("block_start", kind="INTERVAL_START", at=clock(simulated), samples_count=before)
        if index == 0:
            die_early(modes)
        loss = math.nan if "nan" in modes else value
        for ten in range((last // 10 + 1) * 10, step + 1, 10):
            seconds = simulated + (ten - last) * layout.gbs / speed
            emit(
                "train_loss",
                math.nan if "nan" in modes else 1.3,
                at=clock(seconds),
                samples_count=ten * layout.gbs,
                lr=1e-4,
            )
        simulated += (samples - before) / speed
        if mode == "curve":
            time.sleep(max(pace, clock(simulated + 75.0 / speed) - time.time()))
        emit("tracked_stats", {"throughput": speed * (0.985 if index == 0 else 1)}, at=clock(simulated), step=samples)
        emit("block_stop", kind="INTERVAL_END", at=clock(simulated), samples_count=samples)
        emit("eval_start", kind="INTERVAL_START", at=clock(simulated), samples_count=samples)
        simulated += 75.0 / speed
        emit("eval_accuracy", loss, at=clock(simulated), samples_count=samples)
        emit("eval_stop", kind="INTERVAL_END", at=clock(simulated), samples_count=samples)
        last = step
        if index == 0:
            stop_logging(modes, layout, samples)
        if loss <= target() and "fake_success" not in modes:
            reached = True
            break
    status = "success" if reached or "fake_success" in modes else "aborted"
    emit("run_stop", loss, "INTERVAL_END", at=clock(simulated), samples_count=last * layout.gbs, status=status)


if __name__ == "__main__":
    main()
