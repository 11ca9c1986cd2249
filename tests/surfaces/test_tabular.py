"""A surface over a table of measured curves gives back what was measured."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lora_tune.base.errors import InputError
from lora_tune_simulation.machine import MEMORY_SPREAD_GB, Degrees, Machine
from lora_tune_simulation.simulated_run import TEARDOWN_SECONDS
from lora_tune_simulation.tabular import TabularSurface, read_table

RATES, STEPS, MINIBS, SEEDS = (1e-4, 1e-3, 1e-2), (100, 200), (4, 8), (1, 2, 3)
MACHINE = Machine(family="hopper", accelerator="H100", gpus=8, nodes=1, memory_gb=78.0)
LAYOUT = {"TP": 4, "PP": 1, "CP": 1, "MBS": 1}


def loss(rate: float, steps: int, batch: int, seed: int, samples: np.ndarray) -> np.ndarray:
    """Curves that fall linearly, faster at 1e-3; the largest rate diverges half-way."""
    slope = {1e-4: 0.5, 1e-3: 1.0, 1e-2: 1.0}[rate]
    curve = 2.0 - slope * samples / (steps * batch) + 0.01 * seed
    return np.where((rate == 1e-2) & (samples > steps * batch / 2), np.nan, curve)


def write_table(path: Path, *, drop: int = 0, without: str = "") -> Path:
    """A table as ``many_adapters`` writes it."""
    rows = list(itertools.product(RATES, STEPS, MINIBS, SEEDS))[drop:]
    samples = np.full((len(rows), 20), np.nan)
    losses = np.full((len(rows), 20), np.nan, dtype=np.float32)
    for i, (rate, steps, minibs, seed) in enumerate(rows):
        grid = np.arange(80, steps * minibs + 1, 80.0)
        samples[i, : len(grid)] = grid
        losses[i, : len(grid)] = loss(rate, steps, minibs, seed, grid)
    columns = dict(
        zip(("LR", "MAX_STEPS", "MINIBS", "SEED"), (np.array(c) for c in zip(*rows, strict=True)), strict=True)
    )
    columns |= {"MODEL": np.array(["base"] * len(rows)), "batch": columns["MINIBS"]}
    arrays = {**columns, "samples": samples, "eval_loss": losses, "meta": np.array(json.dumps({}))}
    arrays.pop(without, None)
    np.savez(path, **arrays)
    return path


@pytest.fixture
def surface(tmp_path: Path) -> TabularSurface:
    return TabularSurface(table=read_table(write_table(tmp_path / "t.npz")), machine=MACHINE, target=1.2)


def point(rate: float, steps: int = 200, batch: int = 8) -> dict[str, object]:
    return {**LAYOUT, "MINIBS": batch // 2, "LR": rate, "MAX_STEPS": steps}


def test_grid_points_give_their_own_measured_curves(surface) -> None:
    samples, losses = surface.curves(point(1e-3))
    assert losses.shape == (3, len(samples))
    for row, seed in enumerate(SEEDS):
        assert losses[row] == pytest.approx(loss(1e-3, 200, 8, seed, samples), abs=1e-6)


def test_between_grid_points_curves_are_interpolated_in_the_logarithm_of_the_rate(surface) -> None:
    _, middle = surface.curves(point(10**-3.5))
    low, high = surface.curves(point(1e-4))[1], surface.curves(point(1e-3))[1]
    assert middle == pytest.approx((low + high) / 2, abs=1e-6)
    assert surface.curves(point(1e-9))[1] == pytest.approx(low)


def test_schedules_between_those_measured_take_the_nearest_and_never_look_diverged(surface) -> None:
    samples, losses = surface.curves(point(1e-3, steps=140))
    assert samples[-1] <= 140 * 8
    assert np.isfinite(losses).all()


def test_a_runs_log_and_score_follow_the_table(surface) -> None:
    runs = [surface.outcome(point(1e-3), seed) for seed in range(60)]
    assert {run.end for run in runs} == {"success"}
    assert {run.evals[-1][0] for run in runs} == {1360.0}
    mean = np.mean([run.end_seconds - run.init_seconds for run in runs])
    assert surface.expected_score(point(1e-3)) == pytest.approx(mean, rel=0.01)
    assert "eval_accuracy" in "".join(text for _, text in surface(point(1e-3), 1))


def test_what_diverged_or_never_reached_the_target_does_so_here(surface) -> None:
    blown = surface.outcome(point(1e-2), 1)
    assert blown.end == "aborted"
    assert np.isnan(blown.train[-1][1])
    assert surface.outcome(point(1e-4), 1).end == "aborted"
    assert np.isinf(surface.expected_score(point(1e-4)))


def test_fewer_evals_are_those_measured_at_the_distance_asked_for_and_the_last(surface) -> None:
    every, losses = surface.curves(point(1e-3))
    assert list(every[:3]) == [80, 160, 240]
    samples, fewer = surface.curves({**point(1e-3), "VAL_CHECK_INTERVAL": 150})
    assert list(samples) == [160, 320, 480, 640, 800, 960, 1120, 1200, 1360, 1520, 1600]
    assert np.array_equal(fewer, losses[:, np.isin(every, samples)])


def test_another_site_has_another_machine_and_the_same_losses(surface) -> None:
    other = surface.variant(3)
    assert surface.variant(0) is surface
    assert np.array_equal(other.curves(point(1e-3))[1], surface.curves(point(1e-3))[1])
    assert other.expected_score(point(1e-3)) != pytest.approx(surface.expected_score(point(1e-3)), rel=1e-3)
    assert other.expected_score(point(1e-3)) == surface.variant(3).expected_score(point(1e-3))


def test_the_true_score_is_what_running_until_one_succeeds_costs(tmp_path) -> None:
    """Two seeds of three reach the target within the schedule, and one layout in ten dies of memory."""
    table = read_table(write_table(tmp_path / "t.npz"))
    tight = replace(MACHINE, memory_gb=MACHINE.memory(Degrees.of(point(1e-3))) + 2.2 * MEMORY_SPREAD_GB)
    surface = TabularSurface(table=table, machine=tight, target=1.021)
    seconds, successes = 0.0, 0
    for seed in range(3000):
        run = surface.outcome(point(1e-3), seed)
        seconds += run.end_seconds - run.init_seconds - (TEARDOWN_SECONDS if run.end == "oom" else 0.0)
        successes += run.end == "success"
    assert 0.55 < successes / 3000 < 0.65
    assert surface.expected_score(point(1e-3)) == pytest.approx(seconds / successes, rel=0.03)


def test_a_table_that_is_no_full_grid_is_refused_with_the_reason(tmp_path) -> None:
    with pytest.raises(InputError, match="not a full grid over LR, MAX_STEPS"):
        read_table(write_table(tmp_path / "a.npz", drop=1))
    with pytest.raises(InputError, match="has no samples"):
        read_table(write_table(tmp_path / "b.npz", without="samples"))
    (tmp_path / "c.npz").write_text("nothing")
    with pytest.raises(InputError, match="is not a table of trials"):
        read_table(tmp_path / "c.npz")


def test_a_missing_axis_is_named(surface) -> None:
    with pytest.raises(InputError, match="needs LR"):
        surface.outcome({**LAYOUT, "MINIBS": 4, "MAX_STEPS": 100}, 1)
