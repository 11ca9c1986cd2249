"""``lora-tune confirm``: run more seeds of the leading configurations until one is shown to be better."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from lora_tune import store as stores
from lora_tune.base import errors
from lora_tune.base.errors import InputError, SetupError
from lora_tune.base.paths import SweepPaths, display_path
from lora_tune.base.text import counted, redact
from lora_tune.cli import export, report
from lora_tune.cli.confirm_outcome import (
    Confirmation,
    as_json,
    check,
    confirmation,
    confirmed,
    print_checks,
    run_text,
    summary,
    write_results,
)
from lora_tune.cli.interrupts import after_interrupt, make_view, run_interruptibly, writing_results
from lora_tune.cli.options import (
    Review,
    command_line,
    feedback_if_known,
    load_review,
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
    locked_folder,
    make_clock,
    preflight_warnings,
    release_at_exit,
)
from lora_tune.launchers import make_launcher, preview
from lora_tune.logs.run import Eval
from lora_tune.review.stopping import Replicate, name_of, replicates, results
from lora_tune.review.summary import parameters_text, race_text
from lora_tune.search.comparison import ComparisonPlan, ComparisonRules, plan
from lora_tune.search.noise import Noise, noise_of, scale_of
from lora_tune.search.objectives import objective_of
from lora_tune.search.recommendation import leaders, recommend
from lora_tune.store import Changes, open_store
from lora_tune.store.leases import take_lease
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict
from lora_tune.workloads import load as load_workload

if TYPE_CHECKING:
    from lora_tune.search.session import SearchPoint


SUFFIX = ".confirm"
"""Suffix of the race's name in the sweep's database and of its job names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line and its sweep. study: of the replicates, without early stopping.

    per_job: seeds that one job can run. resume: the command line that continues the race.
    """

    review: Review
    study: Study
    paths: SweepPaths
    storage: str | None
    field: tuple[Trial, ...]
    settings: ComparisonRules
    per_job: int
    resume: str


_RACE = ("top", "seeds", "confidence", "parallel", "budget_node_hours", "launcher")
"""Options that define the race: the resume command line repeats them."""

USUAL_RUNS = 10
"""Default maximum of runs of a configuration if no benchmark rules set it."""


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
    """Run ``confirm``; options: cli/commands.py."""
    review = load_review(study_name, more["output"], more["storage"])
    study = replicate_study(review.study, more["parallel"], more["budget_node_hours"], more["launcher"])
    resume = command_line("confirm", review.study.name, *typed(*_RACE))
    options = _options(review, study, more["storage"], top=top, seeds=seeds, confidence=confidence, resume=resume)
    if dry_run:
        _dry_run(options)
        return
    sys.exit(_confirm(options, make_view(quiet, as_json), verbose=not as_json))


def confirm_recommended(review: Review, storage: str | None, resume: str, *, verbose: bool) -> int:
    """Run the recommended configuration as often as a submission requires; returns the exit code.

    resume: the command line that continues after an interrupt. verbose: print text; else JSON.
    """
    study = replicate_study(review.study, None, None, None)
    options = _options(review, study, storage, top=1, seeds=None, confidence=CONFIDENCE, resume=resume)
    return _confirm(options, make_view(False, not verbose), verbose=verbose)


def _options(
    review: Review, study: Study, storage: str | None, *, top: int, seeds: int | None, confidence: float, resume: str
) -> Options:
    """study: of the replicates."""
    benchmark = review.study.benchmark
    if seeds == 1 and not scale_of(review.study).relative:
        raise errors.InputError("--seeds 1: how far values differ between seeds shows from 2 runs on; give 2 or more")
    seeds = seeds or (benchmark.runs if benchmark else USUAL_RUNS)
    per_job = load_workload(review.study, review.file).seeds_per_job
    field = tuple(contenders(review.study, review.sweep, top))
    noise = noise_of(review.study, review.sweep)
    settings = race_settings(study, len(field), seeds, per_job=per_job, confidence=confidence, noise=noise)
    return Options(
        review=review, study=study, paths=SweepPaths(review.paths.root / "confirm"), storage=storage, field=field,
        settings=settings, per_job=per_job, resume=resume,
    )  # fmt: skip


def replicate_study(study: Study, parallel: int | None, node_hours: float | None, launcher: str | None) -> Study:
    """The study for replicates: no pruning, no cap, no trial budget, separate seeds.

    Raises InputError if the name is too long for the suffix, or for an option that does not fit.
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


def _confirm(options: Options, watcher: Any, *, verbose: bool) -> int:
    """Run the race under its lease, then write the results; returns the exit code."""
    study, review = options.study, options.review
    plan = _plan(options)
    preflight_warnings(plan.workload, study, options.paths)  # reports what is missing before anything is recorded
    options.paths.root.mkdir(parents=True, exist_ok=True)
    if verbose:
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
            per_job=options.per_job, echo=watcher.line,
        )  # fmt: skip
        # Replicates reuse what the sweep prepared.
        with (
            release_at_exit(store, lease),
            locked_folder(plan, store, lease) as lock,
            at_work(plan, store, lease, environment, lambda: race, review.paths, lock) as driving,
        ):
            outcome = run_interruptibly(driving)
            if outcome.interrupted:
                watcher.close()
                after_interrupt(driving, options.resume)
        watcher.close()
        if outcome.interrupted:
            return errors.EXIT_INTERRUPTED
        runs = replicates(driving.sweep)
        verdict = confirmation(review.study, driving.sweep, options.field, runs, race.comparison(), options.settings)
        if verdict is None:
            click.echo(f"no verdict: {outcome.reason}; rerun the same command with a larger budget")
            return errors.EXIT_DONE
        with writing_results(options.resume):
            return _conclude(options, store, driving.sweep, verdict, runs, clock.now(), verbose=verbose)
    finally:
        watcher.close()
        store.close()


Runs = dict[int, list[Replicate]]


def _conclude(
    options: Options, store: stores.Store, race: StudyRecords, verdict: Confirmation, runs: Runs, now: float,
    *, verbose: bool,
) -> int:  # fmt: skip
    """Record the outcome in the sweep, write result folder, config and report; returns the exit code."""
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
    report.write_report(review.study, sweep, review.paths.report, feedback_if_known(store, review.study.name))
    if verbose:
        click.echo("\n" + summary(review.study, sweep, verdict))
        print_checks(checks, folder)
        if written is not None:
            click.echo(f"config   {display_path(written.path)}\nreport   {display_path(review.paths.report)}")
        if verdict.more_runs:
            click.echo(f"go on    {with_seeds(review.study, len(options.field), verdict.seeds)}")
    else:
        click.echo(json.dumps({"event": "confirmation", **json.loads(text)}))
    return errors.EXIT_NOTHING_REACHED if verdict.chosen is None else errors.EXIT_DONE


def _noted(options: Options, store: stores.Store, verdict: Confirmation, runs: Runs, now: float) -> StudyRecords:
    """The sweep with the outcome in its trials; saved only if no driver holds the lease."""
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
    """Print the contenders and the first job of each. Writes and submits nothing."""
    click.echo(introduction(options.review.study, options.field, options.settings))
    workload = load_workload(options.study, options.review.file)
    for number, trial in enumerate(options.field):
        seed = options.study.trial_seed(number * options.settings.fewest)
        replicate = Trial(
            number=number,
            seed=seed,
            tuned=trial.tuned,
            parameters=trial.parameters,
            replicates=min(options.per_job, options.settings.most),
        )
        job = workload.job(proposal(replicate, 0), options.paths.attempt(number, 0).folder)
        seeds = " ".join(str(seed + i) for i in range(replicate.replicates))
        click.echo(f"\n# trial {trial.number} again, seeds {seeds}\n{redact(shlex.join(preview(options.study, job)))}")


SEEDS_OFFSET = 1000
"""Added to ``search.seed``, so that replicates share no seed with the sweep's first million trials."""

TOP = 3
"""Default number of configurations in a race."""

CONFIDENCE = 0.95
"""Default confidence that the winner is better."""

FAILURES = 3
"""Infrastructure failures of one configuration's replicates after which the race stops."""


FEWEST = 3
"""Runs of each configuration before the first interim analysis."""


def race_settings(
    study: Study, field: int, seeds: int, *, per_job: int, confidence: float, noise: Noise | None = None
) -> ComparisonRules:
    """Rules to compare ``field`` configurations with at most ``seeds`` runs each. per_job: seeds that one job can run.

    If trials share a job, as many run between two analyses as fit at once: concurrent runs cost less than a job that
    waits for the next analysis.
    """
    at_once = study.budget.parallel // field if study.site.slots is not None else 1
    return ComparisonRules(
        confidence=confidence,
        fewest=min(max(FEWEST, at_once), seeds),
        most=seeds,
        batch=min(max(per_job, at_once), seeds),
        scale=scale_of(study),
        noise=noise,
    )


def contenders(study: Study, sweep: StudyRecords, top: int) -> list[Trial]:
    """The ``top`` leading trials with distinct configurations; first the recommended one, if it was run.

    Raises InputError if no trial reached the target.
    """
    field: list[Trial] = []
    recommended = recommend(study, sweep)
    first = [recommended.trial] if recommended is not None and recommended.ran else []
    for trial in [*first, *leaders(study, sweep)]:
        if all(trial.parameters != other.parameters for other in field):
            field.append(trial)
    if not field:
        raise InputError(f"{study.name}: {objective_of(study).nothing}; nothing to confirm")
    return field[:top]


class Race:
    """Proposes replicates to the driver, in place of a sampler. All its state follows from the records.

    study: of the sweep. records: returns the race's current records. per_job: seeds that one job can run. echo: prints
    the standings each time as many runs have ended as there are configurations.
    """

    def __init__(
        self,
        study: Study,
        field: Sequence[Trial],
        settings: ComparisonRules,
        records: Callable[[], StudyRecords],
        *,
        per_job: int,
        echo: Callable[[str], None],
    ) -> None:
        self._study, self._field, self._settings, self._records = study, field, settings, records
        self._per_job, self._echo = per_job, echo
        self._failed: Counter[int] = Counter()
        self._reported = 0

    def comparison(self) -> ComparisonPlan:
        """The current comparison."""
        runs = results(replicates(self._records()), [t.number for t in self._field])
        return plan(runs, self._settings)

    def ask(self) -> SearchPoint | str:
        """The next job, or why there is none. Raises SetupError if a configuration keeps failing on infrastructure."""
        records = self._records()
        done, standing = replicates(records), self.comparison()
        going = [t for t in records.trials.values() if t.state is not TrialState.FINISHED]
        for trial in self._field:
            known = len(done.get(trial.number, ())) + sum(t.replicates for t in going if t.replicate_of == trial.number)
            short = standing.required.get(name_of(trial.number), 0) - known
            if short > 0:
                self._refuse_failing(trial)
                return self._replicate(trial, known, min(short, self._per_job), records)
        if standing.verdict:
            return standing.verdict.sentence
        return "1 run goes on" if len(going) == 1 else f"{len(going)} runs go on"

    def _replicate(self, trial: Trial, measured: int, count: int, records: StudyRecords) -> SearchPoint:
        from lora_tune.search.session import SearchPoint  # imports Optuna, which takes a second

        number = max((t.number + t.replicates for t in records.trials.values()), default=0)
        which = f"run {measured + 1}" if count == 1 else f"runs {measured + 1} to {measured + count}"
        return SearchPoint(
            number, trial.tuned, f"{which} of {name_of(trial.number)} again", trial.number, trial.parameters, count
        )

    def _refuse_failing(self, trial: Trial) -> None:
        if self._failed[trial.number] < FAILURES:
            return
        raise SetupError(
            f"{FAILURES} replicates of {name_of(trial.number)} failed for reasons of the machine; see driver.log, "
            "fix it and rerun the same command"
        )

    def report(self, number: int, evals: Sequence[Eval]) -> None:
        """Do nothing: replicates are not stopped early."""

    def tell(self, record: Trial) -> None:
        """Record a finished replicate and print the standings after each round."""
        if record.verdict is Verdict.FAILED and record.replicate_of is not None:
            self._failed[record.replicate_of] += 1
        done = replicates(self._records())
        finished = {t.number: done[t.number] for t in self._field if t.number in done}
        rounds = sum(map(len, finished.values())) // len(self._field)
        if rounds > self._reported:
            self._reported = rounds
            self._echo("so far: " + "; ".join(race_text(self._study, finished, self._settings)))


def introduction(study: Study, field: Sequence[Trial], settings: ComparisonRules) -> str:
    """The contenders, one line each, and the number of runs."""
    text = objective_of(study).text
    lines = [f"{name_of(t.number):>10}  {text(t.objective)} in one run: {parameters_text(t)}" for t in field]
    least, most = min(settings.fewest, settings.most) * len(field), settings.most * len(field)
    runs = f"{least} to {most} runs" if least < most else counted(most, "runs")
    runs += f", equally many of each, at most {settings.most}"
    return "\n".join([*lines, f"{runs}; the sweep's own run of each, picked as the luckiest, is not counted"])


def with_seeds(study: Study, configurations: int, seeds: int) -> str:
    """The command line that confirms ``configurations`` configurations with ``seeds`` runs each."""
    top = [] if configurations == TOP else ["--top", str(configurations)]
    return command_line(
        "confirm", study.name, *top, "--seeds", str(seeds), *typed("confidence", "parallel", "launcher")
    )
