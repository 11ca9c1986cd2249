"""The training behind the stand-ins of MLPerf implementations: reads a folder's conf, prints MLLOG, trains for real.

``conf/*.yaml`` names the variables that an implementation reads; which of several variables states a thing differs
between rounds and benchmarks. What Megatron refuses and what a log holds is ``tests/standin/trainer.py``'s.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

from tests.standin.trainer import Degrees, Log, conf, count, emit, eval_steps
from tests.standins.failures import TEXTS, applies
from tests.standins.small_lora import Settings, Training


def main(folder: Path, benchmark: str, *, shrink: int = 1, every: int | None = None, overlap: bool = False) -> None:
    """shrink: samples of the recipe for one of the small training. every: samples between evals where no variable
    says it. overlap: tensor-parallel overlap needs multicast, which a run with FAIL_MODE=userbuffers does not find."""
    values = conf(folder)
    degrees = Degrees.of(values)
    log = Log(benchmark, degrees.gbs)
    log.header(values, float(values["STANDIN_TARGET"]))
    for mode in ("oom", "numa", "userbuffers", "mount"):
        if applies(mode) and (mode != "userbuffers" or overlap):
            print(TEXTS[mode], flush=True)
            sys.exit(1)
    degrees.refuse(benchmark)
    interval, steps = every or count(values, "VAL_CHECK_INTERVAL"), count(values, "MAX_STEPS")
    skipped = count(values, "SKIP_EVALS", otherwise=0)
    evals = eval_steps(benchmark, every=interval, skipped=skipped, last=steps, gbs=log.gbs)
    emit("init_stop", kind="INTERVAL_END")
    settings = Settings(
        lr=float(values.get("LR") or values["LEARNING_RATE"]) * float(values.get("STANDIN_LR_SCALE") or 100),
        steps=steps,
        batch=max(1, log.gbs // shrink),
        warmup=count(values, "WARMUP_STEPS", otherwise=0),
        seed=count(values, "SEED"),
    )
    run(settings, degrees, log, evals, float(values["STANDIN_TARGET"]))


def run(settings: Settings, degrees: Degrees, log: Log, evals: list[int], target: float) -> None:
    """From run_start to run_stop."""
    training = Training(settings)
    # Layouts that talk more are slower.
    talk = sum(math.log2(d) for d in (degrees.tp, degrees.pp, degrees.cp))
    pace = float(os.environ.get("STANDIN_STEP_SECONDS", "0")) * (1 + 0.1 * talk)
    begun, begin, last, loss = time.time(), time.time(), 0, math.nan
    blocks = dict(zip(evals, (b - a for a, b in zip([0, *evals], evals, strict=False)), strict=True))
    log.begin()
    log.block_start(0, evals[0] if evals else settings.steps)
    for step, train_loss in training.steps():
        time.sleep(max(0.0, begun + step * pace - time.time()))
        if step % 10 == 0:
            log.train_loss(step, train_loss, max(1e-6, time.time() - begun) / step)
        if step not in blocks:
            continue
        log.block_stop(step, blocks[step], blocks[step] * log.gbs / max(1e-6, time.time() - begin))
        loss, last = training.eval_loss(), step
        log.eval(step, loss)
        if loss <= target:
            break
        begin = time.time()
        log.block_start(step, evals[0] if len(evals) < 2 else evals[1] - evals[0])
    log.stop(last, loss, "success" if loss <= target else "aborted")
