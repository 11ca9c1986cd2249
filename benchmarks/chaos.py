"""Faults by the hundred: ``python -m benchmarks.chaos --faults 200 --seed 1``, on real Slurm and real PostgreSQL.

Sweeps of a deterministic workload run one after another on the test cluster, every other one with its records in
PostgreSQL and every third one on a small file system that can be full; faults strike at random moments
(``tests/chaos/faults.py``). After each sweep: no trial lost, none run twice, no job left behind or unknown, node-hours
as Slurm accounts them, and the results, hence the ranking, of an undisturbed sweep. Each fault is drawn from the seed
and its own number, and written down as it happens; ``--only`` takes some kinds out of all. Exits 1 when something is
wrong, and says what.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.faults import FAULTS
from tests.chaos.room import Room
from tests.cluster import Cluster
from tests.cluster.cluster import missing
from tests.postgres import Postgres
from tests.postgres import missing as postgres_missing

TRIALS = 16
QUIET_SECONDS = 240.0


def strike(room: Room, seed: int, number: int, kinds: list[str], journal: Path) -> str:
    """Fault ``number`` of ``seed``, after its pause; returns its kind, "" when there was nothing to hit."""
    chance = random.Random(f"{seed} {number}")
    kind = chance.choice(kinds)
    time.sleep(chance.uniform(0.2, 2.5))
    if room.driver.poll() is not None:
        if room.finished():
            return ""
        assert room.driver.returncode not in (1, 2), f"a driver gave up\n{room.said[-3000:]}"
        room.start()  # as a service manager would
    hit = FAULTS[kind](room, chance)
    line = {"at": round(time.time(), 3), "seed": seed, "fault": number, "kind": kind, "hit": hit, "sweep": room.name}
    with journal.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return kind if hit else ""


def disturbed(room: Room, seed: int, first: int, most: int, kinds: list[str], journal: Path) -> Counter[str]:
    """Faults until the sweep has ended or ``most`` have struck; then it is left to end in peace."""
    struck: Counter[str] = Counter()
    room.start()
    number = first
    while sum(struck.values()) < most and not room.finished():
        kind = strike(room, seed, number, kinds, journal)
        number += 1
        if kind:
            struck[kind] += 1
    room.set_clock_right()
    if room.driver.poll() is not None and not room.finished():
        room.start()
    room.finish_all(QUIET_SECONDS)
    return struck


def undisturbed(folder: Path, cluster: Cluster, trials: int) -> dict[int, Any]:
    """The results of a sweep that nothing happens to."""
    room = Room(folder, cluster, trials, seconds=1.0)
    try:
        room.start()
        room.finish_all(QUIET_SECONDS)
        assert set(room.slurm_jobs().values()) == {1}, room.said
        return room.results()
    finally:
        room.close()


def main() -> int:
    arguments = argparse.ArgumentParser(description="faults on running sweeps")
    arguments.add_argument("--faults", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--trials", type=int, default=TRIALS, help="of one sweep")
    arguments.add_argument("--minutes", type=float, default=120.0, help="begin no further sweep after so long")
    arguments.add_argument("--only", nargs="*", choices=sorted(FAULTS), help="these kinds of fault")
    options = arguments.parse_args()
    if reason := missing(accounting=False):
        print(reason)
        return 3
    kinds = sorted(options.only or FAULTS)
    total: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    journal = folder / "faults.jsonl"
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.machine()}; seed {options.seed}, {journal}")
    failed, sweeps, began = 0, 0, time.monotonic()
    with Cluster(folder / "cluster") as cluster:
        expected = undisturbed(folder / "undisturbed", cluster, options.trials)
        database = Postgres() if postgres_missing() == "" else None
        if database:
            database.__enter__()
        try:
            while sum(total.values()) < options.faults and time.monotonic() - began < 60 * options.minutes:
                postgres = database if sweeps % 2 else None
                room = Room(
                    folder / f"sweep{sweeps}", cluster, options.trials, postgres=postgres, small=sweeps % 3 == 2
                )
                try:
                    first = 1000 * sweeps
                    left = options.faults - sum(total.values())
                    struck = disturbed(room, options.seed, first, left, kinds, journal)
                    wrong = room.losses(expected)
                except AssertionError as error:
                    struck, wrong = Counter({"unknown": 1}), [str(error)]
                finally:
                    room.close()
                total += struck
                sweeps += 1
                failed += bool(wrong)
                where = ("PostgreSQL" if postgres else "SQLite") + (", small disk" if room.small else "")
                print(
                    f"{room.name} ({where}): {sum(struck.values())} faults: {'; '.join(wrong) or 'right'}", flush=True
                )
                cluster.clear()
        finally:
            if database:
                database.__exit__()
    kinds_hit = ", ".join(f"{n} {kind}" for kind, n in sorted(total.items()))
    print(f"{sum(total.values())} faults in {sweeps} sweeps, {time.monotonic() - began:.0f} s: {kinds_hit}")
    print("nothing lost, nothing twice, nothing left behind" if not failed else f"{failed} sweeps are wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
