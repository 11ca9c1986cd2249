"""Importance of each tuned parameter, node scaling, changes against the base config, and failing values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import eq, ge, le

from lora_tune.base.text import visible
from lora_tune.config.study import Study
from lora_tune.controller.changed_study import base_trial
from lora_tune.search.noise import noise_of, scale_of
from lora_tune.search.objectives import objective_of
from lora_tune.search.recommendation import leaders
from lora_tune.store.records import StudyRecords, Trial, Value, Verdict
from lora_tune.workloads.base_config import Difference, differences
from lora_tune.workloads.config_file import value_text

CHANCE = 0.05
"""Error probability of naming a parameter if none matters."""

FEWEST = 10
"""Minimum trials that reached the target for printed importances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One tuned parameter. share: of the total importance of 1. best: its values in the best third of trials."""

    name: str
    share: float
    best: str


def knobs(study: Study, sweep: StudyRecords) -> list[Knob]:
    """Importances by PED-ANOVA (Watanabe, Bansal, Hutter 2023), largest first; [] for too few trials.

    A share measures how far a parameter separates the better trials from all; better ones are a tenth, and at least
    five, as the method needs. Also [] if results depend on no parameter (:func:`cannot_tell`).
    """
    return sweep.once(("knobs", study.digest), lambda: _knobs(study, sweep))


def _knobs(study: Study, sweep: StudyRecords) -> list[Knob]:
    done = leaders(study, sweep)
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
    """Whether results depend on any parameter; if not, importances would only divide up noise.

    Kruskal-Wallis test over thirds of each number, and over values of others, at 5% with Bonferroni correction.
    """
    return sweep.once(("set apart", study.digest), lambda: _set_apart(leaders(study, sweep)))


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
    """Why no importance is reported despite enough trials; "" if it is."""
    done = leaders(study, sweep)
    if len(done) < FEWEST or set_apart(study, sweep):
        return ""
    sentence = f"cannot tell: the {len(done)} results go with no parameter, beyond what chance would show"
    noise = noise_of(study, sweep)
    return f"{sentence}; {noise.sentence}" if scale_of(study).relative else sentence


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


# Node scaling: the best measured throughput on each number of nodes.


@dataclass(frozen=True, slots=True)
class NodeScaling:
    """The best on one node count. efficiency: samples/s per GPU relative to the smallest measured node count.

    It exceeds 1 if more GPUs leave each one memory for a better micro batch. stopped: the best trial was stopped early,
    so its speed is an estimate.
    """

    nodes: int
    gpus: int
    samples_per_second: float
    efficiency: float
    trial: int
    stopped: bool = False


def scaling(study: Study, sweep: StudyRecords) -> list[NodeScaling]:
    """One entry per node count with a measured speed, by nodes; empty if the node count does not vary."""
    space = study.search_space
    if not space.varies_nodes:
        return []
    best: dict[int, tuple[bool, float, int]] = {}
    for trial in sweep.trials.values():
        speed = trial.metrics.samples_per_second
        if speed:
            nodes = space.node_count(trial.parameters)
            # A finished measurement has priority over an estimate.
            measured = (trial.verdict == "reached", float(speed), trial.number)
            best[nodes] = max(best.get(nodes, measured), measured)
    rows: list[NodeScaling] = []
    for nodes, (finished, speed, number) in sorted(best.items()):
        gpus = max(1, nodes * max(1, study.site.gpus_per_node))
        base = rows[0].samples_per_second / rows[0].gpus if rows else speed / gpus
        rows.append(NodeScaling(nodes, gpus, speed, speed / gpus / base, number, stopped=not finished))
    return rows


def table(study: Study, rows: Sequence[NodeScaling]) -> str:
    """The rows as aligned text with a heading; "" for none."""
    if not rows:
        return ""
    lines = [f"{'nodes':>8}{'GPUs':>8}{f'{study.progress_unit}/s':>12}{'per GPU':>10}   trial"]
    for row in rows:
        note = ", stopped early" if row.stopped else ""
        lines.append(
            f"{row.nodes:>8}{row.gpus:>8}{row.samples_per_second:>12.4g}{row.efficiency:>9.0%}   {row.trial}{note}"
        )
    return "\n".join(lines)


# Changes of a trial against the base config, and the gain of each.


APART = ("GBS", "NODES")
"""Recorded parameters that are no variables: they follow from others."""


@dataclass(frozen=True, slots=True)
class ChangeGain:
    """The gain of one change given all others.

    share: of the time to the target that it saves. sd: its standard deviation.
    """

    name: str
    share: float
    sd: float

    def __str__(self) -> str:
        return f"saves {100 * self.share:.1f}% ± {100 * self.sd:.1f}%"


def changes(base: Trial, trial: Trial) -> list[Difference]:
    """Variables whose values differ between the base and ``trial``, by name."""
    before, after = (
        {n: value_text(v) for n, v in t.parameters.items() if n not in APART and n in trial.parameters}
        for t in (base, trial)
    )
    return differences(before, after)


def change_gains(study: Study, sweep: StudyRecords, base: Trial, trial: Trial) -> list[ChangeGain]:
    """Gain of each tuned parameter that ``trial`` changes: the cost of undoing it alone; largest first.

    Estimated by the search's model from all trials, with its uncertainty, because single runs are too noisy. Empty if
    the sampler has no such model, or the base is not in the space.
    """
    names = [n for n in trial.tuned if n in base.tuned and trial.tuned[n] != base.tuned[n]]
    if not names or not objective_of(study).timed:
        return []
    from lora_tune.search.grey_box.sampler import GreyBoxSampler
    from lora_tune.search.recorded import in_memory
    from lora_tune.search.samplers import sampler_of

    sampler = sampler_of(study, sweep)
    if not isinstance(sampler, GreyBoxSampler):
        return []
    whole = study.search_space.conditions.complete(trial.tuned)
    undone = [{**whole, n: base.tuned[n]} for n in names]
    compared = sampler.compared(in_memory(study, sweep, sampler), whole, undone)
    costs = [ChangeGain(n, c.share, c.sd) for n, c in zip(names, compared, strict=False)]
    return sorted(costs, key=lambda worth: -worth.share)


def change_lines(study: Study, sweep: StudyRecords, trial: Trial) -> Iterator[str]:
    """The trial's result against the base, and each change with its gain if known, as lines."""
    base = base_trial(sweep)
    if base is None:
        return
    if trial.number == base.number:
        yield f"trial {base.number} is {base.metrics.base} as it stands: nothing that was tried is better"
        return
    name, changed = base.metrics.base, changes(base, trial)
    yield f"trial {trial.number} against {name} (trial {base.number}): {_measured(study, base, trial)}"
    worth = {w.name: w for w in change_gains(study, sweep, base, trial)}
    layout = next((n for n, p in study.space.items() if p.type == "layout"), "")
    for change in changed:
        known = worth.get(change.name)
        yield f"{change}" + (f"   {known}" if known else "")
    if layout in worth:
        yield f"  the layout as a whole {worth[layout]}"
    if worth:
        yield "  (each with the other changes in place, as the search's model expects it)"
    elif len(changed) > 1:
        yield "  (what each of them is worth is not shown by this sweep)"


def _measured(study: Study, base: Trial, trial: Trial) -> str:
    before, after = (t.metrics.objective for t in (base, trial))
    if not before or not after:
        ended = base if not before else trial
        return f"no comparison, trial {ended.number} {ended.verdict or ended.state}: {ended.sentence}"
    objective = objective_of(study)
    return f"{objective.text(after)} against {objective.text(before)}, {100 * (after / before - 1):+.1f}%"


# Parameter values at which trials do not reach the target, which importances cannot show.


FAILS = (Verdict.CENSORED, Verdict.PRUNED, Verdict.INFEASIBLE, Verdict.FAILED)
"""Verdicts without a result. A capped or cancelled trial might have reached one."""

FAILURE_CHANCE = 0.01
"""Error probability, over all tables tested, of reporting a value that has no effect."""

MOST_SHARE = 0.34
"""Maximum success rate at such a value, relative to that elsewhere."""

FEWEST_FAILURES = 3
"""Minimum failures at a reported value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingValue:
    """A value, or a side of a number, at which trials fail. at: such as ``RANK=4``. good, all: successful and all
    trials there; others_good, others: elsewhere. chance: probability by luck. trials: those that failed there."""

    at: str
    name: str
    good: int
    all: int
    others_good: int
    others: int
    chance: float
    trials: tuple[int, ...] = ()

    def sentence(self, study: Study) -> str:
        """The finding as a sentence."""
        what = "reached the target" if objective_of(study).has_target else "measured a value"
        never = "never" if not self.good else "seldom"
        return f"{self.at} {never} {what}: {self.good} of {self.all}, others {self.others_good} of {self.others}"


def failing_values(sweep: StudyRecords) -> list[FailingValue]:
    """At most one per parameter, most significant first; one-sided Fisher's exact test with Bonferroni correction over
    the tables tested."""
    ended = [t for t in sweep.trials.values() if t.tuned and not t.probe and (_good(t) or t.verdict in FAILS)]
    tables = [_table(name, at, holds, ended) for name in _names(ended) for at, holds in _splits(name, ended)]
    sure: dict[str, FailingValue] = {}
    for table in sorted(tables, key=lambda t: t.chance):
        rare = table.good * table.others <= MOST_SHARE * table.others_good * table.all
        likely = min(1.0, table.chance * len(tables))
        if rare and table.all - table.good >= FEWEST_FAILURES and likely <= FAILURE_CHANCE:
            sure.setdefault(table.name, replace(table, chance=likely))
    return list(_not_explained(sure.values()))


def explained(values: list[FailingValue]) -> frozenset[int]:
    """Trials whose failure a value other than a learning rate explains: their curves say nothing about other causes."""
    rates = ("LR", "learning_rate", "lr")
    return frozenset(number for value in values if value.name not in rates for number in value.trials)


def _good(trial: Trial) -> bool:
    return trial.verdict is Verdict.REACHED


def _names(ended: list[Trial]) -> list[str]:
    return list(dict.fromkeys(name for trial in ended for name in trial.tuned))


Split = tuple[str, Callable[[Value], bool]]


def _splits(name: str, ended: list[Trial]) -> Iterator[Split]:
    """Each value (of at most 12); for numbers also both sides of the gaps between neighbours, about ten gaps at
    most."""
    values = list(dict.fromkeys(t.tuned[name] for t in ended if name in t.tuned))
    if len(values) < 2:
        return
    numbers = sorted(v for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    if len(values) <= 12:
        for value in values:
            yield f"{name}={visible(_text(value))}", partial(eq, value)
    if len(numbers) == len(values) and len(numbers) > 2:
        gaps = list(pairwise(numbers))
        for low, high in gaps[:: 1 + (len(gaps) - 1) // 10]:
            yield f"{name} of {_text(low)} or less", partial(ge, low)
            yield f"{name} of {_text(high)} or more", partial(le, high)


def _text(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(name: str, at: str, holds: Callable[[Value], bool], ended: list[Trial]) -> FailingValue:
    from scipy.stats import hypergeom

    here = [t for t in ended if name in t.tuned and holds(t.tuned[name])]
    good, every = sum(map(_good, here)), sum(map(_good, ended))
    chance = float(hypergeom.cdf(good, len(ended), every, len(here))) if here else 1.0
    failed = tuple(t.number for t in here if not _good(t))
    return FailingValue(
        at=at, name=name, good=good, all=len(here), others_good=every - good, others=len(ended) - len(here),
        chance=chance, trials=failed,
    )  # fmt: skip


def _not_explained(surest: Iterable[FailingValue]) -> Iterator[FailingValue]:
    """Values that explain at least ``FEWEST_FAILURES`` failures which a more significant one does not."""
    known: set[int] = set()
    for value in surest:
        if len(set(value.trials) - known) >= FEWEST_FAILURES:
            yield value
            known.update(value.trials)
