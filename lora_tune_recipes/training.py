"""One LoRA training run on this rank: the loop, its evaluations and its log."""

from __future__ import annotations

import itertools
import math
import os
import platform

import torch
from mlperf_logging.mllog import constants

from lora_tune_recipes import text
from lora_tune_recipes.lora_model import tokenizer
from lora_tune_recipes.ranks import Ranks, connect, precision
from lora_tune_recipes.schedule import learning_rate
from lora_tune_recipes.settings import Settings
from lora_tune_recipes.text import Sequences
from lora_tune_recipes.trainer import DROPOUT_SEEDS, Trainer
from lora_tune_recipes.trial_log import TRAIN_LOSS_EVERY, TrialLog, description


def run(settings: Settings) -> None:
    """Train until the target, the last step or divergence, and print the log.

    Before the log's ``run_start`` raises InputError for unusable data or model, SetupError for an unsupported machine.
    """
    torch.set_num_threads(settings.threads)
    ranks = connect(settings)
    _run(settings, ranks)
    ranks.disconnect()


def _run(settings: Settings, ranks: Ranks) -> None:
    log = TrialLog(enabled=ranks.rank == 0)
    log.event(constants.CACHE_CLEAR, True)
    log.start(constants.INIT_START)
    log.identity(os.environ)
    tokenize = tokenizer(settings.model)
    train = text.load(settings.datadir, "train", settings.seq, tokenize, pack=settings.packing)
    validation = text.load(settings.datadir, "validation", settings.seq, tokenize)
    if settings.eval_samples:
        validation = validation.spread(settings.eval_samples)
    trainer = Trainer(settings, ranks)
    text.check(train, validation, trainer.vocabulary, settings.datadir)
    # The adapter's weights are equal on all ranks; dropout must differ between ranks with different data.
    torch.manual_seed(settings.seed + DROPOUT_SEEDS * (1 + ranks.dp_rank))
    log.init(
        description(
            settings,
            platform=f"{ranks.world}x{ranks.device_name or platform.machine()}",
            batch=ranks.batch,
            wide=precision(settings),
            texts=(len(train), len(validation)),
        )
    )
    if settings.warmup:
        trainer.warm_up()
    log.end(constants.INIT_STOP)
    _train(settings, ranks, trainer, train, validation, log)


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
        if (peak := ranks.peak_memory()) is not None:
            log.event("tracked_stats", {"max_memory_usage": round(peak, 3)}, step=samples)
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
    if settings.save_adapter:
        trainer.save_adapter(settings.save_adapter)
