"""The training behind the stand-ins of MLPerf implementations: reads a folder's conf, prints MLLOG, trains for real.

``conf/*.yaml`` names the variables that an implementation reads: ``key: ${oc.env:NAME,default}``. What the keys mean is
the same in all of them; which variable gives a key differs between rounds and benchmarks.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from pathlib import Path

from tests.standins.failures import TEXTS, applies
from tests.standins.small_lora import Settings, Training


def conf(folder: Path) -> dict[str, str]:
    """Key -> its effective value."""
    (file,) = (folder / "conf").glob("*.yaml")
    found = re.findall(r"(\w+): \$\{oc\.env:(\w+),([^}]*)\}", file.read_text())
    return {key: os.environ.get(name) or default for key, name, default in found}


def emit(key: str, value: object = None, kind: str = "POINT_IN_TIME", **metadata: object) -> None:
    """One MLLOG line."""
    line = {"namespace": "", "time_ms": int(time.time() * 1000), "event_type": kind, "key": key, "value": value}
    print(f":::MLLOG {json.dumps({**line, 'metadata': {'file': 'callbacks.py', 'lineno': 1, **metadata}})}", flush=True)


def batch_size(values: dict[str, str]) -> int:
    """The formula, floored as the implementation floors it, or the batch that was given whole."""
    if values.get("gbs"):
        return int(values["gbs"])
    gpus = int(values["nodes"]) * int(values["gpus"])
    return (int(values["minibs"]) * (gpus // (int(values["tp"]) * int(values["pp"])))) // int(values["cp"])


def main(folder: Path, benchmark: str, *, shrink: int = 1, every: int | None = None, overlap: bool = False) -> None:
    """shrink: samples of the recipe for one of the small training. every: samples between evals where no variable
    says it. overlap: tensor-parallel overlap needs multicast, which a run with FAIL_MODE=userbuffers does not find."""
    values = conf(folder)
    gbs = batch_size(values)
    for key, shown in (("global_batch_size", gbs), ("opt_base_learning_rate", float(values["lr"]))):
        emit(key, shown)
    emit("init_start", kind="INTERVAL_START")
    emit("submission_benchmark", benchmark)
    for mode in ("oom", "numa", "userbuffers", "mount"):
        if applies(mode) and (mode != "userbuffers" or overlap):
            print(TEXTS[mode], flush=True)
            sys.exit(1)
    emit("init_stop", kind="INTERVAL_END")
    run(values, gbs, every or int(values["every"]), shrink)


def run(values: dict[str, str], gbs: int, every: int, shrink: int) -> None:
    """From run_start to run_stop."""
    steps, interval = int(values["max_steps"]), max(1, math.ceil(every / gbs))
    training = Training(
        Settings(
            lr=float(values["lr"]) * float(values.get("lr_scale") or 100),
            steps=steps,
            batch=max(1, gbs // shrink),
            warmup=int(values.get("warmup_steps") or 0),
            seed=int(values["seed"]),
        )
    )
    # Layouts that talk more are slower.
    degrees = [int(values[key]) for key in ("tp", "pp", "cp")]
    pace = float(os.environ.get("STANDIN_STEP_SECONDS", "0")) * (1 + 0.1 * sum(math.log2(d) for d in degrees))
    begun, begin, loss = time.time(), time.time(), math.nan
    emit("run_start", kind="INTERVAL_START")
    emit("block_start", kind="INTERVAL_START", samples_count=0)
    for step, train_loss in training.steps():
        time.sleep(max(0.0, begun + step * pace - time.time()))
        if step % 10 == 0:
            emit("train_loss", train_loss, samples_count=step * gbs)
        if step % interval or step // interval <= int(values.get("skip") or 0):
            continue
        samples = step * gbs
        emit("tracked_stats", {"throughput": interval * gbs / (time.time() - begin)}, step=samples)
        emit("block_stop", kind="INTERVAL_END", samples_count=samples)
        emit("eval_start", kind="INTERVAL_START", samples_count=samples)
        loss = training.eval_loss()
        emit("eval_accuracy", loss, samples_count=samples)
        emit("eval_stop", kind="INTERVAL_END", samples_count=samples)
        if loss <= float(values["target"]):
            break
        begin = time.time()
        emit("block_start", kind="INTERVAL_START", samples_count=samples)
    status = "success" if loss <= float(values["target"]) else "aborted"
    emit("run_stop", loss, "INTERVAL_END", status=status)
