"""Callbacks of a run: kernel warm-up, learning rate, evaluations, stop at the target, and the MLLOG lines."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.train import (
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    should_disable_forward_pre_hook,
)
from mlperf_logging.mllog import constants

from lora_tune_recipes.bridge import adapter_files, warm_up
from lora_tune_recipes.bridge.data import Batch, BridgeData, evaluation_batches
from lora_tune_recipes.bridge.healing import heal
from lora_tune_recipes.bridge.settings import BridgeSettings
from lora_tune_recipes.bridge.step import LOSS, evaluate
from lora_tune_recipes.megatron.adapters import cores
from lora_tune_recipes.megatron.blocks import Blocks
from lora_tune_recipes.megatron.loss import over_ranks
from lora_tune_recipes.megatron.states import bound_waiting
from lora_tune_recipes.schedule import learning_rate
from lora_tune_recipes.trial_log import TrialLog


class BridgeRun(Callback):
    """Runs the eval schedule and the log; ``reached``: whether an evaluation met the target."""

    def __init__(self, settings: BridgeSettings, log: TrialLog, data: BridgeData, *, cuda: bool) -> None:
        self._settings, self._log, self._data = settings, log, data
        self._batch = settings.layout.batch
        self._eval_batches: list[Batch] = []
        self._blocks = Blocks(log, self._batch, cuda=cuda)
        self._hooked = False
        self.reached = False

    def on_train_start(self, context: Any) -> None:
        """Before the first step, with the adapters in place: warm up, and start the clock."""
        bound_waiting(self._settings.timeout)
        config = context.state.cfg
        self._hooked = should_disable_forward_pre_hook(
            config.ddp.use_megatron_fsdp, config.optimizer.use_distributed_optimizer, config.ddp.overlap_param_gather
        )
        self._eval_batches = evaluation_batches(self._settings, self._data.validation)
        warm_up.run(context.model, context.optimizer, self._settings)
        torch.distributed.barrier()
        self._log.end(constants.INIT_STOP)
        self._log.start(constants.RUN_START)
        self._blocks.start(0)

    def on_train_step_start(self, context: Any) -> None:
        """Set the learning rate of this step, by the schedule of all recipes, and heal an FP4 run at its step."""
        healing = self._settings.healing
        if healing and context.state.train_state.step == healing.step:
            heal(cores(context.model), healing.precision)
        for group in context.optimizer.param_groups:
            group["lr"] = self._rate(context.state.train_state.step)

    def on_train_step_end(self, context: Any) -> None:
        step = context.state.train_state.step + 1
        settings = self._settings
        ended = step >= settings.max_steps or self._end_of_probe(step)
        if step % settings.log_every == 0:
            ended = not self._log_loss(context, step) or ended
        if self._evaluates(step):
            ended = self._evaluate(context, step, last=ended) or ended
        if ended:
            self._end(context, step)

    def _evaluates(self, step: int) -> bool:
        evals = self._settings.evals
        due = step >= evals.first and (step - evals.first) % evals.interval == 0
        return due and not self._end_of_probe(step)

    def _log_loss(self, context: Any, step: int) -> bool:
        """Log the training loss of the step; returns whether it is finite."""
        mean = context.loss_dict.get(LOSS) if context.loss_dict else None
        if mean is None:  # only the last pipeline stage has it
            mean = torch.zeros((), device=next(context.model[0].parameters()).device)
        loss = over_ranks(mean * self._settings.layout.accumulation) / self._batch
        self._log.train_loss(loss, step * self._batch, self._rate(step - 1))
        return math.isfinite(loss)

    def _evaluate(self, context: Any, step: int, *, last: bool) -> bool:
        """Evaluate and log it; returns whether the run ends."""
        samples = step * self._batch
        self._blocks.stop(samples)
        self._log.start(constants.EVAL_START, samples_count=samples)
        # The hooks prefetch parameters for a training pass. Bridge enables them after the first step.
        hooked = self._hooked and step > 1
        if hooked:
            disable_forward_pre_hook(context.model)
        loss = evaluate(context.model, self._eval_batches, len(self._data.validation), mbs=self._settings.speed.val_mbs)
        if hooked:
            enable_forward_pre_hook(context.model)
        self._log.eval_loss(loss, samples)
        self._log.end(constants.EVAL_STOP, samples_count=samples)
        self.reached = loss <= self._settings.target
        ended = self.reached or not math.isfinite(loss)
        if not ended and not last:
            self._blocks.start(samples)
        return ended

    def _end_of_probe(self, step: int) -> bool:
        """Whether a probe has done its evaluation and its warm block."""
        evals = self._settings.evals
        return self._settings.probe and step >= evals.first + evals.interval

    def _end(self, context: Any, step: int) -> None:
        if self._blocks.open:
            self._blocks.stop(step * self._batch)
        self._log.run_stop(step * self._batch, success=self.reached)
        if self._settings.save_adapter is not None:
            adapter_files.save(list(cores(context.model)), self._settings.save_adapter, self._settings)
        # End by the loop's own condition, so that the step count stays correct.
        context.state.cfg.train.train_iters = step

    def _rate(self, step: int) -> float:
        s = self._settings
        return learning_rate(step, peak=s.lr, floor=s.min_lr, warmup_steps=s.warmup_steps, max_steps=s.max_steps)
