"""Comparison with the best finished runs: what risk is kept, on which shapes, and what does not change an answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.curves.comparison import FEWEST, ComparedRun, compare, needed, supported
from lora_tune.curves.points import Points

TARGET, END = 1.0, 8192.0
SAMPLES = np.arange(384.0, END + 1, 384)


def course(loss: np.ndarray, *, samples: np.ndarray = SAMPLES, **more: object) -> ComparedRun:
    return ComparedRun(curve=Points(samples, loss), length=END, **more)  # type: ignore[arg-type]


def falling(rng: np.random.Generator, samples: np.ndarray = SAMPLES, worse: float = 0.0) -> np.ndarray:
    """A power law that reaches the target at about half of training, with luck of its own and noise."""
    level = 1 + 0.5 * ((samples / END) ** -0.5 - 1.4) + rng.normal(0, 0.02) + worse
    return np.asarray(level + rng.normal(0, 0.005, len(samples)))


def place(run: ComparedRun) -> tuple[float, float]:
    return run.stop(TARGET), run.lowest


def runs(rng: np.random.Generator, count: int) -> list[ComparedRun]:
    """Finished runs, the best first."""
    return sorted((course(falling(rng)) for _ in range(count)), key=place)


def seen(whole: ComparedRun, end: float = END) -> ComparedRun:
    """A run before it reaches the target: what a verdict may look at."""
    before = whole.curve.samples < min(whole.stop(TARGET), end)
    return replace(whole, curve=Points(*(v[before] for v in whole.curve)))


@pytest.mark.parametrize(("rate", "count", "kept"), [(0.01, 14, 1 / 15), (0.01, 99, 0.01), (0.05, 50, 2 / 51)])
def test_references_support_no_rate_below_one_of_them_and_the_run(rate: float, count: int, kept: float) -> None:
    assert supported(rate, count) == pytest.approx(kept)


def test_a_rate_says_how_many_references_it_needs() -> None:
    assert [needed(r) for r in (0.01, 0.05, 0.1)] == [99, 19, 9]


@pytest.mark.parametrize(("finished", "target"), [(8, TARGET), (20, TARGET), (20, -np.inf)])
def test_of_runs_that_come_among_the_best_no_more_are_outside_than_is_supported(finished: int, target: float) -> None:
    """And of those that become the best fewer still."""
    rng = np.random.default_rng(1)
    among, best = [], []
    for _ in range(600):
        others, new = runs(rng, finished), course(falling(rng))
        rank = sum(place(other) < place(new) for other in others)
        if rank <= FEWEST:
            outside = compare(seen(new), others, target=target, rate=0.01).outside
            among.append(outside)
            best += [outside] if rank == 0 else []
    kept = supported(0.01, FEWEST)
    assert np.mean(among) <= kept + 2 * np.sqrt(kept * (1 - kept) / len(among))
    assert np.mean(best) <= kept


@pytest.mark.parametrize("finished", [4, 12])
def test_a_run_that_stays_far_above_is_outside_before_half_of_its_life(finished: int) -> None:
    rng = np.random.default_rng(2)
    flat = course(np.full(len(SAMPLES), 2.0))
    found = compare(seen(flat, END / 2), runs(rng, finished), target=TARGET, rate=0.01)
    assert found.outside
    assert found.at < END / 2
    assert (found.references, found.finished) == (FEWEST, finished)


def test_without_a_target_and_without_a_good_run_bad_ones_are_told_apart() -> None:
    rng = np.random.default_rng(3)
    others = [course(falling(rng, worse=0.5)) for _ in range(8)]
    worse, like = (course(falling(rng, worse=by)) for by in (3.0, 0.4))
    assert compare(worse, others, target=-np.inf, rate=0.01).outside
    assert not compare(like, others, target=-np.inf, rate=0.01).outside


def test_one_more_run_than_are_compared_with_must_have_ended() -> None:
    flat = course(np.full(len(SAMPLES), 9.0))
    few, enough = runs(np.random.default_rng(4), FEWEST), runs(np.random.default_rng(4), FEWEST + 1)
    assert not compare(flat, few, target=TARGET, rate=0.01).references
    assert compare(flat, enough, target=TARGET, rate=0.01).outside


def test_runs_of_another_task_say_nothing() -> None:
    others = [replace(run, task="other") for run in runs(np.random.default_rng(5), 20)]
    assert not compare(course(np.full(len(SAMPLES), 9.0)), others, target=TARGET, rate=0.01).outside


@settings(max_examples=30, deadline=None)
@given(unit=st.floats(0.01, 100), scale=st.floats(0.01, 100), shift=st.floats(-10, 10))
def test_units_change_no_answer(unit: float, scale: float, shift: float) -> None:
    def other(run: ComparedRun) -> ComparedRun:
        return ComparedRun(curve=Points(run.curve.samples * unit, run.curve.loss * scale + shift), length=END * unit)

    rng = np.random.default_rng(7)
    finished = runs(rng, 10)
    for run in (course(falling(rng, worse=w)) for w in (0.0, 0.3, 2.0)):
        here = compare(seen(run), finished, target=TARGET, rate=0.01)
        there = compare(other(seen(run)), [other(r) for r in finished], target=TARGET * scale + shift, rate=0.01)
        assert (here.outside, here.references) == (there.outside, there.references)


def test_sparse_and_dense_evals_get_one_answer() -> None:
    rng = np.random.default_rng(8)
    finished, dense = runs(rng, 10), np.arange(64.0, END + 1, 64)
    line = 1.8 - 0.2 * dense / END
    for samples, loss in ((dense, line), (dense[::12], line[::12])):
        assert compare(course(loss, samples=samples), finished, target=TARGET, rate=0.01).outside


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-1e90, 1e90), min_size=0, max_size=6), min_size=1, max_size=10))
def test_no_curves_break_a_comparison(losses: list[list[float]]) -> None:
    made = [course(np.array(each), samples=SAMPLES[: len(each)]) for each in losses]
    compare(made[0], made[1:], target=TARGET, rate=0.01)
