"""``python -m lora_tune.steer --study NAME``: enqueue, stop, pause, and change the budget of a sweep that runs."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from lora_tune.base.errors import InputError
from lora_tune.base.format import duration, visible
from lora_tune.commands.options import guarded, load_review, output_option, storage_option, study_option
from lora_tune.config.parameters import Value
from lora_tune.config.study import Study
from lora_tune.controller.steering import SETTINGS, course, refusal_of_values, words
from lora_tune.store import LEASE_SECONDS, Store, sqlite_url
from lora_tune.store.records import Sweep, TrialState
from lora_tune.store.requests import Request, Requests


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
@guarded
def main(study_name: str, storage: str | None, output: Path | None, **given: Any) -> None:
    """Ask something of a sweep; its driver does it at its next look and says what it did. Without an option: list.

    Every request is kept with who asked and when, and shown by status. Exit codes: 0 noted; 2 your input; 3 the
    database does not answer.
    """
    review = load_review(study_name, output, storage)
    store = Store(storage or sqlite_url(review.paths.database))
    try:
        desk = Requests(store, review.study.name)
        now = time.time()
        wishes = list(_wishes(course(review.study, desk.all()).study, review.sweep, given, now))
        for wish in wishes:
            noted = desk.ask(wish)
            click.echo(f"request {noted.number}: {words(noted)}")
        if not wishes:
            click.echo("\n".join(listed(desk.all(), now)) or "nothing was asked of this sweep")
        elif now - store.held(review.study.name).renewed_at > LEASE_SECONDS:
            click.echo("nobody drives the sweep now; its next driver does this first", err=True)
    finally:
        store.close()


def listed(requests: list[Request], now: float) -> Iterator[str]:
    """The requests as lines: who asked for what, how long ago, and what became of it."""
    for r in requests:
        ago = duration(max(0.0, now - r.asked_at))
        yield visible(f"{r.number}  {r.who}, {ago} ago: {words(r)}: {r.answer or 'not answered yet'}")


def _wishes(study: Study, sweep: Sweep, given: Mapping[str, Any], now: float) -> Iterator[Request]:
    """The requests of one command line. Raises InputError for what the driver would refuse."""
    who = f"{getpass.getuser()}@{os.uname().nodename}"

    def wish(kind: str, **what: Any) -> Request:
        return Request(kind=kind, what=what, who=who, asked_at=now)

    for number in given["stops"]:
        if number not in sweep.trials:
            raise InputError(f"--stop {number}: there is no such trial; there are {len(sweep.trials)}, from 0")
        if sweep.trials[number].state is TrialState.FINISHED:
            raise InputError(f"--stop {number}: it has ended, {sweep.trials[number].verdict}")
        yield wish("stop", trial=number)
    if given["enqueue"] or given["values"] or given["clone"] is not None:
        yield wish("enqueue", values=_values(study, sweep, given), clone_of=given["clone"])
    if budget := {name: given[name] for name in SETTINGS if given[name] is not None}:
        study.with_options({"budget": budget})  # raises InputError for a value that cannot be
        yield wish("set", **budget)
    if given["pause"] is not None:
        yield wish("pause" if given["pause"] else "resume")


def _values(study: Study, sweep: Sweep, given: Mapping[str, Any]) -> dict[str, Value]:
    """The tuned values to try. Raises InputError for what is no point of the space."""
    clone = given["clone"]
    if not given["enqueue"]:
        raise InputError("--set and --clone say what to try; add --enqueue")
    tuned: dict[str, Value] = {}
    if clone is not None:
        if clone not in sweep.trials:
            raise InputError(f"--clone {clone}: there is no such trial; there are {len(sweep.trials)}, from 0")
        tuned = dict(sweep.trials[clone].tuned)
    distributions = study.search_space.distributions()
    for text in given["values"]:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text}: write NAME=VALUE")
        tuned[name] = typed(distributions.get(name), value)
    if problem := refusal_of_values(study, tuned):
        raise InputError(f"--enqueue: {problem}")
    return tuned


def typed(distribution: BaseDistribution | None, text: str) -> Value:
    """What was typed, as the parameter's own type; the text itself where it is no such value."""
    if isinstance(distribution, CategoricalDistribution):
        return next((choice for choice in distribution.choices if str(choice) == text), text)  # type: ignore[return-value]
    try:
        return int(text) if isinstance(distribution, IntDistribution) else float(text)
    except ValueError:
        raise InputError(f"--set: {text!r} is not a number") from None
