"""The options of ``steer`` as requests, checked against the study and its records."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lora_tune.base.errors import InputError
from lora_tune.config.parameters import Value
from lora_tune.config.study import Study
from lora_tune.controller.steering import SETTINGS, refusal_of_values
from lora_tune.store.port import Request
from lora_tune.store.records import StudyRecords, TrialState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def this_person() -> str:
    """Who asks, as user@host."""
    return f"{getpass.getuser()}@{os.uname().nodename}"


def parse(study: Study, sweep: StudyRecords, options: Mapping[str, Any], now: float) -> Iterator[Request]:
    """The requests of one command line.

    Parameters
    ----------
    study : Study
        As its budget stands after what was asked before.
    sweep : Sweep
        Its records.
    options : mapping
        The options of ``steer`` by their names.
    now : float
        Epoch seconds.

    Raises
    ------
    InputError
        For what the driver would refuse.
    """
    who = this_person()

    def request(kind: str, **what: Any) -> Request:
        return Request(kind=kind, what=what, who=who, asked_at=now)

    for number in options["stops"]:
        if number not in sweep.trials:
            raise InputError(f"--stop {number}: there is no such trial; there are {len(sweep.trials)}, from 0")
        if sweep.trials[number].state is TrialState.FINISHED:
            raise InputError(f"--stop {number}: it has ended, {sweep.trials[number].verdict}")
        yield request("stop", trial=number)
    if options["enqueue"] or options["values"] or options["clone"] is not None:
        yield request("enqueue", values=_values(study, sweep, options), clone_of=options["clone"])
    if budget := {name: options[name] for name in SETTINGS if options[name] is not None}:
        study.with_options({"budget": budget})  # raises InputError for a value that cannot be
        yield request("set", **budget)
    if options["pause"] is not None:
        yield request("pause" if options["pause"] else "resume")


def _values(study: Study, sweep: StudyRecords, options: Mapping[str, Any]) -> dict[str, Value]:
    """The tuned values to try. Raises InputError for what is no point of the space."""
    clone = options["clone"]
    if not options["enqueue"]:
        raise InputError("--set and --clone say what to try; add --enqueue")
    tuned: dict[str, Value] = {}
    if clone is not None:
        if clone not in sweep.trials:
            raise InputError(f"--clone {clone}: there is no such trial; there are {len(sweep.trials)}, from 0")
        tuned = dict(sweep.trials[clone].tuned)
    distributions = study.search_space.distributions()
    for text in options["values"]:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text}: write NAME=VALUE")
        tuned[name] = typed(name, distributions.get(name), value)
    if problem := refusal_of_values(study, tuned):
        raise InputError(f"--enqueue: {problem}")
    return tuned


def typed(name: str, distribution: BaseDistribution | None, text: str) -> Value:
    """What was typed, as the parameter's own type; the text itself where it is no such value."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return next((choice for choice in distribution.choices if str(choice) == text), text)  # type: ignore[return-value]
    try:
        return int(text) if isinstance(distribution, IntDistribution) else float(text)
    except ValueError:
        raise InputError(f"--set {name}: {text!r} is not a number") from None
