"""``python -m lora_tune.schema``: the JSON schema of a study file, for editors and programs."""

from __future__ import annotations

import json

import click

from lora_tune.cli.options import guarded


@click.command()
@guarded
def main() -> None:
    """Print the JSON schema of a study file. An editor completes and checks by it what a study may say.

    What it admits may still be refused with a sentence: rules between keys, and those of a workload, stand in the
    code. In the editor: a first line `#:schema study.schema.json` in the study, and this output in that file.
    Exit codes: 0 printed; 2 your input.
    """
    from lora_tune.config.study_schema import study_schema

    click.echo(json.dumps(study_schema(), indent=1))
