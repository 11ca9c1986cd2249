"""Prints as Hugging Face's Trainer makes them, and a training in its terms."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.standins.small_lora import Settings, Training, rate


def train(
    settings: Settings,
    *,
    batch: int,
    samples_per_epoch: int,
    logging_steps: int,
    eval_steps: int = 0,
    pause: Callable[[int], None] = lambda _: None,
) -> None:
    """Train and print. batch: samples a step as the recipe counts them; the small training may use fewer.
    eval_steps: 0 evaluates never. pause: called with each step's number when it is done."""
    print("***** Running training *****", flush=True)
    begun, total, training = time.time(), 0.0, Training(settings)
    for step, loss in training.steps():
        pause(step)
        total += loss
        epoch = step * batch / samples_per_epoch
        if step % logging_steps == 0:
            logged = {"loss": round(loss, 4), "learning_rate": rate(settings, step), "epoch": epoch}
            print(logged, flush=True)
        if eval_steps and (step % eval_steps == 0 or step == settings.steps):
            before = time.time()
            lost = {"eval_loss": training.eval_loss(), "eval_runtime": time.time() - before, "epoch": epoch}
            print(lost, flush=True)
    seconds = time.time() - begun
    samples = settings.steps * batch
    result = {
        "train_runtime": round(seconds, 4),
        "train_samples_per_second": round(samples / seconds, 3),
        "train_loss": total / settings.steps,
        "epoch": round(samples / samples_per_epoch, 4),
    }
    print(result, flush=True)
