"""``python -m lora_tune.ask`` and ``tell``: the next trial as one JSON object for whoever asks, and how it went."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lora_tune.base.errors import InputError
from lora_tune.cli.options import plan_of
from lora_tune.cli.steer import typed_values
from lora_tune.config.study import find_study, load_study
from lora_tune.store.records import Trial, TrialState


def run_ask(study_name: str, storage: str | None, output: Path | None, values: tuple[str, ...]) -> None:
    """What ``ask`` does; see cli/commands.py for its options."""
    from lora_tune.cli.ask_tell import ask

    file = find_study(study_name)
    plan = plan_of(file, load_study(file), {}, output)
    click.echo(json.dumps(asdict(ask(plan, storage, typed_values(plan.study, values) or None))))


def run_tell(
    study_name: str, storage: str | None, output: Path | None, token: str, evals: str | None, log: Path | None,
    failed: str, running: bool,
) -> None:  # fmt: skip
    """What ``tell`` does; see cli/commands.py for its options."""
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
