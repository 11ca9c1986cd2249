"""One study swept in packs and one trial at a time on one GPU: ``python -m benchmarks.gpu.packed_sweep --out FOLDER``.

Whole sweeps with their driver: search, pruning and refilled slots, as users run them. Printed for each way: trials
that ended, their verdicts, trials an hour of the GPU, its use, and when the sweep's leader was first within 3% of the
fastest trial of all ways. A way that is over its time is interrupted, and what had ended by then counts. Use: model
FLOPs of the training passes behind the evaluations on record, of 790 TFLOP/s for the length of the sweep.

``--slurm``: every job is one of the Slurm that this shell reaches. ``--confirm N``: N seeds of the first pack's three
leaders afterwards, all at one time. ``--cpu``: the shipped tiny base, to try the program without a GPU.
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

from benchmarks.gpu.packed import PEAK, warm_worker
from benchmarks.packed_faults import recorded
from lora_tune.base.llama import Shape
from lora_tune.base.paths import SweepPaths
from lora_tune.cli.confirm.command import SUFFIX
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StudyRecords
from lora_tune_recipes import settings as knobs

WITHIN = 0.03
LEADERS = 3
"""Configurations that ``--confirm`` races."""
CONFIRM_SECONDS = 240
STUDY = """
[workload]
kind = "peft"
[site]
{site}
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
SLURM = 'launcher = "slurm"\nqueue_minutes = 5\nstall_minutes = 2\nkill_seconds = 10'


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


def peak_share(found: StudyRecords, shape: Shape, seq: int, seconds: float) -> float:
    """Of ``PEAK`` in ``seconds``: the passes that led to the last evaluation of each trial."""
    reached: dict[int, float] = {}
    for (trial, _), evals in found.evals.items():
        reached[trial] = max([reached.get(trial, 0.0), *(e.samples for e in evals)])
    return shape.step_flops(int(sum(reached.values())) * seq, seq) / (seconds * PEAK)


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
            f"{name:>22}: {way['ended']} trials in {way['seconds']:.0f} s, {way['an_hour']:.0f} an hour, "
            f"{way['peak_share']:.2%} of peak ({', '.join(f'{n} {v}' for v, n in way['verdicts'].items())}); "
            f"fastest {best:.2f} s; within 3%: {first}",
            flush=True,
        )


def confirm(folder: Path, seeds: int) -> dict[str, Any]:
    """More seeds of the leaders of the sweep in ``folder``, all at one time: its jobs, runs, seconds and node-hours."""
    paths = SweepPaths(folder / "sweep")
    command = [sys.executable, "-m", "lora_tune.confirm", "--study", str(folder / "study.toml")]
    command += ["--output", str(paths.root), "--top", f"{LEADERS}", "--seeds", f"{seeds}", "--confidence", "0.999"]
    command += ["--parallel", f"{LEADERS * seeds}"]
    began = time.monotonic()
    with (folder / "confirm.txt").open("wb") as output:
        code = subprocess.run(command, stdout=output, stderr=output, timeout=CONFIRM_SECONDS, check=False).returncode
    seconds = time.monotonic() - began
    print((folder / "confirm.txt").read_text()[-2500:], flush=True)
    store = Store(sqlite_url(paths.database), read_only=True)
    race = next((store.load(name) for name in store.names() if name.endswith(SUFFIX)), None)
    store.close()
    runs = list(race.trials.values()) if race else []
    found = {
        "exit_code": code,
        "seconds": seconds,
        "jobs": len(list(SweepPaths(paths.root / "confirm").packs.glob("[0-9]*"))),
        "runs": len(runs),
        "node_hours": sum(run.metrics.node_hours or 0.0 for run in runs),
    }
    print(f"confirm: {found}", flush=True)
    return found


def run(slots: Sequence[int], options: argparse.Namespace) -> None:
    """Every way, one after the other; the numbers are written as they come."""
    common = CPU if options.cpu else {**GPU, "target": options.target}
    shape = Shape.from_config(json.loads((options.base / "config.json").read_text()))
    made: dict[str, dict[str, Any]] = {}

    def keep(name: str, numbers: dict[str, Any]) -> None:
        made[name] = numbers
        (options.out / "packed_sweep.json").write_text(json.dumps(made, indent=1) + "\n")

    def note(name: str, slots: int, environment: Mapping[str, str]) -> None:
        told = "\n".join(f"{key} = {json.dumps(value)}" for key, value in environment.items())
        gres = 'gres = "gpu:1"' if options.slurm and common["gpus"] else ""
        site = "\n".join([f"slots = {slots}" if slots > 1 else "", SLURM if options.slurm else "", gres])
        study = STUDY.format(
            site=site, parallel=slots, environment=told, model=options.base, trials=options.trials, **common
        )
        found, epoch, seconds = sweep(study, options.out / name.replace(" ", "_"), options.seconds)
        share = peak_share(found, shape, common["seq"], seconds)
        keep(name, {**summary(found, epoch, seconds), "peak_share": share})
        tell({name: made[name]})

    for count in slots:
        note(f"a pack of {count}", count, {})
    confirmed = confirm(options.out / f"a_pack_of_{slots[0]}", options.confirm) if options.confirm else None
    with warm_worker() as environment:
        note("one, warm worker", 1, environment)
    print("--")
    tell(made)
    if confirmed is not None:
        keep("confirm", confirmed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the numbers and the sweeps")
    parser.add_argument("--base", type=Path, default=knobs.TINY, help="base of the trials (default: the shipped one)")
    parser.add_argument("--slots", type=int, nargs="+", default=[64], help="packs (default %(default)s)")
    parser.add_argument("--trials", type=int, default=192, help="of a sweep, at most (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=90, help="of a sweep, at most (default %(default)s)")
    parser.add_argument("--target", type=float, default=1.08, help="eval loss (default %(default)s)")
    parser.add_argument("--slurm", action="store_true", help="jobs of Slurm (default: processes of this machine)")
    parser.add_argument("--confirm", type=int, default=0, metavar="SEEDS", help="of the first pack's three leaders")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    run(options.slots, options)


if __name__ == "__main__":
    main()
