"""The figure of importances."""

from __future__ import annotations

from lora_tune.analysis.importance import FEWEST, knobs
from lora_tune.config.study import Study
from lora_tune.review.plots.chart import Axis, Bars, Chart
from lora_tune.store.records import StudyRecords


def importance(study: Study, sweep: StudyRecords) -> Chart | None:
    """A bar a knob, the most important first; None while too few trials reached the target."""
    ranking = knobs(study, sweep)
    if not ranking:
        return None
    rows = [(float(len(ranking) - 1 - i), 0.0, 100 * k.share) for i, k in enumerate(ranking)]
    texts = [f"{k.name}: {k.share:.0%}; best third of the trials: {k.best}" for k in ranking]
    return Chart(
        title="Which knobs matter",
        x=Axis(label="share of the importance (%)", low=0.0),
        y=Axis(label="", categories=tuple(k.name for k in reversed(ranking))),
        marks=(Bars(name="importance", bars=rows, colour="one", texts=texts),),
        note=f"PED-ANOVA over the trials that reached the target, at least {FEWEST}: how far a knob sets the better "
        "trials apart from all. " + " ".join(f"{k.name}: best third at {k.best}." for k in ranking[:3]),
        height=80 + 26 * len(ranking),
    )
