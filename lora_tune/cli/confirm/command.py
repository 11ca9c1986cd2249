"""The command: drive the race like a sweep, then write the result folder and note the outcome in the sweep."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from lora_tune import store as stores
from lora_tune.base import errors
from lora_tune.base.paths import SweepPaths, near
from lora_tune.base.text import redact
from lora_tune.cli import export, report
from lora_tune.cli.confirm.outcome import Confirmation, as_json, confirmation, confirmed, summary
from lora_tune.cli.confirm.race import SEEDS_OFFSET, Race, contenders, introduction, race_settings, with_seeds
from lora_tune.cli.confirm.submission import check, run_text, say_checks, write_results
from lora_tune.cli.interrupts import after_interrupt, make_view, run_interruptibly, writing_results
from lora_tune.cli.options import (
    Review,
    again,
    load_review,
    people_if_known,
    typed,
)
from lora_tune.config.study import Study
from lora_tune.config.tables import Pruning
from lora_tune.controller.changed_study import refuse_departed
from lora_tune.controller.driver import proposal
from lora_tune.controller.runtime import (
    DrivePlan,
    Environment,
    at_work,
    given_back,
    make_clock,
    own_folder,
    preflight_warnings,
)
from lora_tune.launchers import make_launcher, preview
from lora_tune.review.stopping import Replicate, replicates
from lora_tune.search.comparison import ComparisonRules
from lora_tune.search.objectives import objective_of
from lora_tune.search.race_scale import scale_of
from lora_tune.store import Changes
from lora_tune.store.leases import take_lease
from lora_tune.store.locate import open_store
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import seeds_per_job

SUFFIX = ".confirm"
"""Ends the name under which the replicates' records stand in the sweep's database, and their jobs' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line and the sweep that it speaks of. study: for replicates, nothing of which is stopped early.

    per_job: seeds that one job can run.
    """

    review: Review
    study: Study
    paths: SweepPaths
    storage: str | None
    field: tuple[Trial, ...]
    settings: ComparisonRules
    per_job: int


_RACE = ("top", "seeds", "confidence", "parallel", "budget_node_hours", "launcher")
"""Options without which the line that goes on would be another race."""

USUAL_RUNS = 10
"""Most runs of a configuration where no rules say how many a result takes."""


def run(
    study_name: str,
    top: int,
    seeds: int | None,
    confidence: float,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **more: Any,
) -> None:
    """What ``confirm`` does; see cli/commands.py for its options."""
    review = load_review(study_name, more["output"], more["storage"])
    scale = scale_of(review.study)
    if seeds == 1 and not scale.prior_freedom:
        raise errors.InputError("--seeds 1: how far values differ between seeds shows from 2 runs on; give 2 or more")
    benchmark = review.study.benchmark
    seeds = seeds or (benchmark.runs if benchmark else USUAL_RUNS)
    per_job = seeds_per_job(load_workload(review.study, review.file))
    study = replicate_study(review.study, more["parallel"], more["budget_node_hours"], more["launcher"])
    field = tuple(contenders(review.study, review.sweep, top))
    options = Options(
        review=review,
        study=study,
        paths=SweepPaths(review.paths.root / "confirm"),
        storage=more["storage"],
        field=field,
        settings=race_settings(study, len(field), seeds, per_job=per_job, confidence=confidence, scale=scale),
        per_job=per_job,
    )
    if dry_run:
        _dry_run(options)
        return
    sys.exit(_confirm(options, make_view(quiet, as_json), say=not as_json))


def replicate_study(study: Study, parallel: int | None, node_hours: float | None, launcher: str | None) -> Study:
    """The study as its replicates run: nothing is pruned or capped, no budget of trials, seeds of their own.

    Raises InputError for a name that has no room for the suffix, or an option that does not fit.
    """
    name = study.name + SUFFIX
    if len(name) > 64:
        raise errors.InputError(f"{study.name}: too long to confirm; at most {64 - len(SUFFIX)} characters are allowed")
    changed = study.with_options(
        {"budget": {"parallel": parallel, "node_hours": node_hours}, "site": {"launcher": launcher}}
    )
    limits = {"trials": None, "wall_hours": None, "node_hours": node_hours}
    return changed.model_copy(
        update={
            "name": name,
            "pruning": Pruning(rule="none", cap=False),
            "search": study.search.model_copy(update={"seed": study.search.seed + SEEDS_OFFSET, "enqueue": ()}),
            "budget": changed.budget.model_copy(update=limits),
        }
    )


def _plan(options: Options) -> DrivePlan:
    review = options.review
    return DrivePlan(
        file=review.file,
        text=review.sweep.study_toml,
        study=options.study,
        from_file=review.study,
        options={},
        paths=options.paths,
        workload=load_workload(options.study, review.file),
    )


def _confirm(options: Options, watcher: Any, *, say: bool) -> int:
    """Run the race between taking and giving back its lease, then hand over; returns the exit code."""
    study, review = options.study, options.review
    plan = _plan(options)
    preflight_warnings(
        plan.workload, study, options.paths
    )  # what is surely missing is said before anything is recorded
    options.paths.root.mkdir(parents=True, exist_ok=True)
    if say:
        click.echo(introduction(options.review.study, options.field, options.settings))
    launcher = make_launcher(study, options.paths.packs)
    clock = make_clock(study, launcher)
    environment = Environment(launcher=launcher, clock=clock, view=watcher, pause=clock.sleep, fixed=True)
    refuse_departed(review.sweep, plan.workload, "put it back before its trials are run again")
    store = open_store(review.paths, options.storage)
    try:
        store.begin(study.name, review.sweep.digest, review.sweep.study_toml, clock.now())
        lease = take_lease(store, study.name, clock.now())
        race = Race(
            review.study, options.field, options.settings, lambda: driving.sweep,
            per_job=options.per_job, say=watcher.line,
        )  # fmt: skip
        # What the sweep prepared serves its replicates.
        with (
            given_back(store, lease),
            own_folder(plan, store, lease) as lock,
            at_work(plan, store, lease, environment, lambda: race, review.paths, lock) as driving,
        ):
            outcome = run_interruptibly(driving)
            if outcome.interrupted:
                watcher.close()
                after_interrupt(driving, again("confirm", review.study.name, *typed(*_RACE)))
        watcher.close()
        if outcome.interrupted:
            return errors.EXIT_INTERRUPTED
        runs = replicates(driving.sweep)
        verdict = confirmation(review.study, driving.sweep, options.field, runs, race.standing())
        if verdict is None:
            click.echo(f"no verdict: {outcome.reason}; rerun the same command with a larger budget")
            return errors.EXIT_DONE
        with writing_results(again("confirm", review.study.name, *typed(*_RACE))):
            return _hand_over(options, store, driving.sweep, verdict, runs, clock.now(), say=say)
    finally:
        watcher.close()
        store.close()


Runs = dict[int, list[Replicate]]


def _hand_over(
    options: Options, store: stores.Store, race: StudyRecords, verdict: Confirmation, runs: Runs, now: float,
    *, say: bool,
) -> int:  # fmt: skip
    """Note the outcome in the sweep, write the result folder, the config and the report; returns the exit code."""
    review = options.review
    sweep = _noted(options, store, verdict, runs, now)
    timed = objective_of(review.study).timed
    folder = review.paths.confirm(verdict.chosen) if verdict.chosen is not None and timed else None
    checks = None
    if folder is not None and verdict.chosen is not None:
        write_results(folder, _texts(options, race, runs[verdict.chosen][: options.settings.most]))
        benchmark = review.study.benchmark
        checks = check(folder, review.study.ruleset(benchmark.name) if benchmark else None)
    record = {
        **as_json(verdict),
        "checks": asdict(checks) if checks else None,
        "confidence": options.settings.confidence,
    }
    text = json.dumps(record, indent=1, default=str)
    (options.paths.root / "confirmation.json").write_text(text + "\n", encoding="utf-8")
    written = export.export_best(review.study, sweep, load_workload(review.study, review.file), review.paths.best)
    report.write_report(review.study, sweep, review.paths.report, people_if_known(store, review.study.name))
    if say:
        click.echo("\n" + summary(review.study, sweep, verdict))
        say_checks(checks, folder)
        if written is not None:
            click.echo(f"config   {near(written.path)}\nreport   {near(review.paths.report)}")
        if verdict.more_runs:
            click.echo(f"go on    {with_seeds(review.study, len(options.field), verdict.seeds)}")
    else:
        click.echo(json.dumps({"event": "confirmation", **json.loads(text)}))
    return errors.EXIT_NOTHING_REACHED if verdict.chosen is None else errors.EXIT_DONE


def _noted(options: Options, store: stores.Store, verdict: Confirmation, runs: Runs, now: float) -> StudyRecords:
    """The sweep with the outcome among its trials, written down if nobody drives it."""
    sweep = store.load(options.review.sweep.name) or options.review.sweep
    changed = confirmed(sweep, verdict, runs)
    try:
        lease = take_lease(store, sweep.name, now)
    except errors.SweepBusyError as error:
        click.echo(f"{error}; the outcome is not recorded in it: rerun the same command afterwards", err=True)
        return sweep
    try:
        store.save(lease, Changes(trials=tuple(changed)), now)
    finally:
        store.release(lease)
    noted = store.load(sweep.name)
    assert noted is not None
    return noted


def _texts(options: Options, race: StudyRecords, runs: Sequence[Replicate]) -> list[str]:
    """The log of each run."""
    workload = load_workload(options.study, options.review.file)
    texts = []
    for run in runs:
        trial = race.trials[run.trial]
        attempt = race.attempts_of(run.trial)[-1]
        job = workload.job(proposal(trial, attempt.number), options.paths.root / attempt.folder)
        texts.append(run_text(job, run.position))
    return texts


def _dry_run(options: Options) -> None:
    """Print who would race and the first job of each. Writes and submits nothing."""
    click.echo(introduction(options.review.study, options.field, options.settings))
    workload = load_workload(options.study, options.review.file)
    for number, trial in enumerate(options.field):
        seed = options.study.trial_seed(number * options.settings.fewest)
        again = Trial(
            number=number,
            seed=seed,
            tuned=trial.tuned,
            parameters=trial.parameters,
            replicates=min(options.per_job, options.settings.most),
        )
        job = workload.job(proposal(again, 0), options.paths.attempt(number, 0).folder)
        seeds = " ".join(str(seed + i) for i in range(again.replicates))
        click.echo(f"\n# trial {trial.number} again, seeds {seeds}\n{redact(shlex.join(preview(options.study, job)))}")
