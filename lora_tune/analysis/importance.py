"""How much each tuned parameter contributes to the score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune.analysis.summary import ranked
from lora_tune.base.format import visible
from lora_tune.config.study import Study
from lora_tune.store.records import StudyRecords, Trial

FEWEST = 10
"""Trials that reached the target before importances are worth printing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One tuned parameter. share: of the importance, all add up to 1. best: where the best third of trials lie."""

    name: str
    share: float
    best: str


def knobs(study: Study, sweep: StudyRecords) -> list[Knob]:
    """Importances by PED-ANOVA (Watanabe, Bansal, Hutter 2023), the largest first; [] with too few trials.

    The share says how much a parameter sets the better trials apart from all: the better ones are a tenth, and at
    least five, as the method needs.
    """
    return sweep.once(("knobs", study.digest), lambda: _knobs(study, sweep))


def _knobs(study: Study, sweep: StudyRecords) -> list[Knob]:
    done = ranked(study, sweep)
    if len(done) < FEWEST:
        return []
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    from lora_tune.search.recorded import in_memory

    better = max(0.1, 5 / len(done))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=better)
    shares = get_param_importances(in_memory(study, sweep), evaluator=evaluator)
    best = done[: max(3, len(done) // 3)]
    return [Knob(name=name, share=share, best=_where(best, name)) for name, share in shares.items()]


def _where(best: Sequence[Trial], name: str) -> str:
    """The range, or the most frequent values, of a parameter among ``best``."""
    values = [t.tuned[name] for t in best if name in t.tuned]
    if not values:
        return "exists in none of them"
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values):
        low, high = min(numbers), max(numbers)
        return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    counts = {v: values.count(v) for v in dict.fromkeys(values)}
    most = sorted(counts, key=lambda v: -counts[v])[:2]
    return ", ".join(f"{visible(v)} ({counts[v]} of {len(values)})" for v in most)
