"""The figures of a sweep. A figure is a data function and a drawing function; the drawing is a :class:`Chart`,
which :mod:`lora_tune.review.plots.chart` and :mod:`lora_tune.review.plots.figures` turn into SVG and plotly.
"""

from __future__ import annotations

from lora_tune.config.study import Study
from lora_tune.review.plots import curves
from lora_tune.review.plots.chart import Chart
from lora_tune.store.records import StudyRecords

__all__ = ["Chart", "charts"]


def charts(study: Study, sweep: StudyRecords, now: float) -> dict[str, Chart]:
    """All figures that this sweep has data for, by short name, in the order in which people read them."""
    drawn = {
        "eval-curves": curves.eval_curves(study, sweep),
        "samples-to-target": curves.samples_to_target(study, sweep),
        "time": curves.time_decomposition(study, sweep),
        "throughput": curves.throughput(study, sweep),
        "spending": curves.spending(study, sweep),
        "timeline": curves.timeline(sweep, now),
    }
    return {name: chart for name, chart in drawn.items() if chart is not None}
