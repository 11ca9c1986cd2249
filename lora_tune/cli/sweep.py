"""``python -m lora_tune.sweep --study NAME``: start or resume a sweep."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from lora_tune import store as stores
from lora_tune.base import errors
from lora_tune.base.paths import SweepPaths, display_path
from lora_tune.base.text import HIDDEN, counted, redact
from lora_tune.cli import export
from lora_tune.cli.interrupts import after_interrupt, make_view, run_interruptibly, writing_results
from lora_tune.cli.logs import check_logs
from lora_tune.cli.options import (
    command_line,
    feedback_if_known,
    plan_of,
    refuse_marks,
    study_overrides,
    typed,
    unresolved_mark,
)
from lora_tune.config.holding import with_extended_space
from lora_tune.config.space import range_text
from lora_tune.config.spent import counts_node_hours
from lora_tune.config.study import Study, closed_violations, find_study, load_study, secrets_written_in
from lora_tune.config.tables import replaced_in
from lora_tune.controller.changed_study import with_base
from lora_tune.controller.driver import Outcome, proposal
from lora_tune.controller.runtime import (
    DrivePlan,
    Environment,
    driver,
    make_clock,
    open_sweep,
    preflight_warnings,
    release_at_exit,
)
from lora_tune.controller.sweep_records import check_store
from lora_tune.launchers import make_launcher, preview
from lora_tune.launchers.base import launcher_kind
from lora_tune.launchers.slurm.client import inherited_variables
from lora_tune.review.importance import scaling, table
from lora_tune.review.stopping import promise_text
from lora_tune.review.summary import machine_text, parameters_text, recommended_text, score_text, trial_name
from lora_tune.search.no_effect import no_effect
from lora_tune.search.objectives import objective_of
from lora_tune.search.recommendation import best_run, nearest, nearest_text, recommend
from lora_tune.store import Lease
from lora_tune.store.leases import take_lease, wait_for_lease
from lora_tune.store.records import StudyRecords, Trial, Verdict
from lora_tune.workloads.base import Job, Start, Workload
from lora_tune.workloads.base_config import parameters_at

if TYPE_CHECKING:
    from lora_tune.search.session import Session

_BUDGET = ("trials", "parallel", "budget_node_hours", "launcher")
"""Options that change the study; the resume command line repeats them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """Driver options of the command line. metrics: [HOST:]PORT, or None."""

    accept_changes: bool
    standby: bool
    metrics: str | None
    verbose: bool


def run(study_name: str, dry_run: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Run ``sweep``; options: cli/commands.py."""
    if options["logs"] and not dry_run:
        raise errors.InputError("--log goes with --dry-run, which starts nothing")
    file = find_study(study_name)
    from_file = load_study(file)
    study_options = study_overrides(options)
    study = from_file.with_options(study_options)
    for key in secrets_written_in(from_file):
        name = key.rpartition(".")[2]
        click.echo(f'warning: {key}: a secret stands in the study file; write {key} = {{ env = "{name}" }}', err=True)
    plan = plan_of(file, from_file, study_options, options["output"])
    for violation in closed_violations(study):  # fatal violations have raised above
        click.echo(f"warning: space.{violation.name}: {violation.sentence}", err=True)
    if replaced := replaced_in(plan.text):
        click.echo(f"warning: {replaced}", err=True)
    if dry_run:
        print_proposals(plan)
        if options["logs"] and not check_logs(study, plan.workload, options["logs"]):
            sys.exit(errors.EXIT_NOTHING_REACHED)
        return
    refuse_marks(file)
    if options["merge_rescued"]:
        _merge_rescued(plan, options["storage"])
    how = How(
        accept_changes=options["accept_changes"],
        standby=options["standby"],
        metrics=options["metrics"],
        verbose=not as_json,
    )
    sys.exit(_sweep(plan, options["storage"], make_view(quiet, as_json), how))


def _merge_rescued(plan: DrivePlan, storage: str | None) -> None:
    """Merge the rescue file of an earlier driver into the database."""
    from lora_tune.store import open_store
    from lora_tune.store.requests import merge_rescued

    store = open_store(plan.paths, storage)
    try:
        lease = take_lease(store, plan.study.name, time.time())
        with release_at_exit(store, lease):
            sweep = merge_rescued(store, lease, plan.paths.rescued)
    finally:
        store.close()
    click.echo(f"{counted(len(sweep.trials), 'trials')} of {plan.paths.rescued} are back in the database", err=True)


def _sweep(plan: DrivePlan, storage: str | None, watcher: Any, how: How) -> int:
    """Run the driver under its lease; returns the exit code."""
    study, paths = plan.study, plan.paths
    try:
        launcher = make_launcher(study, paths.packs)
        clock = make_clock(study, launcher)
        environment = Environment(
            launcher=launcher, clock=clock, view=watcher, pause=clock.sleep, fixed=not how.standby
        )
        if how.metrics:
            from lora_tune.cli.metrics import Metrics

            environment = Metrics().serve(how.metrics, click.echo if how.verbose else None).measured(environment)
        store = _open_patiently(plan, storage, environment) if how.standby else open_sweep(plan, storage, clock.now())
        if how.standby:
            lease, _ = wait_for_lease(store, study.name, clock.now, watcher.line)
        else:
            lease = take_lease(store, study.name, clock.now())
        with driver(plan, store, lease, environment, accept_changes=how.accept_changes) as driving:
            watcher.line(beginning(study, driving.sweep, paths))
            if promise := promise_text(study):
                watcher.line(promise)
            outcome = run_interruptibly(driving)
            if outcome.interrupted:
                watcher.close()
                after_interrupt(driving, command_line("sweep", study.name, *typed(*_BUDGET)))
            else:
                _finish(store, lease, outcome.reason, watcher)
    finally:
        watcher.close()
    if outcome.interrupted:
        return errors.EXIT_INTERRUPTED
    with writing_results(command_line("sweep", study.name)):
        code = _conclude(
            with_base(study, driving.sweep), driving.sweep, plan.workload, paths, outcome, store, verbose=how.verbose
        )
    check_store(store, driving.sweep, driving.requests, paths.rescued, time.time())
    return code


def beginning(study: Study, sweep: StudyRecords, paths: SweepPaths) -> str:
    """The start-up line: new or resumed, number of trials, folder."""
    most = study.budget.trials
    ended = sum(t.verdict is not None for t in sweep.trials.values())
    at_once = f"{study.budget.parallel} at a time, records in {display_path(paths.root)}"
    if not sweep.trials:
        return f"{study.name}: {counted(most, 'trials') if most else 'any number of trials'}, {at_once}"
    taken = f", {len(sweep.trials) - ended} open ones are taken over" if ended < len(sweep.trials) else ""
    done = f"{ended} of {counted(most, 'trials')}" if most else counted(ended, "trials")
    return f"resuming {study.name}: {done} ended{taken}; {at_once}"


def _finish(store: stores.Store, lease: Lease, reason: str, watcher: Any) -> None:
    """Record the end. All results are saved by now, so a database error only costs this mark."""
    try:
        store.finish(lease, reason)
    except errors.StoreError as error:
        watcher.line(f"{error}; the end of the sweep is not recorded; the same command records it")


def _open_patiently(plan: DrivePlan, storage: str | None, environment: Environment) -> stores.Store:
    """The sweep's database; a standby retries until it answers."""
    printed = ""
    while True:
        try:
            return open_sweep(plan, storage, environment.clock.now())
        except errors.StoreError as error:
            if str(error) != printed:
                environment.view.line(f"standby: {error}")
            printed = str(error)
        time.sleep(1.0)


def _conclude(
    study: Study,
    sweep: StudyRecords,
    workload: Workload,
    paths: SweepPaths,
    outcome: Outcome,
    store: stores.Store,
    *,
    verbose: bool,
) -> int:
    """Export the best configuration, write the report, print their paths; returns the exit code."""
    from lora_tune.cli import report
    from lora_tune.search import priors

    sweep = replace(sweep, priors=priors.read(paths.priors))
    written = export.export_best(study, sweep, workload, paths.best)
    report.write_report(study, sweep, paths.report, feedback_if_known(store, study.name))
    if verbose:
        click.echo(summary(study, sweep, outcome))
        if written is not None:
            click.echo(f"config   {display_path(written.path)}\nrun it   {export.typed(written, workload)}")
        if written is None and nearest(study, sweep):
            click.echo(f"config   {command_line('export', study.name, '--nearest')}")
        click.echo(f"report   {display_path(paths.report)}\nreview   {command_line('dashboard', study.name)}")
    return errors.EXIT_DONE if written is not None else errors.EXIT_NOTHING_REACHED


def summary(study: Study, sweep: StudyRecords, outcome: Outcome) -> str:
    """A few lines: reason of the end, verdicts, recommendation, best run."""
    counts = {v: sum(t.verdict is v for t in sweep.trials.values()) for v in Verdict}
    objective = objective_of(study)
    ended = ", ".join(f"{n} {objective.verdict_name(v)}" for v, n in counts.items() if n)
    best = best_run(study, sweep)
    lines = [f"\n{outcome.reason}: {ended or 'no trial ended'}"]
    if best is None:
        lines.append(objective.nothing)
        if closest := nearest(study, sweep):
            lines.append(f"{nearest_text(closest)}: {parameters_text(closest.trial)}")
    else:
        other = f" ({score})" if (score := score_text(study, best)) else ""
        if idle := no_effect(study, sweep):
            lines.append(f"trouble  {idle.sentence}")
        if recommended := recommend(study, sweep):
            sentence = f"{recommended_text(study, recommended)}, {trial_name(recommended.trial)}"
            lines.append(f"take     {sentence}: {parameters_text(recommended.trial)}")
        lines.append(
            f"best run {objective.scalar(best.objective)}{other}, trial {best.number}: {parameters_text(best)}"
        )
    if machine := machine_text(study, sweep):
        lines.append(f"machine  {machine}")
    if rows := scaling(study, sweep):
        lines.append(table(study, rows))
    return "\n".join(lines)


PREVIEWED = 2
"""Proposals that a dry run prints."""

FEW = 4
"""Maximum choices of a parameter that are listed."""


def print_proposals(plan: DrivePlan) -> None:
    """Print the first proposals with files, environment and command lines. Writes and submits nothing."""
    from lora_tune.search.session import Session

    study, workload, paths = plan.study, plan.workload, plan.paths
    try:
        remarks = preflight_warnings(workload, study, paths)
    except (errors.SetupError, errors.StudyError) as error:
        remarks = [f"no trial would run: {error}"]
    if mark := unresolved_mark(plan.file.read_text(encoding="utf-8")):
        remarks = [f"no trial would run: {mark}", *remarks]
    click.echo("".join(f"# {' '.join(remark.split())}\n" for remark in remarks), nl=False)
    if launcher_kind(study.site).slurm:
        click.echo(f"# {inherited_variables(os.environ)}")
    begin = _start(workload)
    study = with_extended_space(study, begin.tuned if begin else None, _unread(workload))
    session = Session(study, start=begin)
    click.echo("".join(f"# {line}\n" for line in _outline(study, begin)), nl=False)
    click.echo("".join(f"# stage {at}, {line}\n" for at, line in enumerate(session.plan(), 1)), nl=False)
    if preparation := workload.preparation(paths.preparation(0).folder):
        click.echo("# before the first trial, once\n" + _shown(study, preparation))
    _print_trials(plan, study, session, begin)


def _print_trials(plan: DrivePlan, study: Study, session: Session, begin: Start | None) -> None:
    """Print the first proposals with their jobs. Raises SetupError after the last one if a job cannot be built."""
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
    """Space, start and budget with its cost, one line each."""
    for name, distribution in study.search_space.distributions().items():
        choices = getattr(distribution, "choices", ())
        few = f"one of {len(choices)}: {', '.join(map(str, choices[:FEW]))} ..." if len(choices) > FEW else ""
        yield f"space: {name} {few or range_text(distribution)}"
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
    """The current configuration; None also if its files are missing, which is reported as a warning."""
    try:
        return workload.start()
    except errors.SetupError:
        return None


def _unread(workload: Workload) -> tuple[str, ...]:
    """Switches that nothing reads; empty if that cannot be determined, which is reported as a warning."""
    try:
        return workload.unread_switches()
    except errors.SetupError:
        return ()


def _shown(study: Study, job: Job) -> str:
    """A job's files, environment and command line, with secrets hidden."""
    files = [f"# file {job.folder / name}\n{text.rstrip()}\n" for name, text in job.files.items()]
    variables = [f"{name}={shlex.quote(value)} \\\n" for name, value in job.environment.items()]
    variables += [f"{name}={HIDDEN} \\\n" for name in job.secrets]
    command = preview(study, job)
    # Slurm's command line submits a generated batch file; show what that runs, too.
    runs = [] if {*job.argv} <= {*command} else [f"# FILE runs: {shlex.join(job.argv)}\n"]
    return redact("".join((*files, *runs, *variables, shlex.join(command), "\n")))
