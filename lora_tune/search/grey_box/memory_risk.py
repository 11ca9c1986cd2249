"""Which configurations of a study die of memory, by its own trials and by physics where that is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_tune.search import fits_in_memory
from lora_tune.search.fits_in_memory import Needs, PeakMemory, Peaks
from lora_tune.search.grey_box import memory
from lora_tune.search.grey_box.features import Coordinates, alike_once
from lora_tune.search.grey_box.gaussian import Array
from lora_tune.search.grey_box.memory import MemoryModel
from lora_tune.search.observations import Observation

Values = Mapping[str, Any]


def death_logs(p: Array) -> Array:
    """ln of the factor that dying of memory with chance ``p`` costs: runs are repeated, a death costs half a run."""
    p = np.minimum(p, 0.999)
    return np.asarray(np.log1p(0.5 * p / (1 - p)))


@dataclass(frozen=True, kw_only=True)
class MemoryRisk:
    """A belief in the chance to die of memory, of configurations as a study names them."""

    coordinates: Coordinates
    needs: Needs | None
    believed: MemoryModel | PeakMemory

    def chance(self, points: Sequence[Values]) -> tuple[Array, Array]:
        """Chance (n) that each configuration dies, now and after one survival."""
        x = _rows(self.coordinates, self.needs, points)
        p, weight = self.believed.probability(x), self.believed.weight(x)
        return p, p * weight / (weight + 1)

    def draws(self, points: Sequence[Values], rng: np.random.Generator, count: int) -> Array:
        """Death rates of configurations (n, count) as the belief has them, jointly."""
        return self.believed.draws(_rows(self.coordinates, self.needs, points), rng, count)

    def differs(self, values: Values, instead: Values) -> bool:
        """Whether the two need other memory."""
        features = self.coordinates.memory_features
        return features(values) != features(instead)


def learn_memory(coordinates: Coordinates, own: Sequence[Observation], needs: Needs | None) -> MemoryRisk:
    """The belief after this study's own trials. needs: of GPU memory, by physics, where that is known."""
    tested = [o for o in own if o.ran or (o.infeasible and not (needs and o.refused))]
    x, died = _rows(coordinates, needs, [o.values for o in tested]), [o.infeasible for o in tested]
    if needs is None:
        believed: MemoryModel | PeakMemory = memory.fit(x, died, coordinates.memory_labels)
    else:
        # What one that died had printed before says nothing of what it asked for then.
        measured = np.array([math.nan if o.infeasible else o.peak_gib for o in tested], dtype=np.float64)
        peaks = Peaks(gib=x[:, 0], features=x[:, 1:], died=died, measured=measured)
        learned = fits_in_memory.learn(peaks, needs.limit, needs.level_sd)
        believed = PeakMemory(learned, memory.recorded(x, died))
    return MemoryRisk(coordinates=coordinates, needs=needs, believed=believed)


def _rows(coordinates: Coordinates, needs: Needs | None, points: Sequence[Values]) -> Array:
    """What memory depends on, a row a configuration; before it the GiB by physics where that is known."""
    width = len(coordinates.memory_labels)
    told = alike_once(coordinates, coordinates.memory_features, points)
    rows = np.array(told, dtype=np.float64).reshape(len(points), width)
    return rows if needs is None else np.c_[np.array([needs.gib(v) for v in points]), rows]
