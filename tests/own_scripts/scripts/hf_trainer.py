"""Hugging Face Trainer: a dict a log step, with a progress bar between."""

import sys

from descent import options, train

arguments = options(output_dir="out", epochs=3).parse_args()
print("***** Running training *****\n  Num examples = 160")
for step, loss, held_out in train(arguments):
    sys.stderr.write(f"\r{step}%|##        | {step}/60 [00:01<00:03, 20.00it/s]")
    if step % 5 == 0:
        print(
            {"loss": round(loss, 4), "grad_norm": 0.31, "learning_rate": arguments.lr, "epoch": step / 20}, flush=True
        )
    if step % 10 == 0:
        print(
            {"eval_loss": held_out, "eval_runtime": 0.01, "eval_samples_per_second": 99.0, "epoch": step / 20},
            flush=True,
        )
print({"train_runtime": 1.0, "train_samples_per_second": 480.0, "train_loss": 0.5, "epoch": 3.0})
