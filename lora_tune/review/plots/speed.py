"""Figures of speed: where the time goes, and throughput by layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lora_tune.base.format import counted, duration
from lora_tune.config.study import Study
from lora_tune.review.describe import batch_words, short_layout
from lora_tune.review.plots.chart import Axis, Bars, Chart, Colour, Mark, Markers
from lora_tune.review.plots.units import time_unit
from lora_tune.search.recommendation import leaders
from lora_tune.store.records import StudyRecords, Trial

SHOWN = 15


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Where one trial's seconds went. ``start_up`` is not scored; the other three add up to the time to target."""

    trial: Trial
    start_up: float
    training: float
    evals: float
    rest: float


def time_parts(study: Study, sweep: StudyRecords) -> list[TimeParts]:
    """The decomposition of the best trials, best first: ``time = samples / speed + evals * seconds_per_eval``.

    ``rest`` is what the two do not explain: the cold first block, data loading, checkpoints. Trials whose log gives
    no throughput are left out.
    """
    parts = []
    for trial in leaders(study, sweep)[:SHOWN]:
        metrics = trial.metrics
        speed, seconds, samples = metrics.samples_per_second, trial.seconds, trial.samples
        if not speed or seconds is None or samples is None:
            continue
        count = sum(e.samples <= samples for e in sweep.last_evals(trial.number))
        evals = count * (metrics.seconds_per_eval or 0.0)
        training = min(samples / speed, seconds)
        rest = max(0.0, seconds - training - evals)
        parts.append(TimeParts(trial, metrics.init_seconds or 0.0, training, min(evals, seconds - training), rest))
    return parts


def time_decomposition(study: Study, sweep: StudyRecords) -> Chart | None:
    """Stacked bars of :func:`time_parts`; None without a trial that has them."""
    parts = time_parts(study, sweep)
    if not parts:
        return None
    unit = time_unit(p.start_up + p.training + p.evals + p.rest for p in parts)
    columns: tuple[tuple[str, Colour, Sequence[float]], ...] = (
        ("start-up (not scored)", "muted", [p.start_up for p in parts]),
        ("training", "one", [p.training for p in parts]),
        ("evals", "two", [p.evals for p in parts]),
        ("rest: cold first block, loading", "four", [p.rest for p in parts]),
    )
    starts = [0.0] * len(parts)
    marks: list[Mark] = []
    for name, colour, lengths in columns:
        rows = [len(parts) - 1 - i for i in range(len(parts))]
        bars = [(float(r), s / unit.seconds, x / unit.seconds) for r, s, x in zip(rows, starts, lengths, strict=True)]
        texts = [f"trial {p.trial.number}: {name} {duration(x)}" for p, x in zip(parts, lengths, strict=True)]
        if any(lengths):
            whose = [p.trial.number for p in parts]
            marks.append(Bars(name=name, bars=bars, colour=colour, texts=texts, trials=whose))
        starts = [s + x for s, x in zip(starts, lengths, strict=True)]
    labels = tuple(f"trial {p.trial.number}" for p in reversed(parts))
    return Chart(
        title="Where the time goes",
        x=Axis(label=f"time from the start of the job ({unit.name})", low=0.0),
        y=Axis(label="best first", categories=labels),
        marks=tuple(marks),
        note=f"Time to the target is {study.progress_unit} / throughput + evals x seconds per eval, and the rest.",
        height=90 + 22 * len(parts),
    )


@dataclass(frozen=True, slots=True)
class LayoutSpeed:
    """Throughput of one layout: samples/s of each trial that measured it."""

    layout: str
    speeds: Sequence[float]
    trials: Sequence[int]


def layout_speeds(study: Study, sweep: StudyRecords) -> list[LayoutSpeed]:
    """Warm throughput by layout, fastest median first. Without a layout in the space: by batch size; none without."""
    name = next((n for n, p in study.space.items() if p.type == "layout"), None)
    speeds: dict[str, list[float]] = {}
    trials: dict[str, list[int]] = {}
    for trial in sweep.trials.values():
        speed = trial.metrics.samples_per_second
        if not speed:
            continue
        choice = trial.tuned.get(name) if name else None
        layout = batch_words(trial.parameters) if choice is None else short_layout(str(choice))
        if not layout:
            continue
        speeds.setdefault(layout, []).append(speed)
        trials.setdefault(layout, []).append(trial.number)
    by_layout = [LayoutSpeed(layout, speeds[layout], trials[layout]) for layout in speeds]
    return sorted(by_layout, key=lambda x: -median(x.speeds))


def throughput(study: Study, sweep: StudyRecords) -> Chart | None:
    """Throughput by layout: a bar to the median, a point a trial; None before anything was measured."""
    layouts = layout_speeds(study, sweep)[:SHOWN]
    if not layouts:
        return None
    rows = {x.layout: float(len(layouts) - 1 - i) for i, x in enumerate(layouts)}
    points = [(speed, rows[x.layout]) for x in layouts for speed in x.speeds]
    speed = f"{study.progress_unit}/s"
    texts = [f"trial {t}: {s:.4g} {speed}" for x in layouts for t, s in zip(x.trials, x.speeds, strict=True)]
    whose = [t for x in layouts for t in x.trials]
    return Chart(
        title="Throughput by layout" if any(p.type == "layout" for p in study.space.values()) else "Throughput",
        x=Axis(label=f"{speed}, warm blocks", low=0.0),
        y=Axis(label="layout", categories=tuple(x.layout for x in reversed(layouts))),
        marks=(
            Bars(
                name="median",
                bars=[(rows[x.layout], 0.0, median(x.speeds)) for x in layouts],
                colour="one",
                texts=[
                    f"{x.layout}: median {median(x.speeds):.4g} {speed} over {counted(len(x.speeds), 'trials')}"
                    for x in layouts
                ],
            ),
            Markers(name="one trial", points=points, colour="two", size=3, texts=texts, trials=whose),
        ),
        note="Trials that differ in nothing that costs time agree within a percent; else the machine is noisy.",
        height=90 + 24 * len(layouts),
    )
