"""Time from a bad eval line in a trial's log to the verified end of its job, for many concurrent trials on real Slurm.

``python -m benchmarks.slurm_latency [--trials 32]`` starts the test cluster with that many virtual nodes (root, the
packages of tests/packages.txt), runs a sweep with one trial per node, lets all trials print an eval line after which
each is pruned, and prints the time until the driver observed each job's end, and how often it called squeue meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lora_tune.store import Store, sqlite_url
from tests.cluster import Cluster, Shape, wait_until

TRIAL = """
import json, os, sys, time
from pathlib import Path
def emit(key, value=None, kind="POINT_IN_TIME", **meta):
    line = {"namespace": "", "time_ms": int(time.time() * 1000), "event_type": kind, "key": key, "value": value}
    print(":::MLLOG " + json.dumps({**line, "metadata": {"file": "trial", "lineno": 1, **meta}}), flush=True)
emit("init_start", kind="INTERVAL_START")
emit("init_stop", kind="INTERVAL_END")
emit("run_start", kind="INTERVAL_START")
Path("ready").touch()
go = Path(os.environ["GO"])
while not go.exists():
    time.sleep(0.05)
emit("train_loss", float("nan"), samples_count=80, lr=1e-4)
emit("eval_accuracy", float("nan"), samples_count=80)
Path("printed").write_text(str(time.time()))
time.sleep(600)
"""

STUDY = """
[workload]
kind = "command"
argv = [{python}, {trial}]
environment = {{ GO = {go} }}
[site]
launcher = "slurm"
gpus_per_node = 8
[space]
LR = {{ type = "float", low = 1e-4, high = 1e-3 }}
[budget]
trials = {trials}
parallel = {trials}
trial_minutes = 10
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=32)
    trials = parser.parse_args().trials
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with Cluster(folder / "cluster", Shape(nodes=trials)) as cluster:
            seconds, asked, ticks = measure(folder, cluster, trials)
    where = f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    print(f"{where}: {trials} trials running at once on {trials} virtual nodes")
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    print(f"eval line to the verified end of the job: median {statistics.median(ordered):.1f} s, p95 {p95:.1f} s,")
    print(f"slowest {ordered[-1]:.1f} s; the driver's own period is 1 s")
    print(f"squeue was asked {asked} times in {ticks:.0f} s of watching {trials} jobs")


def measure(folder: Path, cluster: Cluster, trials: int) -> tuple[list[float], int, float]:
    """Seconds from line to end of each trial; and how many squeue calls in how many seconds."""
    go, sweep = folder / "go", folder / "sweep"
    (folder / "trial.py").write_text(TRIAL)
    values = {"python": sys.executable, "trial": str(folder / "trial.py"), "go": str(go)}
    study = folder / "latency.toml"
    study.write_text(STUDY.format(trials=trials, **{key: json.dumps(value) for key, value in values.items()}))
    counted = counting_squeue(folder, cluster)
    environment = {**os.environ, **cluster.environment, "PATH": f"{folder / 'bin'}:{cluster.environment['PATH']}"}
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(study), "--output", str(sweep), "--quiet"]
    driver = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: running(cluster) == trials, 300, "all trials run", cluster.state_lines)
        wait_until(lambda: len(list(sweep.glob("trials/*/*/ready"))) == trials, 300, "all trials train")
        before, begun = len(counted.read_text().splitlines()), time.time()
        time.sleep(5)
        asked, watched = len(counted.read_text().splitlines()) - before, time.time() - begun
        go.touch()
        driver.wait(300)
    finally:
        driver.kill()
        driver.wait()
    found = Store(sqlite_url(sweep / "sweep.db"), read_only=True).load("latency")
    assert found is not None
    seconds = []
    for trial in found.trials.values():
        printed = float((sweep / "trials" / f"{trial.number:04d}" / "attempt-0" / "printed").read_text())
        assert trial.finished_at is not None
        seconds.append(trial.finished_at - printed)
    return seconds, asked, watched


def running(cluster: Cluster) -> int:
    return len(cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%A").split())


def counting_squeue(folder: Path, cluster: Cluster) -> Path:
    """Install a squeue wrapper that counts its calls; return the file of the count."""
    real = shutil.which("squeue", path=cluster.environment["PATH"])
    assert real is not None
    (folder / "bin").mkdir()
    counted = folder / "asked"
    counted.touch()
    wrapper = folder / "bin" / "squeue"
    wrapper.write_text(f'#!/bin/bash\necho >> {counted}\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    return counted


if __name__ == "__main__":
    main()
