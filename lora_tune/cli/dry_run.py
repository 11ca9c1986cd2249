"""What ``sweep --dry-run`` prints of the trials that would come first. Nothing is written or submitted."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

import click

from lora_tune.base import errors
from lora_tune.base.text import HIDDEN, counted, redact
from lora_tune.cli.options import mark_left
from lora_tune.config.checks import range_words
from lora_tune.config.holding import study_holding
from lora_tune.config.spent import counts_node_hours
from lora_tune.config.study import Study
from lora_tune.controller.driver import proposal
from lora_tune.controller.runtime import DrivePlan, preflight_warnings
from lora_tune.launchers import preview
from lora_tune.launchers.base import launcher_kind
from lora_tune.launchers.slurm.client import in_words
from lora_tune.review.summary import parameters_text
from lora_tune.search.session import Session
from lora_tune.store.records import Trial
from lora_tune.workloads.base import Job, Prepares, Start, Workload, start, unread_switches
from lora_tune.workloads.base_config import parameters_at

PREVIEWED = 2
"""Proposals that are shown."""

FEW = 4
"""Choices of a parameter that are listed."""


def print_proposals(plan: DrivePlan) -> None:
    """The first proposals, their files, environment and command lines."""
    study, workload, paths = plan.study, plan.workload, plan.paths
    try:
        remarks = preflight_warnings(workload, study, paths)
    except (errors.SetupError, errors.StudyError) as error:
        remarks = [f"no trial would run: {error}"]
    if mark := mark_left(plan.file.read_text(encoding="utf-8")):
        remarks = [f"no trial would run: {mark}", *remarks]
    click.echo("".join(f"# {' '.join(remark.split())}\n" for remark in remarks), nl=False)
    if launcher_kind(study.site).slurm:
        click.echo(f"# {in_words(os.environ)}")
    begin = _start(workload)
    study = study_holding(study, begin.tuned if begin else None, _unread(workload))
    session = Session(study, start=begin)
    click.echo("".join(f"# {line}\n" for line in _outline(study, begin)), nl=False)
    click.echo("".join(f"# stage {at}, {line}\n" for at, line in enumerate(session.plan(), 1)), nl=False)
    if isinstance(workload, Prepares) and (preparation := workload.preparation(paths.preparation(0).folder)):
        click.echo("# before the first trial, once\n" + _shown(study, preparation))
    _print_trials(plan, study, session, begin)


def _print_trials(plan: DrivePlan, study: Study, session: Session, begin: Start | None) -> None:
    """The first proposals, each with its job where that can be made; at the end a SetupError says why it cannot."""
    missing: errors.SetupError | None = None
    for _ in range(min(PREVIEWED, study.budget.trials or PREVIEWED)):
        proposed = session.ask()
        if isinstance(proposed, str):
            click.echo(proposed)
            break
        trial = Trial(
            number=proposed.number,
            seed=study.trial_seed(proposed.number),
            tuned=study.search_space.conditions.present(proposed.tuned),
            parameters=proposed.parameters or parameters_at(begin, study.search_space, proposed.tuned),
        )
        what = f"{proposed.base} as it stands" if proposed.base else parameters_text(trial)
        click.echo(f"# trial {trial.number}: {what}")
        try:
            job = plan.workload.job(proposal(trial, 0), plan.paths.attempt(trial.number, 0).folder)
            click.echo(_shown(study, job))
        except errors.SetupError as error:
            missing = error
    if missing is not None:
        raise missing


def _outline(study: Study, begin: Start | None) -> Iterator[str]:
    """The space, what comes first, and what it may cost, in a line each: to be judged before a machine is there."""
    for name, distribution in study.search_space.distributions().items():
        choices = getattr(distribution, "choices", ())
        few = f"one of {len(choices)}: {', '.join(map(str, choices[:FEW]))} ..." if len(choices) > FEW else ""
        yield f"space: {name} {few or range_words(distribution)}"
    points = len(study.search.enqueue)
    first = ["no configuration of today" if begin is None else f"{begin.name} as it stands"]
    first += [f"{counted(points, 'points')} of search.enqueue"] if points else []
    yield f"start: {', then '.join(first)}"
    budget = study.budget
    limits = [counted(budget.trials, "trials")] if budget.trials else []
    limits += [f"{budget.node_hours:g} node-hours"] if budget.node_hours else []
    limits += [f"{budget.wall_hours:g} hours"] if budget.wall_hours else []
    most = study.search_space.most_nodes * budget.trial_minutes / 60
    cost = f"a trial of {budget.trial_minutes:g} min costs up to {most:.3g} node-hours"
    cost = cost if counts_node_hours(study) else f"a trial is ended after {budget.trial_minutes:g} min"
    yield f"budget: {' or '.join(limits)}, {budget.parallel} at a time; {cost}"


def _start(workload: Workload) -> Start | None:
    """The configuration of today; None also where its files are not there yet, which the first line says."""
    try:
        return start(workload)
    except errors.SetupError:
        return None


def _unread(workload: Workload) -> tuple[str, ...]:
    """The switches that nothing reads; none where nobody can tell: that is said, and the plan shown all the same."""
    try:
        return unread_switches(workload)
    except errors.SetupError:
        return ()


def _shown(study: Study, job: Job) -> str:
    """A job's files, environment and command line, secrets hidden: people show this to others."""
    files = [f"# file {job.folder / name}\n{text.rstrip()}\n" for name, text in job.files.items()]
    variables = [f"{name}={shlex.quote(value)} \\\n" for name, value in job.environment.items()]
    variables += [f"{name}={HIDDEN} \\\n" for name in job.secrets]
    command = preview(study, job)
    # Slurm's line submits a batch file of ours; what that runs is the trial.
    runs = [] if {*job.argv} <= {*command} else [f"# FILE runs: {shlex.join(job.argv)}\n"]
    return redact("".join((*files, *runs, *variables, shlex.join(command), "\n")))
