"""``python -m lora_tune.ingest --study NAME LOG...``: old MLLOG logs teach the search before, or while, it spends.

Logs, folders, .gz files and tar archives are read; each run becomes a prior observation with its source and its own
noise (``sweeps/NAME/priors.jsonl``). A driver that runs takes them into account at its next proposal.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from lora_tune.base.errors import EXIT_NOTHING_REACHED, InputError
from lora_tune.cli.options import guarded, named_study_option, output_option, sweep_paths
from lora_tune.config.parameters import LayoutParameter
from lora_tune.config.study import Study, find_study, load_study
from lora_tune.logs.log_files import log_files
from lora_tune.logs.mllog import MllogReader
from lora_tune.search.samplers import sampler_kind
from lora_tune.store.records import PriorRun, Value

MARK = b":::MLLOG"


@dataclass(frozen=True, slots=True)
class Log:
    """One log. parent: the folder or archive it came from, which names its source when the log does not."""

    name: str
    parent: str
    digest: str
    reader: MllogReader


def read_logs(paths: Sequence[Path]) -> Iterator[Log | str]:
    """Every log below ``paths``, or a sentence about a file that could not be read. Raises InputError for no file."""
    for file in log_files(paths):
        reader, digest, marked = MllogReader(), hashlib.sha256(), False
        for piece in file.pieces():
            marked = marked or MARK in piece
            digest.update(piece)
            reader.feed(piece)
        if file.problem:
            yield file.problem
        else:
            yield (
                Log(file.name, file.parent, digest.hexdigest(), reader)
                if marked
                else f"{file.name}: holds no MLLOG line"
            )


def runs_of(log: Log, study: Study, stated: Mapping[str, Value], source: str, now: float) -> Iterator[PriorRun | str]:
    """The runs of a log that teach this study something, and of the others why they do not."""
    from lora_tune.search import priors

    names = _convergence_names(study)
    fixed, own = study.search_space.fixed, study.benchmark
    for run in log.reader.runs():
        values = {**priors.values_of(run.hyperparameters, [*names, *fixed]), **stated}
        lacking = [name for name in names if name not in values]
        other = [n for n in fixed if n in values and values[n] != fixed[n] and n not in _LAYOUT_NAMES]
        origin = (source or priors.source_of(run.hyperparameters) or log.parent, log.name, log.digest)
        prior = priors.prior_run(run, values, origin, now)
        announced = run.hyperparameters.get("submission_benchmark")
        if own is not None and isinstance(announced, str) and announced != own.name:
            yield f"it is of {announced}, and this study trains {own.name}"
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
"""What decides speed, or is told by the batch size."""


def _convergence_names(study: Study) -> list[str]:
    """Tuned parameters that decide convergence, and the batch size where a layout or a parameter varies it."""
    from lora_tune.search.grey_box.features import Coordinates

    coordinates = Coordinates(distributions=study.search_space.distributions(), gpus=study.search_space.gpus)
    names = list(coordinates.convergence_names)
    layouts = any(isinstance(p, LayoutParameter) for p in study.search_space.parameters.values())
    return [*names, "GBS"] if layouts and "GBS" not in names else names


def _unusable(values: Mapping[str, Value], study: Study, names: Sequence[str]) -> str:
    """The first value that the study's scale cannot place, "" when all can be placed; ranges may be left."""
    from optuna.distributions import CategoricalDistribution

    for name in names:
        distribution, value = study.search_space.distributions().get(name), values[name]
        if isinstance(distribution, CategoricalDistribution):
            if value not in distribution.choices:
                return f"{name} = {value}"
        elif not isinstance(value, int | float) or (getattr(distribution, "log", False) and value <= 0):
            return f"{name} = {value}"
    return ""


def _given(pairs: Sequence[str]) -> dict[str, Value]:
    stated: dict[str, Value] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise InputError(f"--set {pair!r}: expected NAME=VALUE, such as LR=4e-4")
        try:
            number = float(text)
            whole = number.is_integer() and "." not in text and "e" not in text.lower()
            stated[name] = int(number) if whole else number
        except ValueError:
            stated[name] = text
    return stated


@click.command()
@named_study_option
@output_option
@click.option("--source", default="", help="who ran these, where [submitter and platform of the log, else its folder]")
@click.option("--set", "pairs", multiple=True, metavar="NAME=VALUE", help="a parameter that the logs do not state")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@guarded
def main(study_name: str, output: Path | None, source: str, pairs: tuple[str, ...], logs: tuple[Path, ...]) -> None:
    """Read old MLLOG logs (files, folders, .gz, tar) into a study as prior observations.

    Before the sweep began or while it runs. The same log again changes nothing; to take priors back, delete lines of
    sweeps/NAME/priors.jsonl.
    Exit codes: 0 something was taken or known already; 2 your input; 3 the machine; 4 nothing was usable.
    """
    from lora_tune.search import priors

    study = load_study(find_study(study_name))
    path = sweep_paths(study.name, output).priors
    known = priors.read(path)
    taken: dict[tuple[str, int], PriorRun] = {}
    left_out: Counter[str] = Counter()
    digests, stated = {run.digest for run in known}, _given(pairs)
    again = 0
    for log in read_logs(logs):
        if isinstance(log, str):
            left_out[log] += 1
        elif log.digest in digests:
            again += 1
        else:
            for at, run in enumerate(runs_of(log, study, stated, source, time.time())):
                if isinstance(run, str):
                    left_out[run] += 1
                else:
                    taken[log.digest, at] = run
                    digests.add(log.digest)
    if taken:
        priors.write(path, [*known, *taken.values()])
    _say(study, [*taken.values()], again, left_out)
    everything = priors.words([*known, *taken.values()])
    click.echo(f"{study.name} starts from {everything or 'no old run'}: {path}")
    if not sampler_kind(study).takes_old_runs:
        click.echo(f"search.sampler is {study.search.sampler}, which uses no old runs; grey_box does", err=True)
    if not taken and not again:
        raise SystemExit(EXIT_NOTHING_REACHED)


def _say(study: Study, taken: Sequence[PriorRun], again: int, left_out: Mapping[str, int]) -> None:
    """What was taken from where, and what was not and why."""
    by_source: dict[str, list[PriorRun]] = {}
    for run in taken:
        by_source.setdefault(run.source, []).append(run)
    for source, runs in by_source.items():
        reached = sum(any(e.loss <= study.target for e in run.evals) for run in runs)
        click.echo(f"{len(runs):4} from {source}: {reached} reached {study.goal}")
    if again:
        click.echo(f"{again:4} known already")
    for why, count in left_out.items():
        click.echo(f"{count:4} left out: {why}", err=True)
