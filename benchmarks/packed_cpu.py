"""Whether packs pay on a CPU: ``python -m benchmarks.packed_cpu [--slots K...] [--trainers K] [--steps N]``.

Prints the processor seconds of a trial of the shipped tiny task in a process of its own, in a pack of K, and in K
processes of transformers.Trainer with peft side by side, start-up included. Processor seconds do not depend on what
else the machine does; with one thread a trial's are its wall time on an idle core.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

from benchmarks.gpu.packed import Knobs, one_at_a_time, packed_seconds, side_by_side


def cost(run: Callable[[], object]) -> tuple[float, float]:
    """Processor seconds of the processes that ``run`` starts and waits for, and wall seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 16], help="default %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="steps of a trial (default %(default)s)")
    parser.add_argument("--trainers", type=int, default=2, help="Trainers side by side (default %(default)s)")
    options = parser.parse_args()
    common: Knobs = {"MAX_STEPS": options.steps}
    single, _ = cost(lambda: one_at_a_time(common, 1))
    print(f"a process of its own: {single:.1f} processor seconds a trial", flush=True)
    spent, _ = cost(lambda: side_by_side(common, options.trainers))
    each = spent / options.trainers
    print(
        f"{options.trainers} Trainers side by side (no evaluations): {each:.1f} processor seconds a trial", flush=True
    )
    for count in options.slots:
        spent, _ = cost(lambda count=count: packed_seconds(common, count))  # type: ignore[misc]
        each = spent / count
        print(f"a pack of {count}: {each:.1f} processor seconds a trial, {single / each:.2f} x as many", flush=True)


if __name__ == "__main__":
    main()
