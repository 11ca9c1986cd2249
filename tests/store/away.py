"""A real sweep on a real PostgreSQL that is taken away while jobs run, end, and are to be stopped.

The trials are a fixed list of points; each prints MLLOG lines, waits for the outage to begin, and then reaches the
target, ends without it, or diverges and goes on until it is stopped, at a moment of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lora_tune.base.paths import AttemptPaths, SweepPaths
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog
from lora_tune.store.records import StudyRecords
from tests.conftest import REPOSITORY
from tests.postgres import Postgres
from tests.recorded import recorded
from tests.waiting import wait_for

How = Literal["stop", "freeze"]
KINDS = ("reaches", "diverges", "ends")
VERDICTS = {"reaches": "reached", "diverges": "pruned", "ends": "censored"}
TARGET, EVALS = 1.0, 20
LATE = 3
"""Trials for which there is a slot only after the outage."""

TRIAL = f"""
import json, os, sys, time
from pathlib import Path
kind, seconds = os.environ["KIND"], float(os.environ["SECONDS"])
def say(key, value, **metadata):
    record = {{"namespace": "", "time_ms": round(time.time() * 1000), "event_type": "POINT_IN_TIME", "key": key}}
    print(":::MLLOG " + json.dumps({{**record, "value": value, "metadata": metadata}}), flush=True)
say("run_start", None)
while not Path(__file__).with_name("away").exists():
    time.sleep(0.05)
for i in range(1, {EVALS} + 1):
    time.sleep(seconds / {EVALS})
    say("eval_accuracy", ({TARGET} if kind == "reaches" else 1.5) + 0.02 * ({EVALS} - i), samples_count=8 * i)
if kind == "diverges":
    for i in range(2):
        say("train_loss", float("nan"), samples_count=8 * ({EVALS} + i))
    time.sleep(120)
say("run_stop", None, status="success" if kind == "reaches" else "aborted")
"""

STUDY = """
description = "jobs that run, end and are stopped while the database is away"
[workload]
kind = "command"
argv = {argv}
[site]
system = "TEST"
kill_seconds = 10
[space]
KIND = {{ type = "categorical", choices = {kinds} }}
SECONDS = {{ type = "float", low = 0.01, high = 10000 }}
GBS = 8
[objective]
target = {target}
[pruning]
no_verdict_before = 1000000
cap = false
[budget]
trials = {trials}
parallel = {parallel}
trial_minutes = {minutes}
[search]
sampler = "random"
"""


@dataclass(frozen=True, kw_only=True)
class PollResult:
    """What the outage showed. Times in seconds; late: from a job's end, or its first bad line, to the driver's act.

    said: lines in the driver's log on the trouble with Optuna's tables.
    """

    away: float
    ended: int
    ended_late: Sequence[float]
    stopped: int
    stopped_late: Sequence[float]
    buffered: int
    submitted: int
    said: int
    caught_up: float
    driver_cpu: float


class Room:
    """One sweep in ``folder`` and its driver. launch: the words that start a driver, before its options."""

    def __init__(self, folder: Path, server: Postgres, name: str, *, seconds: float, parallel: int) -> None:
        """seconds: of the outage, in which ``parallel`` jobs have their moments; the last one outlasts it."""
        self.folder, self.server, self.name, self.seconds = folder, server, name, seconds
        self.url = server.new_database()
        self.paths = SweepPaths(folder / "sweeps" / name)
        share = [(n + 1) / parallel for n in range(parallel - 1)]
        self.points = [(KINDS[n % 3], seconds * s) for n, s in enumerate(share)]
        self.points += [("reaches", 1.1 * seconds + 2), *((kind, 1.0) for kind in KINDS[:LATE])]
        (folder / "studies").mkdir(parents=True)
        (folder / "trial.py").write_text(TRIAL)
        text = STUDY.format(
            argv=json.dumps([sys.executable, "trial.py"]),
            kinds=json.dumps(KINDS),
            target=TARGET,
            trials=len(self.points),
            parallel=parallel,
            minutes=seconds / 60 + 30,
        )
        text += "".join(f"[[search.enqueue]]\nKIND = '{kind}'\nSECONDS = {length}\n" for kind, length in self.points)
        (folder / "studies" / f"{name}.toml").write_text(text)
        self.parallel = parallel
        self.driver: subprocess.Popen[bytes] | None = None

    def start(self, module: str = "lora_tune.sweep") -> None:
        """Start the driver and wait until all its slots are full."""
        argv = [sys.executable, "-m", module, "--study", self.name, "--quiet"]
        environment = {**os.environ, "LORA_TUNE_STORAGE": self.url, "PYTHONPATH": str(REPOSITORY)}
        with (self.folder / "said").open("ab") as said:
            self.driver = subprocess.Popen(
                argv, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        wait_for(self._all_began, 180, "all jobs")
        wait_for(lambda: len(self.sweep().trials) == self.parallel, 60, "their records")

    def _all_began(self) -> bool:
        assert self.driver is not None
        assert self.driver.poll() is None, (self.folder / "said").read_text()
        return sum("run_start" in text for text in self._logs()) == self.parallel

    def close(self) -> None:
        """End the driver, and jobs that it left."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()
        for started in self.paths.trials.glob("*/*/started.json"):
            with contextlib.suppress(ProcessLookupError):
                if not (started.parent / "ended.json").exists():
                    os.killpg(json.loads(started.read_text())["pid"], 9)

    def outage(self, how: How) -> PollResult:
        """Take the server away for ``seconds``, bring it back, and wait until the driver has caught up.

        AssertionError where the driver concludes trials only with the server: not within a minute more.
        """
        assert self.driver is not None
        took = self._cpu()
        began = time.time()
        self.server.freeze() if how == "freeze" else self.server.stop()
        (self.folder / "away").touch()
        time.sleep(self.seconds)  # what is asked is how a time passes
        wait_for(lambda: len(list(self._journal("finished"))) == self.parallel - 1, 60, "acts without the database")
        buffered = len(self.paths.unsaved.read_text().splitlines()) if self.paths.unsaved.exists() else 0
        took = self._cpu() - took
        over = time.time()
        self.server.thaw() if how == "freeze" else self.server.start()
        back = time.monotonic()
        wait_for(lambda: not self.paths.unsaved.exists(), 120, "everything is saved")
        caught_up = time.monotonic() - back
        ended, stopped = self._acts("finished", over), self._acts("stop", over)
        submitted = sum(began < line["at"] < over for line in self._journal("submitted"))
        said = sum("Optuna" in line["text"] for line in self._journal("trouble"))
        return PollResult(
            away=over - began, ended=len(ended), ended_late=ended, stopped=len(stopped), stopped_late=stopped,
            buffered=buffered, submitted=submitted, said=said, caught_up=caught_up, driver_cpu=took,
        )  # fmt: skip

    def finish(self, seconds: float) -> int:
        """The driver's exit code once the sweep is over."""
        assert self.driver is not None
        return self.driver.wait(seconds)

    def losses(self) -> list[str]:
        """What is wrong with the ended sweep, in words; nothing when all is right."""
        sweep, wrong = self.sweep(), []
        if sorted(sweep.trials) != list(range(len(self.points))):
            wrong.append(f"trials {sorted(sweep.trials)} of {len(self.points)}")
        for number, (kind, _) in enumerate(self.points):
            if (trial := sweep.trials.get(number)) is None:
                continue
            run, runs = self._run(number)
            stop = run.reached(TARGET)
            expected = (VERDICTS[kind], stop.seconds if stop else None, stop.samples if stop else None)
            if (found := (str(trial.verdict), trial.seconds, trial.samples)) != expected:
                wrong.append(f"trial {number} is {found}, its log says {expected}")
            if sweep.evals.get((number, 0)) != tuple(run.evals):
                wrong.append(f"trial {number}: the database holds other evals than its log")
            if runs != 1:
                wrong.append(f"trial {number} ran {runs} times")
        rows = self.server.execute(self.url, "SELECT number, state::text FROM trials ORDER BY trial_id")
        names = {"reaches": "COMPLETE", "diverges": "PRUNED", "ends": "PRUNED"}
        if list(rows) != [(n, names[kind]) for n, (kind, _) in enumerate(self.points)]:
            wrong.append(f"Optuna's tables hold {rows}")
        return wrong

    def sweep(self) -> StudyRecords:
        return recorded(self.url, self.name)

    def _acts(self, event: str, before: float) -> list[float]:
        """Seconds from what called for ``event`` to the driver's doing it, where the former was in the outage."""
        late = []
        for line in self._journal(event):
            folder = self.paths.attempt(line["trial"], 0).folder
            if event == "finished":
                cause = json.loads(AttemptPaths(folder).ended.read_text())["at"]
            else:
                texts = (folder / "job.log").read_text().splitlines()
                cause = next(json.loads(t.split(" ", 1)[1])["time_ms"] for t in texts if '"train_loss"' in t) / 1000
            if cause < before:
                late.append(line["at"] - cause)
        return late

    def _journal(self, event: str) -> Iterator[dict[str, Any]]:
        lines = map(json.loads, self.paths.driver_log.read_text().splitlines())
        return (line for line in lines if line["event"] == event)

    def _run(self, number: int) -> tuple[RunLog, int]:
        """What the first attempt's log says, and how many runs all logs of the trial show."""
        reader = MllogReader()
        reader.feed((self.paths.attempt(number, 0).folder / "job.log").read_bytes())
        logs = (self.paths.trials / f"{number:04d}").glob("*/job.log")
        return reader.run(), sum(log.read_text().count('"run_start"') for log in logs)

    def _logs(self) -> list[str]:
        return [log.read_text() for log in self.paths.trials.glob("*/*/job.log")]

    def _cpu(self) -> float:
        """Processor seconds of the driver until now."""
        assert self.driver is not None
        fields = Path(f"/proc/{self.driver.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
