"""``python -m lora_tune.steer --study NAME``: enqueue, stop, pause, and change the budget of a sweep that runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lora_tune import store as stores
from lora_tune.base.text import duration, visible
from lora_tune.cli.options import guarded, load_review, output_option, storage_option, study_option
from lora_tune.cli.steer_request import parse
from lora_tune.controller.steering import course, words
from lora_tune.store import LEASE_SECONDS
from lora_tune.store.locate import open_store
from lora_tune.store.port import Request


@click.command()
@study_option
@storage_option
@output_option
@click.option("--enqueue", is_flag=True, help="try what --set says next, or --clone with the changes of --set")
@click.option("--set", "values", multiple=True, metavar="NAME=VALUE", help="a tuned value; the search fills in others")
@click.option("--clone", type=int, metavar="TRIAL", help="start from this trial's values")
@click.option("--stop", "stops", type=int, multiple=True, metavar="TRIAL", help="end a trial; it counts as cancelled")
@click.option("--pause/--resume", "pause", default=None, help="propose nothing more, or resume; running trials go on")
@click.option("--parallel", type=int, help="trials at one time")
@click.option("--trials", type=int, help="number of trials")
@click.option("--node-hours", type=float, help="node-hours of all trials")
@click.option("--wall-hours", type=float, help="hours since the sweep began")
@click.option("--trial-minutes", type=float, help="limit of one trial; a job's own limit stays as it was submitted")
@click.option("--json", "json_", is_flag=True, help="one JSON object a request, one a line")
@guarded
def main(study_name: str, storage: str | None, output: Path | None, json_: bool, **options: Any) -> None:
    """Ask something of a sweep; its driver does it at its next look and says what it did. Without an option: list.

    Every request is kept with who asked and when, and shown by status. Exit codes: 0 noted; 2 your input; 3 the
    database does not answer.
    """
    review = load_review(study_name, output, storage)
    store = open_store(review.paths, storage)
    try:
        requests = stores.Requests(store, review.study.name)
        now = time.time()
        wanted = list(parse(course(review.study, requests.all()).study, review.sweep, options, now))
        for request in wanted:
            noted = requests.ask(request)
            click.echo(json.dumps(asdict(noted)) if json_ else f"request {noted.number}: {words(noted)}")
        if not wanted and json_:
            for known in requests.all():
                click.echo(json.dumps(asdict(known)))
        elif not wanted:
            click.echo("\n".join(listed(requests.all(), now)) or "nothing was asked of this sweep")
        elif now - store.held(review.study.name).renewed_at > LEASE_SECONDS:
            click.echo("nobody drives the sweep now; its next driver does this first", err=True)
    finally:
        store.close()


def listed(requests: list[Request], now: float) -> Iterator[str]:
    """The requests as lines: who asked for what, how long ago, and what became of it."""
    for r in requests:
        ago = duration(max(0.0, now - r.asked_at))
        yield visible(f"{r.number}  {r.who}, {ago} ago: {words(r)}: {r.answer or 'not answered yet'}")
