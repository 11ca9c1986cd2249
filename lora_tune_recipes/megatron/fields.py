"""The settings as keyword arguments of Megatron-Core's classes in NeMo and Megatron-Bridge."""

from __future__ import annotations

from typing import Any

from lora_tune_recipes.megatron.layout import ProcessLayout
from lora_tune_recipes.megatron.settings import TARGETS, CommonSettings, PrecisionSettings, Recompute
from lora_tune_recipes.megatron.shapes import Shape

FROZEN_OVERLAP = {
    "tp_comm_bulk_wgrad": False,
    "tp_comm_bulk_dgrad": False,
    "tp_comm_overlap_rs_dgrad": True,
    "tp_comm_overlap_disable_qkv": True,
}
"""Overlap of tensor-parallel transfers with frozen weights. These have no weight-gradient product to overlap with:
Transformer Engine would skip the transfer itself, and gradients would be wrong. LoRA needs qkv's gathered input
anyway."""


def llama(shape: Shape, seq: int, *, te: bool) -> dict[str, Any]:
    """The size of a Llama, and its fused operations. te: whether Transformer Engine is installed."""
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_groups,
        "vocab_size": shape.vocab,
        "seq_length": seq,
        "rotary_base": shape.rotary_base,
        "layernorm_epsilon": shape.norm_eps,
        "apply_rope_fusion": te,
        "masked_softmax_fusion": te,
        "persist_layer_norm": te,
        "gradient_accumulation_fusion": False,  # the frozen weights have no gradient to accumulate
    }


def parallelism(layout: ProcessLayout) -> dict[str, Any]:
    """The degrees of parallelism within a copy of the model."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sp,
    }


def recomputation(recompute: Recompute) -> dict[str, Any]:
    """Activation recomputation; empty if there is none."""
    fields: dict[str, Any] = {}
    if recompute.granularity:
        fields["recompute_granularity"] = recompute.granularity
    if recompute.granularity == "full":
        fields |= {"recompute_method": recompute.method, "recompute_num_layers": recompute.layers}
    if recompute.modules:
        fields["recompute_modules"] = list(recompute.modules)
    return fields


def fp8(precision: PrecisionSettings) -> dict[str, Any]:
    """FP8 scaling, and what else is stored or computed in FP8."""
    return {
        "fp8_recipe": precision.recipe,
        "fp8_amax_history_len": precision.history,
        "fp8_amax_compute_algo": precision.algorithm,
        "fp8_param_gather": precision.params,
        "fp8_dot_product_attention": precision.dpa,
    }


def adam(settings: CommonSettings, *, cuda: bool, sharded: bool) -> dict[str, Any]:
    """AdamW with MLPerf's constants. sharded: whether its state is sharded over the data-parallel ranks."""
    return {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.min_lr,
        "weight_decay": settings.weight_decay,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "clip_grad": settings.grad_clip,
        "bf16": cuda,
        "use_distributed_optimizer": sharded,
    }


def lora(settings: CommonSettings, *, all_to_all: bool) -> dict[str, Any]:
    """LoRA on the attention's projections. all_to_all: how its products are exchanged with sequence parallelism."""
    return {
        "target_modules": list(TARGETS),
        "dim": settings.lora_rank,
        "alpha": settings.lora_alpha,
        "dropout": settings.lora_dropout,
        "dropout_position": "pre",
        "lora_A_init_method": "kaiming",
        "a2a_experimental": all_to_all and settings.layout.sp,
    }
