"""Memory of a training step from model shape and layout: the prior mean before any trial has run.

Bytes per GPU: weights, adapters with optimizer state, activations, logits. Formulas: Korthikanti et al. (2022,
"Reducing Activation Recomputation in Large Transformer Models"), with Llama's gated MLP. A study's own trials correct
them (:mod:`lora_tune.search.grey_box.memory`). Mixture-of-experts layers are not modelled.
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
"""Sd of the common relative error of all layouts of a study: 8% of the peak."""

GIB = float(2**30)

UNSHARDED, SHARDED = 10.0, 24.0
"""Bytes of activations per token, layer and unit of hidden size: those that tensor parallelism replicates without
sequence parallelism, and those that it shards (Korthikanti et al., equations 1 and 2, attention without its scores)."""

GATE = 7.0
"""Bytes of the sharded ones saved by storing the input of the MLP's activation in FP8: 2 x 3.5 hidden sizes, 1 byte
each instead of 2."""

KEPT = 2.0
"""Bytes per token and unit of hidden size of a recomputed layer: its input."""

TRAINED, STATE = 18.0, 12.0
"""Bytes per trained weight: bf16 weight, FP32 gradient, FP32 master weight, momentum and variance; STATE is the last
three, which data-parallel ranks shard."""

CONTEXT = 3.0
"""GiB for libraries, communicators and the allocator."""

LORA_TARGETS, ADAPTER_WIDTHS = 2, 2.25
"""Matrices with adapters per layer: joint QKV and the attention's output; rows plus columns of one on average, in
hidden sizes."""

CAPACITIES = {"H200": 139.8, "H100": 79.1, "A100": 79.1, "B300": 268.0, "B200": 178.4, "H800": 79.1, "H20": 95.6}
"""GiB available on a GPU, by a part of the system's name; GB200 and GB300 match B200 and B300."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Inputs of a step's memory besides the layout.

    seq: tokens per sample. fp8: linear layers compute in FP8; fp8_params: frozen weights are stored in FP8 only;
    fp8_act: the input of the MLP's activation is stored in FP8. recomputed: share of layers with recomputed
    activations. rank: of the adapters.
    """

    shape: Shape
    seq: int
    fp8: bool = False
    fp8_params: bool = False
    fp8_act: bool = False
    recomputed: float = 0.0
    rank: int = 16


def step_of(shape: Shape, seq: int, values: Mapping[str, Any]) -> Step:
    """The step for a trial's resolved ``values``, by the names of NVIDIA's scripts and of our recipe."""

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
    """Peak memory of the GPU that needs most, GiB."""
    shape, dp = step.shape, layout.dp(gpus)
    layers = shape.layers / layout.pp
    # FP8 stores a weight and its transpose, alone or in addition to the bf16 one.
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
    # 1F1B holds one micro-batch per following stage; interleaved stages hold a little more.
    flying = min(layout.pp, micro) * (1 + (layout.pp - 1) / (layout.pp * layout.vp) if layout.vp > 1 else 1)
    activations = layers * flying * (step.recomputed * kept + (1 - step.recomputed) * whole)
    working = whole if step.recomputed > 0 else 0.0
    logits = tokens * shape.vocab / layout.tp * 6.0
    return (weights + adapters + activations + working + logits) / GIB + CONTEXT


def _activation_bytes(step: Step, layout: Layout) -> float:
    """Bytes per token and unit of hidden size that one layer keeps for its backward pass."""
    sharded = SHARDED - (GATE if step.fp8_act else 0.0)
    return sharded / layout.tp + UNSHARDED / (layout.tp if layout.sp else 1)


def capacity(system: str) -> float | None:
    """GiB of one GPU of a system by its name; None if unknown."""
    return next((size for name, size in CAPACITIES.items() if name in system.upper()), None)


# Peak memory of points of a study's space, by its model shape, sequence length and GPU.


FAR_OVER = 1.1
"""Predicted peak over the GPU's memory beyond which a retry is useless: the model is within 5% of the measured
peaks."""

_DEGREES = {"tp": "TP", "pp": "PP", "vp": "VP", "cp": "CP", "sp": "SP", "mbs": "MBS", "minibs": "MINIBS"}


@dataclass(frozen=True, kw_only=True)
class StudyPhysics:
    """shape, seq: of the model and its samples. limit: GiB of a GPU. level_sd: sd of the common error of all layouts in
    ln(peak)."""

    shape: Shape
    seq: int
    space: Space
    limit: float
    level_sd: float = LEVEL_SD

    def gib(self, tuned: Mapping[str, Value]) -> float:
        """Peak memory of a point of the space, GiB per GPU; parameters missing from ``tuned`` must not affect
        memory."""
        return self.gib_of(self.space.resolve({**self._corner, **tuned}))

    @cached_property
    def _corner(self) -> Mapping[str, Value]:
        return self.space.corner()

    def gib_of(self, parameters: Mapping[str, Value]) -> float:
        """The same for a trial's resolved parameters."""
        return gib(step_of(self.shape, self.seq, parameters), *self._laid(parameters))

    def _laid(self, values: Mapping[str, Value]) -> tuple[Layout, int]:
        degrees: dict[str, Any] = {field: int(values.get(name, 1)) for field, name in _DEGREES.items()}
        return Layout(**degrees | {"sp": int(values.get("SP", 0))}), self.space.gpu_count(values)


def physics_of(study: Study) -> StudyPhysics | None:
    """The memory model of a study of our Megatron recipes with a known GPU; None for others.

    Other stacks keep and fuse other tensors: their peaks are learned from their trials alone.
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
    """Whether a trial that ran out of memory needs so much that a retry is useless."""
    known = physics_of(study)
    return known is not None and known.gib_of(parameters) > FAR_OVER * known.limit
