"""``python -m lora_tune.sweep --study NAME``: tune a study, or go on with it."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click

from lora_tune import errors, export, view
from lora_tune.commandline import guarded, open_store, output_option, storage_option, study_option, sweep_paths
from lora_tune.driver import Clock, Driver, Outcome, Ports, RealClock, proposal
from lora_tune.driving import after_interrupt, make_view, near, run_interruptibly, take_lease
from lora_tune.launchers import make_launcher, preview
from lora_tune.paths import SweepPaths
from lora_tune.records import Sweep, Trial, Verdict
from lora_tune.scaling import scaling, table
from lora_tune.store import Changes, Lease, Store, tune_sqlite
from lora_tune.study import Study, find_study, load_study, parse_study, study_changes
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import Job, Prepares, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, as it came."""

    file: Path
    study: Study
    from_file: Study
    paths: SweepPaths
    storage: str | None
    accept_changes: bool


@click.command()
@study_option
@click.option("--trials", type=int, help="number of trials, overrides the study")
@click.option("--parallel", type=int, help="trials at one time, overrides the study")
@click.option("--budget-node-hours", type=float, help="node-hours of all trials, overrides the study")
@click.option("--launcher", help="local or slurm, overrides the study's site")
@storage_option
@output_option
@click.option("--seed", type=int, help="seed of the search, overrides the study")
@click.option("--dry-run", is_flag=True, help="print the first proposals, files and commands; submit nothing")
@click.option("--accept-changes", is_flag=True, help="resume although the study file changed")
@click.option("--quiet", is_flag=True, help="print nothing but the result")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object an event")
@guarded
def main(study_name: str, dry_run: bool, accept_changes: bool, quiet: bool, as_json: bool, **given: Any) -> None:
    """Tune a study, or go on with it: trials run, stalled ones are stopped, the best is exported.

    Exit codes: 0 done; 2 your input; 3 the machine; 4 nothing reached the target; 130 interrupted.
    """
    file = find_study(study_name)
    from_file = load_study(file)
    study = from_file.with_options(
        {
            "budget": {k: given[v] for k, v in _BUDGET_OPTIONS.items()},
            "site": {"launcher": given["launcher"]},
            "search": {"seed": given["seed"]},
        }
    )
    workload = load_workload(study, file)
    if dry_run:
        _dry_run(study, workload, sweep_paths(study.name, given["output"]))
        return
    options = Options(
        file=file,
        study=study,
        from_file=from_file,
        paths=sweep_paths(study.name, given["output"]),
        storage=given["storage"],
        accept_changes=accept_changes,
    )
    sys.exit(_sweep(options, workload, make_view(quiet, as_json), say=not as_json))


_BUDGET_OPTIONS = {"trials": "trials", "parallel": "parallel", "node_hours": "budget_node_hours"}


def _sweep(plan: Plan, storage: str | None, watcher: Any, how: How) -> int:
    """Run the driver between taking and giving back the lease; returns the exit code."""
    study, paths = plan.study, plan.paths
    try:
        launcher = make_launcher(study)
        clock = make_clock(study, launcher)
        store = _open(plan, storage, clock.now(), watcher, standby=how.standby)
        if how.standby:
            lease = wait_for_lease(store, study.name, clock.now, watcher.line)
        else:
            lease = take_lease(store, study.name, clock.now())
        watched = Watched(watcher, how.metrics) if how.metrics else watcher
        around = Around(launcher=launcher, clock=clock, view=watched, pause=clock.sleep)
        with driver(plan, store, lease, around, accept_changes=how.accept_changes) as driving:
            outcome = run_interruptibly(driving)
            if outcome.interrupted:
                watcher.close()
                after_interrupt(driving)
            else:
                store.finish(lease, outcome.reason)
    finally:
        watcher.close()
    if outcome.interrupted:
        return errors.EXIT_INTERRUPTED
    return _hand_over(study, driving.sweep, plan.workload, paths, outcome, say=how.say)


def _hand_over(
    study: Study, sweep: Sweep, workload: Workload, paths: SweepPaths, outcome: Outcome, *, say: bool
) -> int:
    """Export the best, write the report, say where they are; returns the exit code."""
    from lora_tune import report

    written = export.export_best(study, sweep, workload, paths.best)
    report.write_report(study, sweep, paths.report)
    if say:
        click.echo(summary(study, sweep, outcome))
        if written is not None:
            click.echo(f"config   {near(written.path)}\nrun it   {written.usage}")
        click.echo(f"report   {near(paths.report)}\nreview   python -m lora_tune.dashboard --study {study.name}")
    return errors.EXIT_DONE if written is not None else errors.EXIT_NOTHING_REACHED


def summary(study: Study, sweep: Sweep, outcome: Outcome) -> str:
    """A few lines: why it ended, how the trials ended, the best."""
    counts = {v: sum(t.verdict is v for t in sweep.trials.values()) for v in Verdict}
    ended = ", ".join(f"{n} {v.value}" for v, n in counts.items() if n)
    best = sweep.best(maximise=study.maximise)
    lines = [f"\n{outcome.reason}: {ended or 'no trial ended'}"]
    if best is None:
        lines.append(
            "no trial measured its throughput"
            if study.maximise
            else f"no trial reached eval loss {study.objective.target:g}"
        )
    else:
        unit = "samples/s" if study.maximise else "s to the target"
        lines.append(
            f"best     {best.facts['objective']:.4g} {unit}, trial {best.number}: {view.parameters_text(best)}"
        )
    if rows := scaling(study, sweep):
        lines.append(table(rows))
    return "\n".join(lines)


def _dry_run(study: Study, workload: Workload, paths: SweepPaths, count: int = 2) -> None:
    """Print the first proposals, their files, environment and command lines. Writes and submits nothing."""
    from lora_tune.search.session import Session

    session = Session(study, None, tune_sqlite)
    if isinstance(workload, Prepares) and (made := workload.preparation(paths.preparation(0).folder)):
        click.echo("# before the first trial, once\n" + _shown(study, made))
    for _ in range(min(count, study.budget.trials or count)):
        asked = session.ask()
        if isinstance(asked, str):
            click.echo(asked)
            return
        trial = Trial(
            number=asked.number,
            seed=study.trial_seed(asked.number),
            tuned=asked.tuned,
            parameters=study.search_space.resolve(asked.tuned),
        )
        folder = paths.attempt(trial.number, 0).folder
        job = workload.job(proposal(trial, 0), folder)
        click.echo(f"# trial {trial.number}: {view.parameters_text(trial)}\n" + _shown(study, job))


def _shown(study: Study, job: Job) -> str:
    """A job's files, environment and command line."""
    files = [f"# file {job.folder / name}\n{text.rstrip()}\n" for name, text in job.files.items()]
    variables = [f"{name}={shlex.quote(value)} \\\n" for name, value in job.environment.items()]
    return "".join((*files, *variables, shlex.join(preview(study, job)), "\n"))


if __name__ == "__main__":
    main()
