"""``doctor``: check this machine, the cluster, the database and, with --probe, a node for what a study needs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from lora_tune import store as stores
from lora_tune.base.errors import (
    EXIT_SETUP,
    Finding,
    LauncherError,
    Level,
    LoraTuneError,
    SetupError,
    StoreError,
    StudyError,
    free_space,
    good,
    problem,
    warning,
)
from lora_tune.base.files import NETWORK, file_system, mountinfo
from lora_tune.base.paths import SweepPaths
from lora_tune.cli.options import sweep_paths
from lora_tune.config.study import Study, find_study, load_study
from lora_tune.config.tables import Site
from lora_tune.controller.runtime import option_refusals, preflight_warnings
from lora_tune.launchers.base import Launcher, Ticket, launcher_kind
from lora_tune.launchers.slurm import parse
from lora_tune.launchers.slurm.client import ask, cluster_of, inherited_variables
from lora_tune.launchers.slurm.launcher import COMMANDS, SlurmLauncher
from lora_tune.launchers.slurm.parse import NODES, WITHOUT_GRES, node_rows
from lora_tune.launchers.slurm.submission import as_submitted, question
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import PLACE_ALIASES, PYXIS, Job, Resources, Workload, places, some_proposal

SWEEP_GB = 1.0
"""Free disk space for a sweep's logs and database; a trial's log takes a few MB."""

_LABELS = {Level.GOOD: "ok", Level.WARNING: "warning", Level.PROBLEM: "PROBLEM"}


def run(
    study_name: str, storage: str | None, output: Path | None, with_probe: bool, probe_minutes: float, json_: bool
) -> None:
    """Run ``doctor``; options: cli/commands.py."""
    file = find_study(study_name)
    study = load_study(file)
    workload = load_workload(study, file)
    paths = sweep_paths(study.name, output)
    show = partial(show_findings, json_=json_)
    worst = show(_local(study, workload, paths, storage))
    if launcher_kind(study.site).slurm:
        worst = max(worst, show(_slurm(study, workload, paths)))
        if with_probe:
            worst = max(worst, show(_probe(study, workload, paths, probe_minutes * 60)))
    if worst is Level.PROBLEM:
        sys.exit(EXIT_SETUP)


def show_findings(findings: Iterable[Finding], *, json_: bool = False) -> Level:
    """Print findings as they arrive, as text or JSON; returns the worst level."""
    worst = Level.GOOD
    for finding in findings:
        worst = max(worst, finding.level)
        label = _LABELS[finding.level]
        if json_:
            record = {"level": label.lower(), "what": finding.what, "why": finding.why, "fix": finding.fix}
            click.echo(json.dumps(record))
            continue
        click.echo(f"{label:8} {finding.what}")
        if finding.why:
            click.echo(f"{'':8}   why:  {finding.why}")
        if finding.fix:
            click.echo(f"{'':8}   fix: {finding.fix}")
    return worst


def _local(study: Study, workload: Workload, paths: SweepPaths, storage: str | None) -> Iterator[Finding]:
    """Checks without a cluster."""
    yield free_space(paths.root, SWEEP_GB, "logs and the database grow there")
    yield database_server(storage) if storage and not storage.startswith("sqlite") else _file(paths, storage)
    findings = workload.findings(paths)
    yield from _command(study, workload, paths) if findings is None else findings


def _command(study: Study, workload: Workload, paths: SweepPaths) -> Iterator[Finding]:
    """Preflight warnings as findings, for workloads that have no checks of their own."""
    try:
        remarks = preflight_warnings(workload, study, paths)
    except (SetupError, StudyError) as error:
        what, _, fix = str(error).rpartition("; ")
        yield problem(what or fix, "no trial would run", fix)
        return
    for remark in remarks:
        what, _, fix = remark.rpartition("; ")
        yield warning(what or fix, "trials may be other than the study says", fix)


def _places(study: Study, workload: Workload) -> dict[str, str]:
    """The workload's container, data, model and tokenizer paths, by our names."""
    known = workload.known_places() or places(study.site)
    return {name: known[name] for name in PLACE_ALIASES if known.get(name)}


def _file(paths: SweepPaths, storage: str | None) -> Finding:
    """Check the file system of the SQLite file."""
    return chosen_database(Path(storage.partition(":///")[2]).resolve()) if storage else database_file(paths.root)


def _slurm(study: Study, workload: Workload, paths: SweepPaths) -> Iterator[Finding]:
    """Checks of the cluster from this host."""
    absent = list(commands())
    if absent:
        yield from absent
        return
    queried = partial(ask, cluster=cluster_of(study.site))
    answer = controller(queried)
    yield answer
    if answer.level is not Level.GOOD:
        return
    yield accounting(queried)
    yield partition(queried, study.site)
    if "CONT" in _places(study, workload) and workload.engine == PYXIS:
        yield pyxis(queried)
    yield mpi(queried, study.site)
    try:
        job = workload.job(some_proposal(study), paths.attempt(0, 0).folder)
    except LoraTuneError:
        return  # reported with the files
    yield good(inherited_variables(os.environ))
    yield from time_limit(queried, as_submitted(job, study.site), job.resources.minutes)
    for refusal in option_refusals(job, study):
        what, _, fix = refusal.rpartition("; ")
        yield problem(what, "no job would be its trial's", fix)
    yield accepted(queried, question(job, study.site))


def _probe(study: Study, workload: Workload, paths: SweepPaths, limit: float) -> Iterator[Finding]:
    """Checks on a node."""
    questions = questions_of(study.site, _places(study, workload), paths.root, workload.sudo_calls())
    try:
        launcher = SlurmLauncher(study.site)
        yield from probe(launcher, study.site, questions, paths.root, limit, click.echo)
    except LoraTuneError as error:
        yield problem(f"the probe was not submitted: {error}", "trials would not be either", "see above")


Ask = Callable[..., str]
"""Runs a Slurm command and returns its standard output; raises LauncherError."""

NO_GRES = "none"
"""``site.gres`` of a cluster without GPU scheduling: trials take whole nodes."""


def commands() -> Iterator[Finding]:
    """Missing Slurm commands."""
    absent = [command for command in COMMANDS if shutil.which(command) is None]
    if absent:
        yield problem(
            f"{', '.join(absent)} are not on PATH",
            "trials are submitted, watched and cancelled with them",
            "run this on the login node, or: module load slurm; --study tiny runs without Slurm",
        )


def controller(ask: Ask) -> Finding:
    """Whether slurmctld answers, and its version."""
    try:
        ask("sinfo", "--noheader", "--format=%P")
        version = ask("sinfo", "--version").strip()
    except LauncherError as error:
        return problem(
            f"the cluster does not answer: {error}",
            "nothing can be submitted; running jobs go on",
            "scontrol ping; ask the administrator",
        )
    return good(f"{version} answers")


def accounting(ask: Ask) -> Finding:
    """Whether sacct works; it is optional."""
    try:
        ask("sacct", "--allocations", "--noheader", "--starttime=now-1minute")
    except LauncherError:
        return warning(
            "sacct does not work",
            "jobs that ended longer ago than Slurm's MinJobAge (300 s) while no driver ran count as lost",
            "keep the driver running, in tmux or as a service",
        )
    return good("sacct works")


def partition(ask: Ask, site: Site) -> Finding:
    """Whether the partition has enough nodes with the GPUs of a trial."""
    name = site.partition
    try:
        rows = node_rows(ask(*NODES), name)
    except LauncherError as error:
        return problem(f"sinfo fails: {error}", "the partition cannot be inspected", "sinfo")
    label = f"partition {name}" if name else "the cluster"
    if not rows:
        return problem(
            f"{label} has no nodes", "nothing can run there", "sinfo --summarize, then correct site.partition"
        )
    gpus = 0 if site.gres == NO_GRES else site.packs * site.gpus_per_node
    fit = {node for node, _, gres, _ in rows if gpus_of(gres) >= gpus}
    up = {node for node, state, _, _ in rows if node in fit and not re.match(r"down|drain|fail|maint", state)}
    if len(fit) < site.nodes:
        return problem(
            f"{len(fit)} nodes of {label} have {gpus} GPUs; a job needs {site.nodes}",
            "trials would wait in the queue forever",
            f"sinfo --Node --format='%N %G', then correct site.partition or site.gpus_per_node; {WITHOUT_GRES}",
        )
    if len(up) < site.nodes:
        return warning(
            f"{len(up)} of {len(fit)} suitable nodes of {label} are up",
            "trials wait until a node comes back",
            "sinfo --list-reasons",
        )
    of = f"nodes with {gpus} GPUs" if site.gres != NO_GRES else f'whole nodes (site.gres = "{NO_GRES}")'
    return good(f"{label}: {len(up)} of {len(fit)} {of} are up")


def time_limit(ask: Ask, site: Site, minutes: float) -> Iterator[Finding]:
    """Whether partition and reservation admit a job of ``minutes`` (0: no limit); a warning if a qos may allow more.

    Unless Slurm enforces the limit, it accepts a longer job, which then pends forever.
    """
    waits = "trials would wait in the queue forever"
    with contextlib.suppress(LauncherError):  # reported by partition()
        if what := parse.beyond_limit(ask(*parse.LIMITS), site, minutes):
            yield (warning if site.qos else problem)(what, waits, parse.REMEDY)
    with contextlib.suppress(LauncherError):  # reported by accepted()
        shown = ask(*parse.reservation(site)) if site.reservation else ""
        if what := parse.beyond_reservation(shown, minutes, time.time()):
            yield problem(what, waits, parse.RESERVATION_REMEDY)


def gpus_of(gres: str) -> int:
    """GPUs in sinfo's gres column: ``gpu:h100:8(S:0-1),nvme:2`` -> 8."""
    return sum(int(m) for m in re.findall(r"(?:^|,)gpu(?::[^,:()]+)?:(\d+)", gres))


def pyxis(ask: Ask) -> Finding:
    """Whether srun has the Pyxis container options."""
    try:
        known = "--container-image" in ask("srun", "--help")
    except LauncherError as error:
        return problem(f"srun --help fails: {error}", "steps cannot be started", "srun --help")
    if not known:
        return problem(
            "srun knows no --container-image",
            "run.sub starts its steps in a container, through the Pyxis plugin",
            "ask the administrator for Pyxis (github.com/NVIDIA/pyxis) in plugstack.conf.d",
        )
    return good("Pyxis: srun knows --container-image")


def mpi(ask: Ask, site: Site) -> Finding:
    """Whether Slurm offers the MPI type of the site."""
    required = site.mpi or "pmix"
    try:
        offered = mpi_types(ask("srun", "--mpi=list"))
    except LauncherError as error:
        return problem(
            f"srun --mpi=list fails: {error}", "the training's ranks cannot find each other", "srun --mpi=list"
        )
    if required not in offered:
        return problem(
            f"MPI type {required} is not offered; there are {', '.join(sorted(offered))}",
            "the training step fails at once",
            "site.mpi = one of these: pmi2 where pmix, which run.sub takes by itself, is missing",
        )
    return good(f"MPI type {required} is offered")


def mpi_types(text: str) -> set[str]:
    """The types in the output of ``srun --mpi=list``: one per line, pmix versions after a colon."""
    types: set[str] = set()
    for line in text.splitlines():
        line = line.removeprefix("srun:").strip()
        if "..." not in line:
            types |= set(line.rpartition(":")[2].replace(",", " ").split())
    return types


def accepted(ask: Ask, question: Sequence[str]) -> Finding:
    """Whether ``question``, an sbatch test, accepts account, partition, reservation and limits."""
    try:
        ask(*question)
    except LauncherError as error:
        return problem(
            f"sbatch refuses a trial: {error}",
            "no trial can be submitted",
            "correct site.account, partition, reservation, gres or sbatch_args; sacctmgr show assoc user=$USER",
        )
    return good("sbatch accepts a trial's options")


def database_file(folder: Path, mounts: str | None = None) -> Finding:
    """Whether ``folder`` is on a network file system. mounts: text of /proc/self/mountinfo."""
    kind = file_system(folder, mountinfo() if mounts is None else mounts) or "an unknown file system"
    if kind in NETWORK:
        return problem(
            f"{folder} is on {kind}",
            "SQLite's locks do not hold there: a second host corrupts the database, so a sweep refuses to begin",
            "keep the sweep folder, and put the database on a local disk (--storage sqlite:////LOCAL/DISK/sweep.db) "
            "or use --storage postgresql+psycopg://...",
        )
    return good(f"the database at {folder} is on {kind}")


def chosen_database(database: Path, mounts: str | None = None) -> Finding:
    """database_file() for the SQLite file of ``--storage``, whose folder must exist: a sweep creates only the file."""
    if database.parent.is_dir():
        return database_file(database.parent, mounts)
    return problem(
        f"{database.parent} is no folder, and --storage names a file in it",
        "every record of the sweep lies there",
        f"make it (mkdir -p {shlex.quote(str(database.parent))}), or correct the URL",
    )


def database_server(url: str) -> Finding:
    """Whether the database server answers."""
    try:
        return good(f"the database {stores.safe_url(url)} answers: {stores.server_version(url)}")
    except StoreError as error:
        return problem(str(error), "every record of the sweep lies there", "start the server, or correct the URL")


JOB_MINUTES = 5.0
_MARK = "doctor:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A command to run on the node, and what its failure means. needed: failure is a problem, else a warning."""

    name: str
    command: str
    what: str
    why: str
    fix: str
    needed: bool = True


def questions_of(site: Site, places: Mapping[str, str], folder: Path, sudo: Sequence[str]) -> list[Question]:
    """The questions for a node. folder: the sweep's. sudo: programs that run.sub calls with sudo."""
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
    """The batch script; it prints one answer line per question."""
    lines = ["#!/bin/bash"]
    for number, check in enumerate(questions):
        lines.append(
            f'if ( {check.command} ) >&2; then echo "{_MARK} {number} yes"; else echo "{_MARK} {number} no"; fi'
        )
    return "\n".join(lines) + "\n"


def answers(questions: list[Question], log: str) -> Iterator[Finding]:
    """The findings in the job's log; a missing answer counts as failure."""
    printed = {parts[1]: parts[2] for line in log.splitlines() if len(parts := line.split()) == 3 and parts[0] == _MARK}
    for number, check in enumerate(questions):
        answer = printed.get(str(number))
        if answer == "yes":
            yield good(f"on a node: {check.what}")
            continue
        what = f"not true on a node: {check.what}" if answer else f"on a node, no answer: {check.what}"
        make = problem if check.needed else warning
        yield make(what, check.why, check.fix)


def probe(
    launcher: Launcher, site: Site, questions: list[Question], folder: Path, limit: float, echo: Callable[[str], None]
) -> Iterator[Finding]:
    """Submit the probe job, wait at most ``limit`` seconds, and read its answers."""
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
    echo(f"probe: job {ticket.job_id} submitted, waiting for it at most {limit / 60:g} min")
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
