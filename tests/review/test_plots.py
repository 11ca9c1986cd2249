"""Figures: data functions that agree with the records, drawings that agree with the data."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_tune.cli import report
from lora_tune.config.layout import LayoutAxes
from lora_tune.config.study import Study
from lora_tune.review import chart as svg
from lora_tune.review import figures
from lora_tune.review.chart import (
    Axis,
    Bars,
    Chart,
    Lines,
    Markers,
    Rule,
    extent,
    linear_ticks,
    log_ticks,
    tick_text,
    time_unit,
)
from lora_tune.review.summary import short_layout
from lora_tune.store.records import StudyRecords, Verdict
from tests.builders import BEGAN, STUDY, hostile, study_of, sweep_of

NOW = BEGAN + 30 * 3600
NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def study() -> Study:
    return study_of()


@pytest.fixture(scope="module")
def sweep(study: Study) -> StudyRecords:
    return sweep_of(study, trials=60, running=2)


def test_every_trial_with_evals_is_one_curve(study: Study, sweep: StudyRecords) -> None:
    data = figures.curve_data(study, sweep)
    drawn = len(data.best) + len(data.reached) + len(data.stopped) + len(data.others)
    assert drawn == sum(bool(sweep.last_evals(n)) for n in sweep.trials)
    assert data.best[0][0] == sweep.best()
    for samples, middle, limit in data.envelope:
        assert samples > 0
        assert limit > middle


def test_times_add_up_to_the_time_to_target(study: Study, sweep: StudyRecords) -> None:
    parts = figures.time_parts(study, sweep)
    assert parts[0].trial == sweep.best()
    for p in parts:
        assert p.training + p.evals + p.rest == pytest.approx(p.trial.seconds)
        assert min(p.start_up, p.training, p.evals, p.rest) >= 0


def test_throughput_is_grouped_by_layout_the_fastest_first(study: Study, sweep: StudyRecords) -> None:
    found = figures.layout_speeds(study, sweep)
    assert sum(len(x.speeds) for x in found) == sum(
        t.metrics.samples_per_second is not None for t in sweep.trials.values()
    )
    assert found[0].layout.startswith("tp2 ")  # the builder makes TP 2 the fastest


def test_two_layouts_never_share_a_short_name() -> None:
    axes = LayoutAxes(tp=(1, 2, 4), pp=(1, 2), vp=(1, 2), cp=(1, 2), sp=(0, 1), mbs=(1, 2), minibs=(1, 4))
    layouts = axes.enumerate(8).layouts
    assert len({short_layout(str(layout)) for layout in layouts}) == len(layouts)


def test_samples_to_target_recovers_the_builder_s_valley() -> None:
    study = study_of()
    data = figures.convergence_data(study, sweep_of(study, trials=200))
    assert data is not None
    assert data.knob == "LR"
    fit = data.model[8]
    valley = min(fit, key=lambda row: row[1])
    assert valley[0] == pytest.approx(5e-4, rel=0.25)  # the builder's best LR
    assert valley[1] == pytest.approx(2900, rel=0.05)  # and its samples there
    assert all(low < middle < high for _, middle, low, high in fit)


def test_the_best_so_far_never_gets_worse_and_spending_never_falls(study: Study, sweep: StudyRecords) -> None:
    bought = figures.spending_points(study, sweep)
    bests = [p.best for p in bought if p.best is not None]
    assert bests == sorted(bests, reverse=True)
    hours = [p.node_hours for p in bought]
    assert hours == sorted(hours)
    best = sweep.best()
    assert best is not None
    assert bests[-1] == best.objective


def test_the_job_of_a_trial_whose_record_is_lost_is_drawn_as_failed() -> None:
    whole = sweep_of(study_of(), trials=6)
    lost = replace(whole, trials={n: t for n, t in whole.trials.items() if n != 2})
    assert {s.colour for s in figures.stays(lost, NOW) if s.trial == 2} == {"bad"}
    assert figures.timeline(lost, NOW) is not None


def test_stays_on_one_node_never_overlap_within_a_lane(sweep: StudyRecords) -> None:
    chart = figures.timeline(sweep, NOW)
    assert chart is not None
    lanes: dict[float, list[tuple[float, float]]] = {}
    for mark in chart.marks:
        assert isinstance(mark, Bars)
        for row, start, length in mark.bars:
            lanes.setdefault(row, []).append((start, start + length))
    for stays in lanes.values():
        ordered = sorted(stays)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(ordered))
    assert sum(len(v) for v in lanes.values()) == sum(len(a.nodes) for a in sweep.attempts.values())


def test_a_trial_that_failed_at_first_shows_both_colours(sweep: StudyRecords) -> None:
    again = next(a for a in sweep.attempts.values() if a.failure == "infrastructure")
    stays = [s for s in figures.stays(sweep, NOW) if s.trial == again.trial]
    assert stays[0].colour == "bad"
    if sweep.trials[again.trial].verdict is Verdict.REACHED:
        assert stays[-1].colour == "good"


def test_ends_of_trials_have_colours_that_can_be_told_apart(sweep: StudyRecords) -> None:
    """Two names of one colour made reached and censored trials look the same."""
    late = next(t for t in sweep.trials.values() if t.verdict is Verdict.PRUNED)
    ended = replace(sweep, trials={**sweep.trials, late.number: replace(late, verdict=Verdict.CENSORED)})
    shown = {stay.outcome: stay.colour for stay in figures.stays(ended, NOW)}
    assert {"reached", "censored"} <= shown.keys()
    for theme in (svg.LIGHT, svg.DARK):
        assert len({theme[colour] for colour in shown.values()}) == len(shown)


def test_a_study_without_layout_numbers_or_trials_still_draws(sweep: StudyRecords) -> None:
    text = STUDY.replace('layout = { type = "layout", tp = [1, 2, 4, 8], minibs = [1, 2, 4] }', "GBS = 8")
    text = text.replace('LR = { type = "float", low = 1e-4, high = 2e-3, log = true }\n', "")
    plain = study_of(text)
    assert "throughput" in figures.charts(plain, sweep_of(plain), NOW)
    empty = StudyRecords(name="built", digest="", study_toml="", began_at=BEGAN)
    assert figures.charts(study_of(), empty, NOW) == {}


def test_svg_is_well_formed_and_shows_what_the_chart_holds(study: Study, sweep: StudyRecords) -> None:
    for chart in figures.charts(study, sweep, NOW).values():
        root = ET.fromstring(svg.standalone(chart))
        assert chart.title in [t.text for t in root.iter(f"{NAMESPACE}text")]
        dots = len([c for c in root.iter(f"{NAMESPACE}circle") if "clipPath" not in c.tag])
        points = sum(len(m.points) for m in chart.marks if isinstance(m, Markers))
        keys = sum(isinstance(m, Markers) for m in chart.marks if m.name) if len(chart.marks) > 1 else 0
        assert dots in (points, points + keys)
        for number in (float(v) for e in root.iter() for k, v in e.attrib.items() if k in ("x", "y", "cx", "cy")):
            assert math.isfinite(number)


def test_hostile_texts_stay_texts() -> None:
    study, sweep = hostile()
    for chart in figures.charts(study, sweep, NOW).values():
        drawing = svg.standalone(chart)
        root = ET.fromstring(drawing)
        assert {e.tag.removeprefix(NAMESPACE) for e in root.iter()} <= {
            "svg", "style", "rect", "text", "line", "path", "g", "circle", "title", "clipPath"
        }  # fmt: skip
        assert "<script>" not in drawing


def test_every_mark_of_a_trial_says_whose_it_is(study: Study, sweep: StudyRecords) -> None:
    drawn = {name: svg.inline(chart) for name, chart in figures.charts(study, sweep, NOW).items()}
    with_evals = {str(n) for n in sweep.trials if sweep.last_evals(n)}
    assert set(re.findall(r'data-t="(\d+)"', drawn["eval-curves"])) == with_evals
    assert set(re.findall(r'data-t="(\d+)"', drawn["timeline"])) == {str(a.trial) for a in sweep.attempts.values()}


@given(st.integers(0, 300), st.integers(2, 40))
def test_a_thinned_line_keeps_its_ends_and_its_order(count: int, most: int) -> None:
    line = [(float(i), 0.0) for i in range(count)]
    thin = figures.thinned(line, most)
    assert len(thin) == min(count, most)
    assert thin == sorted(set(thin))
    assert thin[:1] == line[:1]
    assert thin[-1:] == line[-1:]


def test_values_that_cannot_be_shown_interrupt_a_line() -> None:
    chart = Chart(
        title="t",
        x=Axis(label="x"),
        y=Axis(label="y"),
        marks=(Lines(name="a", lines=[[(0, 1), (1, math.nan), (2, 3), (3, math.inf), (4, 1)]], colour="one"),),
    )
    path = next(e for e in ET.fromstring(svg.standalone(chart)).iter(f"{NAMESPACE}path"))
    assert path.attrib["d"].count("M") == 3


numbers = st.floats(min_value=1e-9, max_value=1e9)


@given(numbers, st.floats(min_value=1.0001, max_value=1e6))
def test_ticks_lie_within_the_range_and_can_be_told_apart(low: float, factor: float) -> None:
    high = low * factor
    for ticks in (linear_ticks(low, high), log_ticks(low, high)):
        assert all(low * 0.998 <= t <= high * 1.002 for t in ticks)
        assert len(ticks) <= 16
    ticks = linear_ticks(low, high)
    texts = [tick_text(t, ticks[1] - ticks[0]) for t in ticks] if len(ticks) > 1 else []
    assert len(set(texts)) == len(texts)


@example([(5e-324, 0.0)], False)
@given(st.lists(st.tuples(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12)), min_size=1, max_size=20), st.booleans())
def test_an_axis_always_has_a_range_that_holds_what_it_can(points: list[tuple[float, float]], log: bool) -> None:
    marks = (Markers(name="p", points=points, colour="one"), Rule(name="r", value=1.0))
    chart = Chart(title="t", x=Axis(label="x", log=log), y=Axis(label="y"), marks=marks)
    low, high = extent(chart, "x")
    assert low < high
    shown = [x for x, _ in points if x > 1e-100 or not log]
    assert all(low <= x <= high for x in shown)
    ET.fromstring(svg.standalone(chart))


@pytest.mark.parametrize(("seconds", "name"), [(90, "s"), (1800, "min"), (20000, "h"), (1e6, "days")])
def test_seconds_are_shown_in_the_unit_that_people_would_say(seconds: float, name: str) -> None:
    assert time_unit([1.0, seconds, math.inf]).name == name


@pytest.mark.parametrize(("form", "start"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_figures_for_slides(study: Study, sweep: StudyRecords, tmp_path: Path, form: str, start: bytes) -> None:
    if form != "svg":
        pytest.importorskip("cairosvg")
    files = report.write_figures(study, sweep, {form: tmp_path})
    assert {f.stem for f in files} == figures.charts(study, sweep, NOW).keys()
    assert all(f.read_bytes().startswith(start) for f in files)


@pytest.mark.parametrize("diverged", [1, 3])
def test_diverged_runs_do_not_flatten_the_picture_of_the_others(diverged: int, study: Study) -> None:
    good = [[(40.0, 1.9), (80.0, 1.8 + 0.01 * run), (120.0, 1.75)] for run in range(8)]
    wild = [[(40.0, 3.5), (80.0, 30.0 + run)] for run in range(diverged)]
    low, high = figures._value_range(study, [*good, *wild], 1.74)
    assert 1.7 < low < 1.74
    assert 1.9 < high < 3.0
