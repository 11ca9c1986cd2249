"""How busy simulated nodes are kept: ``python -m benchmarks.busy``, the real driver with 64 nodes on the virtual clock.

Prints the share of node time, from the first submission to the last proposal, in which a node ran a job.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import tempfile
import time
from datetime import date
from pathlib import Path

from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import load_study
from lora_tune.controller.driver import Dependencies, Driver
from lora_tune.launchers.simulated.launcher import of_study
from lora_tune.review.screen import Quiet
from lora_tune.search.session import Session
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StudyRecords
from lora_tune.workloads import load

STUDY = Path(__file__).resolve().parent.parent / "studies" / "simulated_h100.toml"


def busy(sweep: StudyRecords, nodes: int) -> float:
    """Node-seconds of jobs over those of the cluster, until nothing more was proposed."""
    attempts = list(sweep.attempts.values())
    begin = min(a.intended_at for a in attempts)
    end = max(a.intended_at for a in attempts)
    used = sum(max(0.0, min(a.ended_at or end, end) - max(a.started_at or end, begin)) * a.node_count for a in attempts)
    return used / ((end - begin) * nodes)


def run(nodes: int, node_hours: float) -> None:
    options = {"budget": {"parallel": nodes, "node_hours": node_hours}}
    study = load_study(STUDY).with_options(options)
    with tempfile.TemporaryDirectory() as folder:
        paths = SweepPaths(Path(folder))
        store = Store(sqlite_url(paths.database))
        launcher = of_study(study, study.budget.parallel)
        store.begin(study.name, study.digest, STUDY.read_text(encoding="utf-8"), launcher.now())
        lease = store.take_lease(study.name, "benchmark", launcher.now())
        ports = Dependencies(
            workload=load(study, STUDY), launcher=launcher, store=store, session=Session(study),
            clock=launcher, view=Quiet(),
        )  # fmt: skip
        began, virtual = time.perf_counter(), launcher.now()
        driver = Driver(study, paths, ports, lease, period=1.0)
        driver.run()
        seconds = time.perf_counter() - began
        print(
            f"{nodes} nodes: {len(driver.sweep.trials)} trials, {100 * busy(driver.sweep, nodes):.2f}% busy, "
            f"{(launcher.now() - virtual) / 3600:.1f} virtual hours in {seconds:.0f} s"
        )


def main() -> None:
    print(f"{date.today()}, {platform.machine()}, one core")
    run(8, 15.0)
    run(64, 120.0)


if __name__ == "__main__":
    main()
