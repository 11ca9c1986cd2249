"""What happens to sweeps of one machine, as faults on a running one: each a function of (room, chance).

A fault returns a word on what it hit, "" when there was nothing to hit just then.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.common import fill_for_a_moment
from tests.chaos.local_room import HERE, LocalRoom

Fault = Callable[[LocalRoom, random.Random], str]

SWEEP_FILES = ("driver.log", "driver.lock", "sweep.json", "saved.json", "study.toml", "unsaved.jsonl")
JOB_FILES = ("claim.json", "started.json", "ended.json", "command.json", "cgroup", "job.log.arrivals")


def kill_driver(room: LocalRoom, chance: random.Random) -> str:
    """SIGKILL; another driver starts soon."""
    pid = room.driver.pid
    room.kill_driver()
    time.sleep(chance.uniform(0, 1))
    room.start()
    return f"pid {pid}"


def freeze_driver(room: LocalRoom, chance: random.Random) -> str:
    """The driver stands still and reads no log, as on a laptop that sleeps or a machine that swaps."""
    seconds = chance.uniform(2, 8)
    room.driver.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    room.driver.send_signal(signal.SIGCONT)
    return f"{seconds:.1f} s"


def kill_job(room: LocalRoom, chance: random.Random) -> str:
    """SIGKILL to a trial's program, or to the process that runs it."""
    found = sorted(room.processes() + room.runners())
    if not found:
        return ""
    pid = chance.choice(found)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return f"pid {pid}"


def step_trial_clock(room: LocalRoom, chance: random.Random) -> str:
    """The wall clock that trials read is set, and set right again while they run."""
    seconds = chance.choice((-7200, -60, -1, 1, 60, 7200))
    room.step_clock(seconds)
    time.sleep(chance.uniform(0.2, 2))
    if chance.random() < 0.7:
        room.set_clock_right()
    return f"{seconds:+d} s"


def delete_file(room: LocalRoom, chance: random.Random) -> str:
    path = _file(room, chance)
    if path is None:
        return ""
    path.unlink(missing_ok=True)
    return _name(room, path)


def tear_file(room: LocalRoom, chance: random.Random) -> str:
    """A small file as a power cut on a careless file system leaves it: cut, empty, zeros, or something else."""
    path = _file(room, chance)
    if path is None:
        return ""
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        cut = content[: chance.randrange(len(content) + 1)]
        path.write_bytes(chance.choice((cut, b"", b"\0" * len(content), chance.randbytes(40), b"[]", b'{"at": "x"}')))
        return _name(room, path)
    return ""


def swap_files(room: LocalRoom, chance: random.Random) -> str:
    """Two attempts' files of one kind change places, as a careless copy of folders leaves them."""
    name = chance.choice(JOB_FILES)
    found = [a.folder / name for a in room.attempts() if (a.folder / name).is_file()]
    if len(found) < 2:
        return ""
    one, other = chance.sample(found[-4:], 2)
    with contextlib.suppress(OSError):
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
        return f"{_name(room, one)} {_name(room, other)}"
    return ""


def delete_log(room: LocalRoom, chance: random.Random) -> str:
    attempt = room.live(chance)
    if attempt is None or not attempt.log.exists():
        return ""
    attempt.log.unlink(missing_ok=True)
    return _name(room, attempt.log)


def swap_log(room: LocalRoom, chance: random.Random) -> str:
    """A running trial's log is overwritten with another's, which is of the same form."""
    attempt = room.live(chance)
    others = [a.log for a in room.attempts() if attempt and a != attempt and a.log.exists()]
    if attempt is None or not others:
        return ""
    other = chance.choice(others)
    attempt.log.write_bytes(other.read_bytes())
    return f"{_name(room, attempt.log)} <- {_name(room, other)}"


def delete_database(room: LocalRoom, chance: random.Random) -> str:
    """All of it, or only its log of writes.

    Where that was after its driver's last look, and it has ended well, somebody puts back what was deleted.
    """
    if not _driven(room):
        return ""
    files = room.database_files()
    chosen = files if chance.random() < 0.7 else [p for p in files if p.name.endswith("-wal")]
    trash = room.paths.root.parent / "deleted"
    shutil.rmtree(trash, ignore_errors=True)
    trash.mkdir()
    for path in chosen:
        with contextlib.suppress(FileNotFoundError):
            path.rename(trash / path.name)
    _let_it_be_kept(room)
    if room.finished():
        for path in trash.iterdir():
            path.rename(room.paths.database.with_name(path.name))
        return "put back: " + ", ".join(path.name for path in chosen)
    return ", ".join(path.name for path in chosen)


def swap_database(room: LocalRoom, chance: random.Random) -> str:
    """A copy takes its place: another file with the same contents, or the contents of some seconds ago."""
    backup = _backup(room)
    if backup is None:
        return ""
    time.sleep(chance.choice((0.0, chance.uniform(0.5, 2))))
    if room.driver.poll() is not None or not room.paths.database.exists():
        return ""
    for path in room.database_files():
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the disk is full
        shutil.move(backup, room.paths.database)
        os.sync()
    _let_it_be_kept(room)
    return "a copy"


def set_back_database(room: LocalRoom, chance: random.Random) -> str:
    """A backup of some seconds ago is restored into the file that the driver has open.

    Where that was after its last look, and it has ended well, somebody puts back what the sweep's end was. A backup
    from after its last write took nothing from it: what it has written since stays.
    """
    backup = _backup(room)
    if backup is None:
        return ""
    time.sleep(chance.uniform(1, 3))
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(backup)) as old:
        if room.driver.poll() is None and room.paths.database.exists():
            newer = backup.with_name("newer.db")
            with (
                contextlib.closing(sqlite3.connect(room.paths.database)) as now,
                contextlib.closing(sqlite3.connect(newer)) as copy,
            ):
                now.backup(copy)
                old.backup(now)
                _let_it_be_kept(room)
                if room.finished() and _saves(now) < _saves(copy):
                    copy.backup(now)
                    return "restored and put back"
            return "restored"
    return ""


def _saves(database: sqlite3.Connection) -> int:
    """How often a database was written to by drivers."""
    (count,) = database.execute("SELECT max(saves) FROM lora_tune_lease").fetchone()
    return int(count or 0)


def second_driver(room: LocalRoom, chance: random.Random) -> str:
    """Another driver for the same folder: with the same database or its own, on this host or as if on another.

    In a folder that is nobody's yet, one with its own database would begin a sweep of its own, and rightly.
    """
    own = chance.random() < 0.5 and room.paths.identity.exists()
    further = ("--storage", f"sqlite:///{room.paths.root.parent / 'other.db'}") if own else ()
    abroad = chance.random() < 0.5
    command = room.command(*further)
    if abroad:
        command = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh", *command]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=120)
    alone = room.driver.poll() is not None  # then the second one did the first one's work, which is as well
    assert done.returncode == 3 or alone, f"two drivers in one folder: exit {done.returncode}\n{done.stderr[-1500:]}"
    return ("own database" if own else "same database") + (", another host" if abroad else "")


def fill_disk(room: LocalRoom, chance: random.Random) -> str:
    """The disk with everything on it is full for a moment."""
    return fill_for_a_moment(_filler(room), chance)


def cut_power(room: LocalRoom, chance: random.Random) -> str:
    """The machine loses its power and starts again: every process is gone, and every write that was not synced."""
    room.kill_driver()
    for pid in (*room.runners(), *room.processes()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    room.disk.cut_power()
    _filler(room).unlink(missing_ok=True)  # that it was removed may not have been on the disk
    room.start()
    return json.dumps(sorted(path.name for path in room.paths.root.iterdir())) if room.paths.root.exists() else "all"


def _driven(room: LocalRoom) -> bool:
    """Whether a driver has the sweep in its memory, which shows in its ticks; without one, what is deleted is lost."""
    counts: list[int] = []
    for _ in range(2):
        with contextlib.suppress(sqlite3.Error):
            address = f"file:{room.paths.database}?mode=ro"
            with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
                found = database.execute("SELECT saves FROM lora_tune_lease WHERE name = ?", (room.name,))
                counts += [saves for (saves,) in found]
        time.sleep(1.5)
    return room.driver.poll() is None and len(counts) == 2 and counts[1] - counts[0] >= 3


def _let_it_be_kept(room: LocalRoom) -> None:
    """Wait until the driver has kept what it knows: whoever kills it before has taken the only copy from it."""
    began = time.time()
    while time.time() - began < 20 and room.driver.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if room.paths.rescued.stat().st_mtime >= began - 1:
                return
        time.sleep(0.1)


def _file(room: LocalRoom, chance: random.Random) -> Path | None:
    """Some small file of the sweep, or of an attempt that changed lately."""
    found = [room.paths.root / name for name in SWEEP_FILES]
    for attempt in room.attempts()[-4:]:
        found += [attempt.folder / name for name in JOB_FILES]
    there = [path for path in found if path.is_file()]
    return chance.choice(there) if there else None


def _filler(room: LocalRoom) -> Path:
    return room.paths.root.parent / "filler"


def _backup(room: LocalRoom) -> Path | None:
    if not _driven(room):
        return None
    backup = room.study.with_name("backup.db")
    backup.unlink(missing_ok=True)
    with contextlib.suppress(sqlite3.Error):
        if room.paths.database.exists():
            with (
                contextlib.closing(sqlite3.connect(room.paths.database)) as now,
                contextlib.closing(sqlite3.connect(backup)) as copy,
            ):
                now.backup(copy)
            return backup
    return None


def _name(room: LocalRoom, path: Path) -> str:
    return str(path.relative_to(room.paths.root))


FAULTS: dict[str, Fault] = {
    f.__name__: f
    for f in (
        kill_driver, freeze_driver, kill_job, step_trial_clock, delete_file, tear_file, swap_files, delete_log,
        swap_log, delete_database, swap_database, set_back_database, second_driver, fill_disk, cut_power,
    )
}  # fmt: skip
