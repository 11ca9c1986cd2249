"""What a trial changes against the machine's own config, and what each change is worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lora_tune.config.study import Study
from lora_tune.controller.base_watch import base_trial
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.workloads.base_config import Difference, differences
from lora_tune.workloads.config_file import value_text

APART = ("GBS", "NODES")
"""Values of a record that are no variables: they follow from others."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What one change is worth with all others in place.

    share: of the time to the target that it saves. sd: its standard deviation.
    """

    name: str
    share: float
    sd: float

    def __str__(self) -> str:
        return f"saves {100 * self.share:.1f}% ± {100 * self.sd:.1f}%"


def changes(base: Trial, trial: Trial) -> list[Difference]:
    """The variables that ``trial`` sets otherwise than the base, by name."""
    before, after = (
        {n: value_text(v) for n, v in t.parameters.items() if n not in APART and n in trial.parameters}
        for t in (base, trial)
    )
    return differences(before, after)


def worths(study: Study, sweep: StudyRecords, base: Trial, trial: Trial) -> list[Worth]:
    """Each tuned parameter that ``trial`` changes, by what undoing it alone would cost; the dearest first.

    As the search's model expects it after all trials, with its doubt: single runs are too noisy to tell one change from
    another. Empty where the sampler has no such model, or the base is no point of the space.
    """
    names = [n for n in trial.tuned if n in base.tuned and trial.tuned[n] != base.tuned[n]]
    if not names or not objective_of(study).timed:
        return []
    from lora_tune.search.abilities import Compares
    from lora_tune.search.recorded import in_memory
    from lora_tune.search.samplers import sampler_of

    sampler = sampler_of(study, sweep)
    if not isinstance(sampler, Compares):
        return []
    whole = study.search_space.conditions.complete(trial.tuned)
    undone = [{**whole, n: base.tuned[n]} for n in names]
    compared = sampler.compared(in_memory(study, sweep, sampler), whole, undone)
    costs = [Worth(n, c.share, c.sd) for n, c in zip(names, compared, strict=False)]
    return sorted(costs, key=lambda worth: -worth.share)


def told(study: Study, sweep: StudyRecords, trial: Trial) -> Iterator[str]:
    """The same in lines: how the trial did against the base, and each change with its worth where that is known."""
    base = base_trial(sweep)
    if base is None:
        return
    if trial.number == base.number:
        yield f"trial {base.number} is {base.metrics.base} as it stands: nothing that was tried is better"
        return
    name, changed = base.metrics.base, changes(base, trial)
    yield f"trial {trial.number} against {name} (trial {base.number}): {_measured(study, base, trial)}"
    worth = {w.name: w for w in worths(study, sweep, base, trial)}
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
