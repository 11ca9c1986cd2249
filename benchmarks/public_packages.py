"""``python -m benchmarks.public_packages [FOLDER] [--every N]``: public submissions packaged again from their logs.

FOLDER holds the public results (``logs/``, ``more_logs/``). Of each submission ``lora-tune package`` makes a tree, with
a system description of what the logs say and "not stated" for the rest, and MLPerf's package and repository checkers
look at it in the ruleset of its round. A submission of which only some logs are at hand is left out. Printed: how many
they accept, what they say against the others, and how many scores of LoRA differ from the published table's
(``submissions*.csv``) by more than 0.1 s.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections import Counter
from pathlib import Path

import click
from click.testing import CliRunner

from benchmarks.public_runs import folder as public_folder
from benchmarks.score_agreement import submissions
from lora_tune.base.errors import InputError
from lora_tune.cli.package import _announced
from lora_tune.mlperf.package import described_by_logs, template
from lora_tune.mlperf.submission import read_submission
from lora_tune.package import main as package

SECONDS = 0.1


def packaged(ruleset: str, folder: Path, scratch: Path) -> tuple[bool, list[str]]:
    """Whether the checkers accept the package of a submission, and their errors."""
    (scratch / "code").mkdir()
    (scratch / "code" / "README.md").write_text("made again from logs\n")
    try:
        known = described_by_logs(_announced(folder, ruleset))
    except InputError as error:
        return False, [str(error)]
    system = scratch / "system.json"
    filled = {name: value or "not stated" for name, value in template(known).items()}
    system.write_text(json.dumps(filled))
    words = [folder, "--system", system, "--code", scratch / "code", "--out", scratch / "out", "--ruleset", ruleset]
    done = CliRunner().invoke(package, list(map(str, words)), catch_exceptions=False)
    marks = ("ERROR", "lora-tune:", ": ended with", "lora_tune:")
    errors = [line.strip() for line in done.output.splitlines() if any(mark in line for mark in marks)]
    return done.exit_code == 0, errors or [done.output[-160:]] * (done.exit_code != 0)


def table(data: Path) -> dict[tuple[str, str, str], float]:
    """Published olympic minutes by round, submitter and system."""
    rows = [row for file in sorted(data.glob("submissions*.csv")) for row in csv.DictReader(file.open())]
    return {(row["round"], row["submitter"], row["system"]): float(row["time_min"]) for row in rows if row["time_min"]}


@click.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--every", default=1, show_default=True, help="every so many-th submission")
def main(data: Path | None, every: int) -> None:
    """Package them all and count."""
    data = data or public_folder()
    accepted, against, apart, compared = Counter[str](), Counter[str](), 0, 0
    published = table(data)
    for ruleset, folder in list(submissions(data))[::every]:
        submission = read_submission(folder, ruleset)
        if len(submission.files) < (submission.runs or 0):
            accepted[f"{ruleset} not whole here"] += 1
            continue
        with tempfile.TemporaryDirectory() as scratch:
            accepts, errors = packaged(ruleset, folder, Path(scratch))
        accepted[f"{ruleset} {'accepted' if accepts else 'refused'}"] += 1
        for error in errors:
            against[error[:160]] += 1
        parts = folder.relative_to(data).parts
        score = submission.olympic_minutes
        known = published.get((parts[1], *parts[2:4])) if len(parts) == 4 else None  # the tables are of LoRA alone
        if known is not None and score is not None:
            compared += 1
            if abs(known - score) * 60 > SECONDS:
                apart += 1
                click.echo(f"{folder.relative_to(data)}: the table says {known} min, the rule {score:.3f} min")
        if not accepts:
            click.echo(f"REFUSED {folder.relative_to(data)}: {errors[:1]}")
    for name, count in sorted(accepted.items()):
        click.echo(f"{name:20} {count}")
    for error, count in against.most_common(12):
        click.echo(f"{count:4} {error}")
    click.echo(f"scores compared with the table: {compared}, more than {SECONDS} s apart: {apart}")


if __name__ == "__main__":
    main()
