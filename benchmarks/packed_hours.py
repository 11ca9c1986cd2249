"""GPU time until what is recommended is among the best: ``python -m benchmarks.packed_hours [--slots K...]``.

A replay, no training: trials are drawn at random from the table of the 23.5 M base (``lora_small``: 64 configurations,
five seeds, every curve measured), each ends at the target or its schedule's end, and what the GPU needs for it is
reckoned with the speeds and start-ups in ``records/packed_h200.json`` (one H200). Printed: GPU-seconds until the
configuration that is recommended, the fastest by the mean of its trials so far where it has two at least, is within 3%
of the table's best by the mean of all its seeds. Four ways: one process each, one at a time in a warm worker, packs
whose slots wait for the last of their batch, and packs whose slots are refilled. All see the same trials in the same
order, drawn at random, with no pruning and no search; median over the repeats, and 90% of them.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.tables import chosen_target, path_of
from lora_tune.launchers.simulated.tabular import Table, read_table

RECORD = Path(__file__).parent / "records" / "packed_h200.json"
WITHIN = 0.03
LEAST_RUNS = 2
"""Of a configuration that is recommended: the luck of one run is larger than the 3%."""
STEP = 8
"""Sequences of the step whose speed is on record; a smaller batch is so much less work."""
TIMED_STEPS = 160
"""Steps of the trials whose number an hour is on record."""


@dataclass(frozen=True, slots=True)
class Trial:
    """work: recorded steps until it ends. stop: samples to the target, infinite where it was not reached."""

    configuration: int
    work: float
    stop: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the record says: steps a second of so many slots together; seconds before a trial's first step."""

    slots: tuple[int, ...]
    steps: tuple[float, ...]
    process: float
    worker: float

    @classmethod
    def recorded(cls) -> Speeds:
        """Of the 23.5 M base. A start-up is what an hour of single trials leaves beside their steps."""
        record = json.loads(RECORD.read_text())
        rows = [row for row in record["speed"] if row["shape"] == "small"]
        alone = TIMED_STEPS / rows[0]["trial_steps_per_second"]
        process, worker = (3600 / record["trials"][name] - alone for name in ("one process each", "warm worker"))
        return cls(
            tuple(row["slots"] for row in rows), tuple(row["trial_steps_per_second"] for row in rows), process, worker
        )

    def of(self, active: int) -> float:
        """Steps a second of one of ``active`` slots, between the measured widths by their logarithms."""
        together = np.interp(math.log(active), np.log(self.slots), np.log(self.steps))
        return math.exp(float(together)) / active


def trials_of(table: Table) -> list[list[Trial]]:
    """By configuration, its trials by seed."""
    target = chosen_target(table)
    stops = table.stops(target).reshape(-1, table.seeds)
    trained = np.where(np.isnan(table.losses), 0.0, table.samples)
    ends = np.nanmax(trained, axis=-1).reshape(-1, table.seeds)
    return [
        [Trial(i, float(min(stop, end)) / STEP, float(stop)) for stop, end in zip(row, ending, strict=True)]
        for i, (row, ending) in enumerate(zip(stops, ends, strict=True))
    ]


Ends = Iterator[tuple[float, Trial]]


def one_at_a_time(order: Sequence[Trial], speeds: Speeds, start: float) -> Ends:
    """Each trial's end, in GPU-seconds; ``start``: before each one's first step."""
    now = 0.0
    for trial in order:
        now += start + trial.work / speeds.of(1)
        yield now, trial


def packed(order: Sequence[Trial], speeds: Speeds, slots: int, *, refill: bool) -> Ends:
    """As :func:`one_at_a_time`, in one pack, which starts once; without ``refill`` a batch waits for its last."""
    now, done = speeds.process, 0.0  # done: steps that every slot present has made since the pack began
    waiting, present = list(reversed(order)), list[tuple[float, int, Trial]]()
    while waiting or present:
        if refill or not present:
            while waiting and len(present) < slots:
                trial = waiting.pop()
                heapq.heappush(present, (done + trial.work, len(waiting), trial))
        until, _, trial = heapq.heappop(present)
        now += (until - done) / speeds.of(len(present) + 1)
        done = until
        yield now, trial


def seconds_until_good(ends: Ends, means: Sequence[float]) -> float:
    """When what is recommended is for the first time within 3% of the best; infinite if never."""
    good = (1 + WITHIN) * min(means)
    runs: dict[int, list[float]] = {}
    known: dict[int, float] = {}
    for now, trial in ends:
        stops = runs.setdefault(trial.configuration, [])
        stops.append(trial.stop)
        if len(stops) < LEAST_RUNS:
            continue
        known[trial.configuration] = sum(stops) / len(stops)
        chosen = min(known, key=known.__getitem__)
        if math.isfinite(known[chosen]) and means[chosen] <= good:
            return now
    return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200, help="orders of the trials (default %(default)s)")
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 16], help="default %(default)s")
    options = parser.parse_args()
    trials, speeds = trials_of(read_table(path_of("lora_small"))), Speeds.recorded()
    means = [float(np.mean([trial.stop for trial in seeds])) for seeds in trials]
    ways: dict[str, Callable[[Sequence[Trial]], Ends]] = {
        "one process each": lambda order: one_at_a_time(order, speeds, speeds.process),
        "warm worker": lambda order: one_at_a_time(order, speeds, speeds.worker),
    }
    for slots in options.slots:
        for name, refill in (("batches of", False), ("refilled, slots", True)):
            ways[f"{name} {slots}"] = lambda order, s=slots, r=refill: packed(order, speeds, s, refill=r)  # type: ignore[misc]
    every = [trial for seeds in trials for trial in seeds]
    rng, found = np.random.default_rng(1), {name: list[float]() for name in ways}
    for _ in range(options.repeats):
        order = [every[i] for i in rng.permutation(len(every))]
        for name, way in ways.items():
            found[name].append(seconds_until_good(way(order), means))
    print(f"start-up {speeds.process:.1f} s, in a worker {speeds.worker:.1f} s; {options.repeats} orders of the trials")
    first = np.median(found["one process each"])
    for name, seconds in found.items():
        middle, most = np.quantile(seconds, (0.5, 0.9), method="higher")
        missed = sum(map(math.isinf, seconds))
        print(f"{name:>20}: {middle:6.0f} GPU-s (90%: {most:.0f}), {first / middle:5.1f} x less; never in {missed}")


if __name__ == "__main__":
    main()
