"""GPU time until what is recommended is among the best, with real trials: ``python -m benchmarks.gpu.packed_live``.

The live twin of ``benchmarks.packed_hours``: the trials of the 23.5 M base's table (``lora_small``: its configurations
and seeds), in random order, each until it reaches the target or its schedule ends. Nothing is searched for and nothing
pruned, so all ways see the same trials in the same order. Ways: ``refill`` (a pack whose slots are refilled),
``barrier`` (a pack in which a batch waits for its last trial) and ``worker`` (one at a time in a warm worker).

    run WAY...  trains, and adds what came of it to ``--out``: for each trial its configuration, when it ended, and its
                samples to the target
    tell        when in each run on record the recommendation is for the first time within 3% of the best. The best is
                that by the mean of all seeds in ``--truth``, a run on record in which every trial ended

The seconds include the start of the pack; a warm worker's own start is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.packed import warm_worker
from benchmarks.gpu.trials import run_trial
from benchmarks.packed_hours import Trial, seconds_until_good
from benchmarks.tables import chosen_target, path_of
from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune.launchers.simulated.tabular import read_table
from lora_tune.logs.mllog import MllogReader
from lora_tune.workloads.base import Job, SlotTerms
from lora_tune_recipes import settings as knobs

GPU: dict[str, object] = {"SEQ": 256, "EVAL_SAMPLES": 64, "VAL_CHECK_INTERVAL": 128}
CPU: dict[str, object] = {"SEQ": 64, "EVAL_SAMPLES": 8, "VAL_CHECK_INTERVAL": 32}
POLL = 0.05

Configured = tuple[int, dict[str, str]]
"""The number of a configuration, and the knobs of one of its trials."""
Ended = tuple[float, int, float]
"""Seconds since the way began; the configuration; samples to the target, infinite where it was not reached."""


def in_order(table_name: str, common: Mapping[str, object], seed: int) -> list[Configured]:
    """Every trial of the table, in an order drawn by ``seed``."""
    table = read_table(path_of(table_name))
    fixed = {**common, "TARGET": chosen_target(table)}
    names = ["MINIBS" if name == "GBS" else name for name in table.axes]  # the same on one GPU
    grid = [
        dict(zip(names, (f"{value:g}" for value in values), strict=True))
        for values in itertools.product(*table.axes.values())
    ]
    every = [
        (number, {**{name: str(value) for name, value in fixed.items()}, **point, "SEED": str(1 + run)})
        for number, point in enumerate(grid)
        for run in range(table.seeds)
    ]
    return [every[i] for i in np.random.default_rng(seed).permutation(len(every))]


def samples_to_target(log: bytes, target: float) -> float:
    """What a trial's log says, infinite where it ended above the target."""
    reader = MllogReader()
    reader.feed(log)
    return next((e.samples for e in reader.run().evals if e.loss <= target), math.inf)


def pack(order: Sequence[Configured], slots: int, *, refill: bool) -> Iterator[Ended]:
    """The trials in one pack of ``slots``, as they end; without ``refill`` a batch waits for its last."""
    with tempfile.TemporaryDirectory() as root:
        folder = PackFolder(Path(root) / "pack")
        folder.make()
        began = time.monotonic()
        command = [sys.executable, "-m", "lora_tune_recipes.packed_lora", str(folder.paths.folder), "--idle", "600"]
        host = subprocess.Popen(command)
        waiting = list(enumerate(order))[::-1]
        present: dict[Path, Configured] = {}
        try:
            while waiting or present:
                if host.poll() is not None:
                    raise RuntimeError(f"the pack has ended with {host.returncode}")
                room = slots - len(present) if refill or not present else 0
                for _ in range(min(room, len(waiting))):
                    number, one = waiting.pop()
                    present[ask(folder, Path(root) / f"{number}", one[1])] = one
                for place in [place for place in present if AttemptPaths(place).ended.exists()]:
                    configuration, own = present.pop(place)
                    log = AttemptPaths(place).log.read_bytes()
                    if json.loads(AttemptPaths(place).ended.read_text())["exit_code"] != 0:
                        raise RuntimeError(log.decode(errors="replace")[-500:])
                    yield time.monotonic() - began, configuration, samples_to_target(log, float(own["TARGET"]))
                time.sleep(POLL)
        finally:
            host.kill()
            host.wait()


def ask(folder: PackFolder, place: Path, variables: Mapping[str, str]) -> Path:
    """Ask for a trial; returns its folder, ``place``."""
    place.mkdir()
    slot = SlotTerms(argv=(), knobs=variables)
    folder.ask(Job(name=f"live-{place.name}-0", folder=place, argv=(), log=AttemptPaths(place).log, slot=slot))
    return place


def worker(order: Sequence[Configured]) -> Iterator[Ended]:
    """The trials one at a time, each forked from a process that has imported everything."""
    with warm_worker() as environment, tempfile.TemporaryDirectory() as root:
        began = time.monotonic()
        for number, (configuration, own) in enumerate(order):
            variables = {**own, **environment}
            one = run_trial(
                f"{number}", variables, module="lora_tune_recipes.peft_lora", limit=120, folder=Path(root) / "logs"
            )
            if not one.evals:
                raise RuntimeError(one.failure or "a trial without an evaluation")
            target = float(own["TARGET"])
            stop = next((samples for samples, loss, _ in one.evals if loss <= target), math.inf)
            yield time.monotonic() - began, configuration, stop


def run(options: argparse.Namespace) -> None:
    """Train by every way asked for; what ended within ``--seconds`` is on record as it comes."""
    common = {**(CPU if options.cpu else GPU), "MODEL": options.base}
    table = "lora_tiny" if options.cpu else "lora_small"
    order = in_order(table, common, options.order)[: options.trials]
    for way in options.ways:
        ends = worker(order) if way == "worker" else pack(order, options.slots, refill=way == "refill")
        name = f"{way} {options.slots}" if way != "worker" else way
        kept: list[Ended] = []
        for one in ends:
            if one[0] > options.seconds:
                break
            kept.append(one)
            keep(options.out, f"{name}, order {options.order}", kept, whole=len(kept) == len(order))
        print(f"{name}: {len(kept)} of {len(order)} trials in {kept[-1][0] if kept else 0:.0f} s", flush=True)


def keep(file: Path, name: str, ends: Sequence[Ended], *, whole: bool) -> None:
    """Put a run on record. whole: every trial ended."""
    record: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    rows = [(round(at, 2), number, stop if math.isfinite(stop) else None) for at, number, stop in ends]
    record[name] = {"whole": whole, "ends": rows}
    file.write_text(json.dumps(record) + "\n")


def tell(options: argparse.Namespace) -> None:
    """Print the table."""
    record = json.loads(options.out.read_text())
    ends = {
        name: [(at, number, math.inf if stop is None else stop) for at, number, stop in one["ends"]]
        for name, one in record.items()
    }
    if options.truth not in record or not record[options.truth]["whole"]:
        raise SystemExit(f"--truth {options.truth!r}: allowed is a run in which every trial ended, of {list(record)}")
    means = true_means(ends[options.truth])
    best = min(means)
    print(f"best: {best:.0f} samples; within 3%: {sum(mean <= 1.03 * best for mean in means)} of {len(means)}")
    for name, one in sorted(ends.items()):
        seconds = seconds_until_good(((at, Trial(number, 0.0, stop)) for at, number, stop in one), means)
        last = one[-1][0]
        said = f"{seconds:.0f} s" if math.isfinite(seconds) else f"not in {last:.0f} s"
        print(f"{name:>24}: {said}; {len(one)} trials in {last:.0f} s")


def true_means(ends: Sequence[Ended]) -> list[float]:
    """Mean samples to the target of each configuration, by its number; infinite where it was never tried."""
    stops: dict[int, list[float]] = {}
    for _, number, stop in ends:
        stops.setdefault(number, []).append(stop)
    return [float(np.mean(stops.get(number, math.inf))) for number in range(max(stops) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("run", help="train")
    training.add_argument("ways", nargs="+", choices=("refill", "barrier", "worker"))
    training.add_argument("--base", type=Path, default=knobs.TINY, help="base of the trials (default: the shipped one)")
    training.add_argument("--slots", type=int, default=16, help="of a pack (default %(default)s)")
    training.add_argument("--order", type=int, default=1, help="seed of the order (default %(default)s)")
    training.add_argument("--trials", type=int, help="the first so many alone")
    training.add_argument("--seconds", type=float, default=300, help="of a way, at most (default %(default)s)")
    training.add_argument("--cpu", action="store_true", help="the tiny base's table, to try this without a GPU")
    training.set_defaults(does=run)
    telling = commands.add_parser("tell", help="print when each run on record was within 3%")
    telling.add_argument("--truth", default="refill 64, order 1", help="default %(default)r")
    telling.set_defaults(does=tell)
    for command in (training, telling):
        command.add_argument("--out", type=Path, default=Path("packed_live.json"), help="default %(default)s")
    options = parser.parse_args()
    options.does(options)


if __name__ == "__main__":
    main()
