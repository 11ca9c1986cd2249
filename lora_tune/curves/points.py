"""Turns raw evals into points for a fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lora_tune.logs.run import Eval, RunLog

Array = NDArray[np.float64]

LARGEST_FIT = 256
"""Most points in a fit; a longer curve is thinned by medians of neighbours, which also removes single spikes."""


LARGEST_LOSS = 1e6
"""Largest magnitude of a loss; beyond it counts as NaN."""

LARGEST_SAMPLES = 1e15
"""Largest plausible sample count; larger ones are corrupt."""


class Points(NamedTuple):
    """Finite evals in order: ``samples`` strictly increasing and positive, ``loss`` of the same length."""

    samples: Array
    loss: Array


def evals_of(run: RunLog | Sequence[Eval]) -> Sequence[Eval]:
    """The evals of a run, or the sequence itself."""
    return run.evals if isinstance(run, RunLog) else run


def first_reached(evals: Sequence[Eval], target: float) -> Eval | None:
    """The first eval with ``loss <= target`` (NaN never)."""
    return next((e for e in evals if e.loss <= target), None)


def usable_loss(loss: float) -> bool:
    """Whether a loss is finite and of plausible size."""
    return abs(loss) <= LARGEST_LOSS


def usable_samples(samples: float) -> bool:
    """Whether a sample count is positive, finite and of plausible size."""
    return 1 / LARGEST_SAMPLES <= samples <= LARGEST_SAMPLES


def points(evals: Sequence[Eval]) -> Points:
    """The usable evals, thinned to at most ``LARGEST_FIT`` points."""
    table = np.column_stack(usable(evals))
    if len(table) > LARGEST_FIT:
        table = _medians(table, LARGEST_FIT)
    return Points(table[:, 0], table[:, 1])


def _medians(table: Array, groups: int) -> Array:
    """The medians of ``groups`` groups of rows, whose sizes differ by at most one."""
    size, larger = divmod(len(table), groups)
    ends, columns = larger * (size + 1), table.shape[1]
    parts = (table[:ends].reshape(larger, size + 1, columns), table[ends:].reshape(groups - larger, size, columns))
    return np.concatenate([np.median(part, axis=1) for part in parts if len(part)])


def usable(evals: Sequence[Eval], largest: float = LARGEST_LOSS) -> Points:
    """The valid evals.

    Losses beyond ``largest``, either sign, and samples outside (0, ``LARGEST_SAMPLES``] are left out; of repeated
    samples (a restarted run logs some twice) the last reading counts; decreasing samples are sorted.
    """
    if not evals:
        return Points(np.empty(0), np.empty(0))
    table = np.column_stack(([float(e.samples) for e in evals], [float(e.loss) for e in evals]))
    in_range = (table[:, 0] >= 1 / LARGEST_SAMPLES) & (table[:, 0] <= LARGEST_SAMPLES)
    table = table[in_range & (np.abs(table[:, 1]) <= largest)]
    if len(table) > 1 and not (np.diff(table[:, 0]) > 0).all():
        table = table[::-1][np.unique(table[::-1, 0], return_index=True)[1]]
    return Points(table[:, 0], table[:, 1])


def eval_interval(samples: Array) -> float:
    """Samples between two evals: the median distance; 0 for a single eval."""
    return float(np.median(np.diff(samples))) if len(samples) > 1 else 0.0
