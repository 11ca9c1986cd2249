"""The settings as NeMo's objects: model, LoRA, optimizer and trainer. Uses only NeMo's public interface."""

from __future__ import annotations

import types
from typing import Any

import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.gpt.model.base import HAVE_TE, default_layer_spec, local_layer_spec
from nemo.collections.llm.recipes.tp_overlap_configs.userbuffers import (
    userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora as OVERLAP,
)
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler

from lora_tune_recipes.megatron import adapters, fields
from lora_tune_recipes.megatron.attention import SdpaAttention
from lora_tune_recipes.megatron.machine import check_without_te
from lora_tune_recipes.megatron.processes import Processes
from lora_tune_recipes.nemo.data import IdTokenizer
from lora_tune_recipes.nemo.loss import PerSequenceLoss
from lora_tune_recipes.nemo.settings import NemoSettings


def attention_name() -> str:
    """The attention implementation on this machine."""
    return "transformer_engine" if HAVE_TE else "sdpa"


def check_machine(settings: NemoSettings, *, cuda: bool) -> None:
    """Raise SetupError or InputError for settings that this machine's libraries or GPUs do not support."""
    layout = settings.layout
    if HAVE_TE:
        return
    wants = {
        "FP8": settings.precision.fp8,
        "SP": layout.sp,
        "MCORE_CUDA_GRAPH": settings.speed.cuda_graph,
        "USE_TE_OPS": settings.speed.te_ops,
    }
    check_without_te(wants, settings.shape, layout, cuda=cuda)


def sdpa_spec(config: Any) -> Any:
    """Megatron-Core's layers without Transformer Engine, with PyTorch's flash attention."""
    spec = local_layer_spec(config)
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    return spec


def forward_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A forward pass without a mask, because every attention used here is causal."""
    loss: torch.Tensor = model(
        input_ids=batch["tokens"], position_ids=batch["position_ids"], attention_mask=None, labels=batch["labels"]
    )
    return loss


def build_model(settings: NemoSettings, *, cuda: bool) -> Any:
    """The base model, without weights."""
    shape, speed = settings.shape, settings.speed
    config = llm.LlamaConfig(
        **fields.llama(shape, settings.seq, te=HAVE_TE),
        transformer_layer_spec=default_layer_spec if HAVE_TE else sdpa_spec,
        forward_step_fn=forward_step,
        cross_entropy_loss_fusion=HAVE_TE and speed.fused_loss,
        cross_entropy_fusion_impl="te",
        use_cpu_initialization=not cuda,
        cp_comm_type=speed.cp_comm if settings.layout.cp > 1 else None,
        enable_cuda_graph=speed.cuda_graph,
        cuda_graph_scope=speed.cuda_graph_scope,
        use_te_rng_tracker=HAVE_TE and speed.cuda_graph,
        use_transformer_engine_op_fuser=speed.te_ops or None,
        activation_func_fp8_input_store=settings.precision.act,
        **fields.recomputation(speed.recompute),
        **(fields.FROZEN_OVERLAP if speed.tp_overlap else {}),
    )
    # With gradients on, FP8_PARAMS also keeps each frozen weight in host memory in bf16 (138 GB for 70B), for the
    # optimizer, which never uses it.
    model = llm.LlamaModel(config, tokenizer=IdTokenizer(shape.vocab), model_context_managers=[torch.no_grad()])
    model._training_loss_reduction = PerSequenceLoss()
    model._validation_loss_reduction = PerSequenceLoss()
    return model


class SeededLoRA(llm.peft.LoRA):
    """LoRA with the same initial adapters in every layout and in the Megatron-Bridge recipe."""

    seed: int = 0

    def __call__(self, model: Any) -> Any:
        adapted = super().__call__(model)
        for core in adapters.cores(adapted):
            adapters.start(core, self.seed)
        return adapted


def build_lora(settings: NemoSettings) -> Any:
    """LoRA on the attention's projections."""
    if not HAVE_TE:
        _without_transformer_engine()
    lora = SeededLoRA(**fields.lora(settings, all_to_all=settings.speed.lora_a2a))
    lora.seed = settings.seed
    return lora


def _without_transformer_engine() -> None:
    """Patch NeMo 2.7, which uses ``te.Linear`` unconditionally and mistakes Megatron-Core's stubs for real classes."""
    from nemo.collections.llm.peft import lora, utils

    utils.HAVE_TE = False
    lora.te = types.SimpleNamespace(Linear=type("NoTransformerEngine", (), {}))


def build_optimizer(settings: NemoSettings, *, cuda: bool) -> Any:
    """AdamW with MLPerf's constants, linear warm-up and a half cosine to MIN_LR."""
    config = OptimizerConfig(**fields.adam(settings, cuda=cuda, sharded=cuda))
    cosine = CosineAnnealingScheduler(
        max_steps=settings.max_steps, warmup_steps=settings.warmup_steps, constant_steps=0, min_lr=settings.min_lr
    )
    return nl.MegatronOptimizerModule(config=config, lr_scheduler=cosine)


class Strategy(nl.MegatronStrategy):
    """NeMo's strategy without teardown, which exiting the process makes unnecessary.

    Lightning's copies the whole model to host memory: measured 28 s for the 70B shape on four GPUs, with the node idle.
    """

    def teardown(self) -> None:
        pass


def build_trainer(settings: NemoSettings, processes: Processes, callbacks: list[Any], *, cuda: bool) -> Any:
    """Trainer and strategy on these processes; evaluates at the schedule's first step, and Run schedules the rest."""
    overlap = [
        MegatronCommOverlapCallback(tp_comm_overlap=True, tp_comm_overlap_cfg=OVERLAP, tp_comm_bootstrap_backend="nccl")
    ]
    return nl.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=processes.per_node,
        num_nodes=processes.nodes,
        strategy=_strategy(settings, cuda=cuda),
        plugins=_mixed_precision(settings, cuda=cuda),
        max_steps=settings.max_steps,
        val_check_interval=settings.evals.first,
        limit_val_batches=1.0,
        num_sanity_val_steps=0,
        accumulate_grad_batches=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        callbacks=[*(overlap if settings.speed.tp_overlap else []), *callbacks],
    )


def _strategy(settings: NemoSettings, *, cuda: bool) -> Any:
    """Distribution of the model over the processes."""
    return Strategy(
        **fields.parallelism(settings.layout),
        pipeline_dtype=torch.bfloat16 if cuda else torch.float32,
        use_te_rng_tracker=HAVE_TE and settings.speed.cuda_graph,
        cluster_environment=TorchElasticEnvironment(),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=cuda, grad_reduce_in_fp32=False, average_in_collective=False
        ),
        gradient_as_bucket_view=True,
        ckpt_load_optimizer=False,
        ckpt_async_save=False,
        progress_interval=10**9,
    )


def _mixed_precision(settings: NemoSettings, *, cuda: bool) -> Any:
    dtype = torch.bfloat16 if cuda else torch.float32
    return nl.MegatronMixedPrecision(
        precision="bf16-mixed" if cuda else "32",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        grad_reduce_in_fp32=False,
        fp8="hybrid" if settings.precision.fp8 else None,
        **fields.fp8(settings.precision),
    )
