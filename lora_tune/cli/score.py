"""``python -m lora_tune.score [--ruleset R] FOLDER...``: score result folders by MLPerf's rules, side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lora_tune.base.errors import EXIT_INPUT, InputError
from lora_tune.mlperf.rulesets import as_ruleset
from lora_tune.mlperf.submission import (
    Submission,
    mean_converged,
    passes,
    read_submission,
    result_folders,
    score_interval,
    sentences,
)

HEADINGS = ("folder", "benchmark", "GBS", "files", "converged", "olympic", "factor", "score", "90%", "verdict")


def run(folders: Sequence[Path], ruleset: str | None, json_: bool) -> None:
    """Run ``score``; options: cli/commands.py."""
    if ruleset is not None:
        as_ruleset(ruleset)
    scored: list[Submission] = []
    failed = False
    for folder in (below for parent in folders for below in result_folders(parent)):
        try:
            submission = read_submission(folder, ruleset)
        except InputError as error:
            failed = True
            click.echo(json.dumps(_unscored(folder, error)) if json_ else f"lora_tune: {error}", err=not json_)
            continue
        scored.append(submission)
        if json_:
            click.echo(json.dumps(as_json(submission)))
    if not json_ and scored:
        click.echo(table(scored))
        for submission in scored:
            click.echo("\n" + "\n  ".join([f"{submission.folder}", *sentences(submission)]))
    if failed:
        sys.exit(EXIT_INPUT)


def as_json(submission: Submission) -> dict[str, Any]:
    """A folder's score as plain data. Minutes are None if the rules give no score."""
    return {
        "folder": str(submission.folder),
        "score_minutes": submission.score_minutes,
        "olympic_minutes": submission.olympic_minutes,
        "factor": submission.factor,
        "passes": submission.convergence.passes,
        "compliant": submission.compliant,
        "sentences": sentences(submission),
    }


def _unscored(folder: Path, error: InputError) -> dict[str, Any]:
    """The object of a folder that cannot be scored."""
    return {
        "folder": str(folder), "score_minutes": None, "olympic_minutes": None, "factor": 1.0, "passes": False,
        "compliant": False, "sentences": [str(error)],
    }  # fmt: skip


def table(submissions: Sequence[Submission]) -> str:
    """A table with one folder per row."""
    rows = [HEADINGS, *(_row(s) for s in submissions)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )  # fmt: skip


def _row(s: Submission) -> tuple[str, ...]:
    interval, batch = score_interval(s), s.convergence.batch
    complying = sum(not f.complaints for f in s.files)
    return (
        str(s.folder), s.benchmark or "-", "-" if batch is None else f"{batch:g}", f"{complying}/{len(s.files)} comply",
        _number(mean_converged(s), ".6g"), _number(s.olympic_minutes, ".3f"), f"{s.factor:.4f}",
        _number(s.score_minutes, ".3f"), f"{interval[0]:.2f}..{interval[1]:.2f}" if interval else "-",
        "ok" if passes(s) else "REFUSED",
    )  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
