"""``python -m lora_tune.ask`` and ``tell``: the next trial as one JSON object for whoever asks, and how it went."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lora_tune.base.errors import InputError
from lora_tune.cli.options import guarded, output_option, plan_of, storage_option, study_option
from lora_tune.cli.steer import typed_values
from lora_tune.config.study import find_study, load_study
from lora_tune.store.records import Trial, TrialState


@click.command(name="ask")
@study_option
@storage_option
@output_option
@click.option(
    "--set", "values", multiple=True, metavar="NAME=VALUE", help="a tuned value to try; the search fills in others"
)
@guarded
def ask_command(study_name: str, storage: str | None, output: Path | None, values: tuple[str, ...]) -> None:
    """Ask for the next trial and run it yourself: one JSON object with its token, parameters, seed and command.

    For studies with site.launcher = "outside"; say how it went with tell. Without --set the search proposes.
    Exit codes: 0 done; 2 your input, or nothing to run now; 3 the machine, or another driver is at work.
    """
    from lora_tune.cli.ask_tell import ask

    file = find_study(study_name)
    plan = plan_of(file, load_study(file), {}, output)
    click.echo(json.dumps(asdict(ask(plan, storage, typed_values(plan.study, values) or None))))


@click.command(name="tell")
@study_option
@storage_option
@output_option
@click.option("--token", required=True, help="the token that ask gave")
@click.option("--evals", metavar="JSON", help="[[samples, loss], ...] or [[samples, loss, seconds], ...], all so far")
@click.option("--log", "log", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="its output instead")
@click.option("--failed", default="", metavar="WHY", help="why it has no result")
@click.option("--running", is_flag=True, help="it goes on: ask whether it should")
@guarded
def tell_command(
    study_name: str, storage: str | None, output: Path | None, token: str, evals: str | None, log: Path | None,
    failed: str, running: bool,
) -> None:  # fmt: skip
    """Tell how a trial that you asked for went; prints the verdict as one JSON object. The same told twice is one.

    With --running, "go_on" is false where it should be stopped. Seconds count from when it was asked for.
    Exit codes: 0 done; 2 your input; 3 the machine, or another driver is at work.
    """
    from lora_tune.cli.ask_tell import result_of, tell

    file = find_study(study_name)
    plan = plan_of(file, load_study(file), {}, output)
    text = log.read_text(encoding="utf-8", errors="replace") if log else ""
    result = result_of(_parsed(evals), log=text, failed=failed, over=not running)
    click.echo(json.dumps(as_json(tell(plan, storage, token, result))))


def _parsed(text: str | None) -> Any:
    try:
        return [] if text is None else json.loads(text)
    except ValueError as error:
        raise InputError(f"--evals: not JSON ({error}); write [[samples, loss], ...]") from error


def as_json(trial: Trial) -> dict[str, Any]:
    """A trial as it was judged. go_on: whether its run should go on."""
    return {
        "trial": trial.number,
        "state": trial.state.value,
        "verdict": trial.verdict.value if trial.verdict else None,
        "sentence": trial.sentence,
        "objective": trial.metrics.objective,
        "go_on": trial.state is TrialState.RUNNING,
    }
