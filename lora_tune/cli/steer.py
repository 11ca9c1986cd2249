"""``python -m lora_tune.steer --study NAME``: enqueue, stop, pause, and change the budget of a running sweep.

Options become requests, validated against the study and its records.
"""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lora_tune import store as stores
from lora_tune.base.errors import InputError
from lora_tune.base.text import duration, visible
from lora_tune.cli.options import load_review, name_values
from lora_tune.config.parameters import Value
from lora_tune.config.study import Study
from lora_tune.controller.commits import resolve
from lora_tune.controller.steering import SETTINGS, apply_requests, describe, refusal_of_values
from lora_tune.search.usual_names import COMMIT
from lora_tune.store import LEASE_SECONDS, open_store
from lora_tune.store.port import Request
from lora_tune.store.records import StudyRecords, Trial, TrialState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def run(study_name: str, storage: str | None, output: Path | None, json_: bool, **options: Any) -> None:
    """Run ``steer``; options: cli/commands.py."""
    review = load_review(study_name, output, storage)
    store = open_store(review.paths, storage)
    try:
        requests = stores.Requests(store, review.study.name)
        now = time.time()
        requested = list(parse(apply_requests(review.study, requests.all()).study, review.sweep, options, now))
        for request in requested:
            noted = requests.ask(request)
            click.echo(json.dumps(asdict(noted)) if json_ else f"request {noted.number}: {describe(noted)}")
        if not requested and json_:
            for known in requests.all():
                click.echo(json.dumps(asdict(known)))
        elif not requested:
            click.echo("\n".join(listed(requests.all(), now)) or "nothing was asked of this sweep")
        elif now - store.held(review.study.name).renewed_at > LEASE_SECONDS:
            click.echo("nobody drives the sweep now; its next driver does this first", err=True)
    finally:
        store.close()


def listed(requests: list[Request], now: float) -> Iterator[str]:
    """The requests as lines: user, age, request, answer."""
    for r in requests:
        ago = duration(max(0.0, now - r.asked_at))
        yield visible(f"{r.number}  {r.who}, {ago} ago: {describe(r)}: {r.answer or 'not answered yet'}")


def current_user() -> str:
    """The current user, as user@host."""
    return f"{getpass.getuser()}@{os.uname().nodename}"


def parse(study: Study, sweep: StudyRecords, options: Mapping[str, Any], now: float) -> Iterator[Request]:
    """The requests of one command line. Raises InputError for requests that the driver would refuse.

    study: with the budget as changed by earlier requests. options: those of ``steer``, by name. now: epoch seconds.
    """
    who = current_user()

    def request(kind: str, **what: Any) -> Request:
        return Request(kind=kind, what=what, who=who, asked_at=now)

    for number in options["stops"]:
        if number not in sweep.trials:
            raise InputError(f"--stop {number}: there is no such trial; there are {len(sweep.trials)}, from 0")
        if sweep.trials[number].state is TrialState.FINISHED:
            raise InputError(f"--stop {number}: it has ended, {sweep.trials[number].verdict}")
        yield request("stop", trial=number)
    if options["enqueue"] or options["values"] or options["clone"] is not None or options["commit"]:
        yield _enqueue(study, sweep, options)
    if budget := {name: options[name] for name in SETTINGS if options[name] is not None}:
        study.with_options({"budget": budget})  # raises InputError for an invalid value
        yield request("set", **budget)
    if options["pause"] is not None:
        yield request("pause" if options["pause"] else "resume")


def _enqueue(study: Study, sweep: StudyRecords, options: Mapping[str, Any]) -> Request:
    """The request to try a configuration. Raises InputError if it is not in the space."""
    clone = options["clone"]
    if not options["enqueue"]:
        raise InputError("--set, --clone and --commit say what to try; add --enqueue")
    if clone is not None and clone not in sweep.trials:
        raise InputError(f"--clone {clone}: there is no such trial; there are {len(sweep.trials)}, from 0")
    values = typed_values(study, options["values"])
    try:
        return enqueueing(study, values, clone=sweep.trials.get(clone), commit=options["commit"])
    except InputError as error:
        raise InputError(f"--enqueue: {error}") from error


def enqueueing(
    study: Study, values: Mapping[str, Value], *, clone: Trial | None = None, commit: str | None = None, by: str = ""
) -> Request:
    """The request to try tuned values; the search fills in the others.

    clone: the trial whose other values and commit are used. commit: of the script to run. by: suffix of the user's name
    that names the interface. Raises InputError for values outside the space or an unknown commit.
    """
    tuned = {**(clone.tuned if clone else {}), **values}
    if problem := refusal_of_values(study, tuned):
        raise InputError(problem)
    name = commit or (clone.parameters.get(COMMIT) if clone else None)
    code = resolve(study, str(name)).of_request if name else {}
    what = {"values": tuned, "clone_of": clone.number if clone else None, **code}
    return Request(kind="enqueue", what=what, who=current_user() + by, asked_at=time.time())


def typed_values(study: Study, texts: Sequence[str]) -> dict[str, Value]:
    """``NAME=VALUE`` texts of ``--set`` as the parameters' types. Raises InputError for an invalid value."""
    distributions = study.search_space.distributions()
    return {name: _typed(name, distributions.get(name), text) for name, text in name_values(texts, "--set").items()}


def _typed(name: str, distribution: BaseDistribution | None, text: str) -> Value:
    """A value as its parameter's type; the text itself if it is none of the choices."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return next((choice for choice in distribution.choices if str(choice) == text), text)  # type: ignore[return-value]
    try:
        return int(text) if isinstance(distribution, IntDistribution) else float(text)
    except ValueError:
        raise InputError(f"--set {name}: {text!r} is not a number") from None
