"""The steps of a LoRA training on this rank: forward, backward, optimizer, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from lora_tune.base.errors import InputError
from lora_tune_recipes.batch import Batch, weighted_losses
from lora_tune_recipes.lora_model import build
from lora_tune_recipes.ranks import Ranks
from lora_tune_recipes.settings import Settings
from lora_tune_recipes.step_graph import (
    CAUSAL,
    WARM_UP_STEPS,
    StepGraph,
    compile_layers,
    is_plainly_causal,
    short_of_memory,
    why_eager,
)
from lora_tune_recipes.text import Sequences

DROPOUT_SEEDS = 7919
"""Seed distance between ranks, so that neighbouring seeds share no random numbers."""


def _groups(model: torch.nn.Module, ratio: float, rate: Callable[[], float | torch.Tensor]) -> list[dict[str, object]]:
    """Parameter groups, separate for whole and sharded parameters, which the fused optimizer cannot mix.

    factor: of the group's learning rate; ``ratio`` for the B matrices (LoRA+, Hayou et al. 2024).
    rate: creates each group's learning rate.
    """
    kinds: dict[tuple[bool, float], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            factor = ratio if "lora_B" in name or "lora_embedding_B" in name else 1.0
            kinds.setdefault((isinstance(parameter, DTensor), factor), []).append(parameter)
    return [
        {"params": kind, "factor": factor, "lr": rate()}
        for (_, factor), kind in sorted(kinds.items(), key=lambda k: k[0])
    ]


def _is_eager(settings: Settings, ranks: Ranks, config: Any) -> bool:
    """Whether this run launches every kernel. Raises InputError if a required graph is impossible."""
    if settings.cuda_graph == "0" or why_eager(settings, ranks.device.type, ranks.world):
        return True
    plain = is_plainly_causal(config, settings.seq)
    if not plain and settings.cuda_graph == "1":
        raise InputError("CUDA_GRAPH=1: layers of this model attend to a part of the sequence; allowed is auto or 0")
    return not plain


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of one that may be distributed; a collective, so every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip(parameters: list[torch.nn.Parameter], limit: float) -> None:
    """Scale all gradients so that their joint 2-norm is at most ``limit``; whole and sharded ones may be mixed."""
    norms = [torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([whole(n) for n in norms]))
    # As torch's clip_grad_norm_: without a branch on the norm, so that no device synchronizes.
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class Trainer:
    """The model with its adapter and the optimizer, on this rank."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self._settings = settings
        self._ranks = ranks
        model = ranks.shard(build(settings))
        self._eager = _is_eager(settings, ranks, model.config)
        if not self._eager:
            model.get_base_model().set_attn_implementation(CAUSAL)
        if settings.torch_compile:
            compile_layers(model, model.get_base_model())
        # A recorded step reads its learning rate from device memory.
        rate = (lambda: settings.lr) if self._eager else lambda: torch.tensor(settings.lr, device=ranks.device)
        optimizer = torch.optim.AdamW(
            _groups(model, settings.lora_plus_ratio, rate),
            capturable=not self._eager,
            betas=(settings.adam_beta1, settings.adam_beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.vocabulary = model.config.vocab_size
        self._model, self._optimizer = ranks.prepare(model, optimizer)
        # accelerate's sharding replaces the parameters.
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._model.train()
        self._graphs: dict[str, StepGraph[Batch]] = {}

    def step(self, sequences: Sequences, lr: float) -> torch.Tensor:
        """One optimizer step on this rank's ``minibs`` sequences; returns their mean loss, still on the device."""
        for group in self._optimizer.param_groups:
            if self._eager:
                group["lr"] = lr * group["factor"]
            else:
                group["lr"].fill_(lr * group["factor"])
        batch = Batch.of(sequences, self._ranks.device)
        return self._run("step", self._learn, batch._replace(weight=batch.weight / len(sequences)))

    def _run(self, kind: str, work: Callable[[Batch], torch.Tensor], batch: Batch) -> torch.Tensor:
        """``work`` on ``batch``, by its graph if there is one of this shape."""
        graph = self._graphs.get(kind)
        return graph.replay(batch) if graph is not None and graph.fits(batch) else work(batch)

    def _learn(self, batch: Batch) -> torch.Tensor:
        passes = batch.split(self._settings.mbs)
        total = torch.zeros((), device=self._ranks.device)
        for i, part in enumerate(passes):
            with self._ranks.exchange(self._model, now=i == len(passes) - 1), self._ranks.parts(*part) as own:
                loss = self._loss(*own)
                # Gradients are averaged over ranks, but the parts of one sequence must add up.
                self._ranks.backward(loss * self._ranks.parts_per_sequence)
            total += loss.detach()
        if self._settings.grad_clip:
            clip(self._parameters, self._settings.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter into ``folder``, in peft's format. Every rank must call it; the first one writes."""
        unwrapped = self._ranks.unwrap(self._model)
        learned = {n: whole(p.detach()) for n, p in unwrapped.named_parameters() if p.requires_grad}
        if self._ranks.rank == 0:
            unwrapped.save_pretrained(folder, safe_serialization=True, state_dict=learned)

    @torch.no_grad()
    def evaluate(self, validation: Sequences) -> float:
        """The mean over all validation sequences of their mean loss, the same on every rank."""
        self._model.eval()
        total = torch.zeros((), device=self._ranks.device)
        for rows in self._ranks.shares(len(validation), self._settings.mbs):
            total += self._run("eval", self._score, Batch.of(validation.rows(rows), self._ranks.device))
        self._ranks.evaluated(self._model)
        self._model.train()
        return self._ranks.sum(total) / len(validation)

    def _score(self, batch: Batch) -> torch.Tensor:
        with self._ranks.parts(*batch) as own:
            return self._loss(*own)

    def _loss(
        self, read: torch.Tensor, predict: torch.Tensor, weight: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of the cross entropies."""
        # transformers' default positions fit neither a part of a sequence nor a later sample of a packed row.
        explicit = self._ranks.parts_per_sequence > 1 or self._settings.packing
        positions = {"position_ids": position} if explicit else {}
        with self._ranks.autocast():
            logits = self._model(input_ids=read, use_cache=False, **positions).logits
        return weighted_losses(logits, predict, weight).sum()

    def warm_up(self) -> None:
        """Load, tune and record the kernels on random tokens; restores weights, optimizer and random state."""
        settings = self._settings
        before = [p.detach().clone() for p in self._parameters]
        devices = [self._ranks.device] if self._ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            tokens = np.random.default_rng(0).integers(0, self.vocabulary, (settings.minibs, settings.seq + 1))
            synthetic = Sequences(tokens, np.ones((settings.minibs, settings.seq), np.bool_))
            if self._eager:
                for _ in range(WARM_UP_STEPS):
                    self.step(synthetic, settings.lr)
                self.evaluate(synthetic)
            else:
                self._record(Batch.of(synthetic, self._ranks.device))
        with torch.no_grad():
            for parameter, value in zip(self._parameters, before, strict=True):
                parameter.copy_(value)
        self._forget_steps()
        self._ranks.synchronize()

    def _record(self, batch: Batch) -> None:
        """Record a step and a forward pass of an eval as graphs. Random numbers match those of eager steps."""
        pool = torch.cuda.graph_pool_handle()
        try:
            self._graphs["step"] = StepGraph(self._learn, batch, pool)
            self._model.eval()
            with torch.no_grad():
                self._graphs["eval"] = StepGraph(self._score, batch.split(self._settings.mbs)[0], pool)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            # A graph takes up to half as much memory again, so a run that does not fit may fit without it.
            if self._settings.cuda_graph == "1" or not short_of_memory(error):
                raise
            print("CUDA_GRAPH=auto: no memory for a recorded step; kernels are launched one by one", flush=True)
            self._graphs.clear()
            self._optimizer.zero_grad()
            torch.cuda.empty_cache()
        self._model.train()

    def _forget_steps(self) -> None:
        """Reset the optimizer to its state before the first step."""
        if self._eager:
            self._optimizer.state.clear()
            return
        for moments in self._optimizer.state.values():  # in place, because the recorded step uses these tensors
            for tensor in moments.values():
                tensor.zero_()
