"""What a small trial's start costs in a warm worker, with and without spares: ``python -m benchmarks.gpu.start_up``.

The study ``bridge_h200x1``'s trials, two batch sizes by turns, from the start of the trial's process to its
``run_start``; and from there to the last evaluation, which a spare must not slow down. Both workers serve by turns, so
that whatever else changes meets both. Losses of equal trials are printed beside each other, and how much of the GPU's
memory a spare holds while it waits. In the end one trial of each worker tells which functions its start went into.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.bridge import BF16, small_trial
from benchmarks.gpu.trials import Outcome, run_trial

MODES: dict[str, list[str]] = {"forked": [], "spare": ["--spare"]}
BATCHES = (8, 16)
PROFILED = "benchmarks.gpu.profiled"


def worker(mode: str, module: str, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a warm worker that preloads ``module``; its log is ``folder/worker_MODE.log``."""
    socket = folder / f"{mode}.sock"
    with (folder / f"worker_{mode}.log").open("wb") as log:
        command = [sys.executable, "-m", "lora_tune_recipes.warm_worker", *MODES[mode], "--socket", str(socket), module]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True), socket


def until_ready(workers: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for the workers' imports. Raises SystemExit where one ended."""
    for mode, process in workers.items():
        while "ready" not in (text := (folder / f"worker_{mode}.log").read_text()):
            if process.poll() is not None:
                sys.exit(f"the worker {mode} ended: {text[-500:]}")
            time.sleep(0.1)


def used_mib() -> int:
    """Memory in use on the first GPU, MiB."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(command, text=True))


def row(mode: str, batch: int, outcome: Outcome) -> dict[str, Any]:
    """One trial: seconds from its request to ``run_start``, from there to its last evaluation, and its losses."""
    return {
        "mode": mode,
        "batch": batch,
        "start_seconds": outcome.start_seconds,
        "run_seconds": outcome.evals[-1][2] if outcome.evals else None,
        "samples_per_second": outcome.samples_per_second,
        "gib": outcome.gib,
        "losses": [loss for _, loss, _ in outcome.evals],
        "failure": outcome.failure,
    }


def summary(mode: str, rows: list[dict[str, Any]]) -> str:
    """The medians of one worker's trials but the first, whose compiled code is not in the cache yet."""
    starts = [one["start_seconds"] for one in rows[1:] if one["start_seconds"]]
    runs = [one["run_seconds"] for one in rows[1:] if one["run_seconds"]]
    if not starts or not runs:
        return f"{mode}: no trial ended"
    return (
        f"{mode}: start {statistics.median(starts):.1f} s, {min(starts)} to {max(starts)}, under 5 s in"
        f" {sum(s < 5 for s in starts)} of {len(starts)}; run {statistics.median(runs):.2f} s"
    )


def main() -> int:
    """Run the trials and print what they say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--trials", type=int, default=10, help="of each worker; default %(default)s")
    options = parser.parse_args()
    folder = options.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    started = {mode: worker(mode, "lora_tune_recipes.bridge.trial", folder) for mode in MODES}
    processes = {mode: process for mode, (process, _) in started.items()}
    until_ready(processes, folder)
    variables = {**small_trial(options.base), **BF16, "MCORE_CUDA_GRAPH": 1, "VAL_MBS": 16, "WARMUP_TRAIN_STEPS": 3}
    rows = []
    for i in range(options.trials):
        batch = BATCHES[i % len(BATCHES)]
        for mode, (_, socket) in started.items():
            os.environ["LORA_TUNE_WORKER"] = str(socket)
            trial = {**variables, "MINIBS": batch, "MBS": batch, "SEED": 1 + i // 2}
            outcome = run_trial(f"{mode}_{i}", trial, module="lora_tune_recipes.bridge_lora", limit=60, folder=folder)
            rows.append(row(mode, batch, outcome))
            print(json.dumps(rows[-1]), flush=True)
            options.out.write_text(json.dumps({"trials": rows}, indent=1))
    for mode, (_, socket) in started.items():
        os.environ["LORA_TUNE_WORKER"] = str(socket)
        for _ in range(2):  # the second one's start was rehearsed, where it can be
            run_trial(f"{mode}_profile", variables, module=PROFILED, limit=60, folder=folder)
    time.sleep(10)  # the last rehearsal is over
    with_spare = used_mib()
    for process in processes.values():
        process.terminate()
        process.wait()
    spare_mib = with_spare - used_mib()
    options.out.write_text(json.dumps({"trials": rows, "spare_mib": spare_mib}, indent=1))
    for mode in MODES:
        print(summary(mode, [one for one in rows if one["mode"] == mode]))
    print(f"a spare holds {spare_mib} MiB; profiles: {folder}/*_profile.log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
