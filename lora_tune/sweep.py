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


def _sweep(options: Options, workload: Workload, watcher: Any, *, say: bool) -> int:
    """Run the driver between taking and giving back the lease; returns the exit code."""
    study, paths = options.study, options.paths
    from lora_tune.search.session import Session

    try:
        launcher = make_launcher(study)
        # Simulated jobs run on their launcher's own time.
        clock = cast(Clock, launcher) if study.site.launcher == "simulated" else RealClock()
        store = _prepare(options, clock.now())
        lease = take_lease(store, study.name, clock.now())
        try:
            session = Session(study, store.url, tune_sqlite)
            ports = Ports(workload=workload, launcher=launcher, store=store, session=session, clock=clock, view=watcher)
            local = study.site.launcher == "local"
            period = 0.25 if local else 1.0
            _prepare_once(options, ports, lease, period)
            driver = Driver(study, paths, ports, lease, period=period, settle=0.0 if local else 10.0)
            outcome = run_interruptibly(driver)
            if outcome.interrupted:
                watcher.close()
                after_interrupt(driver)
        finally:
            store.release(lease)
    finally:
        watcher.close()
    if outcome.interrupted:
        return errors.EXIT_INTERRUPTED
    return _hand_over(study, driver.sweep, workload, paths, outcome, say=say)


def _prepare(options: Options, now: float) -> Store:
    """The sweep's folder and database, the study copied; refuses a study that changed since."""
    root, study = options.paths.root, options.study
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            raise PermissionError(13, "Permission denied", str(root))
    except OSError as error:
        raise errors.SurroundingsError(
            f"{error.filename}: {error.strerror}: sweeps cannot be written here; use --output FOLDER"
        ) from error
    store = open_store(options.paths, options.storage)
    text = options.file.read_text(encoding="utf-8")
    found = store.load(study.name)
    if found is None:
        store.begin(study.name, options.from_file.digest, text, now)
    elif found.digest != options.from_file.digest:
        changes = study_changes(parse_study(found.study_toml, options.file), options.from_file)
        if not options.accept_changes:
            raise errors.StudyError(
                options.file,
                "",
                f"changed since this sweep began ({'; '.join(changes)}); "
                "undo that, use another --output, or resume with --accept-changes",
            )
        store.accept_study(study.name, options.from_file.digest, text)
    options.paths.study.write_text(text, encoding="utf-8")
    return store


def _prepare_once(options: Options, ports: Ports, lease: Lease, period: float) -> None:
    """What the workload wants made before the first trial."""
    if not isinstance(ports.workload, Prepares):
        return
    from lora_tune import preparation

    def tick() -> None:
        ports.clock.sleep(period)
        ports.store.save(lease, Changes(), ports.clock.now())  # so that no other driver takes the sweep meanwhile

    how = preparation.Preparation(
        make=ports.workload.preparation,
        launcher=ports.launcher,
        now=ports.clock.now,
        tick=tick,
        say=ports.view.line,
        attempts=options.study.budget.attempts,
    )
    preparation.prepare(options.paths, how)


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
        lines.append(f"no trial reached eval loss {study.objective.target:g}")
    else:
        unit = "samples/s" if study.maximise else "s to the target"
        lines.append(
            f"best     {best.facts['objective']:.4g} {unit}, trial {best.number}: {view.parameters_text(best)}"
        )
    return "\n".join(lines)


def _dry_run(study: Study, workload: Workload, paths: SweepPaths, count: int = 2) -> None:
    """Print the first proposals, their files, environment and command lines. Writes and submits nothing."""
    from lora_tune.search.session import Session

    session = Session(study, None, tune_sqlite)
    if isinstance(workload, Prepares) and (made := workload.preparation(paths.preparation(0).folder)):
        click.echo("# before the first trial, once\n" + _shown(study, made))
    for _ in range(min(count, study.budget.trials or count)):
        asked = session.ask()
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
