"""The report page: template, style and script, trial table, and figures, also as files."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_tune.base.errors import SetupError
from lora_tune.base.text import visible
from lora_tune.config.spent import spent_name, spent_text
from lora_tune.config.study import Study
from lora_tune.review import chart as svg
from lora_tune.review.figures import charts
from lora_tune.review.summary import ending_label, short_layout
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import StudyRecords, Trial

if TYPE_CHECKING:
    from jinja2 import Template


def page_file(name: str) -> str:
    """The text of a file in report_page/."""
    return resources.files("lora_tune.review").joinpath("report_page", name).read_text(encoding="utf-8")


@functools.cache
def template(name: str) -> Template:
    """The Jinja template ``name`` in report_page/, with autoescaping."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("lora_tune.review", "report_page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    return environment.get_template(name)


def _printable(value: Any) -> Any:
    """Texts without control characters; markup unchanged."""
    return visible(value, keep="\n\t") if type(value) is str else value


def write_page(path: Path, text: str) -> None:
    """Write a page to ``path``, replacing an older one atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


_CHARACTER, _BOLD, _PADDING = 7.2, 7.9, 15.0
"""Pixels in the table's font: of a character, of a bold one, of a cell's padding."""

_WORDS = 215.0
"""Minimum width of the column of sentences in pixels."""

_PAGE = 50.0
"""Page margins and table frame in pixels."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell's text, and its sort key if that is another (None: unknown)."""

    text: str
    sort: float | str | None = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. head: its heading. numeric: right-aligned. cells: one per trial."""

    head: str
    numeric: bool
    cells: Sequence[Cell]

    @property
    def width(self) -> float:
        """Minimum width in pixels that breaks no cell and no word of the heading."""
        head = max((len(word) for word in self.head.split()), default=0) * _BOLD
        return max(head, max((len(c.text) for c in self.cells), default=0) * _CHARACTER) + _PADDING


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """The table. states, sentences: one per trial. fits_from: page width in pixels at which all columns fit."""

    numbers: Sequence[int]
    states: Sequence[str]
    columns: Sequence[Column]
    sentences: Sequence[str]

    @property
    def fits_from(self) -> int:
        """On a narrower page each trial becomes a block of named values."""
        return round(sum(column.width for column in self.columns) + _WORDS + _PAGE)

    def rows(self) -> list[tuple[int, str, list[Cell], str]]:
        """(number, state, cells, sentence) of each trial."""
        cells = [list(row) for row in zip(*(c.cells for c in self.columns), strict=True)]
        return list(zip(self.numbers, self.states, cells, self.sentences, strict=True))


def trial_rows(study: Study, sweep: StudyRecords, now: float) -> TrialTable:
    """All trials of the sweep; optional columns that would be empty are omitted. now: epoch seconds."""
    trials, objective = list(sweep.trials.values()), objective_of(study)
    columns = [
        Column(head="Trial", numeric=True, cells=[Cell(str(t.number)) for t in trials]),
        Column(
            head="State",
            numeric=False,
            cells=[Cell(ending_label(study, t) or state_of(study, sweep, t)) for t in trials],
        ),
        _numbers(objective.heading, [t.metrics.objective for t in trials], objective.text),
    ]
    if any(t.metrics.clock_objective is not None for t in trials):
        by_clock = [t.metrics.objective if (m := t.metrics.clock_objective) is None else m for t in trials]
        columns.append(_numbers("By the clock", by_clock, objective.text))
    if objective.timed:
        columns.append(
            _numbers(study.progress_unit, [t.samples for t in trials], lambda v: study.counted(v).split()[0])
        )
    columns.append(_numbers(f"Last {study.measure}", [_last(study, sweep, t) for t in trials], lambda v: f"{v:.4f}"))
    if objective.timed:
        columns.append(
            _numbers(f"{study.progress_unit}/s", [t.metrics.samples_per_second for t in trials], lambda v: f"{v:.4g}")
        )
    spent = [sum(a.node_hours(now) for a in sweep.attempts_of(t.number)) for t in trials]
    columns.append(_numbers(spent_name(study), spent, lambda v: spent_text(study, v, hours)))
    attempts = [len(sweep.attempts_of(t.number)) for t in trials]
    if max(attempts, default=0) > 1:
        columns.append(Column(head="Attempts", numeric=True, cells=[Cell(str(n)) for n in attempts]))
    columns += [_tuned(study, name, trials) for name in tuned_names(sweep)]
    return TrialTable(
        numbers=[t.number for t in trials],
        states=[state_of(study, sweep, t) for t in trials],
        columns=columns,
        sentences=[t.sentence for t in trials],
    )


def _numbers(head: str, values: Sequence[float | None], text: Callable[[float], str]) -> Column:
    cells = [Cell("", None) if v is None else Cell(text(v), float(f"{v:.10g}")) for v in values]
    return Column(head=head[0].upper() + head[1:], numeric=True, cells=cells)


def _tuned(study: Study, name: str, trials: Sequence[Trial]) -> Column:
    kind = getattr(study.space.get(name), "type", "")
    values = [t.tuned.get(name) for t in trials]
    texts = [short_layout(str(v)) if kind == "layout" and v is not None else value_text(v) for v in values]
    return Column(head=name, numeric=kind in ("float", "int"), cells=[Cell(visible(text)) for text in texts])


def _last(study: Study, sweep: StudyRecords, trial: Trial) -> float | None:
    evals = sweep.last_evals(trial.number)
    return study.shown(evals[-1].loss) if evals else None


def tuned_names(sweep: StudyRecords) -> list[str]:
    """The tuned names, in the order of the space."""
    return list(dict.fromkeys(name for trial in sweep.trials.values() for name in trial.tuned))


def state_of(study: Study, sweep: StudyRecords, trial: Trial) -> str:
    """A trial's verdict in its objective's words; the state of its last attempt if open."""
    attempts = sweep.attempts_of(trial.number)
    if trial.verdict is not None:
        return objective_of(study).verdict_name(trial.verdict)
    return str(attempts[-1].state if attempts else trial.state)


def value_text(value: object) -> str:
    """A parameter's value; floats to four digits."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def hours(value: float) -> str:
    """Node-hours to three digits, without exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 1e-4 or value == 0 else "0.0001"


def searched_names(study: Study) -> set[str]:
    """Names with more than one value in the search: tuned ones, and those that differ between layouts."""
    space = study.search_space
    tuned = {name for name, d in space.distributions().items() if not d.single()}
    values: dict[str, set[object]] = {}
    for layout in space.each_layout():
        for name, value in layout.items():
            values.setdefault(name, set()).add(value)
    return tuned | {name for name, settings in values.items() if len(settings) > 1 and name != "GBS"}


def page_figures(study: Study, sweep: StudyRecords, now: float) -> list[dict[str, str]]:
    """Id, title, note and drawing of each figure. now: epoch seconds."""
    return [
        {"id": name, "title": chart.title, "note": chart.note, "svg": svg.inline(chart)}
        for name, chart in charts(study, sweep, now).items()
    ]


def write_figures(study: Study, sweep: StudyRecords, folders: Mapping[str, Path | None]) -> list[Path]:
    """Write each figure in each format ("svg", "png", "pdf") that has a folder; returns the files.

    Raises SetupError if PNG or PDF is requested and CairoSVG is missing.
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
    """An SVG as PNG (at twice its size) or PDF."""
    try:
        import cairosvg
    except (ModuleNotFoundError, OSError) as error:  # OSError: the cairo library is missing
        raise SetupError(
            "PNG and PDF need CairoSVG: pip install 'lora-tune[slides]', and Debian's libcairo2; --svg needs nothing"
        ) from error
    if form == "png":
        content: bytes = cairosvg.svg2png(drawing.encode(), output_width=2 * svg.WIDTH)
    else:
        content = cairosvg.svg2pdf(drawing.encode())
    return content
