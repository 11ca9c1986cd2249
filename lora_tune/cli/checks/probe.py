"""One short job that looks at a node from within: what the login node cannot know."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_tune.base.errors import Finding, good, problem, warning
from lora_tune.config.tables import Site
from lora_tune.launchers.base import Launcher, Ticket
from lora_tune.workloads.base import Job, Resources

JOB_MINUTES = 5.0
_MARK = "doctor:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A command for the node, and what its failure means."""

    name: str
    command: str
    what: str
    why: str
    fix: str
    needed: bool = True


def questions(site: Site, places: Mapping[str, str], folder: Path, sudo: Sequence[str]) -> list[Question]:
    """What to ask a node. folder: the sweep's, which the node must see. sudo: programs that run.sub calls with it."""
    return [*_of_the_cluster(site, folder), *_of_places(places), *map(_of_sudo, sudo)]


def _of_the_cluster(site: Site, folder: Path) -> Iterator[Question]:
    tasks = max(1, site.gpus_per_node)
    yield Question(
        name="shared",
        command=f"touch {shlex.quote(str(folder / 'doctor' / 'seen'))}",
        what=f"the node sees and writes {folder}",
        why="a trial's config and log lie there; the driver reads the log from here",
        fix="--output on a file system that all nodes mount, and site.log_folder as well",
    )
    yield Question(
        name="mpi",
        command=f"srun --ntasks={site.nodes * tasks} --ntasks-per-node={tasks} true",
        what=f"{site.gpus_per_node} tasks a node start with MPI type {site.mpi or 'as Slurm has it'}",
        why="this is how the training's ranks are started",
        fix="srun --mpi=list; then site.mpi, and site.cpu_bind = 'none' where binding is refused",
    )
    if site.gpus_per_node:
        counted = 'srun --ntasks=1 bash -c \'tr , "\\n" <<<"$CUDA_VISIBLE_DEVICES" | grep -c .\''
        yield Question(
            name="gpus",
            command=f'test "$({counted})" = {site.gpus_per_node}',
            what=f"a step sees {site.gpus_per_node} GPUs",
            why="ranks without a GPU end at once, on some clusters with spank's Assertion (arg) failed",
            fix=f"site.gres = 'gpu:{site.gpus_per_node}'",
        )


def _of_places(places: Mapping[str, str]) -> Iterator[Question]:
    for name, value in places.items():
        if value.startswith("/"):
            yield Question(
                name=name,
                command=f"test -r {shlex.quote(value)}",
                what=f"the node reads {name}={value}",
                why="the trial runs there, not here",
                fix="use a path on a file system that all nodes mount",
            )
    if "CONT" in places:
        yield Question(
            name="enroot",
            command="command -v enroot",
            what="the node has enroot",
            why="Pyxis starts containers with it, and run.sub cleans up with `enroot list`",
            fix="ask the administrator to install enroot on the nodes",
        )


def _of_sudo(program: str) -> Question:
    return Question(
        name=f"sudo {program}",
        command=f"sudo -n -l {shlex.quote(program)}",
        what=f"sudo {program} needs no password",
        why="run.sub calls it, and set -e ends the job when it fails",
        fix="CLEAR_CACHES = 0 and VBOOST_VALUE = 0 in [space], or ask the administrator for a sudoers line",
        needed=False,
    )


def script(questions: list[Question]) -> str:
    """The batch script: each question once, its answer on a line of its own."""
    lines = ["#!/bin/bash"]
    for number, question in enumerate(questions):
        lines.append(
            f'if ( {question.command} ) >&2; then echo "{_MARK} {number} yes"; else echo "{_MARK} {number} no"; fi'
        )
    return "\n".join(lines) + "\n"


def answers(questions: list[Question], log: str) -> Iterator[Finding]:
    """The findings in the job's log; a question without an answer is a problem too."""
    printed = {parts[1]: parts[2] for line in log.splitlines() if len(parts := line.split()) == 3 and parts[0] == _MARK}
    for number, question in enumerate(questions):
        answer = printed.get(str(number))
        if answer == "yes":
            yield good(f"on a node: {question.what}")
            continue
        what = f"not true on a node: {question.what}" if answer else f"on a node, no answer: {question.what}"
        make = problem if question.needed else warning
        yield make(what, question.why, question.fix)


def probe(
    launcher: Launcher, site: Site, questions: list[Question], folder: Path, limit: float, say: Callable[[str], None]
) -> Iterator[Finding]:
    """Submit the job, wait at most ``limit`` seconds for its end, and read its answers."""
    place = folder / "doctor" / time.strftime("%Y%m%d-%H%M%S")
    place.mkdir(parents=True)
    (place / "probe.sh").write_text(script(questions), encoding="utf-8")
    job = Job(
        name=f"doctor-{place.name}",
        folder=place,
        argv=("probe.sh",),
        cwd=place,
        log=place / "job.log",
        resources=Resources(nodes=site.nodes, gpus_per_node=site.gpus_per_node, minutes=JOB_MINUTES),
        script=True,
    )
    ticket = Ticket(name=job.name, folder=place, job_id=launcher.submit(job), submitted_at=time.time())
    say(f"probe: job {ticket.job_id} submitted, waiting for it at most {limit / 60:g} min")
    deadline = time.monotonic() + limit
    status = launcher.poll([ticket])[ticket.name]
    while status.state.alive and time.monotonic() < deadline:
        time.sleep(0.5)
        status = launcher.poll([ticket])[ticket.name]
    if status.state.alive:
        launcher.cancel(ticket)
        yield problem(
            f"the probe is still {status.state}: {status.reason}",
            "trials would wait just as long",
            f"squeue --start; sinfo; or wait longer: --probe-minutes {2 * limit / 60:g}",
        )
        return
    yield from answers(questions, job.log.read_text(errors="replace") if job.log.exists() else "")
