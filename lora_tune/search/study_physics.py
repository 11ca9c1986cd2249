"""Physics of a study's points: peak memory and speed by the shape, sequence and GPU that the study names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lora_tune.base.llama import SHAPES, Shape
from lora_tune.config.layout import Layout
from lora_tune.config.parameters import FixedParameter, Value
from lora_tune.config.space import Space
from lora_tune.config.study import Study
from lora_tune.search import physics
from lora_tune.search.physics import LEVEL_SD

FAR = 1.1
"""Peak over the GPU's memory from which on no luck helps: physics is within 5% of the measured peaks."""

_DEGREES = {"tp": "TP", "pp": "PP", "vp": "VP", "cp": "CP", "sp": "SP", "mbs": "MBS", "minibs": "MINIBS"}


@dataclass(frozen=True, kw_only=True)
class StudyPhysics:
    """shape, seq: of the model and its samples. limit: GiB of a GPU. level_sd: how far the peaks may be off for all
    layouts, in ln."""

    shape: Shape
    seq: int
    space: Space
    limit: float
    level_sd: float = LEVEL_SD

    def gib(self, tuned: Mapping[str, Value]) -> float:
        """Peak memory of a point of the space, GiB a GPU; what ``tuned`` leaves open is not what memory depends on."""
        return self.gib_of(self.space.resolve({**self._corner, **tuned}))

    @cached_property
    def _corner(self) -> Mapping[str, Value]:
        return self.space.corner()

    def gib_of(self, parameters: Mapping[str, Value]) -> float:
        """The same of a trial's resolved parameters."""
        return physics.gib(physics.step_of(self.shape, self.seq, parameters), *self._laid(parameters))

    def samples_per_second(self, tuned: Mapping[str, Value]) -> float:
        """Throughput of a point of the space."""
        values = self.space.resolve(tuned)
        return physics.samples_per_second(physics.step_of(self.shape, self.seq, values), *self._laid(values))

    def _laid(self, values: Mapping[str, Value]) -> tuple[Layout, int]:
        degrees: dict[str, Any] = {field: int(values.get(name, 1)) for field, name in _DEGREES.items()}
        return Layout(**degrees | {"sp": int(values.get("SP", 0))}), self.space.gpu_count(values)


def physics_of(study: Study) -> StudyPhysics | None:
    """The physics of a study of our Megatron recipes whose GPU is known by the system's name; None for others.

    Others' stacks keep and fuse other things: their peaks are learned from their trials alone.
    """
    named = study.space.get("LLAMA")
    limit = physics.capacity(study.site.system)
    shape = SHAPES.get(str(named.value).lower()) if isinstance(named, FixedParameter) else None
    if shape is None or limit is None:
        return None
    seq = study.space.get("SEQ")
    length = int(seq.value) if isinstance(seq, FixedParameter) else 8192
    return StudyPhysics(shape=shape, seq=length, space=study.search_space, limit=limit)


def far_over(study: Study, parameters: Mapping[str, Value]) -> bool:
    """Whether a trial that died of memory needs so much that another try is lost."""
    known = physics_of(study)
    return known is not None and known.gib_of(parameters) > FAR * known.limit
