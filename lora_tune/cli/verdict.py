"""``python -m lora_tune.verdict --study NAME``: which configurations beat the baseline, on one error budget.

The verdict depends only on the records, so it may be queried any number of times.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lora_tune.base.errors import InputError
from lora_tune.base.text import visible
from lora_tune.cli.options import load_review
from lora_tune.config.study import Study
from lora_tune.search.campaign import CAMPAIGN_ERROR, ArmState, ArmVerdict, Campaign, campaign
from lora_tune.store.records import StudyRecords

RUN_ONCE_SHOWN = 10
"""Maximum arms with a single run that are listed; there may be thousands."""


def arm_verdict(study: Study, sweep: StudyRecords, trial: int) -> ArmVerdict:
    """The verdict of a trial's arm. Raises InputError if it has none."""
    if trial not in sweep.trials:
        known = f"there are 0 to {max(sweep.trials)}" if sweep.trials else "it has none"
        raise InputError(f"--trial {trial}: {study.name} has no such trial; {known}")
    judged = campaign(study, sweep).of(trial)
    if judged is None:
        raise InputError(
            f"--trial {trial}: it is a run of no configuration of the space (it measures a speed, or a config outside "
            "the space); name another trial"
        )
    return judged


def as_json(judged: Campaign) -> dict[str, Any]:
    """The whole campaign as plain data."""
    return {
        "error": CAMPAIGN_ERROR,
        "spent": judged.spent,
        "tested": judged.tested,
        "sentence": judged.summary,
        "arms": [asdict(arm) for arm in judged.arms],
    }


def run(study_name: str, storage: str | None, output: Path | None, number: int | None, json_: bool) -> None:
    """Run ``verdict``; options: cli/commands.py."""
    review = load_review(study_name, output, storage)
    if number is not None:
        arm = arm_verdict(review.study, review.sweep, number)
        click.echo(json.dumps(asdict(arm)) if json_ else visible(arm.sentence))
        return
    judged = campaign(review.study, review.sweep)
    if json_:
        click.echo(json.dumps(as_json(judged)))
        return
    if not judged.arms:
        click.echo("no trial yet: nothing to compare")
        return
    for arm in shown(judged):
        click.echo(visible(arm.sentence))
    if (hidden := len(judged.arms) - len(shown(judged))) > 0:
        click.echo(f"{hidden} more with one run each")
    click.echo(judged.summary)


def shown(judged: Campaign) -> list[ArmVerdict]:
    """The arms to list: better ones, the baseline, others with several runs, then some with one run."""
    order = (ArmState.BETTER, ArmState.BASELINE, ArmState.OPEN, ArmState.UNSOUND, ArmState.CHOSEN_BY)
    ranked = sorted(judged.arms, key=lambda arm: (order.index(arm.state), arm.trials[0]))
    once = [arm for arm in ranked if arm.state is ArmState.CHOSEN_BY]
    return [arm for arm in ranked if arm.state is not ArmState.CHOSEN_BY] + once[:RUN_ONCE_SHOWN]
