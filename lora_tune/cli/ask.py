"""``python -m lora_tune.ask --study NAME``: the next trial as one JSON object, to be run by whoever asks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from lora_tune.base.errors import InputError
from lora_tune.cli.options import guarded, output_option, plan_of, storage_option, study_option
from lora_tune.cli.steer_request import typed
from lora_tune.config.parameters import Value
from lora_tune.config.study import Study, find_study, load_study


@click.command()
@study_option
@storage_option
@output_option
@click.option(
    "--set", "values", multiple=True, metavar="NAME=VALUE", help="a tuned value to try; the search fills in others"
)
@guarded
def main(study_name: str, storage: str | None, output: Path | None, values: tuple[str, ...]) -> None:
    """Ask for the next trial and run it yourself: one JSON object with its token, parameters, seed and command.

    For studies with site.launcher = "outside"; say how it went with tell. Without --set the search proposes.
    Exit codes: 0 done; 2 your input, or nothing to run now; 3 the machine, or another driver is at work.
    """
    from lora_tune.cli.ask_tell import ask

    file = find_study(study_name)
    plan = plan_of(file, load_study(file), {}, output)
    click.echo(json.dumps(asdict(ask(plan, storage, typed_values(plan.study, values)))))


def typed_values(study: Study, texts: tuple[str, ...]) -> dict[str, Value] | None:
    """What ``--set`` says, as the parameters' own types; None where it says nothing. Raises InputError."""
    distributions = study.search_space.distributions()
    values: dict[str, Value] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text}: write NAME=VALUE")
        values[name] = typed(name, distributions.get(name), value)
    return values or None
