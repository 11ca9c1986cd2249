"""A simulated cluster that only writes logs, for ``benchmarks.scale``: Slurm's answers, and the jobs' files.

``commands`` makes the programs; ``python -m benchmarks.scale_cluster FOLDER`` is the cluster, in a separate process: it
starts submitted jobs at once, appends MLLOG lines to each job's log at the pace of eight H100, and writes the output of
squeue.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lora_tune.curves.comparison import IN_A_ROW
from lora_tune.launchers.slurm.parse import _SQUEUE

EVAL_SECONDS, TRAIN_SECONDS, RUN_SECONDS = 210.0, 36.0, 1800.0
DIVERGED = 0.1
"""Share of evals that are NaN; the sweep stops their jobs."""
SHOWN_SECONDS = 300.0
"""Seconds for which ended jobs stay in squeue (MinJobAge)."""
LOOK_SECONDS = 0.05

_PROGRAMS = {
    "sinfo": 'case "$*" in *--Node*) seq -f "n%04g|idle||gpu*" {nodes};; *) echo "gpu*";; esac',
    "sbatch": """id=$(date +%s%N); id=${{id#???}}; for word; do printf '%s\\0' "$word"; done > {folder}/new/.$id
mv {folder}/new/.$id {folder}/new/$id; echo Submitted batch job $id""",
    "squeue": "cat {folder}/squeue",
    "scancel": "for id; do :; done; echo $id $(date +%s.%N) >> {folder}/cancelled",
    "scontrol": "echo ExitCode=0:0 DerivedExitCode=0:0",
    "srun": "exit 1",
    "sacct": "exit 1",
}


def commands(folder: Path, nodes: int) -> dict[str, str]:
    """Make the programs under ``folder``; return the environment with them first on PATH."""
    (folder / "new").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "squeue").write_text("")
    for name, text in _PROGRAMS.items():
        program = folder / "bin" / name
        program.write_text("#!/bin/sh\n" + text.format(folder=folder, nodes=nodes) + "\n")
        program.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


class Job:
    """One job: its row in squeue, and its future lines."""

    def __init__(self, identity: str, arguments: list[str], node: str, chance: random.Random, *, first: bool) -> None:
        options = dict(a[2:].split("=", 1) for a in arguments if a.startswith("--") and "=" in a)
        self.identity, self.name, self.comment = identity, options["job-name"], options["comment"]
        self.log, self.node = Path(options["output"]), node
        self.started, self.ended, self.state = time.time(), 0.0, "RUNNING"
        command = json.loads((self.log.parent / "command.json").read_text())
        self.batch = int(command["environment"]["GBS"])
        # Jobs of the first fill start anywhere in their run, later ones at its beginning.
        self.lines = self._lines(chance, chance.uniform(0, RUN_SECONDS) if first else 0.0)

    def _lines(self, chance: random.Random, into: float) -> Iterator[tuple[float, str, int, bool]]:
        """(seconds after the start, line, samples of an eval or 0, diverged), by time."""
        yield 0.0, mllog("global_batch_size", self.batch), 0, False
        yield 0.0, mllog("run_start", None), 0, False
        samples, train, evals = into, chance.uniform(0, TRAIN_SECONDS), chance.uniform(0, EVAL_SECONDS)
        while min(train, evals) < RUN_SECONDS - into:
            if train < evals:
                yield train, mllog("train_loss", 1.3, samples_count=int(samples + 2 * train), lr=4e-4), 0, False
                train += TRAIN_SECONDS
            else:
                diverged, at = chance.random() < DIVERGED, int(samples + 2 * evals)
                text = mllog("eval_accuracy", None if diverged else 0.99, samples_count=at)
                if diverged:  # one NaN may be a spike or a skipped step; several NaN train losses in a row are final
                    for back in reversed(range(IN_A_ROW)):
                        text += mllog("train_loss", None, samples_count=at - back, lr=4e-4)
                yield evals, text, at, diverged
                evals += EVAL_SECONDS

    def row(self) -> str:
        values = {
            "JobID": self.identity, "Name": self.name, "State": self.state, "RestartCnt": "0", "exit_code": "0",
            "SubmitTime": f"{self.started:.0f}", "StartTime": f"{self.started:.0f}",
            "EndTime": f"{self.ended:.0f}" if self.ended else "N/A", "NodeList": self.node, "Comment": self.comment,
            "STDOUT": "", "Reason": "None",
        }  # fmt: skip
        return "".join(values[name].ljust(width) for name, width in _SQUEUE.items())


def mllog(key: str, value: object, **metadata: object) -> str:
    """One line; None as a loss means NaN."""
    shown = "NaN" if key in ("eval_accuracy", "train_loss") and value is None else json.dumps(value)
    more = json.dumps({"file": "train.py", "lineno": 1, **metadata})
    kind = "POINT_IN_TIME"
    return (
        f':::MLLOG {{"namespace": "", "time_ms": {int(time.time() * 1000)}, "event_type": "{kind}", "key": "{key}", '
        f'"value": {shown}, "metadata": {more}}}\n'
    )


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder, self.chance = folder, random.Random(7)
        self.nodes = len(os.popen(f"{folder}/bin/sinfo --Node").read().split())
        self.jobs: dict[str, Job] = {}
        self.due: list[tuple[float, str]] = []
        self.next: dict[str, tuple[float, str, int, bool]] = {}
        self.cancelled = 0

    def turn(self) -> None:
        self._submitted()
        self._cancelled()
        now = time.time()
        with (self.folder / "written.jsonl").open("a") as written:
            while self.due and self.due[0][0] <= now:
                self._write(heapq.heappop(self.due)[1], written)

    def _submitted(self) -> None:
        for file in sorted(f for f in (self.folder / "new").iterdir() if not f.name.startswith(".")):
            first = len(self.jobs) < self.nodes
            words = file.read_text().split("\0")
            job = Job(file.name, words, f"n{1 + len(self.jobs) % self.nodes:04d}", self.chance, first=first)
            file.unlink()
            self.jobs[job.identity] = job
            self._plan(job)

    def _cancelled(self) -> None:
        file = self.folder / "cancelled"
        lines = file.read_text().splitlines() if file.exists() else []
        for line in lines[self.cancelled :]:
            job = self.jobs[line.split()[0]]
            if not job.ended:
                job.ended, job.state = time.time(), "CANCELLED"
        self.cancelled = len(lines)

    def _plan(self, job: Job) -> None:
        following = next(job.lines, None)
        if following is None:
            job.ended, job.state = time.time(), "COMPLETED"
            return
        self.next[job.identity] = following
        heapq.heappush(self.due, (job.started + following[0], job.identity))

    def _write(self, identity: str, written: object) -> None:
        job = self.jobs[identity]
        if job.ended:
            return
        _, text, samples, diverged = self.next.pop(identity)
        with job.log.open("a") as log:
            log.write(text)
        if samples:
            fact = {"job": job.name, "id": identity, "samples": samples, "at": time.time(), "diverged": diverged}
            print(json.dumps(fact), file=written, flush=True)  # type: ignore[call-overload]
        self._plan(job)

    def show(self) -> None:
        """Write the output of squeue atomically."""
        now = time.time()
        shown = [j.row() for j in self.jobs.values() if not j.ended or now - j.ended < SHOWN_SECONDS]
        new = self.folder / "squeue.new"
        new.write_text("\n".join(shown) + "\n")
        new.replace(self.folder / "squeue")


def main(folder: Path) -> None:
    cluster = Cluster(folder)
    shown = 0.0
    while True:
        cluster.turn()
        if time.time() - shown > 0.5:
            cluster.show()
            shown = time.time()
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
