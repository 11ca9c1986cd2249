"""Hundreds of faults: ``python -m benchmarks.chaos --faults 400 --seed 1``, on real Slurm, PostgreSQL and disks.

Sweeps of deterministic workloads run one after another, in turn

- on the Slurm test cluster, every other one with its records in PostgreSQL and every third one on a small file system
  that can fill up (``tests/chaos/faults.py``);
- on this machine with time stamps in the trials' logs, and without: on a separate ext4 disk whose power can be cut, so
  that unsynced data is lost (``tests/chaos/local_faults.py``, ``tests/chaos/power.py``);
- on the Slurm test cluster as an unprivileged user, with trials in real time: their programs restart, resume from
  checkpoints, are suspended and delayed, clocks are slewed, jobs are renamed and partitions hidden
  (``tests/chaos/timed_faults.py``).

Faults occur at random moments. After each sweep no trial may be lost or run twice, and no process or job left over.
With simulated trials on Slurm, node-hours must equal Slurm's accounting, and results, hence the ranking, those of an
undisturbed sweep.

Elsewhere every number is recomputed from its run, by the run's ledger and a monotonic clock, and the exported
configuration must be the best one's. Each fault is determined by the seed and its number, and logged as it happens;
``--only`` selects some kinds. Exits 1, with a message, if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import faults, local_faults, power, timed_faults
from tests.chaos.local_room import LocalRoom
from tests.chaos.room import Room
from tests.chaos.timed_room import TimedRoom
from tests.cluster import Cluster
from tests.cluster.cluster import missing
from tests.postgres import Postgres
from tests.postgres import missing as postgres_missing

TRIALS = 10
PLACES = ("slurm", "timed", "local")
FAULTS_PER_SWEEP = 30
"""Maximum: under endless faults a sweep never ends, and its end is not tested."""
QUIET_SECONDS = 300.0


@dataclass(kw_only=True)
class Sweep:
    """A sweep to disturb: its place, its possible faults, and the check of its result."""

    room: Any  # a Room or a LocalRoom
    where: str
    faults: Mapping[str, Callable[[Any, random.Random], str]]
    losses: Callable[[], list[str]]
    struck: Counter[str] = field(default_factory=Counter)

    def strike(self, seed: int, number: int, journal: Path) -> None:
        """Apply fault ``number`` of ``seed``, after its pause."""
        chance = random.Random(f"{seed} {number}")
        kind = chance.choice(sorted(self.faults))
        time.sleep(chance.uniform(0.2, 2.5))
        if self.room.driver.poll() is not None:
            if self.room.finished():
                return
            code = self.room.driver.returncode
            assert code not in (1, 2), f"a driver gave up: exit {code}\n{self.room.said[-3000:]}"
            self.room.start()  # as a service manager does
        hit = self.faults[kind](self.room, chance)
        line = {"at": round(time.time(), 3), "seed": seed, "fault": number, "kind": kind, "hit": hit}
        with journal.open("a") as file:
            file.write(json.dumps({**line, "sweep": self.room.name}) + "\n")
        if hit:
            self.struck[kind] += 1

    def disturb(self, seed: int, first: int, most: int, journal: Path) -> None:
        """Apply faults until the sweep has ended or ``most`` have occurred; then let it end undisturbed."""
        self.room.start()
        number = first
        while self.struck.total() < most and not self.room.finished():
            self.strike(seed, number, journal)
            number += 1
        self.room.set_clock_right()
        if self.room.driver.poll() is not None and not self.room.finished():
            self.room.start()
        self.room.finish_all(QUIET_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place for sweeps: ``make`` returns the next one in a folder, by its number."""

    name: str
    make: Callable[[Path, int], Sweep]


def undisturbed(folder: Path, cluster: Cluster, trials: int) -> dict[int, Any]:
    """The results of a sweep without faults."""
    room = Room(folder, cluster, trials, seconds=1.0)
    try:
        room.start()
        room.finish_all(QUIET_SECONDS)
        assert set(room.slurm_jobs().values()) == {1}, room.said
        return room.results()
    finally:
        room.close()


def on_slurm(cluster: Cluster, database: Postgres | None, folder: Path, trials: int, kinds: set[str]) -> Place:
    """Sweeps on the test cluster."""
    expected = undisturbed(folder / "undisturbed", cluster, trials)
    chosen = {name: fault for name, fault in faults.FAULTS.items() if name in kinds}

    def make(place: Path, number: int) -> Sweep:
        cluster.clear()
        postgres = database if number % 2 else None
        room = Room(place, cluster, trials, postgres=postgres, small=number % 3 == 2)
        where = f"Slurm, {'PostgreSQL' if postgres else 'SQLite'}{', small disk' if room.small else ''}"
        return Sweep(room=room, where=where, faults=chosen, losses=lambda: room.losses(expected))

    return Place(name="slurm", make=make)


def on_this_machine(stamps: bool, trials: int, kinds: set[str]) -> Place:
    """Sweeps of local trials whose logs have time stamps, or not."""
    chosen = {name: fault for name, fault in local_faults.FAULTS.items() if name in kinds}

    def make(place: Path, number: int) -> Sweep:
        room = LocalRoom(place, trials, stamps=stamps, seed=number)
        where = f"this machine, logs {'with' if stamps else 'without'} time stamps"
        return Sweep(room=room, where=where, faults=chosen, losses=room.losses)

    return Place(name="local", make=make)


OF_TIME: Mapping[str, Callable[[Any, random.Random], str]] = {
    **timed_faults.TRIAL_FAULTS,
    **timed_faults.CLUSTER_FAULTS,
    **{
        f.__name__: f
        for f in (
            faults.kill_driver, faults.kill_job, faults.restart_slurmd, faults.restart_controller, faults.rename_job,
            faults.comment_job, faults.suspend_job,
        )
    },
}  # fmt: skip


def timed(cluster: Cluster, trials: int, kinds: set[str]) -> Place:
    """Sweeps on the test cluster with trials in real time: four times as many, so that faults hit them."""
    chosen = {name: fault for name, fault in OF_TIME.items() if name in kinds}

    def make(place: Path, number: int) -> Sweep:
        cluster.clear()
        room = TimedRoom(place, cluster, 4 * trials, stamps=number % 3 != 2, seed=number)
        where = f"Slurm, uid {room.user}, logs {'with' if room.stamps else 'without'} time stamps"
        return Sweep(room=room, where=where, faults=chosen, losses=room.losses)

    return Place(name="timed", make=make)


@contextlib.contextmanager
def places(folder: Path, wanted: set[str], trials: int, kinds: set[str]) -> Iterator[list[Place]]:
    """The places of sweeps, used in turn."""
    found = []
    with contextlib.ExitStack() as stack:
        on_a_cluster = wanted & {"slurm", "timed"}
        cluster = stack.enter_context(Cluster(folder / "cluster")) if on_a_cluster else None
        if cluster and "timed" in wanted and kinds & set(OF_TIME):
            found.append(timed(cluster, trials, kinds))
        if cluster and "slurm" in wanted and kinds & set(faults.FAULTS):
            database = stack.enter_context(Postgres()) if postgres_missing() == "" else None
            found.append(on_slurm(cluster, database, folder, trials, kinds))
        if "local" in wanted and kinds & set(local_faults.FAULTS):
            found += [on_this_machine(stamps, trials, kinds) for stamps in (True, False)]
        yield found


def judged(sweep: Sweep, seed: int, first: int, most: int, journal: Path) -> list[str]:
    """Problems of a sweep after its faults; empty if there are none."""
    try:
        sweep.disturb(seed, first, most, journal)
        return sweep.losses()
    except AssertionError as error:
        return [str(error)]
    finally:
        sweep.room.close()


def main() -> int:
    every = sorted({*faults.FAULTS, *local_faults.FAULTS, *OF_TIME})
    arguments = argparse.ArgumentParser(description="faults on running sweeps")
    arguments.add_argument("--faults", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--trials", type=int, default=TRIALS, help="of one sweep")
    arguments.add_argument("--minutes", type=float, default=120.0, help="begin no further sweep after so long")
    arguments.add_argument("--only", nargs="*", choices=every, help="these kinds of fault")
    arguments.add_argument("--places", nargs="*", choices=PLACES, default=PLACES)
    options = arguments.parse_args()
    no_cluster = missing(accounting=False)
    for place, reason in (("slurm", no_cluster), ("timed", no_cluster or power.missing()), ("local", power.missing())):
        if place in options.places and reason:
            print(f"{place}: {reason}")
            return 3
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    journal = folder / "faults.jsonl"
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.machine()}; seed {options.seed}, {journal}")
    total: Counter[str] = Counter()
    failed, sweeps, began = 0, 0, time.monotonic()
    with places(folder, set(options.places), options.trials, set(options.only or every)) as turns:
        while total.total() < options.faults and time.monotonic() - began < 60 * options.minutes:
            place = turns[sweeps % len(turns)]
            sweep = place.make(folder / f"sweep{sweeps}", sweeps // len(turns))
            wrong = judged(
                sweep, options.seed, 1000 * sweeps, min(FAULTS_PER_SWEEP, options.faults - total.total()), journal
            )
            total += sweep.struck
            sweeps += 1
            failed += bool(wrong)
            said = "; ".join(wrong) or "right"
            print(f"{sweep.room.name} ({sweep.where}): {sweep.struck.total()} faults: {said}", flush=True)
    kinds_hit = ", ".join(f"{n} {kind}" for kind, n in sorted(total.items()))
    print(f"{total.total()} faults in {sweeps} sweeps, {time.monotonic() - began:.0f} s: {kinds_hit}")
    print("0 lost, 0 twice, 0 orphaned, 0 wrong" if not failed else f"{failed} sweeps are wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
