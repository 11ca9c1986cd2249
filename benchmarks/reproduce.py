"""Whether an exported config reproduces its results: ``python -m benchmarks.reproduce [--sweep sweeps/tiny]``.

Runs the exported best config of a finished sweep of the PEFT recipe by hand, several times, with as many concurrent
copies as the sweep had trials. Prints each run's samples and seconds to the target against the export's forecast
(samples exactly, seconds within a 90% interval), and how soon the sweep refilled a free slot: from the end of one
trial's job to the submission of the next.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import load_study
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import Eval
from lora_tune.review.summary import time_interval
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StudyRecords


def by_hand(config: Path, target: float) -> Eval | None:
    """Run ``source config_X.sh`` and the recipe in an otherwise empty environment; return the eval at the target."""
    done = subprocess.run(
        ["bash", "-euc", f"source ./{config.name} && exec {sys.executable} -m lora_tune_recipes.peft_lora"],
        cwd=config.parent,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        check=True,
    )
    reader = MllogReader()
    reader.feed(done.stdout)
    return reader.run().reached(target)


def refills(sweep: StudyRecords, parallel: int) -> list[float]:
    """Seconds from each job's end to the submission that took its slot; the first ``parallel`` had free slots."""
    attempts = list(sweep.attempts.values())
    submissions = sorted(a.intended_at for a in attempts)[parallel:]
    ends = sorted(a.ended_at for a in attempts if a.ended_at is not None)
    return [begun - ended for ended, begun in zip(ends, submissions, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=Path, default=Path("sweeps/tiny"), help="the folder of a finished sweep")
    parser.add_argument("--runs", type=int, default=6)
    options = parser.parse_args()
    paths = SweepPaths(options.sweep)
    if not paths.study.is_file():
        raise SystemExit(f"{options.sweep}: there is no sweep; run make sweep first, or name one with --sweep")
    study = load_study(paths.study)
    store = Store(sqlite_url(paths.database), read_only=True)
    (name,) = store.names()
    sweep = store.load(name)
    store.close()
    best = sweep.best() if sweep is not None else None
    if sweep is None or best is None or best.seconds is None:
        raise SystemExit(f"{options.sweep}: no trial reached the target; run make sweep first")
    (config,) = paths.best.glob("config_*.sh")
    low, high = time_interval(best)
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{config.name}: {best.samples:g} samples, {best.seconds:.2f} s, 90% interval {low:.2f} to {high:.2f} s")
    with ThreadPoolExecutor(study.budget.parallel) as pool:
        stops = list(pool.map(lambda _: by_hand(config, study.objective.target), range(options.runs)))
    for stop in stops:
        print(f"  by hand: {stop.samples:g} samples, {stop.seconds:.2f} s" if stop else "  by hand: not reached")
    same = sum(stop is not None and stop.samples == best.samples for stop in stops)
    within = sum(stop is not None and low <= stop.seconds <= high for stop in stops)
    print(f"same samples: {same} of {len(stops)}; seconds within the interval: {within} of {len(stops)}")
    gaps = refills(sweep, study.budget.parallel)
    print(f"slots refilled {len(gaps)} times: median {median(gaps):.2f} s, longest {max(gaps):.2f} s")


if __name__ == "__main__":
    main()
