"""One LoRA training run on this process's share of the machine: the loop, its evaluations and its log."""

from __future__ import annotations

import itertools
import math
import platform
from typing import NamedTuple

import numpy as np
import torch
from mlperf_logging.mllog import constants
from torch.distributed.tensor import DTensor

from lora_tune.recipes import text
from lora_tune.recipes.lora_model import build, tokenizer
from lora_tune.recipes.ranks import Ranks, connect
from lora_tune.recipes.schedule import learning_rate
from lora_tune.recipes.settings import Settings
from lora_tune.recipes.text import Sequences
from lora_tune.recipes.trial_log import TRAIN_LOSS_EVERY, TrialLog


def run(settings: Settings) -> None:
    """Train until the target, the last step or divergence, and print the log.

    Raises InputError for data or a model that cannot be used and SurroundingsError for what this machine cannot do,
    both before the log's ``run_start``.
    """
    torch.set_num_threads(settings.threads)
    ranks = connect(settings)
    _run(settings, ranks)
    ranks.disconnect()


def _run(settings: Settings, ranks: Ranks) -> None:
    log = TrialLog(enabled=ranks.rank == 0)
    log.start(constants.INIT_START)
    tokenize = tokenizer(settings.model)
    train = text.load(settings.datadir, "train", settings.seq, tokenize)
    validation = text.load(settings.datadir, "validation", settings.seq, tokenize)
    if settings.eval_samples:
        validation = validation.spread(settings.eval_samples)
    trainer = Trainer(settings, ranks)
    for name, sequences in (("train", train), ("validation", validation)):
        sequences.check(trainer.vocabulary, f"{settings.datadir}/{name}")
    # The adapter's weights are the same everywhere; what ranks with other data drop must differ.
    torch.manual_seed(settings.seed + 7919 * (1 + ranks.dp_rank))
    log.init(_description(settings, ranks, len(train), len(validation)))
    if settings.warmup:
        trainer.warm_up()
    log.end(constants.INIT_STOP)
    _train(settings, ranks, trainer, train, validation, log)


def _description(settings: Settings, ranks: Ranks, train: int, validation: int) -> dict[str, object]:
    """What the log says of the run before it starts, by MLLOG key."""
    return {
        constants.SUBMISSION_BENCHMARK: "peft_lora",
        constants.SUBMISSION_ORG: "lora_tune",
        constants.SUBMISSION_DIVISION: constants.OPEN,
        constants.SUBMISSION_STATUS: constants.RESEARCH,
        constants.SUBMISSION_PLATFORM: f"{ranks.world}x{ranks.device_name or platform.machine()}",
        constants.SEED: settings.seed,
        constants.GLOBAL_BATCH_SIZE: ranks.batch,
        constants.TRAIN_SAMPLES: train,
        constants.EVAL_SAMPLES: validation,
        constants.MAX_SEQUENCE_LENGTH: settings.seq,
        constants.GRADIENT_ACCUMULATION_STEPS: settings.accumulation,
        constants.OPT_NAME: constants.ADAMW,
        constants.OPT_BASE_LR: settings.lr,
        constants.OPT_END_LR: settings.min_lr,
        constants.OPT_LR_WARMUP_STEPS: settings.warmup_steps,
        constants.OPT_LR_TRAINING_STEPS: settings.max_steps,
        "opt_adamw_weight_decay": settings.weight_decay,
        constants.OPT_GRADIENT_CLIP_NORM: settings.grad_clip,
        "lora_rank": settings.lora_rank,
        constants.LORA_ALPHA: settings.lora_alpha,
        "lora_dropout": settings.lora_dropout,
        "tensor_parallel": settings.tp,
        "context_parallel": settings.cp,
        "target_eval_loss": settings.target,
    }


def _train(
    settings: Settings, ranks: Ranks, trainer: Trainer, train: Sequences, validation: Sequences, log: TrialLog
) -> None:
    samples = 0
    reached = False
    interval = settings.interval(ranks.batch)
    log.start(constants.RUN_START)
    log.block_start(samples)
    batches = itertools.islice(text.order(len(train), ranks.batch, settings.seed), settings.max_steps)
    for step, rows in enumerate(batches, 1):
        lr = learning_rate(
            step - 1,
            peak=settings.lr,
            floor=settings.min_lr,
            warmup_steps=settings.warmup_steps,
            max_steps=settings.max_steps,
        )
        loss = trainer.step(train.rows(ranks.share(rows)), lr)
        samples += ranks.batch
        if step % TRAIN_LOSS_EVERY == 0:
            mean = ranks.mean(loss)
            log.train_loss(mean, samples, lr)
            if not math.isfinite(mean):
                log.block_stop(samples, ranks.batch)
                break
        if step % interval and step < settings.max_steps:
            continue
        ranks.synchronize()
        log.block_stop(samples, ranks.batch)
        if settings.probe and step > interval:
            break
        log.start(constants.EVAL_START, samples_count=samples)
        eval_loss = trainer.evaluate(validation)
        log.eval_loss(eval_loss, samples)
        log.end(constants.EVAL_STOP, samples_count=samples)
        reached = settings.target is not None and eval_loss <= settings.target
        if reached or not math.isfinite(eval_loss):
            break
        if step < settings.max_steps:
            log.block_start(samples)
    log.run_stop(samples, success=reached)


WARM_UP_STEPS = 2
"""The first allocates and picks kernels, the second shows the steady path to caches and compilers."""


class Batch(NamedTuple):
    """Tensors [n, seq] on the device.

    read: tokens that the model is given. predict: the token after each. weight: what each prediction counts.
    position: of each token in its sequence.
    """

    read: torch.Tensor
    predict: torch.Tensor
    weight: torch.Tensor
    position: torch.Tensor

    @classmethod
    def of(cls, sequences: Sequences, device: torch.device) -> Batch:
        """Every sequence counts 1, spread over its predictions: the loss is MLPerf's mean of per-sequence means."""
        tokens = torch.from_numpy(np.ascontiguousarray(sequences.tokens)).to(device)
        weight = sequences.mask / np.maximum(1, sequences.mask.sum(axis=1, keepdims=True))
        read = tokens[:, :-1]
        return cls(
            read,
            tokens[:, 1:],
            torch.from_numpy(weight.astype(np.float32)).to(device),
            torch.arange(read.shape[1], device=device).expand_as(read),
        )

    def split(self, size: int) -> list[Batch]:
        """``size`` sequences at a time."""
        return [Batch(*parts) for parts in zip(*(tensor.split(size) for tensor in self), strict=True)]


def _alike(parameters: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    """Parameter groups of one kind each: the fused optimizer does not take whole and sharded ones together."""
    kinds = ([p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (False, True))
    return [{"params": kind} for kind in kinds if kind]


def clip(parameters: list[torch.nn.Parameter], limit: float) -> None:
    """Scale all gradients so that their joint 2-norm is at most ``limit``; whole and sharded ones may be mixed."""
    norms = [torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
    # As torch's clip_grad_norm_: no branch on the norm, so that no device has to wait for it.
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class Trainer:
    """The model with its adapter and the optimizer, on this rank."""

    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self._settings = settings
        self._ranks = ranks
        model = build(settings)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        groups = _alike(self._parameters)
        optimizer = torch.optim.AdamW(groups, lr=settings.lr, weight_decay=settings.weight_decay, fused=True)
        self.vocabulary = model.config.vocab_size
        self._model, self._optimizer = ranks.prepare(model, optimizer)
        # Sharding replaces the parameters.
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._model.train()

    def step(self, sequences: Sequences, lr: float) -> torch.Tensor:
        """One optimizer step on this rank's ``minibs`` sequences; returns their mean loss, still on the device."""
        batch = Batch.of(sequences, self._ranks.device)
        passes = batch._replace(weight=batch.weight / len(sequences)).split(self._settings.mbs)
        total = torch.zeros((), device=self._ranks.device)
        for i, part in enumerate(passes):
            with self._ranks.exchange(self._model, now=i == len(passes) - 1), self._ranks.parts(*part) as own:
                loss = self._loss(*own)
                # The ranks' gradients are averaged, but the parts of one sequence add up.
                self._ranks.backward(loss * self._ranks.parts_per_sequence)
            total += loss.detach()
        if self._settings.grad_clip:
            clip(self._parameters, self._settings.grad_clip)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    @torch.no_grad()
    def evaluate(self, validation: Sequences) -> float:
        """The mean over all validation sequences of their mean loss, the same on every rank."""
        self._model.eval()
        total = torch.zeros((), device=self._ranks.device)
        for rows in self._ranks.shares(len(validation), self._settings.mbs):
            with self._ranks.parts(*Batch.of(validation.rows(rows), self._ranks.device)) as own:
                total += self._loss(*own)
        self._model.train()
        return self._ranks.sum(total) / len(validation)

    def _loss(
        self, read: torch.Tensor, predict: torch.Tensor, weight: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of the cross entropies."""
        with self._ranks.autocast():
            logits = self._model(input_ids=read, position_ids=position, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), predict.flatten(), reduction="none")
        return (losses * weight.flatten()).sum()

    def warm_up(self) -> None:
        """Load and tune the kernels on random tokens, and leave weights, optimizer and random state as they were."""
        settings = self._settings
        before = [p.detach().clone() for p in self._parameters]
        devices = [self._ranks.device] if self._ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            tokens = np.random.default_rng(0).integers(0, self.vocabulary, (settings.minibs, settings.seq + 1))
            synthetic = Sequences(tokens, np.ones((settings.minibs, settings.seq), np.bool_))
            for _ in range(WARM_UP_STEPS):
                self.step(synthetic, settings.lr)
            self.evaluate(synthetic)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, before, strict=True):
                parameter.copy_(value)
        self._optimizer.state.clear()
        self._ranks.synchronize()
