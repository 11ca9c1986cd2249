"""Everything that happens to sweeps, as faults on a running one: each a function of (room, chance), drawn by a seed.

A fault returns a word on what it hit, "" when there was nothing to hit just then.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.common import fill_for_a_moment
from tests.chaos.room import Room
from tests.cluster import wait_until

Fault = Callable[[Room, random.Random], str]


def kill_driver(room: Room, chance: random.Random) -> str:
    """SIGKILL; another driver starts at once, as under a service manager."""
    pid = room.driver.pid
    room.driver.kill()
    room.driver.wait()
    time.sleep(chance.uniform(0, 1))
    room.start()
    return f"pid {pid}"


def kill_job(room: Room, chance: random.Random) -> str:
    """SIGKILL to one process of a running job: its batch shell, an srun, or the training."""
    found = sorted(room.job_processes())
    if not found:
        return ""
    pid = chance.choice(found)
    name = Path(f"/proc/{pid}/comm")
    with contextlib.suppress(OSError):
        what = f"{name.read_text().strip()} {pid}"
        os.kill(pid, signal.SIGKILL)
        return what
    return ""


def restart_slurmd(room: Room, chance: random.Random) -> str:
    """A node's daemon dies; its jobs live on, and it comes back before the controller gives the node up."""
    node = chance.choice(room.cluster.nodes)
    room.cluster.kill_slurmd(node)
    time.sleep(chance.uniform(0.1, 3))
    room.cluster.start_slurmd(node)
    return node


def lose_node(room: Room, chance: random.Random) -> str:
    """A power cut: everything on the node is gone. It comes back soon after."""
    node = chance.choice(room.cluster.nodes)
    room.cluster.kill_node(node)
    time.sleep(chance.uniform(0.1, 2))
    room.cluster.start_slurmd(node)

    def back() -> bool:
        # Refused while the node's daemon has not reported yet, and when it is up by itself.
        room.cluster.succeeds("scontrol", "update", f"NodeName={node}", "State=RESUME")
        return not room.cluster.run("sinfo", "-h", "-n", node, "-o", "%t").startswith(("down", "drain"))

    wait_until(back, 30, f"{node} is back")
    return node


def restart_controller(room: Room, chance: random.Random) -> str:
    room.cluster.stop_controller()
    time.sleep(chance.uniform(0.1, 3))
    room.cluster.start_controller()
    return "slurmctld"


def restart_database(room: Room, chance: random.Random) -> str:
    """PostgreSQL ends, in order or as in a crash, and is back soon; a SQLite sweep has no such fault."""
    if room.postgres is None:
        return ""
    how = chance.choice((signal.SIGINT, signal.SIGQUIT))
    room.postgres.stop(how)
    time.sleep(chance.uniform(0.1, 3))
    room.postgres.start()
    return how.name


def truncate_log(room: Room, chance: random.Random) -> str:
    log = room.live_log(chance)
    if log is None:
        return ""
    size = log.stat().st_size
    at = chance.choice((0, chance.randrange(size + 1)))
    os.truncate(log, at)
    return f"{log.parent.parent.name} {size} -> {at}"


def write_half_a_line(room: Room, chance: random.Random) -> str:
    """A rank dies in the middle of a line, and the next line is glued to it."""
    log = room.live_log(chance)
    line = log and room.a_line(log, chance)
    if not log or not line:
        return ""
    with log.open("ab") as file:
        file.write(line[: chance.randrange(1, len(line))])
    return log.parent.parent.name


def repeat_lines(room: Room, chance: random.Random) -> str:
    """Several ranks print the same; late lines of an old moment follow new ones."""
    log = room.live_log(chance)
    if log is None:
        return ""
    lines = log.read_bytes().splitlines(keepends=True)
    if not lines:  # it was emptied a moment ago
        return ""
    chosen = [line for line in chance.choices(lines, k=chance.randrange(1, 12)) if line.endswith(b"\n")]
    with log.open("ab") as file:
        file.write(b"".join(chosen))
    return f"{log.parent.parent.name}, {len(chosen)} lines"


def reorder_lines(room: Room, chance: random.Random) -> str:
    """The last lines of a log change places where they lie, as buffers of several ranks do."""
    log = room.live_log(chance)
    if log is None:
        return ""
    text = log.read_bytes()
    end = text.rfind(b"\n") + 1
    lines = text[:end].splitlines(keepends=True)[-chance.randrange(2, 8) :]
    begin = end - sum(map(len, lines))
    chance.shuffle(lines)
    with log.open("r+b") as file:
        os.pwrite(file.fileno(), b"".join(lines), begin)
    return f"{log.parent.parent.name}, {len(lines)} lines"


def fill_disk(room: Room, chance: random.Random) -> str:
    """The file system with the database and the driver's log is full for a moment."""
    if not room.small:
        return ""
    return fill_for_a_moment(room.paths.root / "filler", chance)


def step_clock(room: Room, chance: random.Random) -> str:
    """The driver's wall clock jumps, back or ahead, as a time service makes it."""
    seconds = chance.choice((-3600, -60, -5, 5, 60, 3600))
    room.step_clock(seconds)
    return f"{seconds:+d} s"


def rename_job(room: Room, chance: random.Random) -> str:
    """A site, or a person, gives a job another name, and now and then a comment of its own as well."""
    if not (job := room.a_job(chance, "RUNNING", "PENDING")):
        return ""
    comment = ("Comment=team-7",) if chance.random() < 0.5 else ()
    return job if room.rename(job, *comment) else ""


def comment_job(room: Room, chance: random.Random) -> str:
    """Somebody writes a comment on a job, over the token that was there, or takes it away."""
    job = room.a_job(chance, "RUNNING", "PENDING")
    text = chance.choice(("billing=x", "", "operator: seen"))
    return job if job and room.cluster.succeeds("scontrol", "update", f"JobId={job}", f"Comment={text}") else ""


def suspend_job(room: Room, chance: random.Random) -> str:
    """An administrator suspends a running job, and lets it go on."""
    job = room.a_job(chance, "RUNNING")
    if not job or not room.cluster.succeeds("scontrol", "suspend", job):
        return ""
    time.sleep(chance.uniform(0.2, 4))
    wait_until(
        lambda: room.cluster.succeeds("scontrol", "resume", job) or room.cluster.job_state(job) != "SUSPENDED",
        30,
        f"job {job} goes on",
    )
    return job


FAULTS: dict[str, Fault] = {
    f.__name__: f
    for f in (
        kill_driver, kill_job, restart_slurmd, lose_node, restart_controller, restart_database, truncate_log,
        write_half_a_line, repeat_lines, reorder_lines, fill_disk, step_clock, rename_job, comment_job, suspend_job,
    )
}  # fmt: skip
