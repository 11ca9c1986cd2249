"""How much each tuned parameter contributes to the score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune.base.format import visible
from lora_tune.config.study import Study
from lora_tune.review.summary import ranked
from lora_tune.search.race_scale import scale_of
from lora_tune.search.scatter import scatter_of
from lora_tune.store.records import StudyRecords, Trial

CHANCE = 0.05
"""Of naming a parameter where none matters."""

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
    least five, as the method needs. [] too where results go with no parameter (:func:`cannot_tell`).
    """
    return sweep.once(("knobs", study.digest), lambda: _knobs(study, sweep))


def _knobs(study: Study, sweep: StudyRecords) -> list[Knob]:
    done = ranked(study, sweep)
    if len(done) < FEWEST or not set_apart(study, sweep):
        return []
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    from lora_tune.search.recorded import in_memory

    better = max(0.1, 5 / len(done))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=better)
    shares = get_param_importances(in_memory(study, sweep), evaluator=evaluator)
    best = done[: max(3, len(done) // 3)]
    return [Knob(name=name, share=share, best=_where(best, name)) for name, share in shares.items()]


def set_apart(study: Study, sweep: StudyRecords) -> bool:
    """Whether results go with any parameter at all: without that, shares of importance divide up luck.

    Kruskal and Wallis' test over the thirds of each number and the values of everything else, at 5% over all of them.
    """
    return sweep.once(("set apart", study.digest), lambda: _set_apart(ranked(study, sweep)))


def _set_apart(done: Sequence[Trial]) -> bool:
    from scipy.stats import kruskal

    chances = []
    for name in dict.fromkeys(name for t in done for name in t.tuned):
        groups = [g for g in _groups(name, done) if len(g) > 1]
        if len(groups) > 1 and len({v for g in groups for v in g}) > 1:
            chances.append(float(kruskal(*groups).pvalue))
    return bool(chances) and min(chances) * len(chances) < CHANCE


def _groups(name: str, done: Sequence[Trial]) -> list[list[float]]:
    """Results by thirds of a number, or by value."""
    known = [t for t in done if name in t.tuned]
    values = [t.tuned[name] for t in known]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if not numbers or len(set(values)) <= 3:
        return [[t.objective for t in known if t.tuned[name] == value] for value in dict.fromkeys(values)]
    ordered = sorted(known, key=lambda t: float(t.tuned[name]))
    third = -(-len(ordered) // 3)
    return [[t.objective for t in ordered[at : at + third]] for at in range(0, len(ordered), third)]


def cannot_tell(study: Study, sweep: StudyRecords) -> str:
    """Why no importance is stated although there are trials enough, "" where it is."""
    done = ranked(study, sweep)
    if len(done) < FEWEST or set_apart(study, sweep):
        return ""
    sentence = f"cannot tell: the {len(done)} results go with no parameter, beyond what chance would show"
    scatter = scatter_of(study, sweep)
    return f"{sentence}; {scatter.words}" if scale_of(study).relative else sentence


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
