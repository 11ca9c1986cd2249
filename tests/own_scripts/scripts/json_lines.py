"""A JSON object a line, training and evals apart."""

import json

from descent import options, train

arguments = options().parse_args()
for step, loss, held_out in train(arguments):
    print(json.dumps({"type": "train", "step": step, "train_loss": loss, "lr": arguments.lr}))
    if step % 10 == 0:
        print(json.dumps({"type": "eval", "step": step, "valid/loss": held_out}), flush=True)
