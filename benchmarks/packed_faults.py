"""Kill packs and drivers at random moments: ``python -m benchmarks.packed_faults [--kills N] [--seed S]``.

Sweeps the shipped tiny task in packs. At random moments it kills (SIGKILL) the pack or the driver, or asks the pack to
end (SIGTERM); a driver that was killed, or ended, is started again with the same command. At the end every trial must
be accounted for: finished with a verdict, with one attempt that came to its end and every other one recorded as
interrupted; and no attempt may have been run by two processes. Exit code 1 where one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from lora_tune.base.paths import AttemptPaths, SweepPaths
from lora_tune.launchers.job_records import alive, read_records
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import Sweep, TrialState

STUDY = """
[workload]
kind = "peft"
[site]
slots = {slots}
[space]
LR = {{ type = "float", low = 1e-4, high = 3e-2, log = true }}
MAX_STEPS = {steps}
SEQ = 64
EVAL_SAMPLES = 8
[objective]
target = 1.0
[search]
sampler = "random"
seed = 1
[pruning]
rule = "none"
cap = false
[budget]
trials = {trials}
parallel = {slots}
attempts = 99
"""


class Run:
    """One sweep, its driver, and what has been killed."""

    def __init__(self, root: Path, study: str, trials: int, seed: int) -> None:
        self._trials = trials
        self._chance = random.Random(seed)
        self.paths = SweepPaths(root / "sweep")
        self._file = root / "faults.toml"
        self._file.write_text(study)
        self.kills: Counter[str] = Counter()
        self._driver = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(self._file), "--output"]
        output = (self.paths.root.parent / "driver.txt").open("ab")
        return subprocess.Popen([*command, str(self.paths.root)], stdout=output, stderr=output, start_new_session=True)

    def drive(self, kills: int, limit: float) -> bool:
        """Until the sweep is over; False where it took longer than ``limit`` seconds."""
        end = time.monotonic() + limit
        next_kill = time.monotonic() + self._chance.uniform(5, 20)
        while time.monotonic() < end:
            time.sleep(0.1)
            if self._driver.poll() is not None:
                if self._over():
                    return True
                self._driver = self._start()
            if time.monotonic() > next_kill and self.kills.total() < kills:
                self._kill()
                next_kill = time.monotonic() + self._chance.uniform(2, 20)
        os.killpg(self._driver.pid, signal.SIGKILL)
        return False

    def _over(self) -> bool:
        """Whether every trial that was to be made has ended."""
        sweep = recorded(self.paths)
        ended = [t for t in sweep.trials.values() if t.state is TrialState.FINISHED] if sweep else []
        return len(ended) == self._trials

    def _kill(self) -> None:
        """SIGKILL to the driver, or to the trainer or the runner of a pack that lives; or SIGTERM to the trainer."""
        victims = [("driver", self._driver.pid, signal.SIGKILL)]
        for folder in self.paths.packs.glob("[0-9]*"):
            records = read_records(AttemptPaths(folder), "")
            named = (
                ("pack", records.started, signal.SIGKILL),
                ("pack, asked to end", records.started, signal.SIGTERM),
                ("pack's runner", records.claim, signal.SIGKILL),
            )
            victims += [(name, record.pid, number) for name, record, number in named if record and alive(record)]
        name, pid, number = self._chance.choice(victims)
        os.kill(pid, number)
        self.kills[name] += 1
        print(f"killed the {name}", flush=True)


def recorded(paths: SweepPaths) -> Sweep | None:
    """What the database says, None before there is one."""
    if not paths.database.exists():
        return None
    store = Store(sqlite_url(paths.database), read_only=True)
    names = store.names()
    return store.load(names[0]) if names else None


def problems(sweep: Sweep, paths: SweepPaths) -> list[str]:
    """What is not as it should be, a sentence each."""
    found = []
    for number, trial in sweep.trials.items():
        attempts = sweep.attempts_of(number)
        if trial.state is not TrialState.FINISHED:
            found.append(f"trial {number} is {trial.state}")
        whole = [a.number for a in attempts if "run_stop" in _text(paths.attempt(number, a.number).log)]
        if len(whole) != 1 or whole[0] != len(attempts) - 1:
            found.append(f"trial {number}: of {len(attempts)} attempts {whole} came to their end")
        for attempt in attempts:
            starts = _text(paths.attempt(number, attempt.number).log).count('"run_start"')
            if starts > 1:
                found.append(f"trial {number}, attempt {attempt.number} was run {starts} times")
            if attempt.number < len(attempts) - 1 and not attempt.failure:
                found.append(f"trial {number}, attempt {attempt.number} was given up without a reason")
    return found


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="default %(default)s")
    parser.add_argument("--trials", type=int, default=64, help="default %(default)s")
    parser.add_argument("--slots", type=int, default=8, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="of a trial (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=3600, help="seconds (default %(default)s)")
    options = parser.parse_args()
    study = STUDY.format(slots=options.slots, steps=options.steps, trials=options.trials)
    with tempfile.TemporaryDirectory() as root:
        run = Run(Path(root), study, options.trials, options.seed)
        over = run.drive(options.kills, options.limit)
        sweep = recorded(run.paths)
        assert sweep is not None
        found = problems(sweep, run.paths) + ([] if over else ["the sweep did not end in time"])
        ends = Counter(a.failure or "came to its end" for a in sweep.attempts.values())
        print(json.dumps({"kills": run.kills, "trials": len(sweep.trials), "attempts": ends, "problems": found}))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
