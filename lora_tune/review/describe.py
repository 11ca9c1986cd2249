"""Trials, layouts, races and money in a few words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from lora_tune.base.text import visible
from lora_tune.config.study import Study
from lora_tune.review import replicates as raced
from lora_tune.search import comparison
from lora_tune.search.objectives import objective_of
from lora_tune.search.race_scale import scale_of
from lora_tune.search.usual_names import BATCH
from lora_tune.store.records import Trial


def parameters_text(trial: Trial) -> str:
    """The tuned values, short: ``LR=0.0031 MAX_STEPS=200 tp4 minibs4``; degrees of 1 are left out of a layout.

    The trial that measures a configuration as it stands has that one's name before them.
    """
    parts = [str(trial.metrics.base)] if trial.metrics.base is not None else []
    for name, value in trial.tuned.items():
        if isinstance(value, str) and value.startswith("tp"):
            parts.append(short_layout(value))
        else:
            parts.append(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}")
    return visible(" ".join(parts))


def short_layout(text: str) -> str:
    """A layout without its degrees of 1: ``tp4 pp1 cp1 minibs4 mbs1 sp1`` is ``tp4 minibs4 sp1``; SP is a switch."""
    return " ".join(re.findall(r"sp1|[a-z]+(?!1\b)\d+", text)) or text


def race_words(study: Study, runs: Mapping[int, Sequence[raced.Replicate]]) -> list[str]:
    """Where the configurations of a race stand, the best first: mean, 90% interval, runs, and those that missed.

    runs: by the trial that they repeat.
    """
    scale, text = scale_of(study), objective_of(study).text
    means = comparison.means(raced.results(runs, runs), scale)
    standings = []
    for number, own in runs.items():
        name, count = raced.name_of(number), raced.runs_words(len(own), raced.missed(own), scale)
        mean, low, high = means.get(name, (math.inf, math.inf, math.inf))
        value = f"({count})" if name not in means else f"{text(mean)} ({text(low)} to {text(high)}, {count})"
        standings.append((scale.order(mean), f"{name} {value}"))
    return [line for _, line in sorted(standings)]


def batch_words(parameters: Mapping[str, object]) -> str:
    """The batch size by the name that it has there, ``GBS 16``; "" where no usual name of it is there."""
    return next((f"{name} {parameters[name]}" for name in BATCH if name in parameters), "")


def interval_words(low: float, high: float, text: Callable[[float], str]) -> str:
    """``low to high`` as ``text`` writes them; with more digits where they would look the same."""
    if low != high and text(low) == text(high):
        unit = " s" if text(low).endswith((" s", " min", " h")) else ""
        for digits in range(3, 17):
            if f"{low:.{digits}g}" != f"{high:.{digits}g}":
                return f"{low:.{digits}g}{unit} to {high:.{digits}g}{unit}"
    return f"{text(low)} to {text(high)}"


def money(study: Study, node_hours: float) -> float | None:
    """What the node-hours cost, None where the study states no price."""
    rate = study.budget.price_per_node_hour
    return None if rate is None else rate * node_hours


def price(study: Study, node_hours: float) -> str:
    """The same in words behind the node-hours, "" without a price."""
    cost = money(study, node_hours)
    return f" = {cost:,.2f} in money" if cost is not None else ""
