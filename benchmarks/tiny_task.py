"""Response of the shipped task to its parameters: ``python -m benchmarks.tiny_task``.

Runs the PEFT recipe over a grid of LR x MAX_STEPS x WARMUP_STEPS to the last step, without a target, and reads from
each whole curve when it would reach any target. Prints the date, the machine and its load, a table of steps and seconds
to the target, the spread between the best and the worst that reach it, and the cost of one trial from start to end, in
wall-clock seconds and in seconds of one core (which other load on the machine hardly changes).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog
from lora_tune_recipes.settings import TINY_TARGET

UNREACHABLE = "0.01"


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration of the grid."""

    lr: float
    max_steps: int
    warmup_steps: int
    minibs: int
    seed: int


@dataclass(frozen=True, slots=True)
class Result:
    """wall: seconds from the start of the process to its end. core: its processor seconds."""

    point: Point
    run: RunLog
    wall: float
    core: float

    def reached(self, target: float) -> tuple[int, int, float] | None:
        """Evaluations, steps and seconds (from ``run_start``) to the target, or None."""
        found = self.run.reached(target)
        if found is None:
            return None
        return self.run.evals.index(found) + 1, round(found.samples / self.point.minibs), found.seconds


def measure(point: Point, fixed: dict[str, str]) -> Result:
    """Run one trial to its last step."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TARGET": UNREACHABLE,
        "LR": str(point.lr),
        "MAX_STEPS": str(point.max_steps),
        "WARMUP_STEPS": str(point.warmup_steps),
        "MINIBS": str(point.minibs),
        "SEED": str(point.seed),
        **fixed,
    }
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        trial = subprocess.Popen([sys.executable, "-m", "lora_tune_recipes.peft_lora"], env=environment, stdout=log)
        _, trial.returncode, usage = os.wait4(trial.pid, 0)
        wall = time.monotonic() - began
        log.seek(0)
        reader = MllogReader()
        reader.feed(log.read())
    if trial.returncode:
        raise SystemExit(f"a trial failed: {point}")
    return Result(point, reader.run(), wall, usage.ru_utime + usage.ru_stime)


def rows(results: list[Result], target: float) -> Iterator[str]:
    """The table, best first."""
    yield "      LR MAX_STEPS WARMUP MINIBS seed evals steps of all      s last loss"
    order = sorted(results, key=lambda r: (r.reached(target) or (0, 0, float("inf")))[2])
    for result in order:
        point, reached = result.point, result.reached(target)
        last = result.run.evals[-1].loss if result.run.evals else float("nan")
        evals, steps, seconds = reached if reached else ("-", "-", None)
        share = f"{reached[1] / point.max_steps:.0%}" if reached else "-"
        shown = f"{seconds:.2f}" if seconds is not None else "-"
        yield (
            f"{point.lr:>8.2g} {point.max_steps:>9} {point.warmup_steps:>6} {point.minibs:>6} {point.seed:>4} "
            f"{evals:>5} {steps:>5} {share:>6} {shown:>6} {last:>9.4f}"
        )


def summary(results: list[Result], target: float) -> str:
    seconds = sorted(r.reached(target)[2] for r in results if r.reached(target))  # type: ignore[index]
    walls, cores = [r.wall for r in results], [r.core for r in results]
    if not seconds:
        return f"No configuration reaches {target}."
    return (
        f"Target {target}: {len(seconds)} of {len(results)} reach it, best {seconds[0]:.2f} s, "
        f"worst {seconds[-1]:.2f} s, spread {seconds[-1] / seconds[0]:.1f}x. To its last step, imports included, a "
        f"trial takes {min(walls):.1f} to {max(walls):.1f} s (median {median(walls):.1f}), "
        f"{min(cores):.1f} to {max(cores):.1f} s of one core."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2])
    parser.add_argument("--max-steps", type=int, nargs="+", default=[100, 200])
    parser.add_argument("--warmup-steps", type=int, nargs="+", default=[0, 40])
    parser.add_argument("--minibs", type=int, nargs="+", default=[8])
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--target", type=float, nargs="+", default=[TINY_TARGET])
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--curves", action="store_true", help="print every eval loss too")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", dest="fixed")
    options = parser.parse_args()
    fixed = dict(item.split("=", 1) for item in options.fixed)
    grid = itertools.product(options.lr, options.max_steps, options.warmup_steps, options.minibs, options.seed)
    before = os.getloadavg()[0]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda point: measure(Point(*point), fixed), grid))
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {before:.1f}, ", end="")
    print(f"{options.jobs} at a time {' '.join(options.fixed)}")
    for target in options.target:
        print("\n".join(rows(results, target)))
        print(summary(results, target))
    if options.curves:
        for result in results:
            print(result.point, " ".join(f"{e.loss:.3f}" for e in result.run.evals))


if __name__ == "__main__":
    main()
