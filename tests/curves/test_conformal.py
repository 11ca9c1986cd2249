"""Comparison with references: what rate is kept, on which shapes, and what does not change an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.curves.conformal import allowed, compare, needed, supported
from lora_tune.curves.overlay import ComparedRun
from lora_tune.curves.points import Points

TARGET, END = 1.0, 8192.0
SAMPLES = np.arange(384.0, END + 1, 384)


def course(loss: np.ndarray, *, samples: np.ndarray = SAMPLES, kind: object = "a", **more: object) -> ComparedRun:
    return ComparedRun(curve=Points(samples, loss), length=END, kind=kind, **more)  # type: ignore[arg-type]


def falling(rng: np.random.Generator, samples: np.ndarray = SAMPLES, worse: float = 0.0) -> np.ndarray:
    """A power law that reaches the target at about half of training, with luck of its own and noise."""
    level = 1 + 0.5 * ((samples / END) ** -0.5 - 1.4) + rng.normal(0, 0.02) + worse
    return np.asarray(level + rng.normal(0, 0.005, len(samples)))


def seen(whole: ComparedRun) -> ComparedRun:
    """A run before it reaches the target: what a verdict may look at."""
    before = whole.curve.samples < min(whole.stop(TARGET), END)
    return ComparedRun(curve=Points(*(v[before] for v in whole.curve)), length=whole.length, kind=whole.kind)


def good(rng: np.random.Generator, count: int, **more: object) -> list[ComparedRun]:
    found = [course(falling(rng), **more) for _ in range(4 * count)]
    return [c for c in found if c.stop(TARGET) < END][:count]


@pytest.mark.parametrize(("rate", "count", "kept"), [(0.01, 14, 1 / 15), (0.01, 99, 0.01), (0.05, 50, 2 / 51)])
def test_references_support_no_rate_below_one_of_them_and_the_run(rate: float, count: int, kept: float) -> None:
    assert supported(rate, count) == pytest.approx(kept)


def test_a_rate_says_how_many_references_it_needs() -> None:
    assert [needed(r) for r in (0.01, 0.05, 0.1)] == [99, 19, 9]


@pytest.mark.parametrize("count", [3, 10, 30])
def test_good_runs_are_outside_no_more_often_than_is_supported(count: int) -> None:
    rng = np.random.default_rng(1)
    outside = [
        compare(seen(new), references, target=TARGET, rate=0.01).outside
        for references, new in ((good(rng, count), good(rng, 1)[0]) for _ in range(200))
    ]
    kept = supported(0.01, count)
    assert np.mean(outside) <= kept + 2 * np.sqrt(kept * (1 - kept) / 200)


def grokking(rng: np.random.Generator) -> np.ndarray:
    """Rises to two and a half times its beginning, and falls at a place of its own."""
    share = SAMPLES / END
    fall = 1 + np.exp(40 * (share - 0.75 / np.exp(rng.normal(0.1, 0.1))))
    return np.asarray(0.8 + (1 + 1.5 * np.clip(3 * share, 0, 1)) / fall + rng.normal(0, 0.01, len(SAMPLES)))


@pytest.mark.parametrize("shape", [falling, grokking])
@pytest.mark.parametrize("rate", [0.01, 0.2])
def test_of_good_runs_no_more_are_outside_beside_the_others_than_the_rate_allows(shape: Any, rate: float) -> None:
    """What the promise rests on, and what no luck of a draw can excuse."""
    rng = np.random.default_rng(11)
    for _ in range(4):
        made = [course(shape(rng)) for _ in range(60)]
        runs = [c for c in made if c.stop(TARGET) < END][:15]
        assert len(runs) == 15
        beside = ((seen(run), [c for c in runs if c is not run]) for run in runs)
        outside = sum(compare(run, others, target=TARGET, rate=rate).outside for run, others in beside)
        assert outside <= allowed(rate, 14)


def test_a_run_that_will_not_get_there_is_outside_long_before_its_end() -> None:
    rng = np.random.default_rng(2)
    found = compare(course(falling(rng, worse=0.5)), good(rng, 20), target=TARGET, rate=0.05)
    assert found.outside
    assert found.at <= END / 4
    assert (found.way, found.references) == ("like", 20)


def test_a_late_step_is_no_reason_to_stop_where_references_have_it_too() -> None:
    rng = np.random.default_rng(3)

    def stepped() -> np.ndarray:
        return np.where(SAMPLES < 0.8 * END, 1.5, 0.95) + rng.normal(0, 0.02, len(SAMPLES))

    references = [course(stepped()) for _ in range(20)]
    late = course(stepped())
    assert not compare(seen(late), references, target=TARGET, rate=0.05).outside
    flat = course(np.full(len(SAMPLES), 1.5))
    assert compare(flat, references, target=TARGET, rate=0.05).at > 0.75 * END


@pytest.mark.parametrize("worse", [0.0, 0.5])
def test_dense_and_sparse_evals_get_the_same_answer(worse: float) -> None:
    rng = np.random.default_rng(4)
    references = good(rng, 30)
    dense = np.arange(48.0, END + 1, 48)
    loss = falling(np.random.default_rng(9), dense, worse)
    answers = []
    for step in (1, 8, 32):
        run = course(loss[step - 1 :: step], samples=dense[step - 1 :: step])
        answers.append(compare(seen(run), references, target=TARGET, rate=0.05).outside)
    assert answers == [worse > 0] * 3


def test_runs_of_another_kind_are_compared_by_how_much_kinds_differ() -> None:
    rng = np.random.default_rng(5)
    alike = good(rng, 12)
    later = course(falling(rng, worse=0.1), kind="b")
    assert compare(seen(later), [*alike, *good(rng, 1, kind="b")], target=TARGET, rate=0.05).way == "pooled"
    assert compare(seen(later), alike, target=TARGET, rate=0.05).way == "none"
    others = [course(falling(rng, worse=w), kind=f"kind {w}") for w in (0.05, 0.1, -0.1, -0.2) for _ in range(3)]
    wide = compare(seen(later), [*alike, *others], target=TARGET, rate=0.05)
    assert (wide.way, wide.outside, wide.supported) == ("unlike", False, pytest.approx(1 / 6))


def test_runs_that_were_let_through_support_no_rate() -> None:
    rng = np.random.default_rng(6)
    free, selected = good(rng, 9), good(rng, 30, free=False)
    found = compare(course(falling(rng)), [*free, *selected], target=TARGET, rate=0.01)
    assert found.supported == pytest.approx(1 / 10)


def test_runs_that_were_let_through_only_widen_the_band() -> None:
    """They fill it up to its limit, and ranked among them twice as many good runs were stopped as beside free ones."""
    rng, alone, beside_all = np.random.default_rng(3), 0, 0
    for _ in range(10):
        free, through = good(rng, 4), list[ComparedRun]()
        for run in good(rng, 25):
            outside = compare(seen(run), [*free, *through], target=TARGET, rate=0.01).outside
            beside_free = compare(seen(run), free, target=TARGET, rate=0.01).outside
            assert beside_free or not outside
            alone, beside_all = alone + beside_free, beside_all + outside
            through += [] if outside else [replace(run, free=False)]
    assert 0 < beside_all <= alone <= 250 / 5


@pytest.mark.parametrize("scale", [1e-6, 1e6, 1e60])
def test_the_scale_of_a_metric_changes_no_answer(scale: float) -> None:
    rng = np.random.default_rng(12)
    references, runs = good(rng, 12), [course(falling(rng, worse=w)) for w in (0.0, 0.03, 0.3)]

    def scaled(run: ComparedRun) -> ComparedRun:
        return course(run.curve.loss * scale)

    for run in runs:
        plain = compare(run, references, target=TARGET, rate=0.1)
        other = compare(scaled(run), [scaled(c) for c in references], target=TARGET * scale, rate=0.1)
        assert (plain.outside, plain.at) == pytest.approx((other.outside, other.at), nan_ok=True)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.floats(0.5, 10), min_size=1, max_size=30), min_size=0, max_size=6),
    st.lists(st.floats(0.5, 10), min_size=1, max_size=30),
    st.floats(0.001, 0.4),
)
def test_no_curves_break_a_comparison(others: list[list[float]], own: list[float], rate: float) -> None:
    references = [
        course(np.array(v), samples=50.0 * np.arange(1, len(v) + 1), kind=i % 2) for i, v in enumerate(others)
    ]
    run = course(np.array(own), samples=70.0 * np.arange(1, len(own) + 1), kind=0)
    found = compare(run, references, target=TARGET, rate=rate)
    assert 0 < found.supported <= 1
    assert not found.outside or run.curve.samples[0] <= found.at <= run.curve.samples[-1]
