"""The settings as Megatron-Bridge's objects: model, LoRA, optimizer, and their container.

Uses only names that megatron-bridge 0.3.1 (pip) and NVIDIA's containers share.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec, transformer_engine_layer_spec
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training import config as bridge
from megatron.bridge.training.comm_overlap import userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.tokenizers.config import TokenizerConfig

from lora_tune.base.errors import SetupError
from lora_tune_recipes.bridge.data import BridgeData
from lora_tune_recipes.bridge.imports import present
from lora_tune_recipes.bridge.settings import BridgeSettings, BridgeSpeed
from lora_tune_recipes.megatron import fields
from lora_tune_recipes.megatron.attention import SdpaAttention
from lora_tune_recipes.megatron.layout import ProcessLayout
from lora_tune_recipes.megatron.machine import check_without_te
from lora_tune_recipes.megatron.shapes import Shape

HAVE_TE = present("transformer_engine")
BLACKWELL = (10, 0)
"""Lowest compute capability with block-scaled formats."""


def attention_name() -> str:
    """The attention implementation on this machine."""
    return "transformer_engine" if HAVE_TE else "sdpa"


def check_machine(settings: BridgeSettings, *, cuda: bool) -> None:
    """Raise SetupError or InputError for settings that this machine's libraries or GPUs do not support."""
    layout, speed = settings.layout, settings.speed
    blocks = {
        "FP4=1": settings.precision.fp4,
        "FP8_RECIPE=mxfp8": settings.precision.fp8 and settings.precision.recipe == "mxfp8",
    }
    capability = torch.cuda.get_device_capability() if cuda else (0, 0)
    for name, wanted in blocks.items():
        if wanted and capability < BLACKWELL:
            gpu = f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}" if cuda else "there is none"
            raise SetupError(f"{name} needs a GPU of compute capability 10.0 (Blackwell) or newer; {gpu}")
    if HAVE_TE:
        return
    wants = {
        "TP_COMM_OVERLAP": speed.tp_overlap,
        "FP8": settings.precision.fp8,
        "SP": layout.sp,
        "MCORE_CUDA_GRAPH": speed.cuda_graph,
        "USE_TE_OPS": speed.te_ops,
        "FUSED_SINGLE_QKV_ROPE": speed.fused_rope,
        "CPU_OFFLOADING": bool(speed.offloaded),
    }
    check_without_te(wants, settings.shape, layout, cuda=cuda)


def sdpa_spec(config: Any) -> Any:
    """Megatron-Core's layers without Transformer Engine, with PyTorch's flash attention."""
    spec = local_layer_spec(config)
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    return spec


class FrozenModel(GPTModelProvider):
    """A model built without gradients.

    With gradients on, FP8 weights keep a bf16 copy of each weight for the optimizer, 138 GB for 70B, never used here.
    """

    def provide(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return super().provide(*args, **kwargs)


def llama(shape: Shape, seq: int) -> dict[str, Any]:
    """The arguments that make Megatron-Core's GPT a Llama of this shape, whatever the run."""
    return {
        **fields.llama(shape, seq, te=HAVE_TE),
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "share_embeddings_and_output_weights": False,
        "make_vocab_size_divisible_by": 1,
        "transformer_layer_spec": transformer_engine_layer_spec if HAVE_TE else sdpa_spec,
        "bias_activation_fusion": HAVE_TE,
        "bias_dropout_fusion": HAVE_TE,
    }


def build_model(settings: BridgeSettings, *, cuda: bool) -> GPTModelProvider:
    """The base model, without weights."""
    layout, speed = settings.layout, settings.speed
    dtype = torch.bfloat16 if cuda else torch.float32
    return FrozenModel(
        **llama(settings.shape, settings.seq),
        **fields.parallelism(layout),
        **_interleaving(layout),
        cp_comm_type=speed.cp_comm if layout.cp > 1 else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        cross_entropy_loss_fusion=HAVE_TE and speed.fused_loss,
        cross_entropy_fusion_impl=speed.loss_implementation if HAVE_TE else "native",
        calculate_per_token_loss=False,
        use_cpu_initialization=not cuda,
        use_transformer_engine_op_fuser=speed.te_ops,
        fused_single_qkv_rope=speed.fused_rope,
        use_te_rng_tracker=speed.te_rng,
        cuda_graph_impl="local" if speed.cuda_graph else "none",
        cuda_graph_scope="full_iteration" if speed.cuda_graph else [],
        cuda_graph_warmup_steps=speed.graph_warmup,
        activation_func_fp8_input_store=settings.precision.act,
        disable_parameter_transpose_cache=settings.precision.params,
        **fields.recomputation(speed.recompute),
        **_offloading(speed),
        **_tp_overlap(speed),
    )


def _interleaving(layout: ProcessLayout) -> dict[str, Any]:
    """Communication between pipeline stages: an interleaved pipeline sends while the next model chunk computes.

    With two stages, both neighbours are the same rank, and sends that are not overlapped would be confused. An
    output must not be deallocated while its send is pending, or other values arrive.
    """
    interleaved = layout.vp > 1
    return {
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": not interleaved,
    }


def _tp_overlap(speed: BridgeSpeed) -> dict[str, Any]:
    """Overlap of tensor-parallel transfers with products, by NVIDIA's settings for LoRA, as in the NeMo recipe.

    Bridge's ``comm_overlap`` is not used: it would enable the optimizer's overlaps, too.
    """
    if not speed.tp_overlap:
        return {}
    products = asdict(userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora)
    return {
        **fields.FROZEN_OVERLAP,
        "tp_comm_overlap": True,
        "tp_comm_overlap_cfg": {name: how for name, how in products.items() if how is not None},
        "tp_comm_bootstrap_backend": "nccl",
    }


def _offloading(speed: BridgeSpeed) -> dict[str, Any]:
    """Offloading of layers' activations to host memory."""
    if not speed.offloaded:
        return {}
    return {
        "cpu_offloading": True,
        "cpu_offloading_num_layers": speed.offloaded,
        "cpu_offloading_activations": True,
        "cpu_offloading_weights": False,
    }


def build_lora(settings: BridgeSettings) -> Any:
    """LoRA on the attention's projections."""
    return LoRA(**fields.lora(settings, all_to_all=settings.speed.lora_a2a))


def build_config(settings: BridgeSettings, model: GPTModelProvider, data: BridgeData, *, cuda: bool) -> Any:
    """The container for ``megatron.bridge.training.pretrain``.

    It does not include LoRA: Bridge's own path requires a checkpoint in its format; a hook of the model works for
    every format.
    """
    return bridge.ConfigContainer(
        model=model,
        **_schedule(settings),
        **_optimization(settings, cuda=cuda),
        dataset=data,
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=settings.shape.vocab),
        checkpoint=bridge.CheckpointConfig(save=None, load=None),
        mixed_precision=_mixed_precision(settings) if cuda else None,
        rng=bridge.RNGConfig(seed=settings.seed, te_rng_tracker=settings.speed.te_rng),
        dist=bridge.DistributedInitConfig(
            distributed_backend="nccl" if cuda else "gloo",
            distributed_timeout_minutes=math.ceil(settings.timeout / 60),
        ),
        rerun_state_machine=bridge.RerunStateMachineConfig(
            rerun_mode="disabled", check_for_nan_in_loss=False, check_for_spiky_loss=False
        ),
    )


def _schedule(settings: BridgeSettings) -> dict[str, Any]:
    """Steps, with Bridge's own evaluations and log lines disabled: Run does both."""
    return {
        "train": bridge.TrainingConfig(
            micro_batch_size=settings.layout.mbs,
            global_batch_size=settings.layout.batch,
            train_iters=settings.max_steps,
            eval_iters=0,
            eval_interval=settings.max_steps,
            manual_gc=True,
            manual_gc_interval=10_000,
            manual_gc_eval=False,
        ),
        "logger": bridge.LoggerConfig(log_interval=settings.max_steps + 1, timing_log_level=0, logging_level=30),
    }


def _optimization(settings: BridgeSettings, *, cuda: bool) -> dict[str, Any]:
    """The optimizer, its weight decay (Run sets the rates), and communication between data-parallel ranks."""
    layout, communication, decay = settings.layout, settings.communication, settings.weight_decay
    sharded = communication.sharded and cuda
    # One rank has nothing to send.
    several = cuda and layout.dp * layout.cp > 1
    return {
        "optimizer": bridge.OptimizerConfig(
            **fields.adam(settings, cuda=cuda, sharded=sharded), params_dtype=torch.bfloat16 if cuda else torch.float32
        ),
        "scheduler": bridge.SchedulerConfig(lr_decay_style="cosine", start_weight_decay=decay, end_weight_decay=decay),
        "ddp": bridge.DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            grad_reduce_in_fp32=False,
            average_in_collective=communication.average,
            overlap_grad_reduce=several and communication.reduce_early,
            overlap_param_gather=several and communication.gather_late,
            bucket_size=communication.bucket,
        ),
    }


def _mixed_precision(settings: BridgeSettings) -> Any:
    precision = settings.precision
    common = partial(
        MixedPrecisionConfig,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        grad_reduce_in_fp32=False,
    )
    if precision.fp4:
        return common(fp4="e2m1", fp4_recipe="nvfp4")
    if not precision.fp8:
        return common()
    return common(fp8="hybrid", fp8_param=precision.params, **fields.fp8(precision))
