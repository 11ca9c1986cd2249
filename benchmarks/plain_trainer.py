"""What a user writes today: ``transformers.Trainer`` with peft, nothing else, as a peer of the PEFT recipe.

``python -m benchmarks.plain_trainer`` reads the recipe's variables (MODEL, DATADIR, SEQ, MINIBS, MBS, MAX_STEPS, LR,
VAL_CHECK_INTERVAL, ...) and prints as much MLLOG as a reader of speeds needs: the clock, blocks and memory. It never
evaluates.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from mlperf_logging.mllog import constants
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from lora_tune_recipes import settings as knobs
from lora_tune_recipes import text
from lora_tune_recipes.lora_model import tokenizer
from lora_tune_recipes.settings import ATTENTION, Settings
from lora_tune_recipes.text import Sequences
from lora_tune_recipes.trial_log import TrialLog


class Blocks(TrainerCallback):  # type: ignore[misc]
    """Prints a block for every VAL_CHECK_INTERVAL samples."""

    def __init__(self, settings: Settings) -> None:
        self._log = TrialLog(enabled=True)
        self._settings = settings

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._log.start(constants.RUN_START)
        self._log.block_start(0)

    def on_step_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        batch = self._settings.minibs
        if state.global_step % self._settings.interval(batch):
            return
        samples = state.global_step * batch
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peak = round(torch.cuda.max_memory_reserved() / 2**30, 3)
            self._log.event("tracked_stats", {"max_memory_usage": peak}, step=samples)
        self._log.block_stop(samples, batch)
        self._log.block_start(samples)

    def on_train_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        self._log.run_stop(state.global_step * self._settings.minibs, success=False)


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences as the Trainer wants them."""

    def __init__(self, sequences: Sequences) -> None:
        self._tokens = torch.from_numpy(sequences.tokens.copy())

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index, :-1]
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    settings = knobs.read(os.environ)
    cuda = torch.cuda.is_available()
    torch.set_num_threads(settings.threads)
    model = LlamaForCausalLM.from_pretrained(
        settings.model, dtype=torch.bfloat16 if cuda else torch.float32, attn_implementation=settings.attn
    )
    adapters = LoraConfig(
        r=settings.adapters.rank,
        lora_alpha=settings.adapters.alpha,
        lora_dropout=settings.adapters.dropout,
        target_modules=list(ATTENTION),
    )
    arguments = TrainingArguments(
        output_dir="/tmp/plain_trainer",
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.mbs,
        gradient_accumulation_steps=settings.accumulation,
        gradient_checkpointing=settings.recompute,
        learning_rate=settings.lr,
        warmup_steps=settings.warmup_steps,
        lr_scheduler_type="cosine",
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.grad_clip,
        bf16=cuda,
        use_cpu=not cuda,
        seed=settings.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    train = Examples(text.load(settings.datadir, "train", settings.seq, tokenizer(settings.model)))
    Trainer(get_peft_model(model, adapters), arguments, train_dataset=train, callbacks=[Blocks(settings)]).train()


if __name__ == "__main__":
    main()
