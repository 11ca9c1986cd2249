"""A surface from a table of real trials: measured curves at every point of a grid, at the speed of a simulated machine.

The table is an .npz of ``python -m lora_tune_recipes.many_adapters``, with one row per trial of a full grid:

    <KNOB>     [trials] for each knob of the grid, SEED among them, with at least two seeds; text is ignored
    batch      [trials] sequences per optimizer step
    samples    [trials, evals] training samples at each evaluation, padded with NaN
    eval_loss  [trials, evals]; NaN where training diverged, and after its end

Between grid points curves are interpolated: linearly in the logarithm for knobs whose values are positive and span
more than a factor of four, else linearly; batch and MAX_STEPS take the nearest value. Outside the grid the edge counts.
A run's seed picks one of the measured seeds. Measured: every loss. Assumed: seconds and memory, by ``machine``, as if
Llama-2-70B were trained on as many samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_tune.base.errors import InputError
from lora_tune_simulation.machine import Degrees, Machine
from lora_tune_simulation.simulated_run import RunOutcome, UndisturbedRun, draw, log_lines, timed

Array = npt.NDArray[np.float64]
TABLES = Path(__file__).parent / "tables"
"""Folder of the shipped tables."""
SAME = 1e-9
BATCH = ("MINIBS", "MBS")
"""Knobs that the column ``batch`` replaces."""
NEAREST = ("GBS", "MAX_STEPS")
"""Axes without interpolation, as they decide where a run evaluates and ends: curves of unequal lengths do not mix."""


@dataclass(frozen=True)
class Table:
    """A grid of curves. axes: knob -> its values, sorted (SEED left out). losses: [*axes, seeds, evals]."""

    axes: Mapping[str, tuple[float, ...]]
    samples: Array
    losses: Array

    @property
    def seeds(self) -> int:
        """Measured seeds of each point."""
        return int(self.losses.shape[-2])

    @property
    def interval(self) -> float:
        """Samples between evals."""
        return float(np.nanmin(self.samples[..., 0]))

    def stops(self, target: float) -> Array:
        """Samples at the first eval at or under ``target`` [*axes, seeds]; infinite if there is none."""
        reached = np.where(self.losses <= target, self.samples, np.inf)
        return np.asarray(reached.min(axis=-1))


def read_table(path: Path) -> Table:
    """The table in an .npz file. Raises InputError unless it is a full grid of at least two seeds."""
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: is not a table of trials: {error}; make one with recipes.many_adapters") from error
    missing = {"SEED", "samples", "eval_loss", "batch"} - data.keys()
    if missing:
        raise InputError(f"{path}: has no {', '.join(sorted(missing))}; make it with recipes.many_adapters")
    rows = len(data["SEED"])
    columns = {n: data[n].astype(np.float64) for n in data if _is_knob(data[n], n, rows)}
    columns["GBS"] = data["batch"].astype(np.float64)
    axes = {n: tuple(sorted(set(c.tolist()))) for n, c in columns.items() if len(set(c.tolist())) > 1 or n == "GBS"}
    seeds = sorted(set(data["SEED"].tolist()))
    if math.prod(len(v) for v in axes.values()) * len(seeds) != rows or len(seeds) < 2:
        raise InputError(f"{path}: {rows} trials are not a full grid over {', '.join(axes)} with two seeds or more")
    shape = (*(len(v) for v in axes.values()), len(seeds), data["samples"].shape[1])
    losses, samples = np.full(shape, np.nan), np.full(shape, np.nan)
    for row in range(rows):
        at = (*(axes[n].index(columns[n][row]) for n in axes), seeds.index(data["SEED"][row].item()))
        losses[at], samples[at] = data["eval_loss"][row], data["samples"][row]
    return Table(axes=axes, samples=samples, losses=losses)


def _is_knob(column: npt.NDArray[Any], name: str, rows: int) -> bool:
    return name.isupper() and name not in ("SEED", *BATCH) and column.shape == (rows,) and column.dtype.kind in "iuf"


@dataclass(frozen=True, kw_only=True)
class TabularSurface:
    """A surface over ``table``: call it with parameters and a seed for the log.

    Parameters read: the table's axes, TP, PP, CP, MINIBS, MBS; and VAL_CHECK_INTERVAL if present, as the interval
    between evaluations, rounded up to a measured one.
    machine: seconds by layout; a layout's batch must be one of the table's. target: eval loss.
    aliases: parameter name -> the table's knob if they differ.
    """

    table: Table
    machine: Machine
    target: float
    aliases: Mapping[str, str] = field(default_factory=dict)
    score: str = "time_to_target"

    def __call__(self, parameters: Mapping[str, object], seed: int) -> Iterator[tuple[float, str]]:
        """The job's log."""
        layout = Degrees.of(parameters)
        header = {
            "seed": seed,
            "global_batch_size": self.machine.gbs(layout),
            "gradient_accumulation_steps": layout.minibs,
        }
        return log_lines(self.outcome(parameters, seed), header)

    def variant(self, number: int) -> TabularSurface:
        """Another site: another machine (``Machine.elsewhere``), the same measured losses. 0 is this surface."""
        if number == 0:
            return self
        draws = np.random.default_rng([number, 21]).normal(size=4).tolist()
        return replace(self, machine=self.machine.elsewhere(number, *draws))

    def curves(self, parameters: Mapping[str, object]) -> tuple[Array, Array]:
        """Samples [evals] and losses [seeds, evals] at ``parameters``, interpolated; cut at the end of the run."""
        named = {self.aliases.get(name, name): value for name, value in parameters.items()}
        named["GBS"] = self.machine.gbs(Degrees.of(parameters))
        corners: list[list[tuple[int, float]]] = []
        for name, values in self.table.axes.items():
            if name not in named:
                raise InputError(f"this surface needs {name}, one of its table's axes; add it to the space")
            corners.append(_neighbours(float(str(named[name])), values, nearest=name in NEAREST))
        losses = np.zeros(self.table.losses.shape[-2:])
        best, samples = 0.0, self.table.samples[(0,) * len(corners)][0]
        for corner in itertools.product(*corners):
            at, weight = tuple(i for i, _ in corner), math.prod(w for _, w in corner)
            losses = losses + weight * self.table.losses[at]
            if weight > best:
                best, samples = weight, self.table.samples[at][0]
        kept = np.isfinite(samples) & (samples <= self._total(parameters) + SAME)
        samples, losses = samples[kept], losses[:, kept]
        evaluated = _evaluated(samples, float(str(parameters.get("VAL_CHECK_INTERVAL") or 0)))
        return samples[evaluated], losses[:, evaluated]

    def outcome(self, parameters: Mapping[str, object], seed: int) -> RunOutcome:
        """One run: a measured seed's curve, with memory and start-up drawn from this seed."""
        rng = np.random.default_rng([seed, 8])
        layout = Degrees.of(parameters)
        luck = draw(self.machine, layout, rng)
        samples, losses = self.curves(parameters)
        curve = losses[int(rng.integers(self.table.seeds))]
        ended = np.flatnonzero(~np.isfinite(curve))
        total = self._total(parameters)
        undisturbed = UndisturbedRun(
            samples=samples,
            losses=curve,
            total=total if math.isfinite(total) else float(samples[-1]),
            step=self.machine.gbs(layout),
            blow_up=float(samples[ended[0]]) - SAME if len(ended) else math.inf,
            target=self.target,
        )
        return timed(undisturbed, luck, self.machine.cold_seconds(), rng)

    def _total(self, parameters: Mapping[str, object]) -> float:
        """Samples at the end of training; infinite without MAX_STEPS."""
        steps = parameters.get("MAX_STEPS")
        return math.inf if steps is None else float(str(steps)) * self.machine.gbs(Degrees.of(parameters))

    def expected_score(self, parameters: Mapping[str, object]) -> float:
        """Mean seconds to the target over the measured seeds, failed runs repeated; infinite if none reaches it."""
        layout = Degrees.of(parameters)
        samples, losses = self.curves(parameters)
        lives = 1 - self.machine.oom_probability(layout)
        reached = losses <= self.target
        finishes = reached.any(axis=1) if losses.size else np.zeros(1, dtype=bool)
        if not finishes.any() or lives < 1e-3:
            return math.inf
        first = reached[finishes].argmax(axis=1)
        speed, eval_seconds = self.machine.samples_per_second(layout), self.machine.seconds_per_eval(layout)
        seconds = self.machine.cold_seconds() + float((samples[first] / speed + eval_seconds * (first + 1)).mean())
        whole = float(samples[-1]) / speed + eval_seconds * len(samples)
        finished = float(finishes.mean())
        failed = (1 - lives) * 0.25 * seconds + lives * (1 - finished) * whole
        return seconds + failed / (lives * finished)


def _evaluated(samples: Array, interval: float) -> npt.NDArray[np.int64]:
    """Indices of the measured evals that a run with ``interval`` samples between evals has; always the last one."""
    passed = np.floor((samples + SAME) / interval) if interval > 0 else np.arange(1.0, len(samples) + 1)
    new = np.diff(passed, prepend=0.0) > 0
    new[-1:] = True
    return np.flatnonzero(new)


def _neighbours(value: float, axis: tuple[float, ...], *, nearest: bool) -> list[tuple[int, float]]:
    """Grid indices around ``value`` with weights that sum to 1."""
    if len(axis) == 1:
        return [(0, 1.0)]
    log = axis[0] > 0 and axis[-1] > 4 * axis[0]
    grid = np.log(axis) if log else np.asarray(axis)
    x = math.log(max(value, 1e-300)) if log else value
    if nearest:
        return [(int(np.abs(grid - x).argmin()), 1.0)]
    at = int(np.clip(np.searchsorted(grid, x), 1, len(grid) - 1))
    share = float(np.clip((x - grid[at - 1]) / (grid[at] - grid[at - 1]), 0.0, 1.0))
    return [(i, w) for i, w in ((at - 1, 1 - share), (at, share)) if w > SAME]
