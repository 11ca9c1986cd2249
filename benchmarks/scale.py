"""A long, wide study: ``python -m benchmarks.scale``, two cores; ``--part cost``, ``live`` for one of them.

cost: processor seconds and seconds of ask + 8 reports + tell, by the sweep's code and by Optuna's SQLite storage with
its TPE, on copies of the same studies of 100 to 10,000 trials, 8 of them open. For Optuna's default RDB storage it is
the median of a few trials each, since ten thousand of them take hours.

live: the real driver in real time on a study of ``--finished`` trials with 1,000 more open at once, at the pace of
trials on eight H100 (half an hour each, an eval every three and a half minutes): real SQLite, real log files that
another process writes, the real Slurm launcher with squeue, sbatch and scancel replaced by programs that simulate a
cluster of a thousand nodes. Prints seconds per tick, the share of one core over the measured minutes, resident memory,
and the seconds from a diverged eval's log line to the cancellation of its job, and from any eval's line to its record
in the database. The first fill, a thousand proposals and submissions at once, is reported separately. About sixty
trials end and begin per minute; a machine, or a search (``--sampler``), that fills slots more slowly never has them all
full, and the output states how many ran.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import cProfile
import datetime
import functools
import json
import platform
import pstats
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna

from benchmarks import scale_cluster
from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import Study, load_study
from lora_tune.controller import proposals
from lora_tune.controller.driver import Dependencies, Driver, RealClock
from lora_tune.launchers.slurm.launcher import SlurmLauncher
from lora_tune.logs.run import Eval
from lora_tune.review.screen import Quiet
from lora_tune.search.optuna_tables import OptunaTables
from lora_tune.search.session import SearchPoint, Session
from lora_tune.store import Changes, Lease, Store, sqlite_url
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, UnitOfWork, Verdict
from lora_tune.workloads import load as load_workload

STUDY = Path(__file__).resolve().parent.parent / "studies" / "simulated_h100.toml"
OPEN = 8
STEPS = [1536 + 384 * k for k in range(8)]
OWN_TRIALS, OPTUNA_TRIALS = 40, 8

LIVE_STUDY = """
[workload]
kind = "command"
argv = ["train"]
log = { kind = "mllog" }
[site]
launcher = "slurm"
[space]
LR = { type = "float", low = 1e-5, high = 1e-2, log = true }
MAX_STEPS = { type = "int", low = 400, high = 1600 }
GBS = 8
layout = { type = "layout", tp = [1, 2, 4, 8], pp = [1, 2, 4], cp = [1, 2, 4, 8], gbs = [8, 16, 32] }
[objective]
target = 0.925
[pruning]
cap = false
[budget]
trials = 100000
parallel = PARALLEL
trial_minutes = 60
"""


def machine() -> str:
    return f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


# -- the past: a study of many finished trials ------------------------------------------------------------------------


def past(study: Study, chance: random.Random, count: int, began: float) -> Changes:
    """``count`` finished trials with 8 evals each."""
    distributions = study.search_space.distributions()
    random_study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    trials, attempts, evals = [], [], []
    for number in range(count):
        tuned = random_study.ask(distributions).params
        at = began + 20 * number
        curve = [Eval(s, 0.99 - 0.0002 * k * chance.random() - 0.005 * k, 200.0 * (k + 1)) for k, s in enumerate(STEPS)]
        reached = chance.random() < 0.3
        metrics = TrialMetrics(
            evals=8.0, samples_per_second=2.1, last_loss=curve[-1].loss, node_hours=0.5,
            last_samples=curve[-1].samples, init_seconds=120.0, seconds_per_eval=34.5,
            objective=chance.uniform(1500, 2500) if reached else None,
        )  # fmt: skip
        trial = Trial(
            number=number,
            seed=number,
            tuned=tuned,
            parameters=study.search_space.resolve(tuned),
            state=TrialState.FINISHED,
            verdict=Verdict.REACHED if reached else Verdict.PRUNED,
            sentence="as it was",
            seconds=metrics.objective,
            samples=curve[-1].samples if reached else None,
            metrics=metrics,
            proposed_at=at,
            finished_at=at + 1800,
        )
        attempt = Attempt(
            trial=number, number=0, job_name=f"{study.name}-{number:04d}-0", folder=f"trials/{number:04d}"
        )
        attempt = replace(attempt, state="ended", job_id=str(number), intended_at=at, submitted_at=at, started_at=at)
        trials.append(trial)
        attempts.append(replace(attempt, ended_at=at + 1800, nodes=("n1",), exit_code=0))
        evals += [(number, 0, k, e) for k, e in enumerate(curve)]
    return Changes(tuple(trials), tuple(attempts), tuple(evals))


# -- the cost of a trial ----------------------------------------------------------------------------------------------


def costs(counts: list[int]) -> None:
    """Print one line per study size."""
    study = load_study(STUDY).with_options({"search": {"sampler": "tpe"}})
    print("processor ms a trial (ms on the clock), medians")
    print("finished trials             ours   Optuna's SQLite path   Optuna's / ours   ours / ours at first")
    first = 0.0
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "study.db"
            store = Store(sqlite_url(file))
            store.begin(study.name, study.digest, "", 0.0)
            house = TunerStudy(study, store, past(study, random.Random(2), count, 0.0))
            for _ in range(OPEN):
                house.propose()
            ours = [own_trial(house) for _ in range(OWN_TRIALS)]
            store.close()
            plain = optuna_study(study, file)
            theirs = [optuna_trial(plain, study) for _ in range(OPTUNA_TRIALS)]
        (a, a_clock), (b, b_clock) = 1000 * np.median(ours, axis=0), 1000 * np.median(theirs, axis=0)
        first = first or a
        own, other = f"{a:.1f} ({a_clock:.1f})", f"{b:.1f} ({b_clock:.1f})"
        print(f"{count:15d} {own:>16s} {other:>22s} {b / a:17.1f} {a / first:22.2f}", flush=True)


class TunerStudy:
    """The records of a study, the search built from them, and Optuna's tables, which mirror them."""

    def __init__(self, study: Study, store: Store, before: Changes) -> None:
        lease = store.take_lease(study.name, "benchmark", time.time())
        store.save(lease, before, time.time())
        found = store.load(study.name)
        assert found is not None
        self.session, self.work = Session(study, found), UnitOfWork(found)
        self.tables = OptunaTables(study, store, lease)
        self.follow()

    def follow(self) -> None:
        said = self.tables.follow(self.work.sweep)
        assert said == "", said

    def propose(self) -> tuple[Trial, Attempt]:
        asked = self.session.ask()
        assert isinstance(asked, SearchPoint)
        trial = Trial(
            number=asked.number, seed=0, tuned=asked.tuned, parameters=asked.tuned, state=TrialState.RUNNING,
            sampler_attributes=asked.sampler_attributes,
        )  # fmt: skip
        attempt = Attempt(trial=trial.number, number=0, job_name=f"j{trial.number}", folder="")
        self.work.put_trial(trial)
        self.work.put_attempt(attempt)
        return trial, attempt


def own_trial(house: TunerStudy) -> tuple[float, float]:
    """Processor and wall-clock seconds of a trial: ask, eight reports in a tick each, tell."""
    cpu, begin = time.process_time(), time.perf_counter()
    trial, attempt = house.propose()
    evals: list[Eval] = []
    for step in STEPS:
        evals.append(Eval(float(step), 0.95, 1.0))
        house.session.report(trial.number, house.work.see_evals(attempt, evals))
        house.follow()
    metrics = TrialMetrics(objective=2000.0 + trial.number % 97, evals=8.0)
    done = replace(trial, metrics=metrics).finished(Verdict.REACHED, "", 1.0)
    house.work.put_trial(done)
    house.session.tell(done)
    house.follow()
    return time.process_time() - cpu, time.perf_counter() - begin


def optuna_study(study: Study, file: Path) -> optuna.Study:
    sampler = optuna.samplers.TPESampler(seed=1, n_startup_trials=5, multivariate=True, constant_liar=True)
    return optuna.create_study(
        study_name=study.name,
        storage=optuna.storages.RDBStorage(sqlite_url(file)),
        sampler=sampler,
        load_if_exists=True,
    )


def optuna_trial(plain: optuna.Study, study: Study) -> tuple[float, float]:
    cpu, begin = time.process_time(), time.perf_counter()
    trial = plain.ask(study.search_space.distributions())
    for step in STEPS:
        trial.report(0.95, step)
    trial.set_user_attr("evals", 8.0)
    trial.set_user_attr("verdict", "reached")
    plain.tell(trial, 2000.0 + trial.number % 97)
    return time.process_time() - cpu, time.perf_counter() - begin


# -- a thousand trials at once ----------------------------------------------------------------------------------------


MOST_FILLING_SECONDS = 180.0
"""On a busy machine trials end as fast as slots are refilled; the measurement then begins after this many seconds."""


class Watcher(Quiet):
    """Records when a tick added an eval to the records."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], int] = {}
        self.open: set[int] = set()
        self.seen: dict[tuple[str, int], float] = {}
        self.updates: list[float] = []

    def update(self, study: Study, sweep: StudyRecords, now: float) -> None:
        self.updates = [*self.updates[-1:], now]
        for trial in sweep.trials.values():
            if trial.state is not TrialState.FINISHED:
                self.open.add(trial.number)
            elif trial.number in self.open:
                self.open.discard(trial.number)
            else:
                continue
            for attempt in sweep.attempts_of(trial.number):
                key = (attempt.trial, attempt.number)
                for eval_ in sweep.evals.get(key, ())[self.known.get(key, 0) :]:
                    self.seen[attempt.job_name, int(eval_.samples)] = now
                    self.known[key] = self.known.get(key, 0) + 1


class Measuring(RealClock):
    """Sets the driver's interrupt after the time limit; records each tick's seconds and the process's usage."""

    def __init__(self, warm: Callable[[], bool], seconds: float) -> None:
        super().__init__()
        self.ticks: list[float] = []
        self._warm, self._seconds = warm, seconds
        self._woke = time.perf_counter()
        self.began: tuple[float, float, float] | None = None
        self.driver: Driver | None = None

    def sleep(self, seconds: float) -> None:
        spent = time.perf_counter() - self._woke
        if self.began:
            self.ticks.append(spent)
        if self.began is None and self._warm():
            self.began = used()
        if self.began is not None and time.time() - self.began[0] > self._seconds and self.driver is not None:
            self.driver.interrupt = True
        super().sleep(seconds)
        self._woke = time.perf_counter()


def used() -> tuple[float, float, float]:
    """Current time, CPU seconds of this process, and CPU seconds of its child processes."""
    return time.time(), time.process_time(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def resident() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def live(trials: int, finished: int, minutes: float, sampler: str) -> None:
    """The whole measurement, with its output."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "scale.toml"
        file.write_text(LIVE_STUDY.replace("PARALLEL", str(trials)))
        study = load_study(file).with_options({"search": {"sampler": sampler}})
        paths = SweepPaths(folder / "sweep")
        paths.root.mkdir()
        store = Store(sqlite_url(paths.database))
        store.begin(study.name, study.digest, file.read_text(), time.time())
        lease = store.take_lease(study.name, "benchmark", time.time())
        store.save(lease, past(study, random.Random(3), finished, time.time() - 30 * 86400), time.time())
        environment = scale_cluster.commands(folder / "cluster", trials)
        os.environ.update(environment)
        here = Path(__file__).resolve().parent.parent
        command = [sys.executable, "-m", "benchmarks.scale_cluster", str(folder / "cluster")]
        with subprocess.Popen(command, cwd=here) as cluster:
            try:
                drive(study, file, paths, store, lease, folder, trials, minutes)
            finally:
                cluster.terminate()


def drive(
    study: Study, file: Path, paths: SweepPaths, store: Store, lease: Lease, folder: Path, trials: int, minutes: float
) -> None:
    begin = time.perf_counter()
    session = Session(study, store.load(study.name))
    watcher = Watcher()
    ready: dict[str, float] = {}

    def warm() -> bool:
        running = sum(a.state == "running" for a in list(driver.sweep.attempts.values())[-2 * trials :])
        if running >= 0.98 * trials or time.time() - ready["filled"] > MOST_FILLING_SECONDS:
            ready.setdefault("at", time.time())
            ready.setdefault("running", running)
        return "at" in ready and time.time() - ready["at"] > 20

    clock = Measuring(warm, 60 * minutes)
    ports = Dependencies(
        workload=load_workload(study, file), launcher=SlurmLauncher(study.site), store=store, session=session,
        clock=clock, view=watcher, projection=OptunaTables(study, store, lease),
    )  # fmt: skip
    driver = clock.driver = Driver(study, paths, ports, lease, period=1.0, submit_grace_seconds=10.0)
    print(
        f"records of {len(driver.sweep.trials)} trials read in {time.perf_counter() - begin:.1f} s, {resident():.0f} MB"
    )
    began = time.time()
    # All slots at once, since gradual filling is not measured here.
    usual, proposals.FILL_SECONDS = proposals.FILL_SECONDS, 1e9
    driver.tick()
    proposals.FILL_SECONDS, ready["filled"] = usual, time.time()
    driver.run()
    assert clock.began is not None
    then, own, commands = (b - a for a, b in zip(clock.began, used(), strict=True))
    filled, at = ready["filled"] - began, ready["at"] - began
    print(f"{trials} proposed and submitted in {filled:.0f} s, {ready['running']:.0f} running after {at:.0f} s")
    show(driver, clock, then, own, commands)
    latencies(folder / "cluster", watcher, clock.began[0])


def show(driver: Driver, clock: Measuring, then: float, own: float, commands: float) -> None:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    ticks = np.array(clock.ticks)
    open_ = sum(t.state is not TrialState.FINISHED for t in driver.sweep.trials.values())
    print(
        f"{open_} trials open, {len(driver.sweep.trials)} in the study, {then:.0f} s measured\n"
        f"tick: median {np.median(ticks):.2f} s, 99% {np.quantile(ticks, 0.99):.2f} s, longest {ticks.max():.2f} s\n"
        f"of one core: driver {100 * own / then:.0f}%, Slurm's commands {100 * commands / then:.0f}%\n"
        f"resident memory {resident():.0f} MB, at most {most:.0f} MB"
    )


def latencies(cluster: Path, watcher: Watcher, since: float) -> None:
    seen = watcher.seen
    written = [json.loads(line) for line in (cluster / "written.jsonl").read_text().splitlines()]
    cancelled: dict[str, float] = {}
    for line in (cluster / "cancelled").read_text().splitlines() if (cluster / "cancelled").exists() else ():
        job, at = line.split()
        cancelled.setdefault(job, float(at))
    written = [w for w in written if w["at"] > since]
    waits = [seen[w["job"], w["samples"]] - w["at"] for w in written if (w["job"], w["samples"]) in seen]
    stops = [cancelled[w["id"]] - w["at"] for w in written if w["diverged"] and w["id"] in cancelled]
    # Lines written before the last tick but one ended could be read in the last one.
    late = sum((w["job"], w["samples"]) not in seen and w["at"] < watcher.updates[0] for w in written)
    for what, found in (("an eval's line to its record", waits), ("a diverged eval's line to scancel", stops)):
        if found:
            print(f"from {what}: median {np.median(found):.2f} s, 99% {np.quantile(found, 0.99):.2f} s of {len(found)}")
    print(f"evals written before the last tick began and never recorded: {late}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--part", choices=("cost", "live", "all"), default="all")
    arguments.add_argument("--sizes", nargs="+", type=int, default=[100, 1000, 3000, 10000], help="studies of cost")
    arguments.add_argument("--trials", type=int, default=1000, help="open at once")
    arguments.add_argument("--finished", type=int, default=9000)
    arguments.add_argument("--minutes", type=float, default=4.0)
    arguments.add_argument("--sampler", default="tpe", help="of the live study (default %(default)s)")
    arguments.add_argument("--profile", action="store_true", help="print where the driver's time goes")
    options = arguments.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(machine())
    if options.part in ("cost", "all"):
        costs(options.sizes)
    if options.part in ("live", "all"):
        work = functools.partial(live, options.trials, options.finished, options.minutes, options.sampler)
        if options.profile:
            with cProfile.Profile() as profile:
                work()
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        else:
            work()


if __name__ == "__main__":
    main()
