"""``python -m lora_tune.schema``: the JSON schema of a study file, for editors and programs."""

from __future__ import annotations

import json

import click


def run() -> None:
    """What ``schema`` does; see cli/commands.py for its options."""
    from lora_tune.config.study_schema import study_schema

    click.echo(json.dumps(study_schema(), indent=1))
