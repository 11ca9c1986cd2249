"""``python -m lora_tune.status --study NAME``: where a sweep stands. Reads only; any number may watch, anywhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lora_tune.base.text import duration, visible
from lora_tune.cli.options import again, guarded, load_review, output_option, storage_option, study_option, watch_store
from lora_tune.cli.standing import Standing, SweepSnapshot, as_json, exit_code, open_trials, standing
from lora_tune.cli.steer import listed as steering_lines
from lora_tune.config.spent import spent_name, spent_text
from lora_tune.config.study import Study
from lora_tune.controller.steering import course
from lora_tune.review import screen
from lora_tune.review.describe import parameters_text, price
from lora_tune.review.importance import scaling, table
from lora_tune.review.stopping import account_words
from lora_tune.review.summary import (
    Overview,
    confirmed_words,
    overview,
    recommended_words,
    score_words,
    trial_name,
)
from lora_tune.search.objectives import objective_of
from lora_tune.search.recommendation import leaders, nearest_words
from lora_tune.store.port import Request
from lora_tune.store.records import StudyRecords, TrialState

BEST_SHOWN = 5


def picture(
    study: Study,
    sweep: StudyRecords,
    driver: tuple[str, float],
    now: float,
    *,
    every: bool,
    over: bool = True,
    requests: Sequence[Request] = (),
) -> RenderableType:
    """The status as a rich renderable. every: all trials instead of the open and the best ones. over: see standing.

    requests: what people asked of the sweep.
    """
    summary = overview(study, sweep, now)
    condition = _condition(study, sweep, driver, now, over=over)
    parts: list[RenderableType] = [_head(study, sweep, summary, condition), ""]
    if every:
        parts += [screen.trials_table(study, sweep, list(sweep.trials.values()), now, "all trials")]
    else:
        running = [t for t in sweep.trials.values() if t.state is not TrialState.FINISHED]
        if running:
            parts += [screen.trials_table(study, sweep, running, now, "open"), ""]
            parts += [Text(f"trial {t.number}: {visible(t.sentence)}", style="red") for t in running if t.sentence]
        if best := leaders(study, sweep)[:BEST_SHOWN]:
            parts += [screen.trials_table(study, sweep, best, now, f"best {len(best)}")]
    if requests:
        parts += ["", Text("requests", style="bold"), Text("\n".join(steering_lines(list(requests), now)))]
    if scales := scaling(study, sweep):
        parts += ["", Text(table(study, scales))]
    if summary.failures:
        parts += ["", _failures(summary)]
    return Group(*parts)


def _head(study: Study, sweep: StudyRecords, summary: Overview, condition: Text) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("sweep", Text(f"{study.name}  {sweep.digest}"))
    grid.add_row("state", condition)
    of = f" of {summary.planned}" if summary.planned else ""
    counts = ", ".join(f"{n} {objective_of(study).word(v)}" for v, n in summary.verdicts.items())
    open_ = f"{summary.open} open" if summary.open else ""
    states = ", ".join(part for part in (open_, counts) if part) or "none ended"
    grid.add_row("trials", Text(f"{summary.trials}{of}: {states}"))
    if summary.trouble:
        grid.add_row("trouble", Text(summary.trouble, style="bold red"))
    if summary.recommended:
        sentence = f"{recommended_words(study, summary.recommended)}, {trial_name(summary.recommended.trial)}"
        grid.add_row("recommended", _styled(sentence, parameters_text(summary.recommended.trial)))
    grid.add_row("best run", _best(study, summary))
    if sentence := confirmed_words(study, summary.best):
        grid.add_row("confirmed", sentence)
    budget = f" of {study.budget.node_hours:g}" if study.budget.node_hours else ""
    overhead = f"; {summary.overhead_hours:.2g} of them in packs that trained nobody" if summary.overhead_hours else ""
    saved = f"; about {spent_text(study, summary.saved)} saved by stopping early" if summary.saved else ""
    spent = f"{spent_text(study, summary.node_hours)}{budget}{price(study, summary.node_hours)}"
    grid.add_row(spent_name(study), Text(f"{spent}{overhead}{saved}"))
    if summary.stopping:
        grid.add_row("stopping", Text(account_words(summary.stopping)))
    grid.add_row("time", duration(summary.seconds))
    return grid


def _condition(study: Study, sweep: StudyRecords, driver: tuple[str, float], now: float, *, over: bool) -> Text:
    owner, sign = driver
    condition = standing(sweep, driver, now, over=over)
    if condition == Standing.RUNNING:
        who = visible(owner).partition(" start ")[0]  # when that process began tells programs apart, not people
        return Text(f"running, driven by {who}, last sign {now - sign:.0f} s ago", style="green")
    if condition == Standing.UNATTENDED:
        what = "trials are open" if open_trials(sweep) else "it is not over"
        if study.site.launcher == "outside":
            return Text(f"{what}; trials are run by you; the next one: {again('ask', study.name)}", style="bold")
        line = again("sweep", study.name)
        return Text(f"{what} and no driver is running; take over with: {line}", style="bold red")
    return Text("ended")


def _styled(sentence: str, parameters: str) -> Text:
    return Text(sentence, style="bold green").append(f"  {parameters}", style="default")


def _best(study: Study, summary: Overview) -> Text:
    if summary.best is None:
        missing = Text(f"{objective_of(study).nothing} yet", style="dim")
        nearest = summary.nearest
        return missing if nearest is None else missing.append(f"; {nearest_words(nearest)}", style="default")
    text = Text(objective_of(study).text(summary.best.objective), style="bold green")
    if score := score_words(study, summary.best):
        text.append(f", {score}", style="green")
    text.append(f"  trial {summary.best.number}  {parameters_text(summary.best)}", style="default")
    return text


def _failures(summary: Overview) -> Table:
    table = Table(title="failures", title_justify="left", title_style="bold", box=None, padding=(0, 1))
    for name in ("class", "attempts", "what", "remedy"):
        table.add_column(name, overflow="fold")
    for f in summary.failures:
        table.add_row(Text(f.kind, style="red"), str(f.attempts), Text(visible(f.line)), Text(visible(f.remedy)))
    return table


@click.command()
@study_option
@storage_option
@output_option
@click.option("--watch", is_flag=True, help="refresh until the sweep ends or Ctrl-C")
@click.option(
    "--every", "period", type=click.FloatRange(min=0.2), default=2.0, show_default=True, help="seconds, with --watch"
)
@click.option("--json", "json_", is_flag=True, help="one JSON object; with --watch, one a line")
@click.option("--all", "all_", is_flag=True, help="all trials, not only the open and the best")
@guarded
def main(
    study_name: str, storage: str | None, output: Path | None, watch: bool, period: float, json_: bool, all_: bool
) -> None:
    """Where a sweep stands. Only reads, so it may run anywhere that reaches the database, any number of times.

    Exit codes: 0 the sweep runs, or ended with a best trial; 2 your input; 3 it is not over and nobody drives it, or
    the database does not answer; 4 the sweep ended and nothing reached the target. Made for monitoring.
    """
    console = Console()
    review = load_review(study_name, output, storage)
    store = watch_store(review.paths, storage)
    try:
        snapshot = SweepSnapshot(review, store)
        if watch and not json_:
            _watch(console, snapshot, period, every=all_)
        else:
            _show(console, snapshot, json_=json_, every=all_)
            while watch and snapshot.standing == Standing.RUNNING:
                time.sleep(period)
                snapshot.again()
                _show(console, snapshot, json_=json_, every=all_)
    finally:
        store.close()
    sys.exit(exit_code(snapshot.standing, overview(snapshot.study, snapshot.sweep, snapshot.now)))


def _watch(console: Console, snapshot: SweepSnapshot, period: float, *, every: bool) -> None:
    """Refresh one screen until the sweep is not running any more, or Ctrl-C."""
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            drawn = _picture(snapshot, every=every)
            live.update(drawn, refresh=True)
            if snapshot.standing != Standing.RUNNING:
                return
            try:
                time.sleep(period)
                snapshot.again()
            except KeyboardInterrupt:
                return


def _show(console: Console, snapshot: SweepSnapshot, *, json_: bool, every: bool) -> None:
    if json_:
        record = as_json(snapshot.study, snapshot.sweep, snapshot.driver, snapshot.now, over=snapshot.over)
        click.echo(json.dumps({**record, "requests": [asdict(request) for request in snapshot.requests]}))
    else:
        console.print(_picture(snapshot, every=every))


def _picture(snapshot: SweepSnapshot, *, every: bool) -> RenderableType:
    shown = course(snapshot.study, snapshot.requests).study
    return picture(
        shown,
        snapshot.sweep,
        snapshot.driver,
        snapshot.now,
        every=every,
        over=snapshot.over,
        requests=snapshot.requests,
    )
