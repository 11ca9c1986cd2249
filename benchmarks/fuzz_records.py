"""Fuzzing of small state files: ``python -m benchmarks.fuzz_records --inputs 1000000``.

Files between jobs, drivers and launchers (claim, started, ended, command, slurm, sweep.json, the folder's lock, the
preparation, the count of saves, arrival times, what a database could not take, a study's copy) are mutated on disk as
by power cuts, full disks and users: cut, emptied, filled with zeros, bytes flipped, values swapped, replaced by other
files. Each must be read or give an error message; for any other exception the input is printed in hexadecimal, and the
exit code is 1.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fuzz import STUDIES, damaged
from lora_tune.base.errors import LoraTuneError
from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import parse_study
from lora_tune.controller import runtime
from lora_tune.controller.sweep_folder import FolderLock, refuse_foreign
from lora_tune.launchers import local
from lora_tune.launchers.base import JobState, Ticket
from lora_tune.launchers.job_records import describe, read_records
from lora_tune.launchers.job_runner import command_record, read_command
from lora_tune.launchers.slurm import launcher as slurm
from lora_tune.logs import arrival
from lora_tune.store import SaveCount, outage, records
from lora_tune.store.records import Attempt, StudyRecords, Trial
from lora_tune.workloads.base import Job
from lora_tune_simulation import launcher
from lora_tune_simulation import launcher as simulated

TOKEN = "a" * 32
NOBODY = {**describe(2**22, TOKEN), "start_ticks": 1}
HOSTILE = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b'""',
    b"-1",
    b"1e999",
    b"NaN",
    b"true",
    b"9" * 40,
    b'"\\ud800"',
    b"[" * 50,
    b"\0" * 64,
)


class Room:
    """A valid sweep folder with one attempt; each check damages one file and calls its reader."""

    def __init__(self, folder: Path) -> None:
        self.paths = SweepPaths(folder)
        self.attempt = self.paths.attempt(0, 0)
        self.attempt.folder.mkdir(parents=True)
        self.paths.prepared.parent.mkdir()
        self.times = folder / ".job.log.times"
        self.simulated = self.attempt.folder / simulated.RECORD
        self.job = Job(name="s-0000-0", folder=self.attempt.folder, argv=("true",), log=self.attempt.log, token=TOKEN)
        self.ticket = Ticket(name=self.job.name, folder=self.attempt.folder, token=TOKEN, job_id="7")
        self.sweep = StudyRecords(name="s", digest="", study_toml="", began_at=0.0, id="b" * 32, folder=str(folder))
        self.whole = {path: text for path, (text, _) in self.targets().items()}
        for path, text in self.whole.items():
            path.write_bytes(text)

    def targets(self) -> dict[Path, tuple[bytes, Callable[[], None]]]:
        """File -> its valid contents, and the check that reads it."""
        ended = {"token": TOKEN, "exit_code": 0, "at": 1e9, "seconds": 3.5, "clock_steps": [0.2]}
        environment = {"CUDA_VISIBLE_DEVICES": "0,1", "LR": "4e-4"}
        prepared = {"key": "c" * 12, "attempt": 0, "state": "running", "job_id": "7"}
        lock = {"token": TOKEN, "about": "study s", "host": "n1", "pid": 7, "start": 1, "boot": "x"}
        trial, attempt = (
            Trial(number=0, seed=1, tuned={}, parameters={}),
            Attempt(trial=0, number=0, job_name="j", folder="f"),
        )
        unsaved = [{"token": 3, "trial": records.to_json(trial)}, {"token": 3, "attempt": records.to_json(attempt)}]
        virtual = {"name": "s", "folder": "f", "log": "l", "minutes": 1, "wanted": 1, "submitted_at": 1.0}
        study = next(file for file in sorted(STUDIES.glob("*.toml"))).read_bytes()
        return {
            self.attempt.claim: (_json(NOBODY), self.job_records),
            self.attempt.started: (_json(NOBODY), self.job_records),
            self.attempt.ended: (_json(ended), self.job_records),
            self.attempt.job: (_json(command_record(self.job, environment)), self.command),
            self.attempt.slurm: (_json({"token": TOKEN, "command": ["sbatch"]}), self.slurm),
            self.paths.identity: (_json({"sweep": "b" * 32, "study": "s", "database": "d"}), self.identity),
            self.paths.lock: (_json(lock), self.lock),
            self.paths.prepared: (_json(prepared), self.preparation),
            self.paths.saved: (_json({"sweep": "b" * 32, "saves": 5}), self.saves),
            self.paths.unsaved: (b"\n".join(map(_json, unsaved)) + b"\n", self.unsaved),
            self.paths.study: (study, self.study),
            self.times: (b"100 1700000000000\n200 1700000001000 e\n", self.arrivals),
            self.simulated: (_json({**virtual, "eligible_at": 2.0, "nodes": ["n1"]}), self.virtual_job),
        }

    def job_records(self) -> None:
        for token in (TOKEN, ""):
            found = read_records(self.attempt, token)
            assert found.started is None or not found.started.process.alive
            assert local._begun(self.ticket, found)["job_id"] == "7"
            if found.ended is not None:
                assert local._ended(self.ticket, found).state is JobState.ENDED
            whole = all(record is not None for record in (found.claim, found.started, found.ended))
            assert whole or found.problem

    def command(self) -> None:
        local._devices(read_command(self.attempt.job))

    def slurm(self) -> None:
        slurm._recorded_token.cache_clear()
        assert slurm._token(self.ticket) in ("", TOKEN)

    def identity(self) -> None:
        for known in (self.sweep, None):
            with contextlib.suppress(LoraTuneError):
                refuse_foreign(self.paths, known, "d")

    def lock(self) -> None:
        seen = FolderLock(self.paths.lock, "x")._look()
        assert seen is None or (seen.owner and not seen.process.gone) or seen.process.gone

    def preparation(self) -> None:
        record = runtime._record(self.paths, self.job)
        assert record["attempt"] >= 0
        assert record["state"] in ("running", "done", "failed")

    def saves(self) -> None:
        with contextlib.suppress(LoraTuneError):
            SaveCount(_Saved(), "s", self.paths.saved).refuse_older()  # type: ignore[arg-type]

    def unsaved(self) -> None:
        token, _, damaged_lines = outage.read(self.paths.unsaved)
        assert token >= 0 or damaged_lines >= 0

    def study(self) -> None:
        with contextlib.suppress(LoraTuneError):
            parse_study(self.paths.study.read_bytes().decode(errors="replace"), self.paths.study)

    def arrivals(self) -> None:
        ends = [row.end for row in arrival._read(self.times)]
        assert ends == sorted(set(ends))

    def virtual_job(self) -> None:
        launcher.record_of(simulated.read_json(self.simulated).content)


class _Saved:
    """A database with three saves."""

    url = "sqlite:////d"

    def saves(self, _name: str) -> tuple[str, int]:
        return "b" * 32, 3


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def mutate(chance: random.Random, whole: bytes, others: list[bytes]) -> bytes:
    """Damage a small file like a power cut, a full disk or a user."""
    kind = chance.random()
    if kind < 0.1:
        return whole[: chance.randrange(len(whole) + 1)]
    if kind < 0.15:
        return whole[: chance.randrange(len(whole) + 1)].ljust(len(whole), b"\0")
    if kind < 0.2:
        return chance.choice(HOSTILE)
    if kind < 0.25:
        return chance.choice(others)
    if kind < 0.6:
        with contextlib.suppress(ValueError):
            content = json.loads(whole)
            for name in chance.sample(sorted(content), chance.randrange(1, len(content) + 1)):
                content[name] = chance.choice(VALUES)
            return json.dumps(content).encode()
    return damaged(chance, bytearray(whole))


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**64, 10**400, 1e308, -1e308, float("nan"), float("inf"), "", "x", "\0", "7",
    "\ud800", [], [1], [None, "x", 1e400], {}, {"a": {"b": []}}, "a" * 5000, [[[[]]]], TOKEN,
)  # fmt: skip


def main() -> int:
    arguments = argparse.ArgumentParser(description="damaged small files through everything that reads them")
    arguments.add_argument("--inputs", type=int, default=100_000)
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    chance, done, start = random.Random(options.seed), Counter[str](), time.monotonic()
    memory = Path("/dev/shm")  # a file system in memory, if available
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        room = Room(Path(folder) / "sweep")
        targets = room.targets()
        files, texts = list(targets), list(room.whole.values())
        for number in range(options.inputs):
            path = chance.choice(files)
            text = mutate(chance, room.whole[path], texts)
            path.write_bytes(text)
            try:
                targets[path][1]()
            except Exception as error:  # noqa: BLE001 - any error is reported with its input
                print(f"input {number}, {path.name}: {type(error).__name__}: {error}\n{text[:2000].hex()}")
                return 1
            path.write_bytes(room.whole[path])
            done[path.name] += 1
    kinds = ", ".join(f"{count:,} {name}" for name, count in sorted(done.items()))
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(f"{sum(done.values()):,} inputs, seed {options.seed}, in {time.monotonic() - start:.0f} s: {kinds}")
    print("tracebacks 0")
    return 0


if __name__ == "__main__":
    sys.exit(main())
