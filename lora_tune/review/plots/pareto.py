"""Two objectives against each other: every trial that has both, and the Pareto front, as Optuna knows it."""

from __future__ import annotations

from lora_tune.config.study import Study
from lora_tune.review.describe import parameters_text
from lora_tune.review.plots.chart import Axis, Chart, Markers
from lora_tune.search.objectives import objectives_of
from lora_tune.store.records import StudyRecords, Trial


def front(study: Study, sweep: StudyRecords) -> list[Trial]:
    """The trials that no other one beats in both objectives, best in the first one first; empty for one objective."""
    if study.objective.second is None:
        return []
    from lora_tune.search.recorded import in_memory  # it imports optuna

    known = [sweep.trials[trial.number] for trial in in_memory(study, sweep).best_trials]
    first = objectives_of(study)[0]
    return sorted(known, key=lambda t: t.objective, reverse=first.maximise)


def pareto(study: Study, sweep: StudyRecords) -> Chart | None:
    """The chart; None for one objective, and before a trial has both values."""
    best = front(study, sweep)
    if not best:
        return None
    first, second = objectives_of(study)
    numbers = {t.number for t in best}
    rest = [t for t in first.ranked(sweep) if t.metrics.second_objective is not None and t.number not in numbers]

    def points(name: str, trials: list[Trial], *, winners: bool) -> Markers:
        return Markers(
            name=name,
            points=[(t.metrics.second_objective or 0.0, t.objective) for t in trials],
            texts=[
                f"trial {t.number}: {first.text(t.objective)}, {second.text(t.metrics.second_objective or 0.0)}: "
                f"{parameters_text(t)}"
                for t in trials
            ],
            colour="best" if winners else "muted",
            trials=[t.number for t in trials],
        )

    return Chart(
        title=f"{first.name[0].upper()}{first.name[1:]} against {second.name}",
        x=Axis(label=f"{second.name} ({second.unit})", low=0.0),
        y=Axis(label=f"{first.name} (s)" if first.timed else first.name),
        marks=(
            points("a trial", rest, winners=False),
            points(f"Pareto front ({len(best)})", best, winners=True),
        ),
        note="No other trial beats one of the front in both.",
    )
