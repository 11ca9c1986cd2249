"""The knobs of a NeMo trial, from environment variables with the names of MLPerf's ``config_*.sh`` files.

``docs/trainers.md`` lists every variable. A knob that MLPerf does not name has NeMo's name in capitals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_tune.base.errors import InputError
from lora_tune_recipes.knobs import Knobs
from lora_tune_recipes.megatron.layout import ProcessLayout
from lora_tune_recipes.megatron.settings import CommonSettings, Recompute, read_common, read_recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class NemoSpeed:
    """Settings that change time and memory, but not the arithmetic."""

    recompute: Recompute
    tp_overlap: bool
    cp_comm: str
    cuda_graph: bool
    cuda_graph_scope: str
    te_ops: bool
    fused_loss: bool
    lora_a2a: bool
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NemoSettings(CommonSettings):
    """One validated trial; see ``docs/trainers.md`` for the variables."""

    speed: NemoSpeed


def read(environment: Mapping[str, str], world: int) -> NemoSettings:
    """The settings in ``environment`` on ``world`` processes.

    Raises InputError for the first invalid value, or a layout that does not fit.
    """
    knobs = Knobs(environment)
    common = read_common(knobs, world, low_precision=False)
    if (vp := common["layout"].vp) > 1:
        raise InputError(
            f"VP={vp}: allowed is 1; NeMo's interleaved pipelines were not seen to run, bridge_lora has them"
        )
    return NemoSettings(**common, speed=_speed(knobs, common["layout"], fp8=common["precision"].fp8))


def _speed(knobs: Knobs, layout: ProcessLayout, *, fp8: bool) -> NemoSpeed:
    recompute = read_recompute(knobs)
    overlap = knobs.switch("TP_COMM_OVERLAP", default=False)
    if overlap and not layout.sp:
        raise InputError(
            "TP_COMM_OVERLAP=1: allowed is 0 unless TP is at least 2 and SP=1; NeMo would switch it off silently"
        )
    if overlap and not fp8:
        # Measured on two H200 (2026-11-21): eval losses of a small Llama end 0.12 higher in bf16, and differ by at most
        # 0.004 in FP8. NeMo's settings for LoRA send some products through FP8 buffers.
        raise InputError(
            "TP_COMM_OVERLAP=1: allowed is 0 with FP8=0; in bf16 the model was seen to learn worse with it"
        )
    scope = knobs.choice("CUDA_GRAPH_SCOPE", ("full", "full_iteration"))
    graph = knobs.switch("MCORE_CUDA_GRAPH", default=False)
    if graph and recompute.granularity == "full":
        raise InputError("MCORE_CUDA_GRAPH=1: allowed is 0 with RECOMPUTE_GRANULARITY=full")
    return NemoSpeed(
        recompute=recompute,
        tp_overlap=overlap,
        cp_comm=knobs.choice("CP_COMM_TYPE", ("a2a", "p2p", "all_gather")),
        cuda_graph=graph,
        cuda_graph_scope=scope,
        te_ops=knobs.switch("USE_TE_OPS", default=False),
        fused_loss=knobs.switch("CROSS_ENTROPY_FUSION", default=True),
        lora_a2a=knobs.switch("LORA_A2A", default=True),
        workers=knobs.integer("NUM_WORKERS", 2, low=0),
    )
