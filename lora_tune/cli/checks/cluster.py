"""What the cluster says of itself, asked from here."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence

from lora_tune.base.errors import Finding, LauncherError, good, problem, warning
from lora_tune.config.tables import Site
from lora_tune.launchers.slurm import parse
from lora_tune.launchers.slurm.launcher import COMMANDS
from lora_tune.launchers.slurm.parse import NODES, WITHOUT_GRES, node_rows

Ask = Callable[..., str]
"""Runs a Slurm command and returns its standard output; raises LauncherError."""

NO_GRES = "none"
"""``site.gres`` of a cluster that knows no GPUs: its nodes are taken whole."""


def commands() -> Iterator[Finding]:
    """Slurm's commands on PATH."""
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
    """Whether sacct works: it is convenient, not needed."""
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
    """The partition, and whether its nodes have the GPUs of a trial."""
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
    """Whether partition and reservation let a job run for ``minutes`` (0: it names no limit). A qos may allow more.

    Slurm takes a job that asks for more, unless it enforces the limit, and lets it wait for ever.
    """
    waits = "trials would wait in the queue forever"
    with contextlib.suppress(LauncherError):  # said of the partition itself
        if what := parse.beyond_limit(ask(*parse.LIMITS), site, minutes):
            yield (warning if parse.by_qos(site) else problem)(what, waits, parse.REMEDY)
    with contextlib.suppress(LauncherError):  # said of sbatch's answer
        shown = ask(*parse.reservation(site)) if site.reservation else ""
        if what := parse.beyond_reservation(shown, minutes, time.time()):
            yield problem(what, waits, parse.RESERVATION_REMEDY)


def gpus_of(gres: str) -> int:
    """The GPUs in sinfo's words: ``gpu:h100:8(S:0-1),nvme:2`` -> 8."""
    return sum(int(m) for m in re.findall(r"(?:^|,)gpu(?::[^,:()]+)?:(\d+)", gres))


def pyxis(ask: Ask) -> Finding:
    """Whether srun knows containers."""
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
    """Whether Slurm offers the MPI start-up that the site names."""
    wanted = site.mpi or "pmix"
    try:
        offered = mpi_types(ask("srun", "--mpi=list"))
    except LauncherError as error:
        return problem(
            f"srun --mpi=list fails: {error}", "the training's ranks cannot find each other", "srun --mpi=list"
        )
    if wanted not in offered:
        return problem(
            f"MPI type {wanted} is not offered; there are {', '.join(sorted(offered))}",
            "the training step fails at once",
            "site.mpi = one of these: pmi2 where pmix, which run.sub takes by itself, is missing",
        )
    return good(f"MPI type {wanted} is offered")


def mpi_types(text: str) -> set[str]:
    """The types in ``srun --mpi=list``: one a line, and pmix's versions behind a colon."""
    types: set[str] = set()
    for line in text.splitlines():
        line = line.removeprefix("srun:").strip()
        if "..." not in line:
            types |= set(line.rpartition(":")[2].replace(",", " ").split())
    return types


def accepted(ask: Ask, question: Sequence[str]) -> Finding:
    """Whether sbatch would take a trial: account, partition, reservation and limits in one ``question``."""
    try:
        ask(*question)
    except LauncherError as error:
        return problem(
            f"sbatch refuses a trial: {error}",
            "no trial can be submitted",
            "correct site.account, partition, reservation, gres or sbatch_args; sacctmgr show assoc user=$USER",
        )
    return good("sbatch accepts a trial's options")
