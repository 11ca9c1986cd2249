"""``python -m lora_tune.doctor --study NAME [--probe]``: what stands between here and the study's first trial."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from lora_tune.base.errors import (
    EXIT_SETUP,
    Finding,
    Level,
    LoraTuneError,
    SetupError,
    StudyError,
    free_space,
    good,
    problem,
    warning,
)
from lora_tune.base.paths import SweepPaths
from lora_tune.cli.checks import cluster, database, probe
from lora_tune.cli.options import sweep_paths
from lora_tune.config.study import Study, find_study, load_study
from lora_tune.controller.runtime import option_refusals, preflight_warnings
from lora_tune.launchers.base import launcher_kind
from lora_tune.launchers.slurm.client import ask, in_words
from lora_tune.launchers.slurm.launcher import SlurmLauncher
from lora_tune.launchers.slurm.submission import question
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import ALSO, PYXIS, Examined, Workload, places, some_proposal

SWEEP_GB = 1.0
"""Room for a sweep's logs and database; a trial's log has a few megabytes."""

_WORDS = {Level.GOOD: "ok", Level.WARNING: "warning", Level.PROBLEM: "PROBLEM"}


def run(
    study_name: str, storage: str | None, output: Path | None, with_probe: bool, probe_minutes: float, json_: bool
) -> None:
    """What ``doctor`` does; see cli/commands.py for its options."""
    file = find_study(study_name)
    study = load_study(file)
    workload = load_workload(study, file)
    paths = sweep_paths(study.name, output)
    show = _print_json if json_ else show_findings
    worst = show(_local(study, workload, paths, storage))
    if launcher_kind(study.site).slurm:
        worst = max(worst, show(_slurm(study, workload, paths)))
        if with_probe:
            worst = max(worst, show(_probe(study, workload, paths, probe_minutes * 60)))
    if worst is Level.PROBLEM:
        sys.exit(EXIT_SETUP)


def _print_json(findings: Iterable[Finding]) -> Level:
    """As :func:`show_findings`, for programs."""
    worst = Level.GOOD
    for finding in findings:
        worst = max(worst, finding.level)
        level = _WORDS[finding.level].lower()
        click.echo(json.dumps({"level": level, "what": finding.what, "why": finding.why, "fix": finding.fix}))
    return worst


def show_findings(findings: Iterable[Finding]) -> Level:
    """Print findings as they are made; returns the worst level."""
    worst = Level.GOOD
    for finding in findings:
        worst = max(worst, finding.level)
        click.echo(f"{_WORDS[finding.level]:8} {finding.what}")
        if finding.why:
            click.echo(f"{'':8}   why:  {finding.why}")
        if finding.fix:
            click.echo(f"{'':8}   fix: {finding.fix}")
    return worst


def _local(study: Study, workload: Workload, paths: SweepPaths, storage: str | None) -> Iterator[Finding]:
    """What can be seen without a cluster."""
    yield free_space(paths.root, SWEEP_GB, "logs and the database grow there")
    yield database.server(storage) if storage and not storage.startswith("sqlite") else _file(paths, storage)
    if isinstance(workload, Examined):
        yield from workload.findings(paths)
    else:
        yield from _command(study, workload, paths)


def _command(study: Study, workload: Workload, paths: SweepPaths) -> Iterator[Finding]:
    """What a sweep of a workload without findings of its own says beforehand."""
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
    """Container, data, model and tokenizer under our names only, of any workload."""
    known = workload.known_places() if isinstance(workload, Examined) else places(study.site)
    return {name: known[name] for name in ALSO if known.get(name)}


def _file(paths: SweepPaths, storage: str | None) -> Finding:
    """Where the SQLite file would lie."""
    return database.chosen(Path(storage.partition(":///")[2]).resolve()) if storage else database.file(paths.root)


def _slurm(study: Study, workload: Workload, paths: SweepPaths) -> Iterator[Finding]:
    """What the cluster says from here."""
    absent = list(cluster.commands())
    if absent:
        yield from absent
        return
    answer = cluster.controller(ask)
    yield answer
    if answer.level is not Level.GOOD:
        return
    yield cluster.accounting(ask)
    yield cluster.partition(ask, study.site)
    engine = workload.engine if isinstance(workload, Examined) else PYXIS
    if "CONT" in _places(study, workload) and engine == PYXIS:
        yield cluster.pyxis(ask)
    yield cluster.mpi(ask, study.site)
    try:
        job = workload.job(some_proposal(study), paths.attempt(0, 0).folder)
    except LoraTuneError:
        return  # said among the files
    yield good(in_words(os.environ))
    yield from cluster.time_limit(ask, study.site, job.resources.minutes)
    for refusal in option_refusals(job, study):
        what, _, fix = refusal.rpartition("; ")
        yield problem(what, "no job would be its trial's", fix)
    yield cluster.accepted(ask, question(job, study.site))


def _probe(study: Study, workload: Workload, paths: SweepPaths, limit: float) -> Iterator[Finding]:
    """What a node says."""
    sudo = workload.sudo_calls() if isinstance(workload, Examined) else []
    questions = probe.questions(study.site, _places(study, workload), paths.root, sudo)
    try:
        launcher = SlurmLauncher(study.site)
        yield from probe.probe(launcher, study.site, questions, paths.root, limit, click.echo)
    except LoraTuneError as error:
        yield problem(f"the probe was not submitted: {error}", "trials would not be either", "see above")
