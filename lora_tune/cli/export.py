"""Export the recommended configuration in the form that its workload's users run by hand: ``best/config_*.sh``."""

from __future__ import annotations

import datetime
import json
import platform
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lora_tune.base import VERSION
from lora_tune.base.errors import InputError, NothingReachedError
from lora_tune.base.host import installed
from lora_tune.base.paths import display_path
from lora_tune.base.text import visible
from lora_tune.cli.options import command_line, load_review, python
from lora_tune.config.study import Study
from lora_tune.controller.changed_study import base_trial, departed, refuse_departed
from lora_tune.controller.conclusion import estimate_text
from lora_tune.review import config_check, importance
from lora_tune.review.stopping import runs_text
from lora_tune.review.summary import best_run_text, objective_text, recommended_text, time_interval, trial_name
from lora_tune.search.no_effect import no_effect
from lora_tune.search.noise import scale_of
from lora_tune.search.objectives import objective_of
from lora_tune.search.pace import clock_text
from lora_tune.search.recommendation import Recommended, nearest, nearest_text, recommend
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import Proposal, Workload

_PACKAGES = ("optuna", "submitit", "torch")


@dataclass(frozen=True, slots=True)
class Written:
    """An export's main file, the command line that runs it, and the other files that it names."""

    path: Path
    usage: str
    others: Sequence[str] = ()


def provenance(
    study: Study, trial: Trial, now: datetime.datetime, recommended: Recommended | None = None
) -> tuple[str, ...]:
    """The origin of an exported config, one line each: tool, study, seeds, score and interval.

    now: time of the export. recommended: its estimate, if the trial is the recommendation.
    """
    ended = trial.finished_at
    measured = f", measured on {datetime.datetime.fromtimestamp(ended, datetime.UTC):%Y-%m-%d}" if ended else ""
    # Reports only packages of this environment: torch may be in a container or on another machine.
    versions = ", ".join(f"{name} {release}" for name in _PACKAGES if (release := installed(name)))
    recommendation: tuple[str, ...] = ()
    if recommended is not None:
        recommendation = (
            f"recommended: {recommended_text(study, recommended)}",
            f"best single run: {best_run_text(study, recommended)}",
        )
    return (
        f"Exported by lora_tune {VERSION} on {now:%Y-%m-%d %H:%M} UTC",
        f"study {study.name}, hash {study.digest}, {trial_name(trial)}{measured}",
        *recommendation,
        *(() if trial.verdict is None else _results(study, trial, selected=recommended is not None)),
        *_confirmed(study, trial),
        f"{versions}, Python {platform.python_version()}",
    )


def _results(study: Study, trial: Trial, *, selected: bool) -> Iterator[str]:
    """The trial's result, and its score if that differs.

    selected: the trial was selected by its result, so no interval of this single run is printed.
    """
    metrics, score = trial.metrics, trial.metrics.objective
    seed = f"1 run, seed {trial.seed if metrics.seed is None else metrics.seed}"
    objective = objective_of(study)
    if score is None:
        yield f"{study.goal} was NOT reached: {trial.verdict or trial.state}: {trial.sentence}; {seed}"
        return
    if not objective.timed:
        yield "; ".join(filter(None, (f"{objective.name}: {objective.text(score)}", clock_text(study, trial), seed)))
        return
    assert trial.seconds is not None
    assert trial.samples is not None
    low, high = time_interval(trial)
    within = "" if selected else f"90% interval {low:.1f} to {high:.1f} s; "
    result = f"time to {study.goal}: {trial.seconds:.3f} s; {within}{study.counted(trial.samples)}; {seed}"
    yield "; ".join(filter(None, (result, estimate_text(metrics))))
    if metrics.packed_seconds is not None:
        yield f"this time is that of the trial alone; beside others in a pack it took {metrics.packed_seconds:.1f} s"
    by_clock = score if metrics.clock_objective is None else metrics.clock_objective
    if by_clock != trial.seconds:
        scale = by_clock / trial.seconds
        within = "" if selected else f", 90% interval {scale * low:.1f} to {scale * high:.1f} s"
        yield f"score, {objective_text(study)}: {by_clock:.1f} s{within}"
    if machine := clock_text(study, trial):
        yield machine


def _confirmed(study: Study, trial: Trial) -> Iterator[str]:
    """The result of ``confirm`` for the trial's configuration."""
    race = trial.metrics.confirmed
    if race is None:
        return
    sentence = runs_text(race.runs, race.missed, scale_of(study))
    if race.seconds is not None and race.low is not None and race.high is not None:
        objective = objective_of(study)
        if objective.timed:
            sentence += f"; mean {race.seconds:.1f} s, 90% interval {race.low:.1f} to {race.high:.1f} s"
        else:
            mean, low, high = (objective.text(value) for value in (race.seconds, race.low, race.high))
            sentence += f"; mean {mean}, 90% interval {low} to {high}"
    yield f"{race.choice} with further seeds{seeds_text(race.seeds)}: {sentence}"
    if race.score:
        yield race.score


def seeds_text(seeds: Sequence[int]) -> str:
    """Seeds as text after a space; "" if an earlier release recorded none."""
    ordered = sorted(seeds)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[0] + len(ordered))):
        return f" {ordered[0]} to {ordered[-1]}"
    return f" {', '.join(map(str, ordered))}" if ordered else ""


def export_trial(
    study: Study, trial: Trial, workload: Workload, folder: Path, recommended: Recommended | None = None
) -> Written:
    """Write the export of ``trial`` into ``folder``, and its data as JSON and TOML.

    recommended: its estimate, if the trial is the recommendation.
    """
    proposal = Proposal(number=trial.number, attempt=0, seed=trial.seed, parameters=trial.parameters)
    lines = provenance(study, trial, datetime.datetime.now(datetime.UTC), recommended)
    exported = workload.export(proposal, lines)
    main_file, *others = exported.files
    data = config_check.sidecar(study, trial, main_file, exported.usage, lines, recommended)
    stem = main_file.removesuffix(".sh")
    sidecars = {
        f"{stem}.json": json.dumps(data, indent=2, ensure_ascii=False) + "\n",
        f"{stem}.toml": config_check.toml_text(data),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**exported.files, **sidecars}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return Written(folder / main_file, exported.usage, others)


def export_best(study: Study, sweep: StudyRecords, workload: Workload, folder: Path) -> Written | None:
    """Replace the export in ``folder`` by the recommendation; returns None, and writes nothing, if there is none."""
    recommended = recommend(study, sweep)
    if recommended is None:
        return None
    for old in folder.glob("config_*") if folder.is_dir() else ():
        old.unlink()
    return export_trial(study, recommended.trial, workload, folder, recommended)


def as_measured(workload: Workload, sweep: StudyRecords) -> Workload:
    """The workload with the base config as the sweep recorded it, if it did."""
    base = base_trial(sweep)
    if base is None or not base.base_values:
        return workload
    return workload.as_recorded(str(base.metrics.base), base.base_values)


def typed(written: Written, workload: Workload) -> str:
    """The command line that runs an export from the working directory.

    Some workloads have a config folder, from which their configs are sourced.
    """
    line = written.usage
    for name in (written.path.name, *written.others) if workload.config_folder() is None else ():
        file = shlex.quote(display_path(written.path.parent / name)).replace("\\", r"\\")
        line = re.sub(rf"(?<![^\s=]){re.escape(name)}(?!\S)", file, line)
    return line.replace(" python -m ", f" {python()} -m ")


def chosen(
    study: Study, sweep: StudyRecords, number: int | None, *, nearest_run: bool = False
) -> tuple[Trial, Recommended | None]:
    """Trial ``number``, or the recommendation; with ``nearest_run`` the trial nearest to an unreached target.

    Raises InputError or NothingReachedError.
    """
    closest = nearest(study, sweep)
    if nearest_run and number is None and closest is not None:
        return closest.trial, None
    if number is None:
        if (recommended := recommend(study, sweep)) is None:
            if idle := no_effect(study, sweep):
                raise NothingReachedError(f"{study.name}: {idle.sentence}")
            hint = ""
            if closest:
                hint = f"; {nearest_text(closest)}; to export it: {command_line('export', study.name, '--nearest')}"
            raise NothingReachedError(f"{study.name}: {objective_of(study).nothing} yet{hint}")
        return recommended.trial, recommended
    if number not in sweep.trials:
        raise InputError(f"--trial {number}: {study.name} has no such trial; there are {_ranges(list(sweep.trials))}")
    trial = sweep.trials[number]
    if trial.metrics.objective is None:
        raise InputError(f"--trial {number}: it did not reach {study.goal} ({trial.verdict or trial.state})")
    return trial, None


def _ranges(numbers: Sequence[int]) -> str:
    return f"0 to {max(numbers)}" if numbers else "none"


def run(
    study_name: str,
    storage: str | None,
    output: Path | None,
    json_: bool,
    number: int | None,
    nearest_run: bool,
    folder: Path | None,
    base: Path | None,
    check: bool,
) -> None:
    """Run ``export``; options: cli/commands.py."""
    review = load_review(study_name, output, storage)  # the recorded study, whatever its file says now
    trial, recommended = chosen(review.study, review.sweep, number, nearest_run=nearest_run)
    workload = as_measured(load_workload(review.study, review.file), review.sweep)
    written = export_trial(review.study, trial, workload, folder or review.paths.best, recommended)
    if json_:
        if base is not None or check:
            raise InputError("--json says what was exported; take --diff and --check out, or --json")
        click.echo(json.dumps(_as_json(review.study, trial, recommended, written, typed(written, workload))))
        return
    if recommended is not None:
        click.echo(f"recommended: {recommended_text(review.study, recommended)}, {trial_name(trial)}")
        click.echo(f"best single run: {best_run_text(review.study, recommended)}")
    click.echo(f"{written.path}\nrun it: {typed(written, workload)}")
    if drift := departed(review.sweep, workload):
        click.echo(f"warning: {drift}; the export sources it: put it back before you run it", err=True)
    if base is not None:
        changes = config_check.changed_against(base, written.path, workload)
        click.echo(f"\nagainst {base}: {len(changes)} variables differ" if changes else f"\nthe same as {base}")
        for change in changes:
            click.echo(visible(change))
        for line in importance.change_lines(review.study, review.sweep, trial) if trial.verdict is not None else ():
            click.echo(visible(line))
    if check:
        refuse_departed(review.sweep, workload, "the export sources it: put it back")
        click.echo("\n" + _checked(written.path, trial, workload))


def _as_json(
    study: Study, trial: Trial, recommended: Recommended | None, written: Written, line: str
) -> dict[str, Any]:
    """An export as plain data. line: the command line that runs it."""
    return {
        "config": str(written.path),
        "run": line,
        "trial": trial.number if trial.verdict is not None else None,
        "parameters": dict(trial.parameters),
        "recommended": None if recommended is None else recommended_text(study, recommended),
        "best_run": None if recommended is None else best_run_text(study, recommended),
    }


def _checked(config: Path, trial: Trial, workload: Workload) -> str:
    """The result of the check as text. Raises InputError if a variable has no reader or another value."""
    exported = config_check.exported_by(config, workload)
    if differences := config_check.effective(trial.parameters, exported):
        raise InputError(f"{config}: {'; '.join(differences)}; a file that it sources sets it again, remove it there")
    readers = workload.readers(exported)
    if readers is None:
        return f"checked: {len(exported)} variables source cleanly; which of them your command reads is not known here"
    if unread := sorted(name for name, reader in readers.items() if not reader):
        raise InputError(
            f"{config}: nothing in the implementation reads {', '.join(unread)}; remove them from the study"
        )
    lines = [f"  {name:<32} {reader}" for name, reader in sorted(readers.items())]
    return "\n".join((f"checked: {len(exported)} variables source cleanly; who reads each:", *lines))
