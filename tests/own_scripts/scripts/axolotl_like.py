"""Axolotl: the Trainer's dicts behind a logging prefix, further keys in them."""

from descent import options, train

arguments = options(output_dir="out").parse_args()
PREFIX = "[2026-11-22 10:00:00,123] [INFO] [axolotl.train:212] [PID:77] [RANK:0]"
for step, loss, held_out in train(arguments):
    if step % 5 == 0:
        logged = {"loss": round(loss, 4), "grad_norm": 0.2, "learning_rate": arguments.lr, "epoch": step / 60}
        print(PREFIX, logged, flush=True)
    if step % 10 == 0:
        told = {"eval_loss": held_out, "eval_runtime": 0.2, "memory/max_active (GiB)": 4.2, "epoch": step / 60}
        print(told, flush=True)
