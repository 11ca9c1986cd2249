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

from trainer import SPEED, Degrees, Log, conf, emit, eval_steps

TARGET = 0.925


def failures() -> set[str]:
    """The failure modes that apply here."""
    found = set()
    for item in os.environ.get("FAIL_MODE", "").split():
        mode, _, condition = item.partition("@")
        name, _, wanted = condition.partition("=")
        if not condition or os.environ.get(name) == wanted:
            found.add(mode)
    return found


def throughput(layout: Degrees) -> float:
    """Samples a second of one node or more: TP=4 is best on 80 GB, as in the public results."""
    penalty = {1: 1.6, 2: 1.12, 4: 1.0, 8: 1.25}.get(layout.tp, 2.0) * (
        1 + 0.06 * (layout.cp - 1) + 0.1 * (layout.pp - 1)
    )
    return SPEED * layout.gpus / 8 / penalty


def curve_losses(values: dict[str, str], layout: Degrees, evals: list[int]) -> Iterator[float]:
    """Eval losses from a formula: the public median curve, slowed by a poor learning rate, with the seed's noise."""
    rng = random.Random(f"{values['SEED']} {values['LR']} {layout.gbs}")
    off = math.log(float(values["LR"]) / 4.5e-4)
    needed = 3000 * (layout.gbs / 8) ** 0.35 * (1 + 0.35 * off * off) * math.exp(rng.gauss(0, 0.05))
    for step in evals:
        yield 0.92483 - 0.02244 * math.log(step * layout.gbs / needed) + rng.gauss(0, 0.0006)


KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH", "SEED", "MAX_STEPS", "LORA_TUNE_WORKER")
"""Variables of the job that a real training takes over."""


def tiny_losses(values: dict[str, str], layout: Degrees, evals: list[int]) -> Iterator[float]:
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


def stop_logging(modes: set[str], layout: Degrees, samples: int) -> None:
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
    values, modes = conf(Path(__file__).parent), failures()
    layout = Degrees.of(values)
    mode = os.environ.get("STANDIN_TRAINING", "curve")
    if "ecc" in modes:
        sys.exit("RuntimeError: CUDA error: uncorrectable ECC error encountered")
    if "nodata" in modes:
        sys.exit("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.npy'")
    print(f"stand-in: training mode {mode}" + ("; this is a formula, not a training" if mode == "curve" else ""))
    log = Log("llama2_70b_lora", layout.gbs)
    log.header(values, target(), **({"clock": "virtual"} if mode == "curve" else {}))
    layout.refuse(log.benchmark)
    evals = eval_steps(
        log.benchmark,
        every=int(values["VAL_CHECK_INTERVAL"]),
        skipped=int(values["SKIP_EVALS"]),
        last=int(values["MAX_STEPS"]),
        gbs=layout.gbs,
    )
    if not evals:
        print("stand-in: MAX_STEPS ends before the first eval")
    emit("init_stop", kind="INTERVAL_END")
    run(values, modes, layout, log, evals, mode)


def run(values: dict[str, str], modes: set[str], layout: Degrees, log: Log, evals: list[int], mode: str) -> None:
    """From run_start to run_stop. In curve mode by the formula's own, true times: STANDIN_SECONDS or more."""
    begun, speed = time.time(), throughput(layout)
    eval_seconds = 75.0 / speed
    pace = float(os.environ.get("STANDIN_SECONDS", "2")) / max(1, len(evals))
    losses = tiny_losses(values, layout, evals) if mode == "tiny" else curve_losses(values, layout, evals)
    clock = (lambda simulated: begun + simulated) if mode == "curve" else (lambda simulated: time.time())
    log.begin(begun)
    simulated, last, reached, loss = 0.0, 0, False, math.nan
    for index, (step, value) in enumerate(zip(evals, losses, strict=False)):
        log.block_start(last, step - last, clock(simulated))
        if index == 0:
            die_early(modes)
        loss = math.nan if "nan" in modes else value
        for ten in range((last // 10 + 1) * 10, step + 1, 10):
            at = clock(simulated + (ten - last) * layout.gbs / speed)
            log.train_loss(ten, math.nan if "nan" in modes else 1.3, layout.gbs / speed, at)
        simulated += (step - last) * layout.gbs / speed
        if mode == "curve":
            time.sleep(max(pace, clock(simulated + eval_seconds) - time.time()))
        log.block_stop(step, step - last, speed * (0.985 if index == 0 else 1), clock(simulated))
        began, simulated = clock(simulated), simulated + eval_seconds
        log.eval(step, loss, began, clock(simulated))
        last = step
        if index == 0:
            stop_logging(modes, layout, step * layout.gbs)
        if loss <= target() and "fake_success" not in modes:
            reached = True
            break
    log.stop(last, loss, "success" if reached or "fake_success" in modes else "aborted", clock(simulated))


if __name__ == "__main__":
    main()
