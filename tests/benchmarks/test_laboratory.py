"""The laboratory: problems that begin at what a user has, and methods that play them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.laboratory import scripts
from benchmarks.laboratory.arena import play
from benchmarks.laboratory.ours import Default
from benchmarks.laboratory.problem import Problem
from benchmarks.laboratory.problems import h100_wide
from lora_tune.search.grey_box.features import at_random


@pytest.mark.parametrize("make", [h100_wide, scripts.batch, scripts.switches])
def test_every_problem_begins_at_a_configuration_that_reaches_the_target(make: Callable[[int], Problem]) -> None:
    problem = make(2)
    assert problem.start is not None
    assert math.isfinite(problem.score(problem.start))
    assert problem.start.keys() == problem.distributions.keys()


@pytest.fixture(scope="module")
def switches() -> Problem:
    """A user's own script; its best point is searched once for the tests that need it."""
    return scripts.switches(1)


def test_the_best_point_is_no_worse_than_random_ones_and_much_better_than_the_start(switches: Problem) -> None:
    rng = np.random.default_rng(3)
    lowest = min(switches.score(at_random(switches.distributions, switches.distributions, rng)) for _ in range(40))
    assert switches.best <= lowest
    assert switches.regret(dict(switches.start or {})) > 0.05


def test_looks_are_at_the_given_node_hours_and_change_no_proposal(switches: Problem) -> None:
    def played(looks: list[float] | None) -> tuple[list[float], list[str]]:
        method = Default(switches, 1)
        trace = play(switches, method, slots=2, budget=0.6, seed=1, looks=looks)
        return [hours for hours, _ in trace.points], method.log

    (_, often), (at, seldom) = played(None), played([0.3, 0.6])
    assert at == [0.3, 0.6]
    assert len(seldom) > 3
    assert often[: len(seldom)] == seldom[: len(often)]
