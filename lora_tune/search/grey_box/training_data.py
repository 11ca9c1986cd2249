"""What observations are to the three Gaussian processes: rows of features with what was read at them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lora_tune.search.grey_box.distinct_rows import alike_once
from lora_tune.search.grey_box.features import Coordinates, trend
from lora_tune.search.grey_box.gaussian import HERE, Array, Data, Posterior, condition
from lora_tune.search.observations import SEED_SD, Observation, Reading

LARGEST = 400
"""Readings that a model keeps; beyond, an even choice of them."""
GOLDEN = 0.5 * (math.sqrt(5) - 1)


def convergence_data(
    coordinates: Coordinates,
    curved: tuple[int, ...],
    observations: Sequence[Observation],
    readings: Mapping[int, Reading],
) -> Data:
    """One row a reading in ``readings``, by its position in ``observations``."""
    numbers = {name: n for n, name in enumerate(dict.fromkeys(["", *(o.source for o in observations)]))}
    places = list(readings)
    source = np.array([numbers[observations[at].source] for at in places], dtype=np.int64)
    keep = chosen(source, LARGEST)
    kept = [readings[places[row]] for row in keep]
    x = np.array([coordinates.convergence_features(observations[places[row]].values) for row in keep]).reshape(
        len(keep), coordinates.convergence_width
    )
    return Data(
        x=x, basis=trend(x, curved), y=np.array([r.ln_samples for r in kept]), sd=np.array([r.sd for r in kept]),
        source=source[keep], below=np.array([r.below for r in kept], dtype=np.bool_),
        extended=np.array([r.extended for r in kept]),
    )  # fmt: skip


def speed_data(coordinates: Coordinates, pairs: Sequence[tuple[Observation, float]], noise: float) -> Data:
    """ln of a speed per distinct layout: the median of its readings."""
    by_row: dict[tuple[float, ...], list[float]] = {}
    names = frozenset(coordinates.speed_names)
    own = [(o.values, value) for o, value in pairs if not o.source and names <= o.values.keys()]
    rows = alike_once(coordinates, coordinates.speed_features, [values for values, _ in own])
    for row, (_, value) in zip(rows, own, strict=True):
        by_row.setdefault(tuple(row), []).append(math.log(value))
    x = np.array(list(by_row)).reshape(len(by_row), len(coordinates.speed_labels))
    return Data(
        x=x, basis=trend(x, ()), y=np.array([float(np.median(v)) for v in by_row.values()]),
        sd=np.full(len(by_row), noise), source=np.full(len(by_row), HERE, dtype=np.int64),
        below=np.zeros(len(by_row), dtype=np.bool_), extended=np.zeros(len(by_row)),
    )  # fmt: skip


def pick(data: Data, keep: npt.NDArray[np.int64]) -> Data:
    """Some rows."""
    return Data(
        x=data.x[keep], basis=data.basis[keep], y=data.y[keep], sd=data.sd[keep], source=data.source[keep],
        below=data.below[keep], extended=data.extended[keep],
    )  # fmt: skip


def thinned(data: Data, largest: int) -> Data:
    """At most ``largest`` rows of ``data``, as :func:`chosen` has them."""
    return data if len(data.y) <= largest else pick(data, chosen(data.source, largest))


def chosen(source: npt.NDArray[np.int64], largest: int) -> npt.NDArray[np.int64]:
    """At most ``largest`` of the rows (n) of these sources: this study's first, half where others have as many to give.

    Never chosen by ``y``: the lowest readings of a noisy quantity are its luckiest, agree with one another, and make
    the noise seem small. Multiples of the golden section spread over the rows evenly, and as rows are added most stay.
    """
    if len(source) <= largest:
        return np.arange(len(source))
    own, others = np.flatnonzero(source == HERE), np.flatnonzero(source != HERE)
    share = max(largest - len(others), largest // 2)
    own = own[np.argsort(np.arange(len(own)) * GOLDEN % 1)[:share]]
    others = others[np.argsort(np.arange(len(others)) * GOLDEN % 1)[: largest - len(own)]]
    return np.sort(np.r_[own, others])


def with_expected(
    coordinates: Coordinates, curved: tuple[int, ...], posterior: Posterior, waiting: Sequence[Observation]
) -> Posterior:
    """The belief in convergence as if running trials had ended as expected of them."""
    if not waiting:
        return posterior
    x = np.array([coordinates.convergence_features(o.values) for o in waiting])
    return _as_if_measured(posterior, x, trend(x, curved), SEED_SD)


def with_expected_speed(
    coordinates: Coordinates, posterior: Posterior, waiting: Sequence[Observation], noise: float
) -> Posterior:
    """The belief in a speed as if running trials had shown the expected one, with this relative ``noise``."""
    rows = list(dict.fromkeys(tuple(coordinates.speed_features(o.values)) for o in waiting))
    return _as_if_measured(posterior, np.array(rows), trend(np.array(rows), ()), noise)


def _as_if_measured(posterior: Posterior, x: Array, basis: Array, sd: float) -> Posterior:
    """The posterior as if ``x`` had been measured with the mean outcome: less is to be learned there."""
    mean, _ = posterior.predict(x, basis)
    old = posterior.data
    data = Data(
        x=np.r_[old.x, x], basis=np.r_[old.basis, basis], y=np.r_[old.y, mean], sd=np.r_[old.sd, np.full(len(x), sd)],
        source=np.r_[old.source, np.full(len(x), HERE, dtype=np.int64)],
        below=np.r_[old.below, np.zeros(len(x), dtype=np.bool_)],
        extended=np.r_[old.extended, np.zeros(len(x))],
    )  # fmt: skip
    return condition(data, posterior.prior)
