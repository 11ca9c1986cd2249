"""Keras' fit: the epoch on a line of its own, a bar drawn again, val_loss behind its last drawing."""

import sys

from descent import options, train

arguments = options().parse_args()
for step, loss, held_out in train(arguments):
    epoch, batch = (step - 1) // 10 + 1, (step - 1) % 10 + 1
    if batch == 1:
        print(f"Epoch {epoch}/6")
    sys.stdout.write(
        f"\r\x1b[1m{batch:2d}/10\x1b[0m \x1b[32m{'━' * batch}\x1b[0m \x1b[1m0s\x1b[0m 9ms/step - loss: {loss:.4f}"
    )
    if batch == 10:
        measures = f"accuracy: 0.51 - loss: {loss:.4f} - val_accuracy: 0.60 - val_loss: {held_out:.4f}"
        sys.stdout.write(f"\r10/10 {'━' * 10} 1s 5ms/step - {measures}\n")
    sys.stdout.flush()
