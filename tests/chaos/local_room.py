"""A sweep of local trials that faults are let loose on, and the questions that it must answer after.

The folder lies on a disk of its own whose power can be cut. Every run of a trial leaves the truth in a ledger outside
of it (:mod:`tests.chaos.trial`), so each number that the sweep reports is recomputed from the run that made it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from lora_tune.base.errors import StoreError
from lora_tune.base.paths import AttemptPaths, SweepPaths
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict
from tests.chaos.common import finish_all
from tests.chaos.power import LoopDisk
from tests.chaos.trial import BATCH, TARGET, samples_to_target

HERE = Path(__file__).resolve().parents[2]
_NUMBERS = itertools.count()

STUDY = """
[workload]
kind = "command"
argv = [{python}, "-m", "tests.chaos.trial"]
cwd = {here}
log = {log}
[workload.environment]
CHAOS_LEDGER = {ledger}
CHAOS_CLOCK = {clock}
CHAOS_HOST_CLOCK = {host_clock}
CHAOS_PACE = "{pace}"
CHAOS_STAMPS = "{stamps:d}"
[site]
launcher = {launcher}
{site}
system = "TEST"
stall_minutes = 1
kill_seconds = 2
[space]
LR = {{ type = "float", low = 1e-4, high = 1e-3, log = true }}
[objective]
target = {target}
[search]
sampler = "random"
seed = {seed}
[pruning]
rule = "none"
cap = false
[budget]
trials = {trials}
parallel = 3
attempts = 60
trial_minutes = 5
"""

PLAIN = (
    "{ kind = 'regex', eval = 'eval at (?P<samples>\\d+): (?P<loss>\\S+)', start = '^run_start', "
    "stop = '^run_stop', global_batch_size = " + str(BATCH) + " }"
)
"""How the log of a trial without time stamps is read."""

MEASURED_SECONDS, ARRIVAL_SECONDS = 0.15, 2.0
"""By how much a time may differ from the truth: from stamps in the log, and from when its lines arrived."""


NOTED_PAUSE, SEEN_LATE = 1.0, 0.4
"""Seconds; a shorter pause may count as the trial's own time, and so much of a longer one (``job_runner``)."""


class LocalRoom:
    """One sweep of ``trials`` and the means to disturb it. ``start`` first, then :meth:`finish_all`.

    stamps: whether the trials' logs have time stamps. pace: seconds between two evals.
    """

    site = ""
    """Further lines of [site]."""
    inexact = 0.0
    """By how many seconds more a time may differ from the truth."""

    def __init__(
        self, folder: Path, trials: int, *, stamps: bool = True, pace: float = 0.35, seed: int = 1,
        name: str = "local",
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True)
        self.name, self.stamps, self.trials = f"{name}{next(_NUMBERS)}", stamps, trials
        self.ledger, self._clock = folder / "ledger", folder / "clock"
        self.ledger.mkdir()
        self.set_clock_right()
        self.disk = LoopDisk(folder / "disk.img", folder / "sweep", megabytes=96)
        self.paths = SweepPaths(folder / "sweep" / "here")
        self.study = folder / f"{self.name}.toml"
        quoted = {name: json.dumps(str(value)) for name, value in self._places().items()}
        log = "{ kind = 'mllog' }" if stamps else PLAIN
        self.study.write_text(
            STUDY.format(
                **quoted, pace=pace, stamps=stamps, log=log, target=TARGET, seed=seed, trials=trials, site=self.site
            )
        )
        self._output = (folder / "driver.out").open("ab")
        self._restored = False  # the last thing that was done was to put kept records into place
        self._said = 0  # characters that drivers before the present one have printed
        self._drivers: list[subprocess.Popen[bytes]] = []

    def _places(self) -> dict[str, Any]:
        return {"python": sys.executable, "here": HERE, "ledger": self.ledger, "clock": self._clock, "host_clock": "",
                "launcher": "local"}  # fmt: skip

    # -- drivers

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        return self._drivers[-1]

    def command(self, *further: str) -> list[str]:
        """The command that drives the sweep."""
        command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(self.study), "--quiet"]
        return [*command, "--output", str(self.paths.root), *further]

    def environment(self) -> dict[str, str]:
        """The driver's."""
        return {**os.environ}

    def start(self) -> subprocess.Popen[bytes]:
        """Start a driver, after doing what the one before has advised a person to do."""
        self._follow_advice("".join(self.said[self._said :].splitlines()[-1:]))
        self._said = len(self.said)
        started = subprocess.Popen(
            self.command(), cwd=HERE, env=self.environment(), stdout=self._output, stderr=subprocess.STDOUT
        )
        self._drivers.append(started)
        return started

    def _follow_advice(self, last: str) -> None:
        """Put the kept records in the place of a lost database; where they are too old as well, go on from them."""
        lost = any(words in last for words in ("rescued.db", "does not hold them", "knows nothing"))
        if self._restored and "older than this folder" in last:
            self.paths.saved.unlink(missing_ok=True)
        elif self.paths.rescued.exists() and (lost or not self.paths.database.exists()):
            for path in self.database_files():
                path.unlink()
            shutil.copy(self.paths.rescued, self.paths.database)
            os.sync()
            self._restored = True
        elif "older than this folder" in last:
            self.paths.saved.unlink(missing_ok=True)
        else:
            self._restored = False

    def kill_driver(self) -> None:
        self.driver.kill()
        self.driver.wait()

    def finished(self) -> bool:
        """Whether a driver has ended the sweep."""
        return bool(self._drivers) and self.driver.poll() in (0, 4)

    def finish_all(self, seconds: float) -> None:
        """Drivers, one after another, until one ends the sweep. AssertionError after that time."""
        finish_all(self, seconds)

    @property
    def said(self) -> str:
        """What the drivers printed."""
        return Path(self._output.name).read_text()

    def close(self) -> None:
        for driver in self._drivers:
            if driver.poll() is None:
                driver.send_signal(signal.SIGCONT)
                driver.kill()
                driver.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._output.close()
        self.disk.unmount()

    # -- what faults hit

    def step_clock(self, seconds: float) -> None:
        """The trials' wall clock is wrong by so much from now on."""
        new = self._clock.with_suffix(".new")
        new.write_text(f"{seconds}")
        new.replace(self._clock)

    def set_clock_right(self) -> None:
        self.step_clock(0.0)

    def attempts(self) -> list[AttemptPaths]:
        """Every attempt's folder, the one that changed last at the end."""
        found = list(self.paths.trials.glob("*/attempt-*"))
        return [AttemptPaths(path) for path in sorted(found, key=lambda path: path.stat().st_mtime)]

    def live(self, chance: random.Random) -> AttemptPaths | None:
        """An attempt that has begun and not ended."""
        found = [a for a in self.attempts() if a.claim.exists() and not a.ended.exists()]
        return chance.choice(found) if found else None

    def database_files(self) -> list[Path]:
        name = self.paths.database.name
        return [p for p in self.paths.root.iterdir() if re.fullmatch(re.escape(name) + "(-wal|-shm|-journal)?", p.name)]

    def processes(self) -> list[int]:
        """Living processes of trials: they carry the ledger's path in their environment."""
        wanted, found = os.fsencode(f"CHAOS_LEDGER={self.ledger}"), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def runners(self) -> list[int]:
        """Living processes that run a job of this sweep: submitit's, whose command line names an attempt's folder."""
        wanted, found = os.fsencode(str(self.paths.trials)), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    # -- what must hold after it

    def sweep(self) -> StudyRecords:
        store = Store(sqlite_url(self.paths.database), read_only=True)
        try:
            found = store.load(self.name)
        finally:
            store.close()
        assert found is not None
        return found

    def runs(self) -> list[dict[str, Any]]:
        """The ledger: one entry for each run of a trial's program."""
        found = []
        for file in self.ledger.glob("*.json"):
            with contextlib.suppress(ValueError):  # it was killed while it wrote
                found.append(json.loads(file.read_text()))
        return found

    def losses(self) -> list[str]:
        """What is wrong with the ended sweep, in words; nothing when all is right."""
        try:
            sweep = self.sweep()
        except StoreError as error:
            return [f"the records are lost: {error}"]
        wrong = []
        unfinished = [t.number for t in sweep.trials.values() if t.state is not TrialState.FINISHED]
        if unfinished or len(sweep.trials) != self.trials:
            wrong.append(f"lost: {len(sweep.trials)} of {self.trials} trials, unfinished {unfinished}")
        runs = self.runs()
        if twice := {token: n for token, n in Counter(run["token"] for run in runs).items() if n > 1}:
            wrong.append(f"ran twice: {twice}")
        if orphans := self.processes():
            wrong.append(f"orphaned: {orphans}")
        by_token = {run["token"]: run for run in runs}
        for trial in sweep.trials.values():
            last = sweep.attempts_of(trial.number)[-1:]
            wrong += self._wrong(trial, by_token.get(last[0].token) if last else None)
        return wrong + self._wrong_export(sweep)

    def _wrong(self, trial: Trial, run: dict[str, Any] | None) -> list[str]:
        """What a trial reports that its own run does not bear out."""
        rate, expected = float(trial.parameters["LR"]), samples_to_target(float(trial.parameters["LR"]), trial.seed)
        if trial.verdict is not Verdict.REACHED:
            missed = expected is not None or trial.verdict not in (Verdict.CENSORED, Verdict.PRUNED)
            return [f"wrong: trial {trial.number} is {trial.verdict}: {trial.sentence}"] if missed else []
        if run is None or (run["rate"], run["seed"]) != (rate, trial.seed):
            return [f"wrong: trial {trial.number} reports a run that was not its own: {run}"]
        if trial.samples != expected:
            return [f"wrong: trial {trial.number} has {trial.samples} samples, its curve {expected}"]
        allowed = self.inexact + (MEASURED_SECONDS if self.stamps else ARRIVAL_SECONDS)
        if run["seconds"] is None or trial.seconds is None:
            return [f"wrong: trial {trial.number} reports {trial.seconds} s of a run that did not get there"]
        # What it stood still is no time of its own, as far as looks at the job can see.
        pauses = run["pauses"]
        low, high = run["seconds"] - sum(pauses), run["seconds"] - sum(p - SEEN_LATE for p in pauses if p > NOTED_PAUSE)
        if not low - allowed < trial.seconds < high + allowed and not _marked(trial):
            return [
                f"wrong: trial {trial.number} took {run['seconds']:.2f} s with pauses {pauses}, {run['restarts']} "
                f"restarts and {run['resumes']} resumes, reported {trial.seconds:.2f} s, unmarked"
            ]
        return []

    def _wrong_export(self, sweep: StudyRecords) -> list[str]:
        best = sweep.best()
        files = list(self.paths.best.glob("*.sh"))
        if best is None or not files:
            return [] if best is None and not files else [f"wrong: the export is {files}, the best trial {best}"]
        exported = re.search(r"export LR=(\S+)", files[0].read_text())
        reached = [t for t in sweep.trials.values() if t.verdict is Verdict.REACHED]
        if exported is None or float(exported[1]) not in [t.parameters["LR"] for t in reached]:
            return [
                f"wrong: {files[0].name} exports {exported and exported[1]}, with which no trial reached the target"
            ]
        return []


def _marked(trial: Trial) -> bool:
    """Whether a result says that its time is an estimate."""
    return trial.metrics.estimated_seconds is not None or "estimated" in trial.sentence
