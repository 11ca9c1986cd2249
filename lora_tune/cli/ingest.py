"""``python -m lora_tune.ingest --study NAME SOURCE...``: read old runs into a study as prior observations.

Sources are logs in the study's format (files, folders, .gz, tar) and records of other programs
(:mod:`lora_tune.logs.trackers`). Each run becomes a prior observation with its source and its own noise
(``sweeps/NAME/priors.jsonl``). A running driver uses them from its next proposal on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from lora_tune.base.errors import EXIT_NOTHING_REACHED, InputError
from lora_tune.base.paths import AttemptPaths
from lora_tune.cli.options import name_values, sweep_paths
from lora_tune.config.parameters import LayoutParameter
from lora_tune.config.study import Study, find_study, load_study
from lora_tune.launchers.job_runner import read_command
from lora_tune.logs.log_files import log_files
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog
from lora_tune.logs.trackers import TrackedRun, scalar, tracked_runs
from lora_tune.search import priors
from lora_tune.search.objectives import objective_of
from lora_tune.search.samplers import takes_old_runs
from lora_tune.store.records import PriorRun, Value
from lora_tune.workloads import load as load_workload

MARK = b":::MLLOG"


@dataclass(frozen=True, slots=True)
class Log:
    """One log. parent: its folder or archive, the default name of its source."""

    name: str
    parent: str
    digest: str
    runs: Sequence[RunLog]


def read_logs(paths: Sequence[Path], study: Study | None = None) -> Iterator[Log | str]:
    """Every log below ``paths``, or a sentence about a file that cannot be read. Raises InputError if there is no file.

    study: its log format is read, too; None: only MLLOG.
    """
    workload = load_workload(study, study.name) if study is not None and study.log_kind != "mllog" else None
    for file in log_files(paths):
        mllog, digest, marked = MllogReader(), hashlib.sha256(), False
        default_reader = workload.reader() if workload else None
        for piece in file.pieces():
            marked = marked or MARK in piece
            digest.update(piece)
            mllog.feed(piece)
            if default_reader is not None:
                default_reader.feed(piece)
        if default_reader is not None and default_reader.run().evals:
            yield Log(file.name, file.parent, digest.hexdigest(), [_with_command(default_reader.run(), file.name)])
        elif file.problem or not marked:
            what = "MLLOG line" if default_reader is None else "eval as the study reads it"
            yield file.problem or f"{file.name}: holds no {what}"
        else:
            yield Log(file.name, file.parent, digest.hexdigest(), mllog.runs())


def _with_command(run: RunLog, log: str) -> RunLog:
    """The run with the values of the trial's recorded command added, if the log is in a trial's folder."""
    command = read_command(AttemptPaths(Path(log).parent).job)
    if isinstance(command, str):
        return run
    pairs = {}
    for argument, following in zip(command.argv, (*command.argv[1:], ""), strict=True):
        name, equals, text = argument.lstrip("-").partition("=")
        pairs[name.replace("-", "_")] = text if equals else following
    values = {n: known for n, text in {**pairs, **command.environment}.items() if (known := scalar(text)) is not None}
    return replace(run, hyperparameters={**values, **run.hyperparameters})


def runs_of(log: Log, study: Study, stated: Mapping[str, Value], source: str, now: float) -> Iterator[PriorRun | str]:
    """The usable runs of a log as prior observations; for the others the reason why they are not."""
    names = learnt_names(study)
    fixed, default_reader = study.search_space.fixed, study.benchmark
    for run in log.runs:
        values = {**priors.values_of(run.hyperparameters, [*names, *fixed]), **stated}
        lacking = [name for name in names if name not in values]
        other = [n for n in fixed if n in values and values[n] != fixed[n] and n not in _LAYOUT_NAMES]
        origin = (source or priors.source_of(run.hyperparameters) or log.parent, log.name, log.digest)
        prior = priors.prior_run(run, values, origin, now)
        announced = run.hyperparameters.get("submission_benchmark")
        if default_reader is not None and isinstance(announced, str) and announced != default_reader.name:
            yield f"it is of {announced}, and this study trains {default_reader.name}"
        elif lacking:
            yield f"its log does not state {', '.join(lacking)}; give it with --set {lacking[0]}=VALUE"
        elif other:
            yield f"it ran with {other[0]} = {values[other[0]]}, which this study fixes to {fixed[other[0]]}"
        elif bad := _unusable(values, study, names):
            yield f"its {bad} is not a value on this study's scale"
        elif prior is None:
            yield "it has no evals"
        else:
            yield prior


_LAYOUT_NAMES = ("TP", "PP", "CP", "MINIBS", "MBS", "GBS", "DP")
"""Parameters that affect only speed, or follow from the batch size."""


def learnt_names(study: Study) -> list[str]:
    """Parameters that an old run must state: those that affect convergence, and the batch size if it is tuned.

    All tuned parameters for objectives that are no times, because their search models do not separate convergence.
    """
    if not objective_of(study).timed:
        return list(study.search_space.distributions())
    from lora_tune.search.grey_box.features import Coordinates

    coordinates = Coordinates(distributions=study.search_space.distributions(), gpus=study.search_space.gpus)
    names = list(coordinates.convergence_names)
    layouts = any(isinstance(p, LayoutParameter) for p in study.search_space.parameters.values())
    return [*names, "GBS"] if layouts and "GBS" not in names else names


def _unusable(values: Mapping[str, Value], study: Study, names: Sequence[str]) -> str:
    """The first value that does not fit the type or choices of its parameter; "" if all do. Ranges may be exceeded."""
    from optuna.distributions import CategoricalDistribution

    for name in names:
        distribution, value = study.search_space.distributions().get(name), values[name]
        if isinstance(distribution, CategoricalDistribution):
            if value not in distribution.choices:
                return f"{name} = {value}"
        elif not isinstance(value, int | float) or (getattr(distribution, "log", False) and value <= 0):
            return f"{name} = {value}"
    return ""


def _stated(pairs: Sequence[str]) -> dict[str, Value]:
    """Values by name; numeric texts as numbers."""
    texts = name_values(pairs, "--set")
    return {name: text if (known := scalar(text)) is None else known for name, text in texts.items()}


def run(
    study_name: str, output: Path | None, source: str, pairs: tuple[str, ...], maps: tuple[str, ...], yes: bool,
    json_: bool, sources: tuple[str, ...],
) -> None:  # fmt: skip
    """Run ``ingest``; options: cli/commands.py."""
    study = load_study(find_study(study_name))
    path = sweep_paths(study.name, output).priors
    known, stated, gathered = priors.read(path), _stated(pairs), Gathered(quiet=json_)
    logs: list[Path] = []
    for name in sources:
        runs = tracked_runs(name)
        if runs is None:
            logs.append(Path(name))
        else:
            gathered.table(study, runs, name_values(maps, "--map", "COLUMN"), stated, yes)
    if logs:
        gathered.logs(study, logs, stated, source)
    fresh = gathered.without(known)
    if fresh:
        priors.write(path, [*known, *fresh])
    if json_:
        click.echo(json.dumps(_as_json(gathered, len(fresh), path)))
    else:
        _print_result(study, fresh, len(gathered.taken) - len(fresh), gathered.left_out)
    if gathered.shown:
        click.echo(
            "nothing of these is taken yet: look at the columns, correct them with --map, and add --yes", err=json_
        )
    everything = priors.describe([*known, *fresh])
    click.echo(f"{study.name} starts from {everything or 'no old run'}: {path}", err=json_)
    if not takes_old_runs(study):
        click.echo(f"search.sampler is {study.search.sampler}, which uses no old runs here", err=True)
    if not gathered.taken and not gathered.shown:
        raise SystemExit(EXIT_NOTHING_REACHED)


class Gathered:
    """Prior observations of all sources, and counts of unusable runs by reason."""

    def __init__(self, *, quiet: bool = False) -> None:
        """quiet: print columns on stderr."""
        self.quiet = quiet
        self.taken: list[PriorRun] = []
        self.left_out: Counter[str] = Counter()
        self.shown = False

    def logs(self, study: Study, paths: Sequence[Path], stated: Mapping[str, Value], source: str) -> None:
        """Add the runs of logs."""
        for log in read_logs(paths, study):
            log_runs = [log] if isinstance(log, str) else runs_of(log, study, stated, source, time.time())
            self._take(log_runs)

    def table(
        self,
        study: Study,
        runs: Sequence[TrackedRun],
        mapped: Mapping[str, str],
        stated: Mapping[str, Value],
        yes: bool,
    ) -> None:
        """Print the column mapping of another program's runs; add the runs if ``yes``."""
        names = learnt_names(study)
        columns = priors.columns_of(study, names, runs, mapped, stated)
        for line in priors.described(study, columns, runs, stated):
            click.echo(line, err=self.quiet)
        if columns.lacking or not columns.metric:
            lacking = [*columns.lacking, *([] if columns.metric else [priors.EVAL])]
            raise InputError(f"{runs[0].source}: no column for {', '.join(lacking)}: see --map and --set")
        self.shown = self.shown or not yes
        if yes:
            read = (priors.tracked_prior(run, columns, study, stated, time.time()) for run in runs)
            self._take(_usable(prior, study, names) for prior in read)

    def _take(self, runs: Iterable[PriorRun | str]) -> None:
        for run in runs:
            if isinstance(run, str):
                self.left_out[run] += 1
            else:
                self.taken.append(run)

    def without(self, known: Sequence[PriorRun]) -> list[PriorRun]:
        """The distinct runs that are not in ``known``. All runs of a log share its digest."""
        before = {run.digest for run in known}
        fresh, duplicates = [], set[tuple[str, str]]()
        for run in self.taken:
            mark = (run.digest, repr(run.evals))
            if run.digest not in before and mark not in duplicates:
                duplicates.add(mark)
                fresh.append(run)
        return fresh


def _usable(prior: PriorRun | str, study: Study, names: Sequence[str]) -> PriorRun | str:
    if isinstance(prior, str) or not (bad := _unusable(prior.values, study, names)):
        return prior
    return f"its {bad} is not a value on this study's scale"


def _as_json(gathered: Gathered, taken: int, file: Path) -> dict[str, object]:
    return {
        "taken": taken,
        "known": len(gathered.taken) - taken,
        "left_out": dict(gathered.left_out),
        "only_shown": gathered.shown,
        "file": str(file),
    }


def _print_result(study: Study, taken: Sequence[PriorRun], known: int, left_out: Mapping[str, int]) -> None:
    """Print counts of added runs by source, and of the others by reason."""
    by_source: dict[str, list[PriorRun]] = {}
    for run in taken:
        by_source.setdefault(run.source, []).append(run)
    for source, runs in by_source.items():
        reached = sum(any(e.loss <= study.target for e in run.evals) for run in runs)
        click.echo(f"{len(runs):4} from {source}: {reached} reached {study.goal}")
    if known:
        click.echo(f"{known:4} known already")
    for why, count in left_out.items():
        click.echo(f"{count:4} left out: {why}", err=True)
