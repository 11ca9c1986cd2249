"""The processes of one run: which data each reads, how the model is distributed, and how they communicate.

Four kinds of parallelism: copies with averaged gradients (DDP, the default), shards over the data-parallel ranks
(FSDP2, for FSDP=1: ``sharding``), shards over the context-parallel ranks (accelerate's, for CP above 1), and
transformers' tensor parallelism over all ranks. Other combinations raise an error with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed.fsdp
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin

from lora_tune.base.errors import InputError, SetupError
from lora_tune_recipes.fsdp_settings import DEFAULT_SHARDING, Sharding
from lora_tune_recipes.settings import Settings
from lora_tune_recipes.step_graph import why_eager

SILENCE = timedelta(minutes=5)
"""Timeout of a collective, so that a lost rank does not hang the job."""


class Ranks:
    """This process among ``world``: data-parallel rank ``dp_rank`` of ``dp``.

    batch: sequences per optimizer step over all ranks (the global batch size).
    """

    def __init__(self, accelerator: Accelerator, settings: Settings) -> None:
        self._accelerator = accelerator
        self._tp, self._cp = settings.tp, settings.cp
        self._sharding: Sharding | None = None
        self.rank: int = accelerator.process_index
        self.world: int = accelerator.num_processes
        if settings.fsdp and settings.cp == 1 and self.world > 1:
            self._sharding = settings.sharding
        self.device: torch.device = accelerator.device
        self.device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        self.dp = self.world // (self._tp * self._cp)
        # The ranks of one model copy are adjacent: accelerate's mesh is (data, context, tensor), the last fastest.
        self.dp_rank = self.rank // (self._tp * self._cp)
        self.batch = settings.minibs * self.dp

    def shard(self, model: Any) -> Any:
        """The model; under FSDP its parameters are replaced by this rank's shards."""
        if self._sharding is None:
            return model
        from lora_tune_recipes.sharding import shard  # only here: torch 2.5 has no fully_shard

        return shard(model, self._sharding, self.device, self.world)

    def evaluated(self, model: Any) -> None:
        """Free gathered parameters after forward passes without backward passes."""
        if self._sharding is not None:
            from lora_tune_recipes.sharding import free_gathered

            free_gathered(model)

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """The model on its device, wrapped for gradient averaging unless its weights are sharded."""
        if self._sharding is not None:
            return model, optimizer
        if self._tp > 1:
            return model.to(self.device), optimizer
        return self._accelerator.prepare(model, optimizer)

    def unwrap(self, model: Any) -> Any:
        """The model from before :meth:`prepare`."""
        return self._accelerator.unwrap_model(model)

    def autocast(self) -> AbstractContextManager[None]:
        """Arithmetic in the run's precision."""
        return self._accelerator.autocast()

    @contextmanager
    def exchange(self, model: Any, *, now: bool) -> Iterator[None]:
        """Average gradients of backward passes within over the ranks (``now``), or accumulate them for a later pass."""
        if self._sharding is not None:
            model.set_requires_gradient_sync(now)
            yield
            return
        with nullcontext() if now or self.dp == 1 else self._accelerator.no_sync(model):
            yield

    @contextmanager
    def parts(self, *sequences: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """This rank's part of tensors [batch, sequence, ...] under context parallelism; else the tensors themselves.

        Run both the forward and the backward pass inside.
        """
        if self._cp == 1:
            yield sequences
            return
        # accelerate shards buffers in place; copies need no restoring.
        buffers = [s.contiguous().clone() for s in sequences]
        with self._accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            yield tuple(buffers)

    @property
    def parts_per_sequence(self) -> int:
        """Ranks that share one sequence."""
        return self._cp

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)

    def share(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """This rank's part of a global batch."""
        return rows[self.dp_rank :: self.dp]

    def shares(self, count: int, size: int) -> Iterator[npt.NDArray[np.int64]]:
        """This rank's part of ``count`` sequences, ``size`` at a time, padded with -1 to equal counts on all ranks."""
        turn = size * self.dp
        rows = np.arange(-(-count // turn) * turn)
        rows[count:] = -1
        for start in range(0, len(rows), turn):
            yield self.share(rows[start : start + turn])

    def sum(self, value: torch.Tensor) -> float:
        """The sum over all ranks, with each sequence counted once; the same on every rank."""
        return float(self._accelerator.reduce(value, "sum")) / self._tp if self.world > 1 else float(value)

    def mean(self, value: torch.Tensor) -> float:
        """The mean over the data-parallel ranks."""
        return self.sum(value) / self.dp

    def synchronize(self) -> None:
        """Wait for the device, so that the clock includes pending work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory(self) -> float | None:
        """The peak of this rank's allocator, GiB; None on a CPU."""
        return torch.cuda.max_memory_reserved() / 2**30 if self.device.type == "cuda" else None

    def disconnect(self) -> None:
        """Leave the process group. The caller must have released the model: DDP that outlives its group hangs."""
        self._accelerator.free_memory()
        self._accelerator.end_training()


def connect(settings: Settings) -> Ranks:
    """Join the processes that the launcher started (``WORLD_SIZE``); one without a launcher.

    Raises InputError if the parallelism does not fit their number, SetupError if this machine or its libraries do not
    support it.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    refuse(settings, world, cuda=cuda)
    handlers = [InitProcessGroupKwargs(timeout=SILENCE)]
    if settings.sharding.offload and world > 1:
        # Offloaded shards are reduced on the CPU for the gradient norm; accelerate reuses this process group.
        torch.distributed.init_process_group("cuda:nccl,cpu:gloo", timeout=SILENCE)
    options: dict[str, Any] = {}
    if settings.cp > 1:
        options["parallelism_config"] = ParallelismConfig(dp_shard_size=world // settings.cp, cp_size=settings.cp)
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
    accelerator = Accelerator(cpu=not cuda, mixed_precision=precision(settings), kwargs_handlers=handlers, **options)
    return Ranks(accelerator, settings)


def refuse(settings: Settings, world: int, *, cuda: bool) -> None:
    """Raise for an unsupported combination of TP, CP, FSDP and ``world`` processes; see ``connect``."""
    tp, cp = settings.tp, settings.cp
    for name, degree in (("TP", tp), ("CP", cp)):
        if degree > 1 and world == 1:
            raise InputError(f"{name}={degree}: allowed is 1 in a single process; start several under torchrun")
    if world % (tp * cp):
        raise InputError(f"TP={tp} CP={cp}: allowed is a product that divides the {world} processes")
    if tp > 1 and (tp < world or settings.fsdp):
        raise InputError(
            f"TP={tp} with {world} processes, CP={cp}, FSDP={int(settings.fsdp)}: allowed is TP={world} alone or TP=1; "
            "accelerate does not combine transformers' tensor parallelism with data or context parallelism"
        )
    if settings.save_adapter and (tp > 1 or cp > 1):
        raise InputError("SAVE_ADAPTER: allowed with TP=1 and CP=1, where the adapter can be gathered")
    _refuse_sharded(settings, world, cuda=cuda)
    if settings.cuda_graph == "1" and (reason := why_eager(settings, "cuda" if cuda else "cpu", world)):
        raise InputError(f"CUDA_GRAPH=1: {reason}; allowed is auto or 0")
    if settings.torch_compile and world > 1:
        raise InputError(f"TORCH_COMPILE=1 with {world} processes: allowed is one process, or TORCH_COMPILE unset")
    if cp > 1 and settings.seq % (2 * cp):
        raise InputError(f"SEQ={settings.seq}: allowed is a multiple of 2*CP={2 * cp}")
    if cp > 1 and settings.attn != "sdpa":
        raise InputError(f"ATTN={settings.attn!r}: allowed is sdpa where CP is above 1")
    if cp > 1 and not cuda:
        raise SetupError(f"CP={cp}: needs GPUs: accelerate does not shard on CPUs; allowed there are TP and FSDP")


def _refuse_sharded(settings: Settings, world: int, *, cuda: bool) -> None:
    """Raise for settings that do not support weights or rows of data distributed over ranks."""
    sharding, shared = settings.sharding, settings.fsdp or settings.tp > 1 or settings.cp > 1
    if settings.load_in_4bit and shared:
        raise InputError(
            f"LOAD_IN_4BIT={settings.load_in_4bit!r}: bitsandbytes' weights cannot be sharded here; allowed is FSDP=0, "
            "TP=1, CP=1, or LOAD_IN_4BIT unset"
        )
    if settings.adapters.modules_to_save and (settings.tp > 1 or settings.cp > 1):
        raise InputError("MODULES_TO_SAVE: whole modules are not trained in parts; allowed is TP=1 and CP=1")
    if settings.packing and settings.cp > 1:
        raise InputError("PACKING=1: accelerate cuts a row without regard to its samples; allowed is CP=1")
    if settings.cp > 1 and sharding != DEFAULT_SHARDING:
        raise InputError("FSDP_STRATEGY, FSDP_WRAP, FSDP_SHARDS, FSDP_OFFLOAD: allowed is CP=1; accelerate shards else")
    if sharding.shards and world % sharding.shards:
        raise InputError(f"FSDP_SHARDS={sharding.shards}: allowed is a divisor of the {world} processes, or 0")
    if settings.adapters.dora and settings.fsdp and sharding.wrap == "none":
        raise InputError("FSDP_WRAP='none': not with DORA=1, which reads each layer's weights; allowed is layer")
    if settings.fsdp and not hasattr(torch.distributed.fsdp, "fully_shard"):
        raise SetupError(f"FSDP=1: torch {torch.__version__} is here; allowed is 0, or torch 2.6 and later")
    if sharding.offload and not cuda:
        raise SetupError("FSDP_OFFLOAD=1: there is no GPU here to offload from; allowed is 0")


def precision(settings: Settings) -> str:
    """accelerate's name of the forward pass's precision."""
    if settings.dtype == "auto":
        return "bf16" if torch.cuda.is_available() else "no"
    return "bf16" if settings.dtype == "bfloat16" else "no"
