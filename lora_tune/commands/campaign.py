"""What sweep, status and report do with a campaign: its sweeps in turn under one budget, and where each stands."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from lora_tune.analysis.summary import Overview, overview, recommended_words, trial_name
from lora_tune.base.errors import EXIT_DONE, EXIT_NOTHING_REACHED, EXIT_SETUP, InputError, NoSweepError
from lora_tune.commands.again import again
from lora_tune.commands.options import Review, recorded_study, sweep_paths, watch_store
from lora_tune.commands.report import write_report
from lora_tune.commands.standing import Standing, SweepSnapshot, as_json
from lora_tune.config.campaign import Campaign, Member, allotments, load_campaign
from lora_tune.objectives import objective_of
from lora_tune.review.report_page import campaign_html, write_page

WAITING = "waiting"
"""The condition of a sweep that has not begun."""

_OF_ONE = ("register", "standby", "logs", "signing_key")
"""Options of ``sweep`` that are about one study."""


@dataclass(frozen=True, slots=True)
class CampaignRow:
    """Where one sweep of a campaign stands. allotted: its node-hours. snapshot: its records; None before it begins."""

    member: Member
    folder: Path
    allotted: float
    snapshot: SweepSnapshot | None

    @property
    def state(self) -> str:
        """Running, unattended, ended or waiting."""
        return WAITING if self.snapshot is None else self.snapshot.standing

    @property
    def seen(self) -> Overview | None:
        """The sweep at a glance."""
        return None if self.snapshot is None else overview(self.snapshot.study, self.snapshot.sweep, self.snapshot.now)

    @property
    def spent(self) -> float:
        """Node-hours used so far."""
        return 0.0 if self.snapshot is None else self.snapshot.sweep.node_hours(self.snapshot.now)


def sweep_each(context: click.Context, file: Path) -> int:
    """Run the command of ``context`` for each sweep of a campaign in turn, each with what it is allotted.

    One that ends without a result does not keep the next from its turn; the machine's faults and Ctrl-C do. The same
    command goes on where an earlier one ended. Returns the exit code.
    """
    options = context.params
    if refused := [name for name in _OF_ONE if options.get(name)]:
        option = f"--{refused[0].replace('logs', 'log').replace('_', '-')}"
        raise InputError(f"{option} is about one study, and {file} is a campaign of several; name one of its studies")
    campaign = _budgeted(load_campaign(file), options["budget_node_hours"])
    worst = EXIT_DONE
    for number in range(len(campaign.members)):
        row = rows(campaign, options["output"], options["storage"])[number]
        code = _turn(context, campaign, row, number)
        worst = max(worst, code)
        if code not in (EXIT_DONE, EXIT_NOTHING_REACHED):
            return code
        if not options["dry_run"]:
            write_pages(campaign, options["output"], options["storage"])
    return worst


def _turn(context: click.Context, campaign: Campaign, row: CampaignRow, number: int) -> int:
    """One sweep's turn; returns its exit code."""
    name, options = row.member.study.name, context.params
    if not options["quiet"]:
        event = {"event": "campaign", "study": name, "sweep": number + 1, "of": len(campaign.members)}
        text = f"{campaign.name}: {name}, sweep {number + 1} of {len(campaign.members)}, {row.allotted:.3g} node-hours"
        click.echo(json.dumps({**event, "node_hours": row.allotted}) if options["as_json"] else text)
    if row.allotted <= 0:
        return EXIT_NOTHING_REACHED
    own = {"study_name": str(row.member.file), "output": row.folder, "budget_node_hours": row.allotted}
    try:
        context.invoke(context.command, **{**options, **own})
    except SystemExit as end:
        return int(end.code or 0)
    return EXIT_DONE


def _budgeted(campaign: Campaign, node_hours: float | None) -> Campaign:
    if node_hours is None:
        return campaign
    if not (math.isfinite(node_hours) and node_hours > 0):
        raise InputError(f"--budget-node-hours: {node_hours:g} is not a number of node-hours above 0")
    return replace(campaign, node_hours=node_hours)


def rows(campaign: Campaign, output: Path | None, storage: str | None) -> list[CampaignRow]:
    """Where each sweep stands now, in their order. Raises StoreError where the database does not answer."""
    root = sweep_paths(campaign.name, output).root
    snapshots = [_look(member, root / member.study.name, storage) for member in campaign.members]
    now = time.time()
    spent = [0.0 if snapshot is None else snapshot.sweep.node_hours(now) for snapshot in snapshots]
    ended = [snapshot is not None and snapshot.standing == Standing.ENDED for snapshot in snapshots]
    parts = allotments(campaign, spent, ended)
    return [
        CampaignRow(member, root / member.study.name, part, snapshot)
        for member, part, snapshot in zip(campaign.members, parts, snapshots, strict=True)
    ]


def _look(member: Member, folder: Path, storage: str | None) -> SweepSnapshot | None:
    """The records of a sweep that has begun."""
    paths = sweep_paths(member.study.name, folder)
    try:
        store = watch_store(paths, storage)
    except NoSweepError:
        return None
    try:
        sweep = store.load(member.study.name)
        if sweep is None:
            return None
        return SweepSnapshot(Review(recorded_study(sweep, member.file), sweep, paths, member.file), store)
    finally:
        store.close()


def show_status(file: Path, output: Path | None, storage: str | None, *, json_: bool, watch: bool, every: float) -> int:
    """Print where a campaign stands, again and again with ``watch`` while it runs; returns the exit code."""
    campaign = load_campaign(file)
    while True:
        sweep_rows = rows(campaign, output, storage)
        if json_:
            click.echo(json.dumps(_as_json(campaign, sweep_rows)))
        else:
            Console().print(_drawn(campaign, sweep_rows))
        if not watch or condition(sweep_rows) != Standing.RUNNING:
            return exit_code(sweep_rows)
        time.sleep(every)


def condition(sweep_rows: list[CampaignRow]) -> str:
    """The campaign's condition: running while one sweep is, ended when all are."""
    states = [row.state for row in sweep_rows]
    if Standing.RUNNING in states:
        return Standing.RUNNING
    return Standing.ENDED if all(s == Standing.ENDED for s in states) else Standing.UNATTENDED


def exit_code(sweep_rows: list[CampaignRow]) -> int:
    """For monitoring: 0 running, or all ended with a best trial; 3 unattended; 4 ended, and one reached nothing."""
    if condition(sweep_rows) == Standing.UNATTENDED:
        return EXIT_SETUP
    missed = any(row.seen is None or row.seen.best is None for row in sweep_rows)
    return EXIT_NOTHING_REACHED if missed and condition(sweep_rows) == Standing.ENDED else EXIT_DONE


def _as_json(campaign: Campaign, sweep_rows: list[CampaignRow]) -> dict[str, Any]:
    """Node-hours; ``status`` of each sweep is what ``status --json`` prints of it, None before it begins."""
    return {
        "campaign": campaign.name,
        "state": condition(sweep_rows),
        "node_hours": sum(row.spent for row in sweep_rows),
        "node_hours_budget": campaign.node_hours,
        "sweeps": [
            {
                "study": row.member.study.name,
                "benchmark": _benchmark(row),
                "state": row.state,
                "folder": str(row.folder),
                "node_hours_allotted": row.allotted,
                "status": None if row.snapshot is None else _status(row.snapshot),
            }
            for row in sweep_rows
        ],
    }


def _status(snapshot: SweepSnapshot) -> Mapping[str, Any]:
    return as_json(snapshot.study, snapshot.sweep, snapshot.driver, snapshot.now, over=snapshot.over)


def _benchmark(row: CampaignRow) -> str:
    benchmark = row.member.study.benchmark
    return "" if benchmark is None else benchmark.name


def cells(row: CampaignRow) -> tuple[str, ...]:
    """A row for people: study, benchmark, state, trials, node-hours, result."""
    seen, study = row.seen, row.member.study
    of = f" of {study.budget.trials}" if study.budget.trials else ""
    hours = f"{row.spent:.3g} of {row.allotted:.3g}"
    return (study.name, _benchmark(row), row.state, f"{seen.trials if seen else 0}{of}", hours, _result(row))


def _result(row: CampaignRow) -> str:
    seen = row.seen
    if row.snapshot is None or seen is None:
        return ""
    if seen.recommended is not None:
        return f"{recommended_words(row.snapshot.study, seen.recommended)}, {trial_name(seen.recommended.trial)}"
    return objective_of(row.snapshot.study).nothing


HEADS = ("study", "benchmark", "state", "trials", "node-hours", "result")


def _drawn(campaign: Campaign, sweep_rows: list[CampaignRow]) -> Table:
    spent = sum(row.spent for row in sweep_rows)
    title = f"{campaign.name}: {condition(sweep_rows)}, {spent:.3g} of {campaign.node_hours:g} node-hours"
    if condition(sweep_rows) == Standing.UNATTENDED:
        title += f"; go on with: {again('sweep', campaign.name)}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for head in HEADS:
        table.add_column(head, overflow="fold")
    for row in sweep_rows:
        table.add_row(*cells(row))
    return table


def write_pages(campaign: Campaign, output: Path | None, storage: str | None, *, each: bool = False) -> Path:
    """Write the campaign's page, which links the reports of its sweeps; with ``each``, those too. Returns its path."""
    sweep_rows = rows(campaign, output, storage)
    for row in sweep_rows if each else ():
        if row.snapshot is not None:
            write_report(row.snapshot.study, row.snapshot.sweep, sweep_paths(row.member.study.name, row.folder).report)
    path = sweep_paths(campaign.name, output).report
    spent = f"{sum(row.spent for row in sweep_rows):.3g} of {campaign.node_hours:g} node-hours, {condition(sweep_rows)}"
    lines = [(cells(row), f"{row.folder.name}/{path.name}" if row.snapshot else "") for row in sweep_rows]
    write_page(path, campaign_html(campaign.name, campaign.description, spent, HEADS, lines))
    return path
