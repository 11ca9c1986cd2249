"""The unit of a study's cost: node-hours, or machine time for scripts on one machine. Pure."""

from __future__ import annotations

from collections.abc import Callable

from lora_tune.base.registry import on_this_machine
from lora_tune.base.text import duration
from lora_tune.config.study import Study


def counts_node_hours(study: Study) -> bool:
    """Whether cost is in node-hours: not on a single machine, unless a budget, price or score uses them."""
    budget, settings = study.budget, study.objective
    was_requested = budget.node_hours is not None or budget.price_per_node_hour is not None
    return (
        was_requested or "node_hours" in (settings.score, settings.second) or not on_this_machine(study.site.launcher)
    )


def spent_name(study: Study) -> str:
    """The name of the cost: ``node-hours`` or ``machine time``."""
    return "node-hours" if counts_node_hours(study) else "machine time"


def spent_text(study: Study, node_hours: float, hours: Callable[[float], str] = "{:.3g}".format) -> str:
    """The amount, as text. hours: formats node-hours."""
    return hours(node_hours) if counts_node_hours(study) else duration(node_hours * 3600)


def spent_phrase(node_hours: float, *, machine_time: bool) -> str:
    """An amount with its name: ``0.25 node-hours``, or ``15.0 min of machine time``."""
    return f"{duration(node_hours * 3600)} of machine time" if machine_time else f"{node_hours:.3g} node-hours"
