"""Kill packs, drivers and nodes at random: ``python -m benchmarks.packed_faults [--slurm] [--kills N]``.

Sweeps the shipped tiny task in packs, or another base on its data (``--base``, and ``--gpus 1`` for GPUs), on this
machine or (``--slurm``) on the tests' Slurm cluster. At random moments it kills (SIGKILL) the pack or the driver, asks
the pack to end (SIGTERM), or cuts a node's power (Slurm); a driver that was killed, or ended, is restarted with the
same command. At the end every trial must be finished with a verdict, with one attempt that ended and every other one
recorded as interrupted; and no attempt may have been run by two processes. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
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
from lora_tune.launchers.job_records import read_records
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StudyRecords, TrialState
from lora_tune_recipes.settings import TINY
from tests.cluster import Cluster, wait_until

STUDY = """
[workload]
kind = "peft"
[site]
slots = {slots}
packs = {packs}
launcher = "{launcher}"
system = "TINY"
gpus_per_node = {gpus}
model = "{base}"
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
parallel = {parallel}
attempts = 99
"""


Victim = tuple[str, int, int]
"""Kind, process id, and the signal to send."""


class Run:
    """One sweep, its driver, and what has been killed. cluster: where it runs, None on this machine."""

    def __init__(self, root: Path, study: str, trials: int, seed: int, cluster: Cluster | None) -> None:
        self._trials, self._cluster = trials, cluster
        self._chance = random.Random(seed)
        self.paths = SweepPaths(root / "sweep")
        self._file = root / "faults.toml"
        self._file.write_text(study)
        self.kills: Counter[str] = Counter()
        self._driver = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(self._file), "--output"]
        environment = {**os.environ, **(self._cluster.environment if self._cluster else {})}
        with (self.paths.root.parent / "driver.txt").open("ab") as output:
            return subprocess.Popen(
                [*command, str(self.paths.root)], env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def drive(self, kills: int, limit: float, pause: tuple[float, float]) -> bool:
        """Run until the sweep is over; False after ``limit`` seconds. pause: range of seconds between two faults."""
        end = time.monotonic() + limit
        next_kill = time.monotonic() + self._chance.uniform(*pause)
        while time.monotonic() < end:
            time.sleep(0.1)
            if self._driver.poll() is not None:
                if self._over():
                    return True
                self._driver = self._start()
            if time.monotonic() > next_kill and self.kills.total() < kills:
                self._kill()
                next_kill = time.monotonic() + self._chance.uniform(*pause)
        os.killpg(self._driver.pid, signal.SIGKILL)
        return False

    def _over(self) -> bool:
        """Whether all planned trials have ended."""
        sweep = recorded(self.paths)
        ended = [t for t in sweep.trials.values() if t.state is TrialState.FINISHED] if sweep else []
        return len(ended) == self._trials

    def _kill(self) -> None:
        """Kill the driver, a living pack, or its node."""
        packs = self._packs() if self._cluster else self._packs() + self._runners()
        kinds = {"driver": [("driver", self._driver.pid, signal.SIGKILL)], "pack": packs}
        if self._cluster and packs:
            kinds["node"] = []
        kind = self._chance.choice([name for name, victims in kinds.items() if victims or name == "node"])
        if kind == "node":
            name = self._lose_node()
        else:
            name, pid, number = self._chance.choice(kinds[kind])
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)
        self.kills[name] += 1
        print(f"killed the {name}", flush=True)

    def _runners(self) -> list[Victim]:
        """Processes that wait for the living packs on this machine, by their records."""
        claims = [read_records(AttemptPaths(folder), "").claim for folder in self.paths.packs.glob("[0-9]*")]
        return [("pack's runner", c.process.pid, signal.SIGKILL) for c in claims if c and c.process.alive]

    def _packs(self) -> list[Victim]:
        """The trainers in this sweep's jobs: every node of the test cluster is this machine."""
        folder, victims = str(self.paths.packs).encode(), []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                if words[1:3] == [b"-m", b"lora_tune_recipes.packed_lora"] and words[3].startswith(folder):
                    victims.append(("pack", int(entry.name), signal.SIGKILL))
                    victims.append(("pack, asked to end", int(entry.name), signal.SIGTERM))
        return victims

    def _lose_node(self) -> str:
        """Cut the power of a node with a running pack; it returns soon after."""
        assert self._cluster is not None
        cluster = self._cluster
        busy = cluster.run("squeue", "-h", "-t", "running", "-o", "%N").split()
        node = self._chance.choice(busy or list(cluster.nodes))
        cluster.kill_node(node)
        time.sleep(self._chance.uniform(0.1, 2))
        cluster.start_slurmd(node)

        def back() -> bool:
            # Fails before the node's daemon has registered, and if the node is already up.
            cluster.succeeds("scontrol", "update", f"NodeName={node}", "State=RESUME")
            return not cluster.run("sinfo", "-h", "-n", node, "-o", "%t").startswith(("down", "drain"))

        wait_until(back, 60, f"{node} is back")
        return "node" if busy else "idle node"


def recorded(paths: SweepPaths) -> StudyRecords | None:
    """The records in the database; None if there is none yet."""
    if not paths.database.exists():
        return None
    store = Store(sqlite_url(paths.database), read_only=True)
    names = store.names()
    return store.load(names[0]) if names else None


def problems(sweep: StudyRecords, paths: SweepPaths) -> list[str]:
    """The problems found, one sentence each."""
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
    parser.add_argument("--packs", type=int, default=1, help="in one job (default %(default)s)")
    parser.add_argument("--gpus", type=int, default=0, help="of a pack, on this machine (default %(default)s)")
    parser.add_argument("--base", type=Path, default=TINY, help="base of the trials (default: the shipped one)")
    parser.add_argument("--steps", type=int, default=60, help="of a trial (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slurm", action="store_true", help="on the tests' Slurm cluster; needs root and Slurm")
    parser.add_argument(
        "--pause", type=float, default=20.0, help="seconds between two faults at most (default %(default)s)"
    )
    parser.add_argument("--limit", type=float, default=3600, help="seconds (default %(default)s)")
    options = parser.parse_args()
    launcher = "slurm" if options.slurm else "local"
    study = STUDY.format(
        slots=options.slots,
        packs=options.packs,
        parallel=options.slots * options.packs,
        steps=options.steps,
        trials=options.trials,
        launcher=launcher,
        gpus=options.gpus,
        base=options.base.resolve(),
    )
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(Path(root) / "cluster")) if options.slurm else None
        run = Run(Path(root), study, options.trials, options.seed, cluster)
        over = run.drive(options.kills, options.limit, (options.pause / 4, options.pause))
        sweep = recorded(run.paths)
        assert sweep is not None
        found = problems(sweep, run.paths) + ([] if over else ["the sweep did not end in time"])
        ends = Counter(a.failure or "came to its end" for a in sweep.attempts.values())
        print(json.dumps({"kills": run.kills, "trials": len(sweep.trials), "attempts": ends, "problems": found}))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
