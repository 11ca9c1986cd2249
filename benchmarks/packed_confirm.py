"""Ten seeds of three leaders as one job: ``python -m benchmarks.packed_confirm --out FILE``.

Sweeps the shipped tiny task (or ``--model`` and ``--data``) over three learning rates, and lets ``lora_tune.confirm``
race them: once with all runs in packs, once one at a time. Both on the tests' real Slurm cluster, or on this machine
(``--here``, with ``--gpus 1`` on its GPU). Printed and written: jobs submitted, runs, runs that reached the target,
seconds of the race on the clock and of its jobs. Which runs the race asks for depends on
what it measures: seconds compare by the run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_tune.base.errors import EXIT_DONE, EXIT_NOTHING_REACHED
from lora_tune.base.paths import SweepPaths
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StudyRecords, Verdict
from tests.cluster import Cluster

RATES = 0.004, 0.005, 0.006

STUDY = """
[workload]
kind = "peft"
[site]
launcher = "{launcher}"
gpus_per_node = {gpus}
{slots}
{files}
[space]
LR = {{ type = "categorical", choices = [{rates}] }}
MAX_STEPS = {steps}
{knobs}
[objective]
target = {target}
[search]
sampler = "random"
seed = 1
enqueue = [{points}]
[pruning]
rule = "none"
cap = false
[budget]
trials = 3
parallel = {parallel}
"""


def study(options: argparse.Namespace, *, packed: bool) -> str:
    """The study file."""
    runs = options.seeds * len(RATES)
    files = {"model": options.model, "data": options.data}
    return STUDY.format(
        launcher="local" if options.here else "slurm",
        gpus=options.gpus,
        slots=f"slots = {runs}" if packed else "",
        files="\n".join(f'{name} = "{path.resolve()}"' for name, path in files.items() if path),
        rates=", ".join(map(str, RATES)),
        points=", ".join(f"{{ LR = {rate} }}" for rate in RATES),
        steps=options.steps,
        knobs="\n".join(options.knobs),
        target=options.target,
        parallel=runs if packed else 1,
    )


def race(folder: Path, text: str, seeds: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """Sweep and confirm in ``folder``; what came of the race."""
    folder.mkdir()
    file, paths = folder / "confirmed.toml", SweepPaths(folder / "sweep")
    file.write_text(text)
    common = ["--study", str(file), "--output", str(paths.root), "--quiet"]
    own = {**os.environ, **environment}
    subprocess.run([sys.executable, "-m", "lora_tune.sweep", *common], env=own, check=True)
    began = time.monotonic()
    more = ["--top", str(len(RATES)), "--seeds", str(seeds)]
    done = subprocess.run([sys.executable, "-m", "lora_tune.confirm", *common, *more], env=own, check=False)
    assert done.returncode in (EXIT_DONE, EXIT_NOTHING_REACHED), done
    seconds = time.monotonic() - began
    records = Store(sqlite_url(paths.database), read_only=True).load("confirmed.confirm")
    assert records is not None
    return figures(records, seconds)


def figures(records: StudyRecords, seconds: float) -> dict[str, Any]:
    """The race in numbers. seconds: on the clock."""
    runs = [trial for trial in records.trials.values() if trial.verdict is not None]
    # Under Slurm an id is a job's; on this machine a process's, of those that were alive at one time.
    jobs = {attempt.job_id for attempt in records.attempts.values() if attempt.job_id}
    return {
        "jobs": len(jobs),
        "runs": len(runs),
        "reached": sum(trial.verdict is Verdict.REACHED for trial in runs),
        "seconds": round(seconds, 1),
        "seconds_of_a_run": round(seconds / len(runs), 2),
        "job_seconds": round(records.node_hours(time.time()) * 3600, 1),
    }


@contextlib.contextmanager
def place(*, here: bool) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder, and what a client of its cluster needs."""
    with tempfile.TemporaryDirectory() as folder:
        if here:
            yield Path(folder), {}
            return
        with Cluster(Path(folder) / "cluster") as cluster:
            yield Path(folder), dict(cluster.environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--target", type=float, default=1.7)
    parser.add_argument("--here", action="store_true", help="on this machine, without Slurm")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument(
        "--knobs",
        nargs="*",
        default=["SEQ = 32", "EVAL_SAMPLES = 8", "VAL_CHECK_INTERVAL = 16"],
        help="further lines of [space]",
    )
    parser.add_argument("--ways", nargs="+", choices=("packed", "single"), default=["packed", "single"])
    parser.add_argument("--out", type=Path, help="a record of the figures")
    options = parser.parse_args()
    machine = f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(machine, flush=True)
    found: dict[str, Any] = {"machine": machine, "gpus": options.gpus, "slurm": not options.here}
    with place(here=options.here) as (folder, environment):
        for way in options.ways:
            found[way] = race(folder / way, study(options, packed=way == "packed"), options.seeds, environment)
            print(way, json.dumps(found[way]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
