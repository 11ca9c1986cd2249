"""Callbacks of a run: random state, kernel warm-up, evaluations, stop at the target, and the MLLOG lines."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state, tensor_parallel
from mlperf_logging.mllog import constants

from lora_tune_recipes.megatron import hf, recompute
from lora_tune_recipes.megatron.adapters import cores
from lora_tune_recipes.megatron.blocks import Blocks
from lora_tune_recipes.megatron.loss import over_ranks
from lora_tune_recipes.nemo import warm_up
from lora_tune_recipes.nemo.settings import NemoSettings
from lora_tune_recipes.trial_log import TrialLog


class Seeds(pl.Callback):
    """Seeds the random states from this trial's seed before the adapters are created.

    NeMo seeds Megatron's states with a constant, so otherwise every seed would have the same initial adapters.
    """

    def __init__(self, settings: NemoSettings, *, cuda: bool) -> None:
        self._settings, self._cuda = settings, cuda

    def on_train_start(self, *_: Any) -> None:
        seed = self._settings.seed + 1
        torch.manual_seed(seed)
        if self._cuda:
            graphs = self._settings.speed.cuda_graph
            tensor_parallel.model_parallel_cuda_manual_seed(seed, te_rng_tracker=graphs, use_cudagraphable_rng=graphs)
            # Dropout: equal on tensor-parallel ranks, which hold the same activations; different where data differ.
            torch.cuda.manual_seed(
                seed + 7919 * (1 + parallel_state.get_data_parallel_rank(with_context_parallel=True))
            )


class Base(pl.Callback):
    """Loads a Hugging Face base before the adapters are created (NeMo itself loads a NeMo folder)."""

    def __init__(self, settings: NemoSettings) -> None:
        self._settings = settings

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        assert self._settings.model is not None
        rank = parallel_state.get_tensor_model_parallel_rank()
        for core in cores(trainer.strategy.megatron_parallel):
            hf.load(core, self._settings.model, self._settings.shape, rank, self._settings.layout.tp)


class Recomputation(pl.Callback):
    """Enables gradients for the adapters of recomputed layers."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        for core in cores(trainer.strategy.megatron_parallel):
            recompute.let_gradients_in(core)


class NemoRun(pl.Callback):
    """Runs the eval schedule and the log; ``reached``: whether an evaluation met the target."""

    def __init__(self, settings: NemoSettings, log: TrialLog, *, cuda: bool, sequences: int) -> None:
        self._settings, self._log = settings, log
        self._sequences = sequences
        self._batch = settings.layout.batch
        self._started = False
        self._blocks = Blocks(log, self._batch, cuda=cuda)
        self._eval_sum: torch.Tensor | None = None
        self.reached = False

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Before the first step, with the adapters in place: warm up, and start the clock."""
        if self._started:
            return
        self._started = True
        warm_up.run(trainer, self._settings)
        torch.distributed.barrier()
        self._log.end(constants.INIT_STOP)
        self._log.start(constants.RUN_START)
        self._blocks.start(0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        step = trainer.global_step
        if self._end_of_probe(trainer):
            _stop(trainer)
        if step % self._settings.log_every:
            return
        share = outputs["loss"] if isinstance(outputs, dict) else outputs
        loss = over_ranks(share) / self._batch
        self._log.train_loss(loss, step * self._batch, trainer.optimizers[0].param_groups[0]["lr"])
        if not math.isfinite(loss):
            _stop(trainer)

    def _end_of_probe(self, trainer: Any) -> bool:
        """Whether a probe has done its evaluation and its warm block."""
        return (
            self._settings.probe and trainer.global_step >= self._settings.evals.first + self._settings.evals.interval
        )

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        samples = trainer.global_step * self._batch
        self._blocks.stop(samples)
        self._log.start(constants.EVAL_START, samples_count=samples)
        self._eval_sum = None

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._eval_sum = outputs.double() if self._eval_sum is None else self._eval_sum + outputs.double()

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        samples = trainer.global_step * self._batch
        assert self._eval_sum is not None, "an evaluation without a batch"
        loss = over_ranks(self._eval_sum) / self._sequences
        self._log.eval_loss(loss, samples)
        self._log.end(constants.EVAL_STOP, samples_count=samples)
        # The first evaluation is later than the interval between the others.
        trainer.val_check_interval = trainer.val_check_batch = self._settings.evals.interval
        self.reached = loss <= self._settings.target
        if self.reached or not math.isfinite(loss):
            _stop(trainer)
        elif trainer.global_step < self._settings.max_steps:
            self._blocks.start(samples)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        samples = trainer.global_step * self._batch
        if self._blocks.open:
            self._blocks.stop(samples)
        self._log.run_stop(samples, success=self.reached)


def _stop(trainer: Any) -> None:
    """End the run after this step, without Lightning's final evaluation."""
    trainer.should_stop = True
    trainer.limit_val_batches = 0
