"""One study swept in packs and one trial at a time on one GPU: ``python -m benchmarks.gpu.packed_sweep --out FOLDER``.

Whole sweeps with their driver: search, pruning and refilled slots, as users run them. Printed for each way: trials
that ended, their verdicts, trials an hour of the GPU, and when the sweep's leader was first within 3% of the fastest
trial of all ways. A way that is over its time is interrupted, and what had ended by then counts. ``--cpu``: the shipped
tiny base, to try the program without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.packed import warm_worker
from benchmarks.packed_faults import recorded
from lora_tune.base.paths import SweepPaths
from lora_tune.recipes import settings as knobs
from lora_tune.store.records import StudyRecords

WITHIN = 0.03
STUDY = """
[workload]
kind = "peft"
[site]
{slots}
system = "H200"
gpus_per_node = {gpus}
model = "{model}"
[site.environment]
{environment}
[space]
LR = {{ type = "float", low = 1e-4, high = 3e-2, log = true }}
LORA_RANK = {{ type = "categorical", choices = [8, 16, 32, 64] }}
WARMUP_STEPS = {{ type = "int", low = 0, high = 40, step = 10 }}
MAX_STEPS = {{ type = "int", low = 80, high = 160, step = 40 }}
layout = {{ type = "layout", minibs = [8], mbs = [8] }}
SEQ = {seq}
EVAL_SAMPLES = {evals}
VAL_CHECK_INTERVAL = 128
[objective]
target = {target}
[search]
seed = 1
[budget]
trials = {trials}
parallel = {parallel}
trial_minutes = 3
"""
GPU: dict[str, Any] = {"seq": 256, "evals": 64, "target": 1.08, "gpus": 1}
CPU: dict[str, Any] = {"seq": 64, "evals": 8, "target": 1.9, "gpus": 0}


def sweep(study: str, folder: Path, limit: float) -> tuple[StudyRecords, float, float]:
    """What is on record of a sweep when it has ended, or after ``limit`` seconds; when it began, and its length."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file = folder / "study.toml"
    file.write_text(study)
    command = [
        sys.executable,
        "-m",
        "lora_tune.sweep",
        "--study",
        str(file),
        "--output",
        str(folder / "sweep"),
        "--quiet",
    ]
    began, epoch = time.monotonic(), time.time()
    with (folder / "driver.txt").open("wb") as output:
        driver = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            driver.wait(limit)
        except subprocess.TimeoutExpired:
            driver.send_signal(signal.SIGINT)
    seconds = time.monotonic() - began
    if driver.poll() is None:
        try:
            driver.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    found = recorded(SweepPaths(folder / "sweep"))
    assert found is not None, (folder / "driver.txt").read_text()[-2000:]
    return found, epoch, seconds


def leaders(found: StudyRecords, epoch: float) -> list[tuple[float, float]]:
    """Seconds since the sweep began, and the best objective by then, of each trial that reached the target."""
    ends = sorted(
        (trial.finished_at - epoch, trial.metrics.objective)
        for trial in found.trials.values()
        if trial.finished_at is not None and trial.seconds is not None and trial.metrics.objective is not None
    )
    best, steps = math.inf, []
    for at, objective in ends:
        if objective < best:
            best = objective
            steps.append((at, objective))
    return steps


def summary(found: StudyRecords, epoch: float, seconds: float) -> dict[str, Any]:
    """Numbers of one way."""
    ended = [t for t in found.trials.values() if t.finished_at is not None and t.finished_at <= epoch + seconds]
    return {
        "seconds": seconds,
        "ended": len(ended),
        "verdicts": Counter(str(t.verdict.value) for t in ended if t.verdict),
        "an_hour": 3600 * len(ended) / seconds,
        "leaders": leaders(found, epoch),
    }


def tell(ways: Mapping[str, Mapping[str, Any]]) -> None:
    """The table."""
    every = [value for way in ways.values() for _, value in way["leaders"]]
    good = (1 + WITHIN) * min(every, default=math.inf)
    for name, way in ways.items():
        first = next((f"{at:.0f} s" for at, value in way["leaders"] if value <= good), "never")
        best = min((value for _, value in way["leaders"]), default=math.nan)
        print(
            f"{name:>22}: {way['ended']} trials in {way['seconds']:.0f} s, {way['an_hour']:.0f} an hour "
            f"({', '.join(f'{n} {v}' for v, n in way['verdicts'].items())}); fastest {best:.2f} s; within 3%: {first}",
            flush=True,
        )


def run(slots: Sequence[int], options: argparse.Namespace) -> None:
    """Every way, one after the other; the numbers are written as they come."""
    common = CPU if options.cpu else {**GPU, "target": options.target}
    made: dict[str, dict[str, Any]] = {}

    def note(name: str, slots: str, parallel: int, environment: Mapping[str, str]) -> None:
        told = "\n".join(f"{key} = {json.dumps(value)}" for key, value in environment.items())
        study = STUDY.format(
            slots=slots, parallel=parallel, environment=told, model=options.base, trials=options.trials, **common
        )
        made[name] = summary(*sweep(study, options.out / name.replace(" ", "_"), options.seconds))
        (options.out / "packed_sweep.json").write_text(json.dumps(made, indent=1) + "\n")
        tell({name: made[name]})

    for count in slots:
        note(f"a pack of {count}", f"slots = {count}", count, {})
    with warm_worker() as environment:
        note("one, warm worker", "", 1, environment)
    print("--")
    tell(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the numbers and the sweeps")
    parser.add_argument("--base", type=Path, default=knobs.TINY, help="base of the trials (default: the shipped one)")
    parser.add_argument("--slots", type=int, nargs="+", default=[64], help="packs (default %(default)s)")
    parser.add_argument("--trials", type=int, default=192, help="of a sweep, at most (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=90, help="of a sweep, at most (default %(default)s)")
    parser.add_argument("--target", type=float, default=1.08, help="eval loss (default %(default)s)")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run(options.slots, options)


if __name__ == "__main__":
    main()
