"""Memory of a training step from a model's shape and its layout: what is believed before any trial ran.

Bytes a GPU: weights, adapters with their optimizer's state, activations, logits. Formulas are those of Korthikanti et
al. (2022, "Reducing Activation Recomputation in Large Transformer Models"), with Llama's gated MLP. They are prior
means, which a study's own trials correct (:mod:`lora_tune.search.grey_box.memory`). Experts are not counted.
"""

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

LEVEL_SD = 0.08
"""How far all figures of a study's layouts are off together: 8% of the peak."""

GIB = float(2**30)

UNSHARDED, SHARDED = 10.0, 24.0
"""Bytes of activations a token, layer and unit of width that tensor parallelism leaves whole without sequence
parallelism, and those that it divides (Korthikanti et al., equations 1 and 2, attention without its scores)."""

GATE = 7.0
"""Of those that are divided, bytes that storing the MLP's input to its activation in FP8 saves: 2 x 3.5 widths, 1 byte
each instead of 2."""

KEPT = 2.0
"""Bytes a token and unit of width of a layer whose activations are computed again: its input."""

TRAINED, STATE = 18.0, 12.0
"""Bytes of a trained weight: in bf16, its gradient in FP32, and FP32 master, momentum and variance; the last three,
which data-parallel ranks share."""

CONTEXT = 3.0
"""GiB that libraries, communicators and the allocator take on top."""

LORA_TARGETS, ADAPTER_WIDTHS = 2, 2.25
"""Matrices of a layer that have adapters: the joint query, key and value one, and the attention's output; rows and
columns of one together, in widths of the model."""

CAPACITIES = {"H200": 139.8, "H100": 79.1, "A100": 79.1, "B300": 268.0, "B200": 178.4, "H800": 79.1, "H20": 95.6}
"""GiB that a GPU offers, by a part of the system's name; GB200 and GB300 are found as B200 and B300."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What decides a step's memory beside the layout.

    seq: tokens a sample. fp8: linear layers compute in it; fp8_params: frozen weights are kept in it alone;
    fp8_act: the MLP's input to its activation is stored in it. recomputed: share of the layers whose activations are
    computed again. rank: of the adapters.
    """

    shape: Shape
    seq: int
    fp8: bool = False
    fp8_params: bool = False
    fp8_act: bool = False
    recomputed: float = 0.0
    rank: int = 16


def step_of(shape: Shape, seq: int, values: Mapping[str, Any]) -> Step:
    """The step that a trial's resolved ``values`` ask for, by the names of NVIDIA's scripts and of our recipe."""

    def on(name: str) -> bool:
        return str(values.get(name, 0)) in ("1", "True", "true")

    share = 0.0
    if values.get("RECOMPUTE_GRANULARITY") == "full":
        layers = float(values.get("RECOMPUTE_NUM_LAYERS", 1))
        share = min(1.0, layers / shape.layers) if values.get("RECOMPUTE_METHOD") == "block" else float(layers > 0)
    return Step(
        shape=shape,
        seq=seq,
        fp8=on("FP8"),
        fp8_params=on("FP8") and on("FP8_PARAMS"),
        fp8_act=on("FP8") and (on("FP8_ACT") or on("FP8_ACTIVATION")),
        recomputed=share,
        rank=int(values.get("LORA_RANK", 16)),
    )


def gib(step: Step, layout: Layout, gpus: int) -> float:
    """Peak memory of the fullest GPU, GiB."""
    shape, dp = step.shape, layout.dp(gpus)
    layers = shape.layers / layout.pp
    # In FP8 a weight and its transpose are held, alone or beside the one in bf16.
    weight = 4.0 if step.fp8 and not step.fp8_params else 2.0
    block = (shape.parameters - 2 * shape.vocab * shape.hidden) / shape.layers
    ends = shape.vocab * shape.hidden * (1 if layout.pp > 1 else 2)  # embedding and output layer, in bf16
    weights = (weight * layers * block + 2.0 * ends) / layout.tp
    adapters = layers * LORA_TARGETS * step.rank * ADAPTER_WIDTHS * shape.hidden / layout.tp
    adapters *= TRAINED - STATE + STATE / max(1, dp)
    tokens = layout.mbs * step.seq / layout.cp
    whole = tokens * shape.hidden * _activation_bytes(step, layout)
    kept = tokens * shape.hidden * KEPT / (layout.tp if layout.sp else 1)
    micro = max(1, layout.minibs // layout.mbs)
    # 1F1B holds as many micro-batches as stages follow; interleaved stages hold a little more.
    flying = min(layout.pp, micro) * (1 + (layout.pp - 1) / (layout.pp * layout.vp) if layout.vp > 1 else 1)
    activations = layers * flying * (step.recomputed * kept + (1 - step.recomputed) * whole)
    working = whole if step.recomputed > 0 else 0.0
    logits = tokens * shape.vocab / layout.tp * 6.0
    return (weights + adapters + activations + working + logits) / GIB + CONTEXT


def _activation_bytes(step: Step, layout: Layout) -> float:
    """Bytes a token and unit of width that one layer keeps for its backward pass."""
    sharded = SHARDED - (GATE if step.fp8_act else 0.0)
    return sharded / layout.tp + UNSHARDED / (layout.tp if layout.sp else 1)


def capacity(system: str) -> float | None:
    """GiB of one GPU of a system by its name; None where the name says nothing."""
    return next((size for name, size in CAPACITIES.items() if name in system.upper()), None)


# Physics of a study's points: peak memory by the shape, sequence and GPU that the study names.


FAR_OVER = 1.1
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
        return gib(step_of(self.shape, self.seq, parameters), *self._laid(parameters))

    def _laid(self, values: Mapping[str, Value]) -> tuple[Layout, int]:
        degrees: dict[str, Any] = {field: int(values.get(name, 1)) for field, name in _DEGREES.items()}
        return Layout(**degrees | {"sp": int(values.get("SP", 0))}), self.space.gpu_count(values)


def physics_of(study: Study) -> StudyPhysics | None:
    """The physics of a study of our Megatron recipes whose GPU is known by the system's name; None for others.

    Others' stacks keep and fuse other things: their peaks are learned from their trials alone.
    """
    named = study.space.get("LLAMA")
    limit = capacity(study.site.system)
    shape = SHAPES.get(str(named.value).lower()) if isinstance(named, FixedParameter) else None
    if shape is None or limit is None:
        return None
    seq = study.space.get("SEQ")
    length = int(seq.value) if isinstance(seq, FixedParameter) else 8192
    return StudyPhysics(shape=shape, seq=length, space=study.search_space, limit=limit)


def far_over_memory(study: Study, parameters: Mapping[str, Value]) -> bool:
    """Whether a trial that died of memory needs so much that another try is lost."""
    known = physics_of(study)
    return known is not None and known.gib_of(parameters) > FAR_OVER * known.limit
