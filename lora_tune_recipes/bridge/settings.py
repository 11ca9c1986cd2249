"""The knobs of a Megatron-Bridge trial, with the names and defaults of MLPerf v6.0's configuration files.

``docs/trainers.md`` lists every variable. Other names of a knob in v5.1 or the other recipes are accepted, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lora_tune.base.errors import InputError
from lora_tune_recipes.knobs import Knobs
from lora_tune_recipes.megatron.layout import ProcessLayout
from lora_tune_recipes.megatron.settings import (
    CommonSettings,
    PrecisionSettings,
    Recompute,
    read_common,
    read_recompute,
)

SPELLINGS = {
    "SEQ": ("MAX_SEQLEN", "SEQ"),
    "TARGET": ("TARGET_LOG_PPL", "TARGET"),
    "DATADIR": ("DATA_ROOT", "DATADIR"),
    "MODEL": ("CKPT_ROOT", "MODEL"),
    "LOGGING_INTERVAL": ("LOG_EVERY_N_STEPS", "LOGGING_INTERVAL"),
    "LAYERS": ("OVERWRITTEN_NUM_LAYERS", "LAYERS"),
    "CROSS_ENTROPY_FUSION": ("CROSS_ENTROPY_LOSS_FUSION", "CROSS_ENTROPY_FUSION"),
    "FP8_PARAMS": ("FP8_PARAMS", "FP8_WEIGHTS"),
    "SKIP_EVALS": ("SKIP_EVALS", "SKIP_EVAL"),
    "GLOBAL_BATCH_SIZE": ("GLOBAL_BATCH_SIZE", "GBS"),
}
"""Our name of a knob -> accepted variables, v6.0's first."""

FP8_HEAD = 128
"""Head width for which FP8 attention is known to run; one H200 had no backend for 64."""

REFUSED = {
    "NCCL_UB": "user buffers are not registered by this recipe",
    "FSDP": "this recipe shards by TP, PP and CP",
    "PRE_QUANTIZED_MODEL": "weights are quantized as they are loaded",
    "STORE_GPU": "this recipe keeps no second copy of the weights",
    "GRADIENT_ACCUMULATION_FUSION": "frozen weights have no gradient to accumulate, and the adapters' needs Apex",
}
"""Switches of v6.0 that this recipe does not support -> why. 0, False and null are accepted."""

HEALED = {"FP8_DS": "delayed", "FP8_CS": "tensorwise", "MXFP8": "mxfp8", "BF16": ""}
"""HEALING_PRECISION -> FP8 recipe after healing, "" for BF16. The first is v6.0's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Distribution of the optimizer state over the data-parallel ranks, and communication overlap.

    sharded: the distributed optimizer. bucket: parameters per message.
    """

    sharded: bool
    reduce_early: bool
    gather_late: bool
    average: bool
    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSpeed:
    """Settings that change time and memory, but not the arithmetic.

    offloaded: layers with activations in host memory. val_mbs: sequences per forward pass of an evaluation.
    """

    recompute: Recompute
    tp_overlap: bool
    cp_comm: str
    cuda_graph: bool
    graph_warmup: int
    te_rng: bool
    te_ops: bool
    fused_rope: bool
    fused_loss: bool
    loss_implementation: str
    lora_a2a: bool
    offloaded: int
    val_mbs: int
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Healing:
    """After ``step`` optimizer steps an FP4 run computes in ``precision``."""

    step: int
    precision: PrecisionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings(CommonSettings):
    """One validated trial; see ``docs/trainers.md`` for the variables.

    healing: None if the precision does not change. adapter: peft folder of the initial adapter. save_adapter: output.
    """

    communication: Communication
    speed: BridgeSpeed
    healing: Healing | None
    adapter: Path | None
    save_adapter: Path | None


def read(environment: Mapping[str, str], world: int) -> BridgeSettings:
    """The settings in ``environment`` on ``world`` processes.

    Raises InputError for the first invalid value, or a layout that does not fit.
    """
    # Configuration files of v6.0 write null for an unset knob.
    texts = {name: "" if value.strip().lower() in ("null", "none") else value for name, value in environment.items()}
    knobs = Knobs(texts, SPELLINGS)
    _refuse(knobs)
    common = read_common(knobs, world, low_precision=True)
    precision: PrecisionSettings = common["precision"]
    if knobs.switch("FP4", default=False):
        precision = common["precision"] = _four_bits(knobs, precision)
    if precision.dpa and (head := common["shape"].head) != FP8_HEAD:
        raise InputError(
            f"FP8_DPA=1: allowed is 0 for heads of {head} channels; Transformer Engine's FP8 attention takes {FP8_HEAD}"
        )
    speed, healing = _speed(knobs, common["layout"], fp8=precision.fp8), _healing(knobs, precision)
    if healing and speed.cuda_graph:
        raise InputError("MCORE_CUDA_GRAPH=1: allowed is 0 with HEALING_ITER; a captured graph keeps its precision")
    return BridgeSettings(
        **common,
        communication=_communication(knobs, common["layout"], te_ops=speed.te_ops),
        speed=speed,
        healing=healing,
        adapter=knobs.folder("ADAPTER", None),
        save_adapter=Path(knobs.text("SAVE_ADAPTER")) if knobs.given("SAVE_ADAPTER") else None,
    )


def _four_bits(knobs: Knobs, precision: PrecisionSettings) -> PrecisionSettings:
    """Products in NVFP4; weights and attention stay in bf16."""
    if knobs.given("FP8") and precision.fp8:
        raise InputError("FP4=1 FP8=1: allowed is one of them")
    knobs.choice("FP4_RECIPE", ("nvfp4",))
    return replace(precision, fp4=True, fp8=False, params=False, dpa=False, act=False)


def _healing(knobs: Knobs, precision: PrecisionSettings) -> Healing | None:
    step = knobs.integer("HEALING_ITER", 0, low=0)
    recipe = HEALED[knobs.choice("HEALING_PRECISION", tuple(HEALED))]
    if step == 0:
        return None
    if not precision.fp4:
        raise InputError(f"HEALING_ITER={step}: allowed is 0 unless FP4=1; only an FP4 run changes its precision")
    healed = replace(precision, fp4=False, fp8=bool(recipe), recipe=recipe or precision.recipe)
    return Healing(step=step, precision=healed)


def _refuse(knobs: Knobs) -> None:
    for name, why in REFUSED.items():
        if knobs.text(name, "0").lower() not in ("0", "false"):
            raise InputError(f"{name}={knobs.text(name)}: allowed is 0; {why}")


def _communication(knobs: Knobs, layout: ProcessLayout, *, te_ops: bool) -> Communication:
    sharded = knobs.switch("USE_DISTRIBUTED_OPTIMIZER", default=True)
    reduce_early = knobs.switch("DDP_OVERLAP_GRAD_REDUCE", default=True)
    # The wait for gathered parameters is a module hook, and fused operations call no module. Measured on two H200
    # (2026-11-23): the eval loss of a small Llama at DP=2 or CP=2 ends 0.08 higher, in bf16 and in FP8.
    unhooked = te_ops and layout.dp * layout.cp > 1
    gather_late = knobs.switch("DDP_OVERLAP_PARAM_GATHER", default=sharded and reduce_early and not unhooked)
    if gather_late and not (sharded and reduce_early):
        raise InputError(
            "DDP_OVERLAP_PARAM_GATHER=1: allowed is 0 unless USE_DISTRIBUTED_OPTIMIZER=1 and DDP_OVERLAP_GRAD_REDUCE=1"
        )
    if gather_late and unhooked:
        raise InputError(
            f"DDP_OVERLAP_PARAM_GATHER=1: allowed is 0 with USE_TE_OPS=1 where DP={layout.dp} CP={layout.cp} ranks"
            " share gradients; two of them were seen to learn worse with it"
        )
    return Communication(
        sharded=sharded,
        reduce_early=reduce_early,
        gather_late=gather_late,
        average=knobs.switch("DDP_AVERAGE_IN_COLLECTIVE", default=False),
        bucket=knobs.integer("BUCKET_SIZE", 45_000_000, low=1),
    )


def _tp_overlap(knobs: Knobs, layout: ProcessLayout, *, fp8: bool) -> bool:
    """Whether tensor-parallel transfers overlap with products, as in the NeMo recipe."""
    if not knobs.switch("TP_COMM_OVERLAP", default=False):
        return False
    val_mbs = knobs.integer("VAL_MBS", 1, low=1)
    rules = [
        (not layout.sp, "unless TP is at least 2 and SP=1"),
        (not fp8, "with FP8=0; its buffers are FP8's, and NeMo's model was seen to learn worse with it in bf16"),
        (knobs.switch("USE_TE_OPS", default=False), "with USE_TE_OPS=1; fused operations send by rules of their own"),
        (knobs.switch("MCORE_CUDA_GRAPH", default=False), "with MCORE_CUDA_GRAPH=1; the two were not tried together"),
        (val_mbs != layout.mbs, f"with VAL_MBS={val_mbs} MBS={layout.mbs}; its buffers have one size"),
    ]
    for broken, allowed in rules:
        if broken:
            raise InputError(f"TP_COMM_OVERLAP=1: allowed is 0 {allowed}")
    return True


def _speed(knobs: Knobs, layout: ProcessLayout, *, fp8: bool) -> BridgeSpeed:
    recompute, tp_overlap = read_recompute(knobs), _tp_overlap(knobs, layout, fp8=fp8)
    graph = knobs.switch("MCORE_CUDA_GRAPH", default=False)
    offloaded = knobs.switch("CPU_OFFLOADING", default=False)
    for name, wanted in (("MCORE_CUDA_GRAPH", graph), ("CPU_OFFLOADING", offloaded)):
        if wanted and recompute:
            raise InputError(f"{name}=1: allowed is 0 with RECOMPUTE_GRANULARITY={recompute.granularity}")
    if offloaded and (graph or layout.pp > 1):
        raise InputError("CPU_OFFLOADING=1: allowed is 0 with MCORE_CUDA_GRAPH=1 or PP above 1")
    if graph and layout.dp * layout.cp > 1:
        # Measured on two H200 (2026-11-23): the eval loss of a small Llama at DP=2 ends 0.046 higher with graphs.
        raise InputError(
            f"MCORE_CUDA_GRAPH=1: allowed is 0 where DP={layout.dp} CP={layout.cp} ranks share gradients; two of them"
            " were seen to learn worse with it"
        )
    knobs.choice("CUDA_GRAPH_SCOPE", ("full_iteration",))
    return BridgeSpeed(
        recompute=recompute,
        tp_overlap=tp_overlap,
        cp_comm=knobs.choice("CP_COMM_TYPE", ("a2a", "p2p", "all_gather")),
        cuda_graph=graph,
        graph_warmup=knobs.integer("CUDA_GRAPH_WARMUP_STEPS", 1, low=1),
        te_rng=graph and knobs.switch("USE_TE_RNG_TRACKER", default=True),
        te_ops=knobs.switch("USE_TE_OPS", default=not tp_overlap),
        fused_rope=knobs.switch("FUSED_SINGLE_QKV_ROPE", default=True),
        fused_loss=knobs.switch("CROSS_ENTROPY_FUSION", default=True),
        loss_implementation=knobs.choice("CROSS_ENTROPY_LOSS_FUSION_IMPL", ("te", "native")),
        lora_a2a=knobs.switch("LORA_A2A", default=True),
        offloaded=knobs.integer("CPU_OFFLOADING_NUM_LAYERS", 20, low=1) if offloaded else 0,
        val_mbs=knobs.integer("VAL_MBS", 1, low=1),
        workers=knobs.integer("NUM_WORKERS", 8, low=0),
    )
