"""The figures of a report: in its page, and each as a file of its own: SVG, PNG for slides, or PDF."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from lora_tune.base.errors import SetupError
from lora_tune.config.study import Study
from lora_tune.review.plots import chart as svg
from lora_tune.review.plots import charts
from lora_tune.store.records import StudyRecords


def page_figures(study: Study, sweep: StudyRecords, now: float) -> list[dict[str, str]]:
    """Each figure as the page shows it: id, title, note and drawing. now: epoch seconds."""
    return [
        {"id": name, "title": chart.title, "note": chart.note, "svg": svg.inline(chart)}
        for name, chart in charts(study, sweep, now).items()
    ]


def write_figures(study: Study, sweep: StudyRecords, folders: Mapping[str, Path | None]) -> list[Path]:
    """Each figure as a file of each form ("svg", "png", "pdf") that has a folder; returns the files.

    Raises SetupError where PNG or PDF is asked for and CairoSVG is missing.
    """
    drawings = {name: svg.standalone(chart) for name, chart in charts(study, sweep, time.time()).items()}
    written = []
    for form, folder in folders.items():
        if folder is None:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for name, drawing in drawings.items():
            file = folder / f"{name}.{form}"
            file.write_bytes(drawing.encode() if form == "svg" else _converted(drawing, form))
            written.append(file)
    return written


def _converted(drawing: str, form: str) -> bytes:
    """An SVG as PNG (twice its size, for sharp slides) or PDF."""
    try:
        import cairosvg
    except (ModuleNotFoundError, OSError) as error:  # OSError: the package is there, the cairo library is not
        raise SetupError(
            "PNG and PDF need CairoSVG: pip install 'lora-tune[slides]', and Debian's libcairo2; --svg needs nothing"
        ) from error
    if form == "png":
        content: bytes = cairosvg.svg2png(drawing.encode(), output_width=2 * svg.WIDTH)
    else:
        content = cairosvg.svg2pdf(drawing.encode())
    return content
